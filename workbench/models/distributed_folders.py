"""Folders of PyTorch's distributed checkpoint (DCP), with ``.metadata`` and ``*.distcp`` files, also of Megatron."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import CheckpointError
from workbench.models.state_files import CONFIG, WEIGHT_KEYS, WEIGHTS, LazyTensor, check_safetensors, safetensors_state

#: File that lists the tensors of a folder and where they are.
METADATA = ".metadata"
#: Name that HuggingFaceStorageWriter gives to the file of one rank, and key of the positions of its parts of tensors.
_PART = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_PLACES = "DCP_SHARDING_INFO"
#: Names of tensors that stack all layers along their first axis; Megatron stores equal layers in this way.
_STACKED = re.compile(r"(?:^|(?<=\.))layers\.(?!\d)")
#: Classes in a ``.metadata`` file; all of them only hold values.
_ALLOWED_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
}
#: Those whose values are not used, and types with attributes that cannot be set.
_UNUSED = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "_get_layout")
_IMMUTABLE = {"torch": ("Size",), "collections": ("OrderedDict",), "builtins": ("set", "frozenset")}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")


def part_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a folder that hold parts of tensors, each file those of one rank."""
    return tuple(file for file in sorted(folder.glob("shard-*.safetensors")) if _PART.fullmatch(file.name))


def require_complete_tensors(file: Path) -> None:
    """Raise CheckpointError if a safetensors file is known to hold only parts of tensors, by its name or header."""
    if _PART.fullmatch(file.name) or any(any(offsets) for offsets in _offsets(file).values()):
        raise CheckpointError(
            f"{file.name} holds parts of tensors, of one rank of several; pass the folder with the files of all ranks."
        )


def _damaged(file: Path, *, at: str = "") -> CheckpointError:
    where = f" at {at}" if at else ""
    return CheckpointError(f"{file} is damaged{where}; download the checkpoint again.")


def _incomplete(folder: Path, key: str) -> CheckpointError:
    return CheckpointError(f"{folder} does not hold all parts of {key}; download the checkpoint again.")


def distributed_state(folder: Path) -> dict[str, LazyTensor]:
    """Return the weights of a DCP folder by name, without their values and without optimizer and random states.

    A tensor of several chunks is assembled when it is read. In a Megatron folder (``torch_dist``), a tensor that stacks
    all layers becomes one tensor per layer.
    """
    if not (folder / METADATA).is_file():
        return _parts_state(folder)
    metadata = _read_metadata(folder / METADATA)
    try:
        is_megatron = CONFIG.json(folder / "metadata.json").get("sharded_backend") == "torch_dist"
    except CheckpointError:
        is_megatron = False
    try:
        tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        state: dict[str, LazyTensor] = {}
        for name, key in _weights(folder, metadata, tensors, is_megatron=is_megatron).items():
            stored = _stored(folder, key, tensors[key], places)
            if is_megatron and _STACKED.search(name) and stored.shape:
                for i in range(stored.shape[0]):
                    state[_STACKED.sub(f"layers.{i}.", name, count=1)] = stored.entry(i)
            else:
                state[name] = stored.full()
        return state
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder / METADATA) from error


