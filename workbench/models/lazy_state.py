"""State dicts whose tensors stay on disk until they are read one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import CheckpointError
from workbench.models.state_files import check_safetensors, read_state

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
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    n_bytes: int

    def __getitem__(self, index: Any) -> Tensor:
        """Part of the tensor; ``[...]`` is all of it, which is how transformers reads."""
        return self.read()[index]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory, or mapped from a file, already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor, tensor.numel() * tensor.element_size())


def lazy_state(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a file by name, without their values.

    Raises:
        CheckpointError: See `read_state`.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}; check the path.")
    if path.suffix == ".safetensors":
        return _of_safetensors(path)
    return {name: LazyTensor.of(tensor) for name, tensor in read_state(path, mmap=True).items()}


def _of_safetensors(path: Path) -> dict[str, LazyTensor]:
    from safetensors import safe_open

    check_safetensors(path)
    # The file stays open, and mapped, as long as one of its tensors is held.
    file = safe_open(path, framework="pt", backend="mmap")

    def lazy(name: str) -> LazyTensor:
        piece = file.get_slice(name)
        dtype = file.get_tensor(name).dtype
        shape = tuple(piece.get_shape())
        n_elements = torch.Size(shape).numel()
        return LazyTensor(shape, dtype, lambda: file.get_tensor(name), n_elements * dtype.itemsize)

    return {name: lazy(name) for name in file.keys()}  # noqa: SIM118 it is no dict
