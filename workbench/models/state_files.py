"""Weight files, read without running code, and their comparison with a model before any tensor is loaded."""

from __future__ import annotations

import json
import math
import mmap
import os
import pickle
import re
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import CheckpointError
from workbench.io.files import FileKind, as_path


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint, not yet in memory."""

    shape: tuple[int, ...]  # shape of the tensor
    dtype: torch.dtype  # type of its elements as returned by `read`
    read: Callable[[], Tensor]  # function that reads it: a view of the file where the format allows that, else a copy
    n_bytes: int  # size in the file, in bytes
    #: Whether `read` returns a view without memory of its own: of the file, or of a tensor in memory.
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


# torch reads a pickle without running code by rejecting every class and function that it does not know. But training
# scripts store an ``argparse.Namespace``, a dataclass or a path along with the weights, and torch rejects their files.
# So its restricted reader receives a placeholder for each unknown class, and the name in the file is never looked up or
# imported. A pickle that calls a function, which is how code is hidden in one, is still rejected.

#: Classes of the standard library that only hold the values with which they are called.
_HARMLESS = ("pathlib.", "datetime.", "types.SimpleNamespace", "uuid.UUID", "decimal.Decimal", "fractions.Fraction")
#: Modules of the standard library, by their current names and by those of Python 2, which torch.save writes.
_OF_PYTHON = {*sys.stdlib_module_names, *IMPORT_MAPPING}
_OF_NUMPY = ("scalar", "_reconstruct", "_frombuffer", "dtype", "ndarray")


class _Kind(type):
    """Metaclass of placeholders; a pickle that calls a function calls one of these classes."""

    full_name: str

    def __call__(cls: Any, *_: Any, **__: Any) -> Any:
        if not _only_holds_values(cls.full_name):
            raise pickle.UnpicklingError(f"it calls {cls.full_name}")
        return Placeholder.__new__(cls)


class Placeholder(metaclass=_Kind):
    """Empty object in place of one whose class is not imported."""

    full_name = "an object"

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Create the placeholder; the arguments are ignored."""
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Discard the state of the object."""


def placeholders(path: Path) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return placeholders for the names in a pickle that torch does not know, in the form for ``safe_globals``."""
    try:
        if not zipfile.is_zipfile(path):
            return []
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001 damaged bytes can cause any exception, and torch.load will raise it
        return []
    # A separate class for each name, so that a call can be identified by it; a dict in place of a defaultdict,
    # which the reader of torch would not fill.
    found: dict[str, Any] = {name: _Kind("Placeholder", (Placeholder,), {"full_name": name}) for name in names}
    if "collections.defaultdict" in found:
        found["collections.defaultdict"] = lambda *_: {}
    return [(each, name) for name, each in found.items()]


def _only_holds_values(name: str) -> bool:
    """Return whether calling this name only creates an object from values, as every third-party class is assumed to."""
    module, _, last = name.rpartition(".")
    if module.partition(".")[0] == "numpy":
        return last in _OF_NUMPY
    is_of_python = {module.partition(".")[0], module} & _OF_PYTHON
    is_class = last.lstrip("_")[:1].isupper() and not is_of_python
    return is_class or any(name == known or (known[-1] == "." and name.startswith(known)) for known in _HARMLESS)


#: What files of a checkpoint are: of weights, with the options of a model, and with the names of other files.
WEIGHTS = FileKind("a file of weights", "check the path, or download it again", CheckpointError, "", 1 << 62)
CHECKPOINT = FileKind("a checkpoint that can be read", "check the path and its permissions", CheckpointError, "source")
CONFIG = FileKind("a configuration of a model", "download the checkpoint again", CheckpointError, name="")
_INDEX = FileKind("an index of a sharded checkpoint", "download it again", CheckpointError, name="")
#: Options of a configuration for which objects are created one by one, and their largest value.
_COUNTED, _MOST = re.compile(r"^(?:num|n)_.*(?:layer|block)s?$|layers$|depth"), 2000
#: File suffixes that `read_state` reads.
STATE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar")
#: Keys under which training scripts, Lightning, DeepSpeed and PyTorch's distributed checkpoints store the weights.
WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module", "app")
#: Names of shards. Other words before the dash belong to formats whose shards hold parts of tensors.
_SHARD = re.compile(
    r"((?:model|pytorch_model|diffusion_pytorch_model)(?:\.\w+)?)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)"
)
#: Files from which transformers takes the weights: the first of them that a folder contains.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


