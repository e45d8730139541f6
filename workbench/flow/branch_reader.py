"""Tracking of the residual stream through a block: the branches added to it, and the states before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.monitors.matrices import effective_rank, widened


def rms(x: Tensor, rows: Tensor | None = None) -> float:
    """Return the root mean square of states (..., feature), over the tokens of the mask ``rows``, in float64."""
    norm = norm_of(x, rows)
    n = int(rows.sum()) * x.shape[-1] if _fits(rows, x) else x.numel()
    return norm / math.sqrt(n) if n else math.nan


def norm_of(x: Tensor, rows: Tensor | None = None) -> float:
    """Return the Euclidean norm of all entries, computed in float64; arguments as for `rms`."""
    x = x.detach()
    if _fits(rows, x):
        x = x[rows.to(x.device)]
    return float(torch.linalg.vector_norm(widened(x)))


def token_cosine(states: Tensor, rows: Tensor | None = None) -> float:
    """Return the mean cosine between two different tokens of a sequence, which tends to 1 in representation collapse.

    States have shape (sequence, ..., feature), or (token, feature) for a single sequence; ``rows`` is a mask of the
    tokens to include. States that are zero are never included. NaN if no sequence has two included tokens.
    """
    states = widened(states.detach())
    states = states[None] if states.ndim == 2 else states.flatten(1, -2)
    counts = torch.ones(states.shape[:2], dtype=torch.bool) if rows is None else rows.reshape(states.shape[:2])
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    counts = counts.to(states.device) & (length[..., 0] > 0)
    direction = torch.where(counts[..., None], states / length, 0.0)
    n = counts.sum(1).to(direction.dtype)
    pairs = direction.sum(1).square().sum(-1) - direction.square().sum((1, 2))
    n_pairs = (n * (n - 1)).sum()
    return float(pairs.sum() / n_pairs)


def relative_effective_rank(states: Tensor, rows: Tensor | None = None) -> float:
    """Return the effective rank of token states (Roy and Vetterli 2007) over its maximum, min(tokens, features).

    The states are not centered, so that tokens with the same state count as one direction. ``rows`` is a mask of the
    tokens to include. NaN if all states are zero or one is not finite.
    """
    states = widened(states.detach())
    states = states.flatten(0, -2) if rows is None else states[rows.to(states.device)]
    if not len(states) or not bool(torch.isfinite(states).all()):
        return math.nan
    # The eigenvalues of the smaller Gram matrix are the squared singular values. This is faster than a singular value
    # decomposition, and the loss of those below 1e-8 of the largest hardly matters.
    gram = states.T @ states if len(states) >= states.shape[-1] else states @ states.T
    squares = torch.linalg.eigvalsh(gram)
    floor = squares[-1] * len(gram) * torch.finfo(squares.dtype).eps
    s = squares.masked_fill(squares <= floor, 0).sqrt()
    return float(effective_rank(s, alpha=1.0)) / len(gram)


def _fits(rows: Tensor | None, x: Tensor) -> TypeGuard[Tensor]:
    return rows is not None and rows.shape == x.shape[:-1]


_ADDITIONS = frozenset({"add", "radd", "iadd"})
#: Operations that change only the scale, precision or shape of a state.
_SCALINGS = frozenset({"mul", "rmul", "imul", "multiply", "div", "truediv", "itruediv", "divide"})
_RESHAPINGS = frozenset(
    {
        *("to", "type", "float", "half", "bfloat16", "double", "type_as", "contiguous", "clone", "dropout"),
        *("view", "view_as", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "unflatten"),
        *("movedim", "swapaxes"),
    }
)
_NORMS = frozenset({"layer_norm", "rms_norm"})


class WatchedState:
    """Root mean square of a state and, after the backward pass, norm of the loss's gradient with respect to it.

    The state is part of a graph; its current values are measured, even if it is written to later. Without a gradient,
    the norm is NaN. ``rows`` is a mask of the tokens to include.
    """

    def __init__(self, state: Tensor, rows: Tensor | None) -> None:
        self.rms, self.gradient_norm = rms(state, rows), math.nan
        self._rows = rows
        if state.requires_grad:
            state.register_hook(self._take)

    def _take(self, gradient: Tensor) -> None:
        self.gradient_norm = norm_of(gradient, self._rows)


@dataclass(frozen=True)
class _PartialSum:
    """A state that was never computed: the stream plus some of several branches that are added at once."""

    rms: float
    full: WatchedState

    @property
    def gradient_norm(self) -> float:
        return self.full.gradient_norm


#: Magnitudes of one state of the stream and of its gradient.
StreamState = WatchedState | _PartialSum


@dataclass(frozen=True)
class Sublayer:
    """One addition to the residual stream."""

    name: str
    before: StreamState
    branch_rms: float
    stream_rms: float


@dataclass(frozen=True)
class _Member:
    """A tensor that is the residual stream, possibly scaled or normalized."""

    tensor: Tensor  # the tensor, kept so that its address is not reused
    n_before: int  # number of sublayers before it
    state: WatchedState  # state of the stream, without the scaling


@dataclass(frozen=True)
class _Summand:
    """A branch and the name of the module that computed it."""

    name: str
    tensor: Tensor


@dataclass
class BlockStream:
    """Residual stream inside one call of a block, with its measurements."""

    paths: Mapping[nn.Module, str]  # module -> its path within the block
    rows: Tensor | None  # boolean mask of the tokens to include; None for all
    size: int  # number of entries of the state
    sublayers: list[Sublayer] = field(default_factory=list)  # additions so far, in order
    #: Whether the output of the block is the result of the last addition, possibly scaled or normalized.
    reaches_output: bool = True
    members: dict[int, _Member] = field(default_factory=dict)  # tensors that are the stream, by id
    #: Tensors that are branches with the names of their modules, by id.
    labels: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    #: Tensors that are sums of branches with these branches, by id.
    parts: dict[int, tuple[Tensor, list[_Summand]]] = field(default_factory=dict)

    def label(self, tensor: Any) -> str:
        """Return the name of the module that computed a tensor; empty if unknown."""
        return self.labels.get(id(tensor), (None, ""))[1]

    def parts_of(self, tensor: Tensor) -> list[_Summand]:
        """Return the branches whose sum a tensor is; usually only the tensor itself."""
        return self.parts.get(id(tensor), (tensor, [_Summand(self.label(tensor), tensor)]))[1]


class BranchReader(TorchFunctionMode):
    """Mode that tracks the residual stream through the running block, ``block``, without changing anything.

    A branch is a tensor that is added to the stream: to the tensor that entered the block, or to the result of scaling
    it (DeepNorm), normalizing it (Post-LN) or an earlier addition. Several branches that are first added to each other
    (GPT-J) are measured separately. Additions inside a branch do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block: BlockStream | None = None

    def begin(self, module: nn.Module, state: Tensor, watched: WatchedState, rows: Tensor | None) -> BlockStream:
        """Start tracking a block from the tensor that it actually receives."""
        paths = {part: path for path, part in module.named_modules() if path}
        self.block = BlockStream(paths, rows, state.numel())
        self.block.members[id(state)] = _Member(state, 0, watched)
        return self.block

    def end(self, state: Tensor) -> None:
        """Finish tracking the running block, which returns a given state."""
        block, self.block = self.block, None
        if block is None:
            return
        member = block.members.get(id(state))
        if member is not None:
            del block.sublayers[member.n_before :]
        block.reaches_output = member is not None
        block.members, block.labels, block.parts = {}, {}, {}  # release the graph

    def leave(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        """Mark the output of a module inside a block as stream or as branch; a forward hook."""
        block = self.block
        if block is None or module not in block.paths:
            return
        tensors = output if isinstance(output, tuple | list) else [output]
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for tensor in tensors:
            if not _is_of_size(tensor, block.size) or id(tensor) in block.members:
                continue
            if _only_rescales(module):
                source = next((t for t in given if id(t) in block.members or id(t) in block.labels), None)
                if source is not None and source is not tensor:
                    self._derive(block, source, tensor, is_new_state=True)
            else:
                block.labels[id(tensor)] = tensor, block.paths[module]
                block.parts.pop(id(tensor), None)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        block = self.block
        if block is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        if name in _ADDITIONS and (addition := _addition(block, args, kwargs)) is not None:
            stream, branch, factor = addition
            with torch._C.DisableTorchFunction():
                note = self._note_sum if stream is None else self._note_addition
                finish = note(block, stream, branch, factor)
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                with torch._C.DisableTorchFunction():
                    finish(result)
            return result
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (source := _source(block, name, args, kwargs)) is not None:
            with torch._C.DisableTorchFunction():
                self._derive(block, source, result, is_new_state=name in _NORMS)
        return result

    def _note_addition(
        self, block: BlockStream, stream: Tensor, branch: Tensor, factor: float
    ) -> Callable[[Tensor], None]:
        """Measure stream and branch before their sum, which may be in place; return the function to call after it."""
        member = block.members[id(stream)]
        stream_rms = rms(stream, block.rows)
        parts = block.parts_of(branch)
        names = [part.name for part in parts]
        sizes = [abs(factor) * rms(part.tensor, block.rows) for part in parts]
        sums = [stream_rms]
        total = stream
        for part in parts[:-1]:
            total = total.detach() + factor * part.tensor.detach()
            sums.append(rms(total, block.rows))

        def finish(result: Tensor) -> None:
            del block.sublayers[member.n_before :]  # these additions were inside the branch
            after = WatchedState(result, block.rows)
            before: list[StreamState] = [member.state, *(_PartialSum(size, after) for size in sums[1:])]
            block.sublayers += [
                Sublayer(name, state, size, added_to)
                for name, state, size, added_to in zip(names, before, sizes, sums, strict=True)
            ]
            block.members[id(result)] = _Member(result, len(block.sublayers), after)

        return finish

    def _note_sum(
        self, block: BlockStream, stream: None, operands: Sequence[Tensor], factor: float
    ) -> Callable[[Tensor], None]:
        """Record the sum of two branches before they reach the stream; return the function to call after it."""
        del stream
        parts = [part for t in operands for part in block.parts_of(t)]
        # Branches are copied, because an addition in place overwrites the first.
        parts = [replace(part, tensor=part.tensor.detach().clone()) for part in parts] if factor == 1 else []

        def finish(result: Tensor) -> None:
            if parts and all(part.name for part in parts):
                block.parts[id(result)] = result, parts
                block.labels[id(result)] = result, "+".join(part.name for part in parts)

        return finish

    @staticmethod
    def _derive(block: BlockStream, source: Tensor, result: Tensor, *, is_new_state: bool) -> None:
        """Mark the result of an operation without weights like its source, as stream or branch."""
        if not _is_of_size(result, block.size):
            return
        member = block.members.get(id(source))
        if member is not None:
            state = WatchedState(result, block.rows) if is_new_state else member.state
            block.members[id(result)] = _Member(result, member.n_before, state)
        elif label := block.label(source):
            block.labels[id(result)] = result, label


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten each path to the shortest prefix that distinguishes it from the others and does not end in an index."""
    split = [name.split(".") for name in names]
    short = []
    for i, path in enumerate(split):
        for n in range(1, len(path) + 1):
            is_unique = all(other[:n] != path[:n] or other == path for j, other in enumerate(split) if j != i)
            if is_unique and not path[n - 1].isdigit():
                break
        short.append(".".join(path[:n]) or "branch")
    return short


def _addition(block: BlockStream, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Any, float] | None:
    """Return stream, branch and factor of an addition; None and two branches with a factor, or None for other sums."""
    operands = [*args, *(kwargs[name] for name in ("input", "other") if name in kwargs)][:2]
    if len(operands) < 2 or not all(_is_of_size(t, block.size) for t in operands):
        return None
    if operands[0].shape != operands[1].shape:
        return None
    factor = kwargs.get("alpha", 1)
    is_member = [id(t) in block.members for t in operands]
    if is_member == [False, False]:
        return None, operands, factor
    if all(is_member):  # for example the stream and its normalization: the later one is the branch
        order = [block.members[id(t)].n_before for t in operands]
        is_member[0] = order[0] <= order[1]
    stream, branch = operands if is_member[0] else operands[::-1]
    return stream, branch, factor if is_member[0] else 1


def _source(block: BlockStream, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the stream or branch of which a call only changes the scale, precision or shape, or that it normalizes."""
    operands = [*args, *(kwargs[key] for key in ("input", "other") if key in kwargs)]
    known = next((t for t in operands if id(t) in block.members or id(t) in block.labels), None)
    if known is None:
        return None
    if name in _RESHAPINGS or name in _NORMS:
        return known if known is operands[0] else None
    if name in _SCALINGS or name in _ADDITIONS:
        others = [t for t in operands if t is not known]
        is_branch = name in _SCALINGS and id(known) not in block.members
        return known if all(_is_scalar(t) or (is_branch and _is_gain(t)) for t in others) else None
    return None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_gain(value: Any) -> bool:
    """Return whether a factor has one entry per feature, as in LayerScale."""
    return isinstance(value, Tensor) and value.ndim == 1


def _is_of_size(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() == size


def _only_rescales(module: nn.Module) -> bool:
    """Return whether a module only rescales its input: a norm, a dropout, a gain per feature or an identity."""
    is_activation = type(module).__module__ == "torch.nn.modules.activation"
    return not is_activation and all(parameter.ndim < 2 for parameter in module.parameters())
