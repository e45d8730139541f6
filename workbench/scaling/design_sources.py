"""Sources of designs: options of the zoo and functions; `transformers_source` has configurations of transformers."""

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
        depth: Number of residual blocks at the target size.
    """

    if TYPE_CHECKING:  # Attributes of some sources, properties of others.

        @property
        def width(self) -> int: ...  # noqa: D102

        @property
        def depth(self) -> int: ...  # noqa: D102

    @property
    def width_per_head(self) -> int | None:
        """Width of the residual stream per attention head; None if there are no heads or their number is unknown."""
        return None

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary at the target size; None if the design reads no tokens or the size is unknown."""
        return None

    @property
    def n_classes(self) -> int | None:
        """Number of classes of a design that reads images and can have any number of classes; None otherwise."""
        return None

    @property
    def target_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters at the target size, by name; empty if they are unknown before a model is built."""
        return {}

    def with_images(self, side: int) -> DesignSource:
        """Return the source for square images of another side; itself if it reads none or their size is fixed."""
        del side
        return self

    @abstractmethod
    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """Return a description of a size as JSON values."""

    @abstractmethod
    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """Build a model with initial parameters; the caller preserves the global random state."""

    @abstractmethod
    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Return the number of parameters of a model of a size, with tied parameters counted once."""

    def nearest_width(self, width: int) -> int:
        """Return the nearest width that a model can have; the smaller one of two equally near widths.

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
        """Return whether a single head can have this width."""
        del width
        return True


@dataclass(frozen=True)
class ZooSource(DesignSource):
    """A design from options of the zoo."""

    config: ArchitectureConfig

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.config.d_model

    @property
    def depth(self) -> int:
        """Number of residual blocks."""
        return self.config.n_layers

    @property
    def width_per_head(self) -> int | None:
        """Width of a head; None if there are no heads."""
        return self.config.head_dim if self.config.n_heads else None

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary; None for images."""
        return self.config.vocab_size

    def with_images(self, side: int) -> ZooSource:
        """Return the source for square images of another side; itself if it reads none."""
        if self.config.image_size is None:
            return self
        return ZooSource(ArchitectureConfig.from_dict(self.config.as_dict() | {"image_size": side}))

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """Return the family and its options at a size."""
        return self.at(width, depth, self.config.seed, None).as_dict()

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """Build a model with initial parameters; the zoo uses its own random generators."""
        return build(self.at(width, depth, seed, vocabulary))

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Return the number of parameters of a model of a size, with tied parameters counted once."""
        return count_parameters(self.at(width, depth, 0, vocabulary))

    def at(self, width: int, depth: int, seed: int, vocabulary: int | None) -> ArchitectureConfig:
        """Return the configuration at a size."""
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

    The vocabulary can be reduced if the function has a parameter ``vocabulary``.
    """

    function: Callable[..., nn.Module]
    width: int
    depth: int

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """Return the name of the function."""
        del width, depth
        return {"function": getattr(self.function, "__qualname__", type(self.function).__name__)}

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """Build a model with initial parameters.

        Raises:
            OptionError: If the function returns no module.
        """
        torch.manual_seed(seed)
        has_vocabulary = "vocabulary" in inspect.signature(self.function).parameters
        options = {"vocabulary": vocabulary} if vocabulary is not None and has_vocabulary else {}
        model = self.function(width, depth, seed, **options)
        if not isinstance(model, nn.Module):
            raise OptionError(
                f"The function must return a torch module of width {width} and depth {depth}, got "
                f"{type(model).__name__}."
            )
        return model

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Return the number of parameters; memory is allocated only if the function itself chooses a device."""
        with torch.device("meta"):
            model = self.make(width, depth, 0, vocabulary)
        return sum(parameter.numel() for parameter in model.parameters())