def _parts_state(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of safetensors files of several ranks, each assembled from its parts when it is read."""
    boxes: dict[str, dict[tuple[int, ...], _Box]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for file in part_files(folder):
        offsets = _offsets(file)
        for name, tensor in safetensors_state(file).items():
            part = _Box(offsets.get(name, (0,) * len(tensor.shape)), tensor.shape, tensor.read)
            is_wrong = part.offsets in boxes.setdefault(name, {}) or len(part.offsets) != len(part.sizes)
            if is_wrong or dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                raise _damaged(file, at=name)
            boxes[name][part.offsets] = part
    state = {}
    for name, parts in boxes.items():
        ends = [[o + n for o, n in zip(p.offsets, p.sizes, strict=True)] for p in parts.values()]
        shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
        if not are_tiles(shape, [(part.offsets, part.sizes) for part in parts.values()]):
            raise _incomplete(folder, name)
        state[name] = _Stored(shape, dtypes[name], tuple(parts.values())).full()
    return state


def are_tiles(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether boxes, each given by offsets and sizes, fill a shape without gaps and without overlaps."""
    if any(not len(offsets) == len(sizes) == len(shape) for offsets, sizes in boxes):
        return False
    low = np.array([offsets for offsets, _ in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    high = low + np.array([sizes for _, sizes in boxes], dtype=np.int64).reshape(low.shape)
    if (low < 0).any() or (high < low).any() or (high > np.array(shape, dtype=np.int64)).any():
        return False
    volumes = (high - low).prod(1)
    low, high = low[volumes > 0], high[volumes > 0]
    overlap = ((low[:, None] < high[None]) & (low[None] < high[:, None])).all(-1)
    return int(volumes.sum()) == math.prod(shape) and int(overlap.sum()) == len(low)


def _offsets(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the offsets of the part of each tensor in a safetensors file; empty if the header lists no parts."""
    from safetensors import safe_open

    check_safetensors(file)
    with safe_open(file, framework="pt", backend="pread") as opened:
        text = (opened.metadata() or {}).get(_PLACES)
    try:
        return {name: tuple(map(int, place["saved_offsets"])) for name, place in json.loads(text or "{}").items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(file, at=_PLACES) from error


class _Unpickler(pickle.Unpickler):
    """Unpickler that creates only values and the classes of a ``.metadata`` file, and raises for any other.

    A pickle can set attributes of whatever it finds. So it finds only types that are immutable, and subclasses of the
    others that exist for this pickle alone.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._found: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return found
        if name in _IMMUTABLE.get(module, ()):
            return super().find_class(module, name)
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return self._subclass(PurePosixPath)
        if (module, name) == ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"):
            module, name = "torch.distributed.checkpoint.metadata", "Metadata"  # it adds one dict
        if name not in _ALLOWED_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        if name in _UNUSED:
            return self._subclass(_Unused)
        found = self._subclass(super().find_class(module, name))
        if name == "TensorProperties":  # its own method reads the unused values too
            found.__setstate__ = lambda properties, state: setattr(properties, "dtype", state[0])
        return found

    def _subclass(self, parent: type) -> Any:
        return self._found.setdefault(f"{parent.__module__}.{parent.__name__}", type(parent.__name__, (parent,), {}))


class _Unused:
    """Value that is not used, such as a memory format."""

    def __new__(cls, *_: Any) -> Any:
        """Create the object without its values."""
        return super().__new__(cls)


def _read_metadata(file: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata = _Unpickler(WEIGHTS.check(file).read_bytes()).load()
    except pickle.UnpicklingError as error:
        if "not allowed" in str(error):
            raise CheckpointError(
                f"{file} holds more than the positions of tensors, possibly code ({error}), and was not loaded; "
                "save the model's state dict as .safetensors where you trust it."
            ) from error
        raise _damaged(file) from error
    except Exception as error:  # damaged bytes can cause any exception in the reader
        raise _damaged(file) from error
    parts = (getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None))
    if not isinstance(metadata, Metadata) or not all(isinstance(part, Mapping) for part in parts):
        raise _damaged(file)
    return metadata


def _weights(folder: Path, metadata: Any, tensors: Mapping[str, Any], *, is_megatron: bool) -> dict[str, str]:
    """Return the key in the folder, where nested dicts are flattened, of each tensor of the model by name."""
    known = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    paths = {key: tuple(map(str, known.get(key, (key,)))) for key in tensors}
    while inner := [word for word in WEIGHT_KEYS if any(len(p) > 1 and p[0] == word for p in paths.values())]:
        if len(inner) > 1:
            raise CheckpointError(f"{folder} may hold weights under each of {', '.join(inner)}; save only one of them.")
        paths = {key: path[1:] for key, path in paths.items() if len(path) > 1 and path[0] == inner[0]}
    names = {path[0]: key for key, path in paths.items() if len(path) == 1}
    if is_megatron:
        others = [name for name in names if "optimizer" in name.split(".")[:2] or name.startswith("rng_state")]
        names = {name: key for name, key in names.items() if name not in others}
    if not names:
        held = ", ".join(sorted({path[0] for path in paths.values()})[:3]) or "no tensors"
        raise CheckpointError(f"{folder} holds {held}, but no weights; save module.state_dict() into it.")
    return names


@dataclass(frozen=True)
class _Box:
    """A part of a tensor: its position in the tensor, and a function that reads its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class _Stored:
    """A tensor of a folder and the boxes that fill it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[_Box, ...]

    def full(self) -> LazyTensor:
        """Return the full tensor, which is read later."""
        n_bytes = math.prod(self.shape) * self.dtype.itemsize
        return LazyTensor(self.shape, self.dtype, lambda: self._read(), n_bytes)

    def entry(self, i: int) -> LazyTensor:
        """Return the tensor at one index of its first axis, which is read later."""
        shape = self.shape[1:]
        return LazyTensor(shape, self.dtype, lambda: self._read(i)[0], math.prod(shape) * self.dtype.itemsize)

    def _read(self, index: int | None = None) -> Tensor:
        """Read the tensor, or its part at one index of the first axis, which is kept with length 1."""
        if len(self.boxes) == 1 and index is None:
            return self.boxes[0].read()
        first, shape = (0, self.shape) if index is None else (index, (1, *self.shape[1:]))
        out = torch.empty(shape, dtype=self.dtype)
        for box in self.boxes:
            into, of = [], []
            for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                start = first if axis == 0 else 0
                low, high = max(offset, start), min(offset + size, start + shape[axis])
                into.append(slice(low - start, max(low, high) - start))
                of.append(slice(low - offset, max(low, high) - offset))
            if all(part.stop > part.start for part in of):
                out[tuple(into)] = box.read()[tuple(of)]
        return out


def _stored(folder: Path, key: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> _Stored:
    """Return a tensor of the metadata; its chunks must fill it and be in files of the folder."""
    shape, dtype = tuple(entry.size), entry.properties.dtype
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
    if any((key, offsets) not in places for offsets in sizes):
        raise _incomplete(folder, key)
    boxes, ends = [], []
    for offsets, size in sizes.items():
        info = places[key, offsets]
        if info.transform_descriptors:
            raise CheckpointError(f"{folder} is compressed ({info.transform_descriptors}); save it without transforms.")
        name, start, length = info.relative_path, int(info.offset), int(info.length)
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{folder / METADATA} names {name!r}, which is not there; download it again.")
        boxes.append(_Box(offsets, size, partial(_read_chunk, folder / name, start, length, key, size, dtype)))
        ends.append((folder / name, start + length))
    if not are_tiles(shape, list(sizes.items())) or type(dtype) is not torch.dtype:
        raise _incomplete(folder, key)
    for file, end in ends:
        if not file.is_file() or end > file.stat().st_size:
            raise CheckpointError(f"{file} is missing or truncated; download it again.")
    return _Stored(shape, dtype, tuple(boxes))


def _read_chunk(path: Path, start: int, length: int, key: str, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Read one chunk of a tensor, which is an archive of torch within a file."""
    with WEIGHTS.check(path).open("rb") as file:
        file.seek(start)
        data = file.read(length)
    if not data.startswith(b"PK"):
        raise _damaged(path, at=key)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} holds more than a tensor at {key}, possibly code; download it again."
        ) from error
    except Exception as error:  # damaged bytes can cause any exception in the reader
        raise _damaged(path, at=key) from error
    is_dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_dense or tuple(tensor.shape) != sizes or tensor.dtype != dtype:
        raise CheckpointError(f"{path.name} holds a different tensor at the position of {key}; download it again.")
    return tensor
