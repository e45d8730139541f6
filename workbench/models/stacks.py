"""Stacks of blocks: candidates among the calls of a model, and the choice of the one that is the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from torch import nn

from workbench.errors import AnatomyError
from workbench.models.block_calls import Call, Slot, has_matrix, record_calls
from workbench.models.calling import tensors_of

_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DECODER_NAMES = ("decoder_layers", "num_decoder_layers")
_ENCODER_NAMES = ("encoder_layers", "num_encoder_layers")
#: Parts of a composite config; those that hold the language decoder come first.
_PARTS = (
    "decoder", "text_config", "llm_config", "language_config", "thinker_config", "vision_config", "audio_config",
    "encoder",
)  # fmt: skip


@dataclass(frozen=True)
class BlockCount:
    """A number of blocks in a config."""

    n_blocks: int  # number of blocks
    where: str  # path of the option in the config

    def __str__(self) -> str:
        return f"{self.where} = {self.n_blocks}"

    def matches(self, stack: str) -> bool:
        """Return whether the option and the stack name the same part of a model, such as the decoder."""
        part = next((part for part in ("decoder", "encoder", "text", "vision", "audio") if part in self.where), None)
        return part is not None and part in stack


def block_counts(model: nn.Module) -> list[BlockCount]:
    """Return the numbers of blocks that ``model.config`` states, the main stack first; empty without a config."""
    config = getattr(model, "config", None)
    if config is None:
        config = next((c for c in (getattr(m, "config", None) for m in model.children()) if c is not None), None)
    return list(_counts(config, ""))


def _counts(config: Any, prefix: str) -> Iterator[BlockCount]:
    if config is None or isinstance(config, str | int | float):
        return
    is_encoder_decoder = bool(_read(config, "is_encoder_decoder"))
    names = (*_DECODER_NAMES, *_NAMES, *_ENCODER_NAMES) if is_encoder_decoder else _NAMES
    seen: set[int] = set()
    for name in names:
        value = _read(config, name)
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value > 0
            and (is_encoder_decoder or value not in seen)
        ):
            seen.add(value)
            yield BlockCount(value, f"{prefix}{name}")
    for part in _PARTS:
        yield from _counts(_read(config, part), f"{prefix}{part}.")


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


#: Function that returns why the members of a candidate are no residual blocks, as text; empty if they are.
Lack = Callable[["Candidate"], str]
#: Maximum numbers of candidates that a message names, and that are tested for it.
_MAX_LISTED, _MAX_TRIED = 6, 12
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
#: Minimum fraction of the parameters of all repeated modules that a stack must hold if no config confirms its length.
MIN_COVERAGE = 0.5


@dataclass(frozen=True, eq=False)
class Candidate:
    """Calls that may be the blocks of one stack, in order."""

    name: str
    calls: list[Call]

    @cached_property
    def n_links(self) -> int:
        """Number of calls that pass their state to the next call unchanged."""
        return self._count_links(self.shape)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the state; () if the calls do not keep one common shape."""
        common = set.intersection(*(call.shapes for call in self.calls))
        order = dict.fromkeys(s.shape for s in self.calls[0].inputs if s.shape in common)
        return max(order, key=self._count_links, default=())

    def _count_links(self, shape: tuple[int, ...]) -> int:
        return sum(bool(links_between(a, b, shape)) for a, b in pairwise(self.calls))

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """Shapes of the states that most blocks change and pass on; the last block often returns only one of two."""
        found = []
        for before, after in pairwise(self.calls):
            taken = {state.fingerprint for state in after.inputs}
            changed = {state.fingerprint: state.shape for state in before.changed}
            found.append([shape for fingerprint, shape in changed.items() if fingerprint in taken])
        return sorted(found, key=len)[len(found) // 2] if found else []

    @property
    def is_complete(self) -> bool:
        """Whether one state of one shape passes through all calls."""
        return bool(self.shape) and self.n_links == len(self.calls) - 1

    @property
    def alternates_with_norms(self) -> bool:
        """Whether at least half of the modules, but not all, have no matrix: norms and branches, no complete blocks."""
        n_norms = sum(not has_matrix(call.module) for call in self.calls)
        return n_norms < len(self.calls) <= 2 * n_norms

    @property
    def modules(self) -> list[str]:
        """Names of the modules called, without duplicates."""
        return list(dict.fromkeys(call.name for call in self.calls))

    @property
    def blocks(self) -> list[nn.Module]:
        """Module of each call."""
        return [call.module for call in self.calls]

    def __str__(self) -> str:
        name = self.name or "the model itself"
        if not self.shape:
            shapes = sorted({shape[-1] for call in self.calls for shape in call.shapes})
            widths = f"widths {', '.join(map(str, shapes))}" if len(shapes) > 1 else "no common shape"
            return f"{name} ({len(self.calls)} blocks, {widths})"
        return f"{name} ({len(self.calls)} blocks, {self.n_links} of {len(self.calls) - 1} links)"


def links_between(before: Call, after: Call, shape: tuple[int, ...]) -> list[tuple[Slot, Slot]]:
    """Return pairs (output slot, input slot) through which a state of a shape (() for any) passes unchanged."""
    return [
        (out.slot, into.slot)
        for out in before.changed
        for into in after.inputs
        if out.shape == into.shape and out.fingerprint == into.fingerprint and shape in (out.shape, ())
    ]


def find_candidates(model: nn.Module, calls: Sequence[Call]) -> list[Candidate]:
    """Group calls by container, by containers that differ only in an index, and by class under one parent."""
    modules = dict(model.named_modules())
    groups: dict[str, list[Call]] = {}
    for call in calls:
        parent, _, _ = call.name.rpartition(".")
        if isinstance(modules[parent], _CONTAINERS):
            keys = [*dict.fromkeys((parent, _pattern(call.name, modules)))]
        else:
            keys = [f"{parent}[{type(call.module).__name__}]"]
        for key in keys:
            groups.setdefault(key, []).append(call)
    return [Candidate(name, members) for name, members in groups.items() if any(c.shapes for c in members)]


def _pattern(name: str, modules: dict[str, nn.Module]) -> str:
    """Return the path of a module's container, with ``*`` in place of indices in outer containers."""
    parts, out = name.split(".")[:-1], []
    for depth, part in enumerate(parts):
        holder = modules[".".join(parts[:depth])]
        is_index = isinstance(holder, nn.ModuleList | nn.Sequential) or (
            isinstance(holder, nn.ModuleDict) and any(letter.isdigit() for letter in part)
        )
        out.append("*" if is_index else part)
    return ".".join(out)


def _is_inside(inner: Candidate, outer: Candidate) -> bool:
    """Return whether every module of one candidate is inside a module of the other."""
    roots = tuple(f"{name}." for name in outer.modules)
    return all(name.startswith(roots) for name in inner.modules)


def is_fragment(part: Candidate, whole: Candidate) -> bool:
    """Return whether a stage is a part of a longer stack that is spread over several containers."""
    return len(part.calls) < len(whole.calls) and {c.index for c in part.calls} <= {c.index for c in whole.calls}


def overlap(a: Candidate, b: Candidate) -> bool:
    """Return whether two candidates share calls, or one is inside the other's modules."""
    names = {(call.name, call.index) for call in a.calls}
    return any((call.name, call.index) in names for call in b.calls) or _is_inside(a, b) or _is_inside(b, a)


def is_outer(candidate: Candidate, among: Sequence[Candidate]) -> bool:
    """Return whether no other candidate's modules contain those of this one."""
    return not any(_is_inside(candidate, other) for other in among if other is not candidate)


def choose_by_name(candidates: Sequence[Candidate], stack: str, lack: Lack) -> Candidate:
    """Return the candidate of a given name, or raise AnatomyError, which suggests those that are residual blocks."""
    found = [c for c in candidates if c.name == stack]
    if not found:
        others = _listed(candidates, lack)
        raise AnatomyError(
            f"There is no stack '{stack}' whose modules ran; "
            + (f"expected one of {others}." if others else "no module of this model is a residual block by itself.")
        )
    if not found[0].shape:
        raise AnatomyError(
            f"The blocks of '{stack}' do not keep the shape of the residual stream: found {found[0]}; "
            "pass to wb.profile(..., stack=) the path of one stage of constant width."
        )
    if reason := lack(found[0]):
        raise AnatomyError(f"The modules of '{stack}' are no residual blocks: {reason}; choose one of whole ones.")
    return found[0]


def _listed(candidates: Sequence[Candidate], lack: Lack) -> str:
    """Return a list of the longest candidates for a message; each can be passed as ``stack=``."""
    ranked = sorted((c for c in candidates if c.shape and len(c.calls) > 1), key=lambda c: -len(c.calls))
    fitting = (c for c in ranked[:_MAX_TRIED] if not lack(c))
    return ", ".join(map(str, islice(fitting, _MAX_LISTED)))


def choose(model: nn.Module, plausible: Sequence[Candidate], lack: Lack) -> Candidate:
    """Return the candidate that is the model's residual stream, or raise AnatomyError if that is not certain."""
    counts = block_counts(model)
    if not plausible:
        raise AnatomyError(
            f"{type(model).__name__} has no stack of residual blocks: no two modules of one kind pass on a state of "
            "constant shape unchanged"
            + (f" (the config states {counts[0]})" if counts else "")
            + "; if a single module is the block, pass its container to wb.profile(..., stack=)."
        )
    if counts:
        return _choose_by_count(model, plausible, counts, lack)
    remaining = list(plausible)  # stacks that are no part of another's blocks
    for outer in plausible:
        for inner in plausible:
            if inner is not outer and _is_inside(inner, outer):
                loser = outer if _is_made_of(outer, inner) else inner
                remaining = [c for c in remaining if c is not loser]
    chosen = max(remaining or plausible, key=lambda c: (len(c.calls), c.calls[-1].end))
    _require_complete(chosen, plausible, lack)
    _require_coverage(model, chosen, plausible)
    return chosen


def _choose_by_count(
    model: nn.Module, plausible: Sequence[Candidate], counts: Sequence[BlockCount], lack: Lack
) -> Candidate:
    """Return the complete stack of the length that the config states: the outermost, and of several the last to run."""
    for position, count in enumerate(counts):
        fitting = [c for c in plausible if c.is_complete and len(c.calls) == count.n_blocks]
        fitting = [c for c in fitting if is_outer(c, fitting) and not any(is_fragment(c, other) for other in plausible)]
        if fitting:
            chosen = max(fitting, key=lambda c: (count.matches(c.name), c.calls[-1].end))
            if position and max(len(c.calls) for c in plausible) > count.n_blocks:
                break
            return chosen
        if any(len(child) == count.n_blocks for child in model.modules() if isinstance(child, nn.ModuleList)):
            break
    incomplete = [c for c in plausible if not c.is_complete and len(c.calls) == counts[0].n_blocks]
    if incomplete:
        _require_complete(incomplete[0], plausible, lack)
    found = ", ".join(map(str, sorted(plausible, key=lambda c: -len(c.calls))[:_MAX_LISTED]))
    readable = _listed(plausible, lack)
    raise AnatomyError(
        f"The config of {type(model).__name__} states {counts[0]}, but the stacks found are {found}; "
        + (f"pass to wb.profile(..., stack=) one of {readable}." if readable else "none of them can be read.")
    )


def _is_made_of(outer: Candidate, inner: Candidate) -> bool:
    """Return whether the outer modules only group the inner ones, and are not blocks with parts inside.

    Groups repeat one kind of module; a block consists of different parts, such as attention and MLP. A longer stack
    within modules that are no stream themselves is never dropped, because it may be the one that must be rejected.
    """
    if len(inner.calls) <= len(outer.calls):
        return False
    if not outer.is_complete:
        return True
    kinds = {tuple(sorted(tuple(p.shape) for p in call.module.parameters())) for call in inner.calls}
    return inner.is_complete and len(kinds) == 1


def _require_complete(chosen: Candidate, plausible: Sequence[Candidate], lack: Lack) -> None:
    """Raise AnatomyError if a stack is not one residual stream through all its calls."""
    if chosen.is_complete:
        return
    if not chosen.shape:
        reason = "the width of its state changes from stage to stage"
    else:
        broken = [b.name for a, b in pairwise(chosen.calls) if not links_between(a, b, chosen.shape)]
        reason = f"the state that enters {broken[0]} is not the one that the previous block returned"
    others = _listed([c for c in plausible if c is not chosen], lack)
    expected = f"one of {others}" if others else "a container of complete blocks"
    raise AnatomyError(
        f"The longest stack, {chosen}, is not one residual stream: {reason}; pass to wb.profile(..., stack=) "
        f"{expected}."
    )


def _require_coverage(model: nn.Module, chosen: Candidate, plausible: Sequence[Candidate]) -> None:
    """Raise AnatomyError if a stack holds few of the repeated parameters: the real blocks are then elsewhere."""
    complete = [c for c in plausible if c is chosen or c.is_complete]
    fraction = fraction_of_repeated(model, (call.module for c in complete for call in c.calls))
    if 0 < fraction < MIN_COVERAGE:
        raise AnatomyError(
            f"The longest stack, {chosen}, holds only {fraction:.0%} of the parameters of all repeated modules, so the "
            "residual stream probably runs outside of it; pass to wb.profile(..., stack=) the container of the real "
            "blocks."
        )


def fraction_of_repeated(model: nn.Module, modules: Iterable[nn.Module]) -> float:
    """Return the fraction of the parameters of all repeated modules that the given modules hold; 0 if none."""
    inside = {p for module in modules for p in module.parameters()}
    repeated = {
        p
        for holder in model.modules()
        if isinstance(holder, _CONTAINERS)
        for child in holder.children()
        if not isinstance(child, nn.Embedding)  # begins a stream, and a head, which changes the width, ends one
        and not (isinstance(child, nn.Linear) and child.in_features != child.out_features)
        for p in child.parameters()
    }
    return sum(p.numel() for p in inside & repeated) / max(1, sum(p.numel() for p in repeated))


def stream_axis_of(name: str, shape: tuple[int, ...], inputs: Any, stream: int) -> int:
    """Return the axis that counts streams, as of hyper-connections; AnatomyError if not exactly one axis fits."""
    tokens = _token_shape(inputs)
    fitting = [a for a in range(len(shape) - 1) if len(shape) == 4 and (*shape[:a], *shape[a + 1 : -1]) == tokens]
    if len(fitting) != 1 or stream >= shape[fitting[0]]:
        raise AnatomyError(
            f"There is no stream {stream} in {name}: its states have shape {shape}, expected exactly one axis in "
            f"addition to those of the tokens {tokens}; pass another number, or sequences of another length."
        )
    return fitting[0]


def _token_shape(inputs: Any) -> tuple[int, ...] | None:
    """Return the shape of the token ids among the inputs; None if there are none."""
    ids = (v for _, v in tensors_of(inputs) if v.ndim == 2 and not v.is_floating_point())
    return next((tuple(v.shape) for v in ids), None)


def require_one_stream(chosen: Candidate) -> None:
    """Raise AnatomyError if a stack carries several residual streams."""
    if len(streams := chosen.streams) > 1:
        raise AnatomyError(
            f"The stack {chosen.name} carries {len(streams)} parallel residual streams, of shapes "
            f"{' and '.join(map(str, streams))}, expected one; choose another model, or another stack by "
            "wb.profile(..., stack=)."
        )


def feature_axis_of(
    model: nn.Module, inputs: Any, name: str, shape: tuple[int, ...], modules: Sequence[nn.Module]
) -> int:
    """Return the axis of states that counts features: -1, or 1 for images.

    The size of that axis is a dimension of the modules' parameters. Where this holds for both axes, the layers inside
    that receive the state decide, for which the model runs once more: a linear map takes features last, a convolution
    second. AnatomyError is raised if the axis is neither of the two, it cannot be determined, or a state is more than
    one vector per token.
    """
    tokens = _token_shape(inputs)
    if tokens is not None and len(shape) > 3:
        axes = [a for a in range(len(shape) - 1) if (*shape[:a], *shape[a + 1 : -1]) == tokens]
        n = shape[axes[0]] if len(axes) == 1 else 0
        remedy = f"choose one of them by its number, wb.profile(..., stack='{name}:0') to '{name}:{n - 1}'"
        raise AnatomyError(
            f"The stack {name} carries several residual streams at once: its state has shape {shape}, expected (batch, "
            f"token, feature); {remedy if n else 'choose another model, because this one cannot be read'}."
        )
    widths = {size for module in modules for p in module.parameters() if p.ndim < 3 for size in p.shape}
    parts = {part for module in modules for part in module.modules()}
    may_be_second = (len(shape) == 4 and shape[1] in widths) or any(_axis_taken_by(p, shape) == 1 for p in parts)
    if not widths or shape[-1] in widths:
        axis = _axis_by_layers(shape, modules, record_calls(model, inputs, everything=True)) if may_be_second else -1
        if axis == -1 or (axis is None and len(shape) == 3):
            return -1
        if axis is None:
            raise AnatomyError(
                f"The states of {name} have shape {shape}, and its modules do not determine whether axis 1 or the last "
                "one counts features, because both sizes are widths of theirs; pass images of another size."
            )
    if len(shape) == 4 and may_be_second:
        return 1
    raise AnatomyError(
        f"The last dimension of the state of {name}, shape {shape}, is not its feature dimension; only streams with "
        "features last, or images (batch, feature, height, width), can be read."
    )


def _axis_by_layers(shape: tuple[int, ...], modules: Sequence[nn.Module], calls: Sequence[Call]) -> int | None:
    """Return the feature axis according to the layers inside the blocks; None if they do not agree on one.

    Layers that receive the state itself decide; if there are none, those that receive a tensor of its shape. For states
    of three axes only the former count: with as many tokens as features, a transposed state has the same shape.
    """
    parts = {part for module in modules for part in module.modules()}
    states = {s.fingerprint for call in calls if call.module in modules for s in call.inputs if s.shape == shape}
    of_state: set[int] = set()
    of_shape: set[int] = set()
    for call in calls:
        axis = _axis_taken_by(call.module, shape) if call.module in parts else None
        given = {s.fingerprint for s in call.inputs if s.shape == shape}
        if axis is not None and given:
            of_shape.add(axis)
            if given & states:
                of_state.add(axis)
    found = of_state if of_state or len(shape) == 3 else of_shape
    return found.pop() if len(found) == 1 else None


def _axis_taken_by(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Return the axis of a tensor that a layer of torch (for norms, only torch's own) treats as features, or None."""
    if isinstance(module, nn.Linear):
        return -1 if module.in_features == shape[-1] else None
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        return -1 if tuple(module.normalized_shape) == shape[-1:] else None  # type: ignore[arg-type]
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        is_given = len(shape) == (3 if isinstance(module, nn.Conv1d) else 4)
        return 1 if is_given and module.in_channels == shape[1] else None
    sizes = (getattr(module, "num_features", None), getattr(module, "num_channels", None))
    is_norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.GroupNorm)
    return 1 if is_norm and len(shape) > 2 and shape[1] in sizes else None