def read_config(path: Path) -> dict[str, Any]:
    """Return the options of a model, or raise CheckpointError for a number of layers that no model has."""
    config = CONFIG.json(path)
    for options in (config, *(each for each in config.values() if isinstance(each, dict))):
        for name, value in options.items():
            if isinstance(value, int) and value > _MOST and _COUNTED.search(name):
                raise CheckpointError.of(name, value, f"at most {_MOST}", remedy=f"correct it in {path}")
    return config


def require_files(folder: Path) -> None:
    """Raise `CheckpointError` if a folder holds a pipe or a device, on which a reader would wait forever."""
    for file in folder.iterdir():
        if file.exists() and not file.is_file() and not file.is_dir():
            WEIGHTS.check(file)


def read_state(path: str | os.PathLike[str], *, mmap: bool = False) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors`` file, or of a pickle under `WEIGHT_KEYS`, without running code."""
    path = as_path(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        check_safetensors(path)
        return load_file(path)
    state = _read_weights(path, mmap=mmap)
    for _ in WEIGHT_KEYS:  # a pickle may contain itself
        if not isinstance(state, dict):
            break
        inner = [key for key in WEIGHT_KEYS if isinstance(state.get(key), dict) and state[key]]
        if len(inner) > 1:
            raise CheckpointError(f"{path.name} may hold weights under each of {', '.join(inner)}; save only one.")
        if not inner:
            break
        state = state[inner[0]]
    if isinstance(state, Placeholder):
        raise CheckpointError(
            f"{path.name} contains no state dict, but an object of the class {state.full_name}; "
            "save its module.state_dict() in an environment where that class is available."
        )
    if isinstance(state, dict):
        # Transformer Engine saves an empty extra state for modules without one.
        empty = {n for n, v in state.items() if v is None or (isinstance(v, torch.Tensor) and v.numel() == 0)}
        empty = {name for name in empty if isinstance(name, str) and name.endswith("_extra_state")}
        state = {name: value for name, value in state.items() if name not in empty}
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise CheckpointError(f"{path.name} contains no state dict; save module.state_dict() in it.")
    if any(value.layout is not torch.strided or value.is_quantized or value.is_nested for value in state.values()):
        raise CheckpointError(f"{path.name} contains sparse, quantized or nested tensors; save them as dense tensors.")
    return state


def is_plain_pickle(path: Path) -> bool:
    """Return whether a file is a safetensors file, or a pickle of named tensors without other objects."""
    if path.suffix == ".safetensors":
        return True
    names = placeholders(path)
    state = _read_weights(path, mmap=True)
    return not names and isinstance(state, dict) and all(isinstance(value, torch.Tensor) for value in state.values())


def read_objects(path: Path) -> dict[str, Any]:
    """Return the tensors and simple values of a pickled dict, mapped from the file."""
    content = _read_weights(path, mmap=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} contains no dict of tensors; download it again.")
    return content


def check_safetensors(path: Path) -> None:
    """Raise CheckpointError if the header of a ``.safetensors`` file does not agree with its length."""
    from safetensors import SafetensorError, safe_open

    WEIGHTS.check(path)
    try:
        with safe_open(path, framework="pt", backend="pread"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is truncated or not a safetensors file; download it again.") from error


def safetensors_state(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a ``.safetensors`` file, each mapped when it is read, as files may exceed the memory."""
    from safetensors.torch import _TYPES

    check_safetensors(path)
    with path.open("rb") as file:
        begin = 8 + (n_header := int.from_bytes(file.read(8), "little"))
        header = json.loads(file.read(n_header))

    def lazy(about: dict[str, Any]) -> LazyTensor:
        dtype: Any = _TYPES[about["dtype"]]
        (start, end), shape = about["data_offsets"], tuple(about["shape"])
        return LazyTensor(
            shape, dtype, lambda: _mapped(path, begin + start, end - start, dtype).view(shape), end - start, True
        )

    return {name: lazy(about) for name, about in header.items() if name != "__metadata__"}


