"""Comparison of the tensors of a checkpoint with those of a model before any of them is loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models.state_files import LazyTensor

if TYPE_CHECKING:
    from torch import Tensor

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
    """Return the tensors of a state dict that fit a module, by their names in the module, and those that do not fit.

    The arguments and the error are those of `load_state`; the weights of the module may be on the meta device.
    """
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
