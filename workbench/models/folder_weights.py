"""Weights of a Hugging Face folder, in files of any supported format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.models.distributed_folders import part_files
from workbench.models.lazy_tensor import LazyTensor
from workbench.models.state_files import WEIGHT_FILES, index_files, is_plain_pickle, numbered_shards
from workbench.models.weight_folders import has_weights, place_state, single_files, weight_places

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a Hugging Face folder, which stay on disk.

    Attributes:
        state: Name -> tensor, in the order in which transformers reads them.
        is_usual: Whether transformers itself can read them from the folder.
    """

    state: Mapping[str, LazyTensor]
    is_usual: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self.state)

    @property
    def n_elements(self) -> int:
        """Number of elements of all tensors together."""
        return sum(tensor.n_elements for tensor in self.state.values())

    @property
    def n_bytes(self) -> int:
        """Size of all tensors together in the files, in bytes."""
        return sum(tensor.n_bytes for tensor in self.state.values())

    @property
    def integers(self) -> frozenset[str]:
        """Names of the tensors that hold integers or booleans."""
        return frozenset(
            name for name, t in self.state.items() if not (t.dtype.is_floating_point or t.dtype.is_complex)
        )

    def read(self) -> dict[str, Tensor]:
        """Read all tensors, by name; none of them is a view of a file."""
        return {name: t.read().clone() if t.is_view else t.read() for name, t in self.state.items()}


def folder_weights(folder: Path, *, is_fetched: bool = True) -> FolderWeights | None:
    """Return the weights of a Hugging Face folder; None if there are none.

    They are in the files that transformers reads. If there are none, they are in a distributed checkpoint of PyTorch or
    DeepSpeed, or in a single file of weights under another name.

    Args:
        folder: A folder with a config.json.
        is_fetched: Whether all files of the checkpoint are downloaded; otherwise only those of transformers are used.

    Raises:
        CheckpointError: If a file is damaged or holds code, an index names a missing file, or several files may hold
            the weights.
    """
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    is_usual = file is not None and not part_files(folder)
    if file is not None:
        places, has_metadata = index_files(file) if file.suffix == ".json" else ((file,), True)
        is_usual = is_usual and has_metadata and all(is_plain_pickle(place) for place in places)
    elif not (places := numbered_shards(folder)) and is_fetched:
        places = weight_places(folder) if has_weights(folder) or single_files(folder) else ()
    if not places:
        return None
    return FolderWeights({name: tensor for place in places for name, tensor in place_state(place).items()}, is_usual)
