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
        shape: Its shape.
        dtype: Its dtype as `read` gives it.
        read: Function that reads it: a view of the file where the format allows that, else a copy.
        n_bytes: Bytes that it takes in the file.
        is_view: Whether what `read` gives takes no memory of its own: a view of the file, or of a tensor that is there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    n_bytes: int
    is_view: bool = False

    @property
    def n_elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Part of the tensor; ``[...]`` is all of it, which is how transformers reads."""
        return self.read()[index]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory, or mapped from a file, already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor, tensor.numel() * tensor.element_size(), True)
