"""A tensor that stays on disk until it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint, not yet in memory.

    Attributes:
        shape: Shape of the tensor.
        dtype: Type of its elements as returned by `read`.
        read: Function that reads it: a view of the file where the format allows that, else a copy.
        n_bytes: Size in the file, in bytes.
        is_view: Whether `read` returns a view without memory of its own: of the file, or of a tensor in memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    n_bytes: int
    is_view: bool = False

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part of the tensor; transformers reads all of it by ``[...]``."""
        return self.read()[index]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor that is already in memory or mapped from a file."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor, tensor.numel() * tensor.element_size(), True)