def _mapped(path: Path, start: int, n_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return a part of a file as a flat tensor; writing to it does not change the file."""
    if not n_bytes:
        return torch.empty(0, dtype=dtype)
    if start % dtype.itemsize:  # old files have headers of any length
        with path.open("rb") as file:
            file.seek(start)
            return torch.frombuffer(bytearray(file.read(n_bytes)), dtype=dtype)
    before = start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), before + n_bytes, access=mmap.ACCESS_COPY, offset=start - before)
    return torch.frombuffer(pages, dtype=dtype, offset=before)


def numbered_shards(folder: Path) -> tuple[Path, ...]:
    """Return the files of a sharded checkpoint without an index, recognized by names such as model-00001-of-00003."""
    sets: dict[str, dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        if match := _SHARD.fullmatch(file.name):
            sets.setdefault(f"{match[1]}-{{:0>5}}-of-{match[3]}{match[4]}", {})[int(match[2])] = file
    if len(sets) > 1:
        patterns = [pattern.replace("{:0>5}", "*") for pattern in sets]
        raise CheckpointError(f"{folder} contains several sets of shards ({', '.join(patterns)}); keep one.")
    for pattern, found in sets.items():
        numbers = range(1, int(pattern.rsplit("-of-")[1][:5]) + 1)
        if missing := [pattern.format(i) for i in numbers if i not in found]:
            raise CheckpointError(f"The shard {missing[0]} is missing in {folder}; download that file too.")
        return tuple(found[i] for i in numbers)
    return ()


def index_files(path: Path) -> tuple[tuple[Path, ...], bool]:
    """Return the existing files of a sharded checkpoint, and whether its index has metadata."""
    index = _INDEX.json(path)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise _INDEX.rejected(path, "it lists no files of tensors")
    names = sorted(set(shards.values()))
    for name in names:
        # transformers would follow a path out of the folder
        if Path(name).name != name or not (path.parent / name).is_file():
            raise CheckpointError(f"{path.name} lists {name}, which is not in the folder; download that file too.")
    return tuple(path.parent / name for name in names), isinstance(index.get("metadata"), dict)


def _read_weights(path: Path, *, mmap: bool) -> object:
    """Return the content of a pickle, with placeholders for objects of classes that torch does not know."""
    damaged = CheckpointError(f"{path.name} is damaged or incomplete; download it again.")
    with WEIGHTS.check(path).open("rb") as file:
        # torch takes a zip archive without its end for an old pickle and then suspects code in it.
        if file.read(2) == b"PK" and not zipfile.is_zipfile(path):
            raise damaged
    try:
        with torch.serialization.safe_globals(placeholders(path)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} was not loaded, because it contains more than tensors, possibly code; if you trust it, save "
            "its state dict as .safetensors."
        ) from error
    except Exception as error:  # a damaged file can cause any error in the reader
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path.name} is a program of TorchScript, not a state dict; save the state_dict() of its module."
            ) from error
        raise damaged from error


#: Prefix of torch.compile for names of the module that it wraps, anywhere in the model.
_COMPILED = "_orig_mod."
#: Prefix of DataParallel and DistributedDataParallel for every name.
_PARALLEL = "module."
#: Bytes of tensors on disk that are read into a module at once.
_AT_ONCE = 2**28


@dataclass(frozen=True)
class Misfit:
    """Differences between the tensors of a checkpoint and those of a model; false if there are none."""

    missing: tuple[str, ...] = ()  # the model's tensors that the checkpoint lacks
    unexpected: tuple[str, ...] = ()  # those in the checkpoint that the model does not have
    misshapen: tuple[tuple[str, str], ...] = ()  # those of another shape, with "(found) instead of (expected)"
    integers: tuple[str, ...] = ()  # integers where the model has floats: quantized weights without their scales
    untied: tuple[str, ...] = ()  # those that differ from another tensor to which the model ties them
    of_another_head: tuple[str, ...] = ()  # unexpected ones that a model of its family with another head has

    def __bool__(self) -> bool:
        return self.n_tensors > 0

    @property
    def n_tensors(self) -> int:
        """Number of tensors that do not fit, without those of another head, which are harmless."""
        return sum(map(len, (self.missing, self.unexpected, self.misshapen, self.integers, self.untied)))

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the model's tensors that the checkpoint cannot provide."""
        return (*self.missing, *(name for name, _ in self.misshapen))

    def found(self) -> str:
        """Describe the differences as a predicate: "lacks 2 tensors (a, b) and has 1 unexpected tensor (c)"."""
        shapes = [f"{name}: {shape}" for name, shape in self.misshapen]
        parts = [
            f"lacks {_counted(self.missing)}" if self.missing else "",
            f"has {_counted(self.unexpected, 'unexpected ')}" if self.unexpected else "",
            f"has {_counted(shapes, after=' of another shape')}" if shapes else "",
            f"has {_counted(self.integers, 'integer ', ' in place of floats')}" if self.integers else "",
            f"has {_counted(self.untied, after=' that should equal another')}" if self.untied else "",
        ]
        parts = [part for part in parts if part]
        return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)

    def unloaded(self, *, left: str) -> str:
        """Describe in one clause what was done with the tensors that do not fit; missing ones have ``left``."""
        parts = [
            f"{_counted(self.left)} left at {left}" if self.left else "",
            f"{_counted(self.unexpected)} ignored" if self.unexpected else "",
            f"{_counted(self.integers, 'integer ')} loaded as floats" if self.integers else "",
            f"{_counted(self.untied)} ignored in favor of the tensor tied to it" if self.untied else "",
            f"{_counted(self.of_another_head)} of another head ignored" if self.of_another_head else "",
        ]
        return ", ".join(part for part in parts if part)


