"""What a design is made from: options of the zoo, or a function; `transformers_source` has the third kind."""

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
    """Where the models of a design come from.

    Attributes:
        width: Of the residual stream at the target size.
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
        """Tokens at the target size; None: it reads none, or it is not known."""
        return None

    @property
    def n_classes(self) -> int | None:
        """Classes of a design that reads images and can have any number of them; None: it is another, or unknown."""
        return None

    @property
    def target_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the weights at the target size, by name; empty: they are not known without building it."""
        return {}

    @abstractmethod
    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """What is known of a size, as plain values."""

    @abstractmethod
    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """A fresh model; the caller keeps the global random state."""

    @abstractmethod
    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Its weights, tied ones once."""

    def nearest_width(self, width: int) -> int:
        """The nearest width that a model can have; of two equally near the smaller.

        A multiple of the width per head, so that heads stay as wide as they are; or, below that, one narrower head.
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
    """Options of the zoo."""

    config: ArchitectureConfig

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.config.d_model  # which the family says where the user does not

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
        """Tokens; None for images."""
        return self.config.vocab_size

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """The family and its options."""
        return self.at(width, depth, self.config.seed, None).as_dict()

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """See `DesignSource`; the zoo has generators of its own."""
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
    """A function from width, depth and seed to a model.

    Its vocabulary can be cut where it takes a ``vocabulary``; otherwise it stays what the function makes it.
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
        """See `DesignSource`; memory is used where the function asks for a device of its own."""
        with torch.device("meta"):
            model = self.make(width, depth, 0, vocabulary)
        return sum(weight.numel() for weight in model.parameters())
