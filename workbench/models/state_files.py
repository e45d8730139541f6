"""Files of weights, read without running code, and the files that belong together."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import CheckpointError
from workbench.models.inert_objects import Placeholder, placeholders
from workbench.models.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    from torch import Tensor

#: Endings that `read_state` reads.
STATE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar")
#: The keys under which training scripts, Lightning, DeepSpeed and PyTorch's distributed checkpoints keep the weights.
WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module", "app")
#: The names of shards. Other words before the dash belong to formats whose shards hold parts of tensors.
_SHARD = re.compile(
    r"((?:model|pytorch_model|diffusion_pytorch_model)(?:\.\w+)?)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)"
)
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
    state = _read_weights(path, mmap=mmap)
    while isinstance(state, dict):
        inner = [key for key in WEIGHT_KEYS if isinstance(state.get(key), dict) and state[key]]
        if len(inner) > 1:
            raise CheckpointError(
                f"{path.name} may hold weights under each of {', '.join(inner)}; save one of them alone."
            )
        if not inner:
            break
        state = state[inner[0]]
    if isinstance(state, Placeholder):
        raise CheckpointError(
            f"{path.name} holds no state dict but an object of the class {state.full_name}; "
            "save its module.state_dict() where that class is known."
        )
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if not _is_empty_extra(name, value)}
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise CheckpointError(f"{path.name} holds no state dict; save module.state_dict() into it.")
    if any(value.layout is not torch.strided or value.is_quantized or value.is_nested for value in state.values()):
        raise CheckpointError(f"{path.name} holds sparse, quantized or nested tensors; save them as dense ones.")
    return state


def _refuse_unreadable(path: Path) -> None:
    """Refuse a file that this user may not read.

    Raises:
        CheckpointError: If it is one.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror}); check its permissions.") from error


def is_plain_pickle(path: Path) -> bool:
    """Whether a file is a pickle of tensors by name and nothing else, or no pickle but a safetensors file.

    Raises:
        CheckpointError: If it is damaged or holds code.
    """
    if path.suffix == ".safetensors":
        return True
    names = placeholders(path)
    state = _read_weights(path, mmap=True)
    return not names and isinstance(state, dict) and all(isinstance(value, torch.Tensor) for value in state.values())


def read_objects(path: Path) -> dict[str, Any]:
    """The tensors and plain values of a pickle of a dict, mapped from the file.

    Raises:
        CheckpointError: If it is damaged, holds code or no dict.
    """
    held = _read_weights(path, mmap=True)
    if not isinstance(held, dict):
        raise CheckpointError(f"{path.name} holds no dict of tensors; fetch it again.")
    return held


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

    _refuse_unreadable(path)
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is truncated or no safetensors file; fetch it again.") from error


def safetensors_state(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a ``.safetensors`` file by name, without their values.

    Raises:
        CheckpointError: If it is damaged.
    """
    from safetensors import safe_open

    check_safetensors(path)
    # The file stays open, and mapped, as long as one of its tensors is held.
    file = safe_open(path, framework="pt", backend="mmap")

    def lazy(name: str) -> LazyTensor:
        piece = file.get_slice(name)
        dtype = file.get_tensor(name).dtype
        shape = tuple(piece.get_shape())
        n_elements = torch.Size(shape).numel()
        return LazyTensor(shape, dtype, lambda: file.get_tensor(name), n_elements * dtype.itemsize, True)

    return {name: lazy(name) for name in file.keys()}  # noqa: SIM118 it is no dict


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


def _read_weights(path: Path, *, mmap: bool) -> object:
    """The content of a pickle.

    Raises:
        CheckpointError: If it is damaged or holds code.
    """
    try:
        return _read_pickle(path, mmap=mmap and zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} holds more than tensors, possibly code, and was not loaded; "
            "save its state dict as .safetensors where you trust it."
        ) from error


def _read_pickle(path: Path, **options: bool) -> object:
    """The content of a pickle; an UnpicklingError if it calls functions, or is no pickle.

    Objects of classes that torch does not know are replaced by placeholders.
    """
    damaged = f"{path.name} is damaged or incomplete; fetch it again."
    _refuse_unreadable(path)
    with path.open("rb") as file:
        # torch takes a zip archive without its end for an old pickle and then suspects code in it.
        if file.read(2) == b"PK" and not zipfile.is_zipfile(path):
            raise CheckpointError(damaged)
    try:
        with torch.serialization.safe_globals(placeholders(path)):
            return torch.load(path, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # noise makes the reader fail in any way
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path.name} is a program of TorchScript, not a state dict; save the state_dict() of its module."
            ) from error
        raise CheckpointError(damaged) from error