def some(names: Iterable[str]) -> str:
    """Return the first three of many names as text for a message."""
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in natural order, with layer 10 after layer 2."""

    def key(name: str) -> list[tuple[bool, str]]:
        return [(not part.isdecimal(), part.zfill(9) if part.isdecimal() else part) for part in name.split(".")]

    return tuple(sorted(names, key=key))


def shapes_differ(found: Collection[int], expected: Collection[int]) -> str:
    """Return the text of `Misfit.misshapen` for two shapes."""
    return " instead of ".join(f"({', '.join(map(str, shape))})" for shape in (found, expected))


def unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Return name -> name without the prefixes that torch.compile and data parallelism add.

    A wrapper adds its prefix to every name below it; a prefix that only some names have is kept. Names are unchanged if
    nothing is wrapped or two of them would become equal.
    """
    names = list(names)
    plain = dict(zip(names, names, strict=True))
    while (shorter := _without_one_wrapper(list(plain.values()))) is not None:
        plain = dict(zip(names, shorter, strict=True))
    return plain if len(set(plain.values())) == len(names) else dict(zip(names, names, strict=True))


def load_state(
    module: nn.Module,
    state: Mapping[str, Tensor | LazyTensor],
    name: str,
    *,
    remedy: str,
    left: str,
    strict: bool = True,
) -> str:
    """Load the tensors of a state dict into a module, which is not changed if they do not fit or cannot be read.

    The module, and the one that the state dict was saved from, may be wrapped by torch.compile or data parallelism. The
    saved object may have contained the module, as in Lightning: a prefix of the names is removed if the tensors under
    it, and under no other prefix, are those of the module.
    """
    if any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in module.state_dict().values()):
        raise CheckpointError(
            f"The weights of {type(module).__name__} are on the meta device and have no values; "
            "call module.to_empty(device='cpu') before loading its weights."
        )
    fitting, misfit = matched_state(module, state, name, remedy=remedy, strict=strict)
    for tensor in fitting.values():
        _read(tensor)  # damaged tensors are found before the module is changed
    # Tensors are loaded in groups whose memory is freed in between; those of one module stay together.
    part: dict[str, Tensor] = {}
    n_bytes, owner = 0, ""
    for key, tensor in fitting.items():
        if n_bytes >= _AT_ONCE and key.rpartition(".")[0] != owner:
            module.load_state_dict(part, strict=False)  # only tensors that are tied to another one are missing
            part, n_bytes = {}, 0
        part[key], owner = _read(tensor), key.rpartition(".")[0]
        n_bytes += tensor.n_bytes if isinstance(tensor, LazyTensor) else 0
    module.load_state_dict(part, strict=False)
    return misfit.unloaded(left=left)


def matched_state(
    module: nn.Module, state: Mapping[str, Tensor | LazyTensor], name: str, *, remedy: str, strict: bool = True
) -> tuple[dict[str, Tensor | LazyTensor], Misfit]:
    """Return the tensors that fit a module, by their names in it, and those that do not; see `load_state`."""
    own = module.state_dict(keep_vars=True)
    misfit = _compare(own, state)
    if misfit:
        renamed = _as_named_in(own, state)
        other = _compare(own, renamed)
        if other.n_tensors < misfit.n_tensors:
            state, misfit = renamed, other
        if misfit.left and (unprefixed := _without_prefix(own, state)):
            state, misfit = unprefixed, _compare(own, unprefixed)
    kept = {*misfit.untied, *misfit.left}
    fitting = {key: tensor for key, tensor in state.items() if key in own and key not in kept}
    if misfit and (strict or not fitting):
        lenient = ", or pass wb.open_checkpoint(..., strict=False) to load the tensors that fit" if fitting else ""
        raise CheckpointError(f"{name} does not fit {type(module).__name__}: it {misfit.found()}; {remedy}{lenient}.")
    return fitting, misfit


