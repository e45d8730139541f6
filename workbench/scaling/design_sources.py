"""The sources of a design: options of the zoo, or a function; `transformers_source` has the third kind."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import OptionError
from workbench.scaling.resizing import GRANULE, in_proportion, kv_heads
from workbench.zoo import ArchitectureConfig, build, count_parameters


class DesignSource(ABC):
    """Builder of the models of a design at any size.

    Attributes:
        width: Width of the residual stream at the target size.
        depth: Residual blocks at the target size.
        width_per_head: Width of the stream for each attention head; None: there are no heads, or unknown ones.
    """

    if TYPE_CHECKING:  # attributes of some sources, properties of others

        @property
        def width(self) -> int: ...  # noqa: D102

        @property
        def depth(self) -> int: ...  # noqa: D102

    @property
    def width_per_head(self) -> int | None:
        """See above."""
        return None

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary at the target size; None if the design reads no tokens, or it is not known."""
        return None

    @property
    def n_classes(self) -> int | None:
        """Number of classes of a design that reads images and can have any number of them; else None."""
        return None

    @property
    def target_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the weights at the target size, by name; empty if they are not known without building the model."""
        return {}

    def with_images(self, side: int) -> DesignSource:
        """The same for square images of another side; itself if it reads none, or their size cannot be chosen."""
        del side
        return self

    @abstractmethod
    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """Describe a size as plain values."""

    @abstractmethod
    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """Build a fresh model; the caller preserves the global random state."""

    @abstractmethod
    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Number of parameters of a model of a size, tied ones counted once."""

    def nearest_width(self, width: int) -> int:
        """The nearest width that a model can have; of two equally near ones the smaller.

        It is a multiple of the width per head, so that heads keep their width, or less than the width of one head.
        """
        per_head = self.width_per_head
        if per_head is None:
            return width
        if width >= per_head:
            below = width // per_head * per_head
            return below if width - below <= below + per_head - width else below + per_head
        narrow = [w for w in range(GRANULE, per_head, GRANULE) if self._is_width(w)]
        return min([*narrow, per_head], key=lambda w: abs(w - width))

    def _is_width(self, width: int) -> bool:
        """Whether a single head can be that wide."""
        del width
        return True


@dataclass(frozen=True)
class ZooSource(DesignSource):
    """A design from options of the zoo."""

    config: ArchitectureConfig

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.config.d_model  # set by the family where the user does not set it

    @property
    def depth(self) -> int:
        """Residual blocks."""
        return self.config.n_layers

    @property
    def width_per_head(self) -> int | None:
        """Width of a head."""
        return self.config.head_dim if self.config.n_heads else None

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary; None for images."""
        return self.config.vocab_size

    def with_images(self, side: int) -> ZooSource:
        """See `DesignSource`."""
        if self.config.image_size is None:
            return self
        return ZooSource(ArchitectureConfig.from_dict(self.config.as_dict() | {"image_size": side}))

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """The family and its options."""
        return self.at(width, depth, self.config.seed, None).as_dict()

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """See `DesignSource`; the zoo uses its own random generators."""
        return build(self.at(width, depth, seed, vocabulary))

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """See `DesignSource`."""
        return count_parameters(self.at(width, depth, 0, vocabulary))

    def at(self, width: int, depth: int, seed: int, vocabulary: int | None) -> ArchitectureConfig:
        """The configuration at a size."""
        options = self.config.as_dict() | {"d_model": width, "n_layers": depth, "seed": seed}
        if self.config.n_heads:
            options["n_heads"] = max(1, width // self.config.head_dim)
            if self.config.n_kv_heads is not None:
                sharing = self.config.n_heads / self.config.n_kv_heads
                options["n_kv_heads"] = kv_heads(options["n_heads"], sharing)
        if options.get("mlp_width") is not None:
            options["mlp_width"] = in_proportion(options["mlp_width"], width, self.width)
        if vocabulary is not None and self.config.vocab_size is not None:
            options["vocab_size"] = vocabulary
        return ArchitectureConfig.from_dict(options)


@dataclass(frozen=True)
class FunctionSource(DesignSource):
    """A design from a function of width, depth and seed that returns a model.

    Its vocabulary can be reduced where the function takes a ``vocabulary``; otherwise it is that of the function.
    """

    function: Callable[..., nn.Module]
    width: int
    depth: int

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """The function's name."""
        del width, depth
        return {"function": getattr(self.function, "__qualname__", type(self.function).__name__)}

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """See `DesignSource`.

        Raises:
            OptionError: If the function returns no module.
        """
        torch.manual_seed(seed)
        takes_it = "vocabulary" in inspect.signature(self.function).parameters
        more = {"vocabulary": vocabulary} if vocabulary is not None and takes_it else {}
        model = self.function(width, depth, seed, **more)
        if not isinstance(model, nn.Module):
            raise OptionError(
                f"The function returned a {type(model).__name__}, expected a torch module of width {width} and depth "
                f"{depth}; return the model."
            )
        return model

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """See `DesignSource`; memory is used where the function chooses a device itself."""
        with torch.device("meta"):
            model = self.make(width, depth, 0, vocabulary)
        return sum(weight.numel() for weight in model.parameters())
