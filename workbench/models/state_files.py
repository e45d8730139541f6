"""Files of weights: state dicts read without running code, and the weights of a Hugging Face folder."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workbench.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

#: Endings that `read_state` reads.
STATE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
#: The keys under which training scripts, Lightning, DeepSpeed and PyTorch's distributed checkpoints keep the weights.
WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module", "app")
#: The names of shards. Other words before the dash belong to formats whose shards hold parts of tensors.
_SHARD = re.compile(r"(model|pytorch_model|diffusion_pytorch_model)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
#: The files that transformers takes the weights from: the first of them that a folder has.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_state(path: str | os.PathLike[str], *, mmap: bool = False) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file or of a pickle, which is read without running code.

    A pickle may hold them below the keys `WEIGHT_KEYS`, beside an optimizer and the like, which are left out.

    Args:
        path: Path of the file.
        mmap: Whether tensors of a pickle are views of the file, where its format allows that.

    Raises:
        CheckpointError: If the file is missing, damaged, holds code, or holds no state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}; check the path.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        check_safetensors(path)
        return load_file(path)
    try:
        state = _read_pickle(path, mmap=mmap and zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} holds more than tensors, possibly code, and was not loaded; "
            "save its state dict as .safetensors where you trust it."
        ) from error
    while isinstance(state, dict):
        inner = [key for key in WEIGHT_KEYS if isinstance(state.get(key), dict) and state[key]]
        if len(inner) > 1:
            raise CheckpointError(
                f"{path.name} may hold weights under each of {', '.join(inner)}; save one of them alone."
            )
        if not inner:
            break
        state = state[inner[0]]
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if not _is_empty_extra(name, value)}
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise CheckpointError(f"{path.name} holds no state dict; save module.state_dict() into it.")
    if any(value.layout is not torch.strided or value.is_quantized or value.is_nested for value in state.values()):
        raise CheckpointError(f"{path.name} holds sparse, quantized or nested tensors; save them as dense ones.")
    return state


def _is_empty_extra(name: object, value: object) -> bool:
    """Whether an entry is the extra state of a module that has none, as Transformer Engine saves it."""
    is_empty = value is None or (isinstance(value, torch.Tensor) and value.numel() == 0)
    return isinstance(name, str) and name.endswith("_extra_state") and is_empty


def check_safetensors(path: Path) -> None:
    """Refuse a ``.safetensors`` file whose header does not agree with its length.

    Raises:
        CheckpointError: If it is damaged or another kind of file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is truncated or no safetensors file; fetch it again.") from error


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a Hugging Face folder, of which only the headers are in memory.

    Attributes:
        files: Files of the tensors, in the order in which transformers reads them.
        names: Names of all tensors.
        n_elements: Number of elements of all tensors together.
        integers: Names of the tensors that hold integers or booleans.
        has_metadata: Whether the index of a sharded checkpoint has the section without which transformers fails.
    """

    files: tuple[Path, ...]
    names: tuple[str, ...]
    n_elements: int
    integers: frozenset[str]
    has_metadata: bool = True

    def read(self) -> dict[str, Tensor]:
        """All tensors by name.

        Raises:
            CheckpointError: See `read_state`.
        """
        state: dict[str, Tensor] = {}
        for file in self.files:
            state |= read_state(file)
        return state


def folder_weights(folder: Path) -> FolderWeights | None:
    """The weights that transformers would read from a folder; None if it would look elsewhere or finds none.

    Raises:
        CheckpointError: If a file is damaged or holds code, or an index names a file that is not there.
    """
    weights = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    files = numbered_shards(folder) if weights is None else (weights,)
    if not files:
        return None
    has_metadata = weights is not None  # without an index transformers finds no shards
    if weights is not None and weights.suffix == ".json":
        files, has_metadata = index_files(weights)
    headers = {name: (size, is_integer) for file in files for name, size, is_integer in _header(file)}
    return FolderWeights(
        files,
        tuple(headers),
        sum(size for size, _ in headers.values()),
        frozenset(name for name, (_, is_integer) in headers.items() if is_integer),
        has_metadata,
    )


def numbered_shards(folder: Path) -> tuple[Path, ...]:
    """The files of a sharded checkpoint without an index, known by their names, such as model-00001-of-00003.

    Raises:
        CheckpointError: If one of them is missing, or there are several sets of them.
    """
    sets: dict[str, dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        if match := _SHARD.fullmatch(file.name):
            sets.setdefault(f"{match[1]}-{{:0>5}}-of-{match[3]}{match[4]}", {})[int(match[2])] = file
    if len(sets) > 1:
        raise CheckpointError(
            f"{folder} holds several sets of shards ({', '.join(s.replace('{:0>5}', '*') for s in sets)}); leave one."
        )
    for pattern, found in sets.items():
        whole = range(1, int(pattern.rsplit("-of-")[1][:5]) + 1)
        if missing := [pattern.format(i) for i in whole if i not in found]:
            raise CheckpointError(f"{folder} lacks {missing[0]} of its shards; fetch that file too.")
        return tuple(found[i] for i in whole)
    return ()


def index_files(path: Path) -> tuple[tuple[Path, ...], bool]:
    """The files of a sharded checkpoint, all of which exist, and whether its index has metadata.

    Raises:
        CheckpointError: If the index is damaged, or a file is missing.
    """
    damaged = f"{path.name} is no index of a sharded checkpoint; fetch it again."
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(damaged) from error
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(damaged)
    names = sorted(set(shards.values()))
    for name in names:
        # transformers would follow a path out of the folder
        if Path(name).name != name or not (path.parent / name).is_file():
            raise CheckpointError(f"{path.name} names {name}, which is not in the folder; fetch that file too.")
    return tuple(path.parent / name for name in names), isinstance(index.get("metadata"), dict)


def _header(file: Path) -> list[tuple[str, int, bool]]:
    """Name, number of elements, and whether they are integers, of each tensor of a file."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        check_safetensors(file)
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 it is no dict
            return [
                (name, math.prod(piece.get_shape()), not piece.get_dtype().startswith(("F", "BF", "C")))
                for name, piece in slices.items()
            ]
    state = _read_pickle(file, mmap=zipfile.is_zipfile(file))
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.name} holds no state dict; save the model with save_pretrained().")
    return [
        (name, value.numel(), not (value.is_floating_point() or value.is_complex()))
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    ]


def _read_pickle(path: Path, **options: bool) -> object:
    """The content of a pickle; an UnpicklingError if that is more than tensors and plain values."""
    damaged = f"{path.name} is damaged or incomplete; fetch it again."
    with path.open("rb") as file:
        # torch takes a zip archive without its end for an old pickle and then suspects code in it.
        if file.read(2) == b"PK" and not zipfile.is_zipfile(path):
            raise CheckpointError(damaged)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # noise makes the reader fail in any way
        raise CheckpointError(damaged) from error