def tied_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name -> name of an earlier tensor with the same memory; safetensors stores such tensors only once."""
    first: dict[tuple, str] = {}
    tied = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or nn.parameter.is_lazy(tensor):
            continue
        if not tensor.is_meta and not tensor.data_ptr():
            continue
        place = (id(tensor) if tensor.is_meta else tensor.data_ptr(), tensor.shape, tensor.stride())
        if place in first:
            tied[name] = first[place]
        first.setdefault(place, name)
    return tied


def _read(tensor: Tensor | LazyTensor) -> Tensor:
    return tensor.read() if isinstance(tensor, LazyTensor) else tensor


def _compare(own: Mapping[str, Tensor], state: Mapping[str, Tensor | LazyTensor]) -> Misfit:
    """Return the differences between the tensors of a module and those of a checkpoint."""
    tied = tied_names(own)
    held = {tied.get(name, name) for name in state}  # a tensor may be kept under any of its names
    known = {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor)}  # no extra state
    both = [name for name in known if name in state and not nn.parameter.is_lazy(known[name])]
    fits = [name for name in both if known[name].shape == state[name].shape]
    firsts: dict[str, Tensor | LazyTensor] = {}
    untied = [name for name in fits if not _same(firsts.setdefault(tied.get(name, name), state[name]), state[name])]
    return Misfit(
        missing=in_order(name for name in known if name not in tied and name not in held),
        unexpected=in_order(name for name in state if name not in own),
        misshapen=tuple(
            (name, shapes_differ(state[name].shape, known[name].shape)) for name in in_order({*both} - {*fits})
        ),
        integers=in_order(name for name in fits if _has_fraction(known[name]) and not _has_fraction(state[name])),
        untied=in_order(untied),
    )


def _same(one: Tensor | LazyTensor, other: Tensor | LazyTensor) -> bool:
    """Return whether two tensors have the same values, including NaN."""
    if one is other:
        return True
    first, second = _read(one), _read(other)
    if first.dtype == second.dtype and torch.equal(first, second):
        return True
    return _has_fraction(first) and torch.allclose(first, second.to(first.dtype), rtol=0, atol=0, equal_nan=True)


def _has_fraction(tensor: Tensor | LazyTensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _as_named_in(own: Mapping[str, Tensor], state: Mapping[str, Tensor | LazyTensor]) -> dict[str, Tensor | LazyTensor]:
    """Return the state dict under the names of the module where these differ only by wrappers."""
    named = {plain: name for name, plain in unwrapped_names(own).items()}
    return {named.get(plain, plain): state[name] for name, plain in unwrapped_names(state).items()}


def _without_prefix(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor | LazyTensor]
) -> dict[str, Tensor | LazyTensor] | None:
    """Return the state dict without the prefix of the module's tensors; None if no or more than one prefix fits."""
    n_below = Counter(name[: dot.end()] for name in state for dot in re.finditer(r"\.", name))
    n_needed = len(own.keys() - tied_names(own).keys())
    found: list[tuple[dict[str, Tensor | LazyTensor], dict[str, Tensor | LazyTensor]]] = []
    for prefix in (prefix for prefix, n in n_below.items() if n >= n_needed):
        below = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        beside = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
        below = _as_named_in(own, below)
        # The same tensors are found again below a prefix that ends in the prefix of a wrapper.
        is_known = any(all(other.get(name) is tensor for name, tensor in below.items()) for other, _ in found)
        if not is_known and not _compare(own, below).left:
            found.append((below, beside))
    if len(found) != 1 or found[0][0].keys() & found[0][1].keys():
        return None
    below, beside = found[0]
    return below | beside


def _without_one_wrapper(names: list[str]) -> list[str] | None:
    """Return the names without the prefix of one wrapper; None if there is no wrapper."""
    if names and all(name.startswith(_PARALLEL) for name in names):
        return [name.removeprefix(_PARALLEL) for name in names]
    heads = {name[: name.index(_COMPILED)] for name in names if f".{_COMPILED}" in f".{name}"}
    for head in sorted(heads):
        marked = head + _COMPILED
        if (not head or head.endswith(".")) and all(n.startswith(marked) for n in names if n.startswith(head)):
            return [head + name.removeprefix(marked) if name.startswith(marked) else name for name in names]
    return None


def _counted(names: Collection[str], before: str = "", after: str = "") -> str:
    return f"{len(names)} {before}tensor{'s' * (len(names) != 1)}{after} ({some(names)})"
