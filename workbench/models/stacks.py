"""Which calls form a stack of blocks, which of several stacks is the residual stream, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from torch import Tensor, nn

from workbench.errors import AnatomyError
from workbench.models.block_calls import Call, Slot, has_matrix
from workbench.models.block_counts import BlockCount, block_counts

#: Whether the members of a candidate are residual blocks.
AreBlocks = Callable[["Candidate"], bool]
#: Candidates that a message names at most, and that are tried for it.
_MOST_LISTED, _MOST_TRIED = 6, 12
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
#: Least share of the parameters of all repeated modules that a stack must hold if no config confirms its length.
LEAST_COVERAGE = 0.5


@dataclass(frozen=True, eq=False)
class Candidate:
    """Calls that might be the blocks of one stack, in order."""

    name: str
    calls: list[Call]

    @cached_property
    def n_links(self) -> int:
        """The number of calls that pass their state on, unchanged, to the next."""
        return self._count_links(self.shape)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the state; () if the calls do not all keep one common shape."""
        common = set.intersection(*(call.shapes for call in self.calls))
        order = dict.fromkeys(s.shape for s in self.calls[0].inputs if s.shape in common)
        return max(order, key=self._count_links, default=())

    def _count_links(self, shape: tuple[int, ...]) -> int:
        return sum(bool(links_between(a, b, shape)) for a, b in pairwise(self.calls))

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """Shapes of the different states that most blocks change and hand on side by side.

        Most, not all: the last block of a model with two streams often returns one of them alone.
        """
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
        """Whether half of the modules, and not all, have no matrix: a norm and a branch each, but no whole blocks."""
        plain = sum(not has_matrix(call.module) for call in self.calls)
        return plain < len(self.calls) <= 2 * plain

    @property
    def modules(self) -> list[str]:
        """Names of the modules called, each once."""
        return list(dict.fromkeys(call.name for call in self.calls))

    def __str__(self) -> str:
        name = self.name or "the model itself"
        if not self.shape:
            shapes = sorted({shape[-1] for call in self.calls for shape in call.shapes})
            widths = f"widths {', '.join(map(str, shapes))}" if len(shapes) > 1 else "no common shape"
            return f"{name} ({len(self.calls)} blocks, {widths})"
        return f"{name} ({len(self.calls)} blocks, {self.n_links} of {len(self.calls) - 1} links)"


def links_between(before: Call, after: Call, shape: tuple[int, ...]) -> list[tuple[Slot, Slot]]:
    """Pairs (output slot, input slot) through which a state of a shape, or () for any, passes unchanged."""
    return [
        (out.slot, into.slot)
        for out in before.changed
        for into in after.inputs
        if out.shape == into.shape and out.fingerprint == into.fingerprint and shape in (out.shape, ())
    ]


def find_candidates(model: nn.Module, calls: Sequence[Call]) -> list[Candidate]:
    """Group calls by container, by containers that differ in an index only, and by class under one parent."""
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
    """The container's path, with ``*`` for what is itself an index in an outer container."""
    parts, out = name.split(".")[:-1], []
    for depth, part in enumerate(parts):
        holder = modules[".".join(parts[:depth])]
        is_index = isinstance(holder, nn.ModuleList | nn.Sequential) or (
            isinstance(holder, nn.ModuleDict) and any(letter.isdigit() for letter in part)
        )
        out.append("*" if is_index else part)
    return ".".join(out)


def _is_inside(inner: Candidate, outer: Candidate) -> bool:
    """Whether every module of one candidate lies inside a module of the other."""
    roots = tuple(f"{name}." for name in outer.modules)
    return all(name.startswith(roots) for name in inner.modules)


def is_fragment(part: Candidate, whole: Candidate) -> bool:
    """Whether a stage is a part of a longer stack that is spread over several containers."""
    return len(part.calls) < len(whole.calls) and {c.index for c in part.calls} <= {c.index for c in whole.calls}


def overlap(a: Candidate, b: Candidate) -> bool:
    """Whether two candidates share calls, or one lies inside the other's modules."""
    names = {(call.name, call.index) for call in a.calls}
    return any((call.name, call.index) in names for call in b.calls) or _is_inside(a, b) or _is_inside(b, a)


def is_outer(candidate: Candidate, among: Sequence[Candidate]) -> bool:
    """Whether no other candidate's modules contain this one's."""
    return not any(_is_inside(candidate, other) for other in among if other is not candidate)


def choose_by_name(candidates: Sequence[Candidate], stack: str, are_blocks: AreBlocks) -> Candidate:
    """The candidate of that name.

    Args:
        candidates: All that ran.
        stack: Name of the stack.
        are_blocks: Whether the members of a candidate are residual blocks; only such are suggested.

    Raises:
        AnatomyError: If there is none, or its blocks change the shape of the stream.
    """
    found = [c for c in candidates if c.name == stack]
    if not found:
        others = _listed(candidates, are_blocks)
        raise AnatomyError(
            f"There is no stack '{stack}' whose modules ran; "
            + (f"expected one of {others}." if others else "no module of this model is a residual block by itself.")
        )
    if not found[0].shape:
        raise AnatomyError(
            f"The blocks of '{stack}' do not keep the shape of the residual stream: found {found[0]}; "
            "pass as stack= the path of one stage of constant width."
        )
    return found[0]


def _listed(candidates: Sequence[Candidate], are_blocks: AreBlocks) -> str:
    """The most promising candidates, for messages: what is named there can be passed as ``stack=``."""
    ranked = sorted((c for c in candidates if c.shape and len(c.calls) > 1), key=lambda c: -len(c.calls))
    fitting = (c for c in ranked[:_MOST_TRIED] if are_blocks(c))
    return ", ".join(map(str, islice(fitting, _MOST_LISTED)))


def choose(model: nn.Module, plausible: Sequence[Candidate], are_blocks: AreBlocks) -> Candidate:
    """The candidate that is the model's residual stream.

    Args:
        model: Model, for its config.
        plausible: Candidates of which at least half of the links hold.
        are_blocks: As in `choose_by_name`.

    Raises:
        AnatomyError: If there is doubt.
    """
    counts = block_counts(model)
    if not plausible:
        raise AnatomyError(
            f"{type(model).__name__} has no stack of residual blocks: no two modules of one kind hand a state of one "
            "shape on unchanged"
            + (f" (the config says {counts[0]})" if counts else "")
            + "; if a single module is the block, pass its container as stack=."
        )
    if counts:
        return _choose_by_count(model, plausible, counts, are_blocks)
    chosen = _choose_by_length(plausible)
    _refuse_incomplete(chosen, plausible, are_blocks)
    _refuse_low_coverage(model, chosen, plausible)
    return chosen


def _choose_by_count(
    model: nn.Module, plausible: Sequence[Candidate], counts: Sequence[BlockCount], are_blocks: AreBlocks
) -> Candidate:
    """The complete stack of the length that the config states; the outermost, and the last to run."""
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
        _refuse_incomplete(incomplete[0], plausible, are_blocks)
    found = ", ".join(map(str, sorted(plausible, key=lambda c: -len(c.calls))[:_MOST_LISTED]))
    readable = _listed(plausible, are_blocks)
    raise AnatomyError(
        f"The config of {type(model).__name__} says {counts[0]}, but the stacks found are {found}; "
        + (f"pass as stack= one of {readable}." if readable else "none of them can be read.")
    )


def _choose_by_length(plausible: Sequence[Candidate]) -> Candidate:
    """The longest stack that is not a part of another's blocks; of equals the last to run."""
    remaining = list(plausible)
    for outer in plausible:
        for inner in plausible:
            if inner is not outer and _is_inside(inner, outer):
                loser = outer if _is_made_of(outer, inner) else inner
                remaining = [c for c in remaining if c is not loser]
    return max(remaining or plausible, key=lambda c: (len(c.calls), c.calls[-1].end))


def _is_made_of(outer: Candidate, inner: Candidate) -> bool:
    """Whether the outer modules only group the inner ones, rather than being blocks with parts inside.

    Groups repeat one kind of module inside; a block is made of different parts, such as attention and MLP. A longer
    stack in modules that are no stream themselves is never dropped: it may be the one that must be refused.
    """
    if len(inner.calls) <= len(outer.calls):
        return False
    if not outer.is_complete:
        return True
    kinds = {tuple(sorted(tuple(p.shape) for p in call.module.parameters())) for call in inner.calls}
    return inner.is_complete and len(kinds) == 1


def _refuse_incomplete(chosen: Candidate, plausible: Sequence[Candidate], are_blocks: AreBlocks) -> None:
    if chosen.is_complete:
        return
    if not chosen.shape:
        reason = "the width of its state changes from stage to stage"
    else:
        broken = [b.name for a, b in pairwise(chosen.calls) if not links_between(a, b, chosen.shape)]
        reason = f"what reaches {broken[0]} is not what the block before it returned"
    others = _listed([c for c in plausible if c is not chosen], are_blocks)
    raise AnatomyError(
        f"The longest stack, {chosen}, is not one residual stream: {reason}; "
        f"pass as stack= {f'one of {others}' if others else 'a container of whole blocks'}."
    )


def _refuse_low_coverage(model: nn.Module, chosen: Candidate, plausible: Sequence[Candidate]) -> None:
    """Refuse a stack that is a small part of the repeated modules: the true blocks then add outside of modules."""
    whole = [c for c in plausible if c is chosen or c.is_complete]
    share = share_of_repeated(model, (call.module for c in whole for call in c.calls))
    if 0 < share < LEAST_COVERAGE:
        raise AnatomyError(
            f"The longest stack, {chosen}, holds only {share:.0%} of the weights of all repeated modules, so the "
            "residual stream probably runs outside of it; pass as stack= the container of the true blocks."
        )


def share_of_repeated(model: nn.Module, modules: Iterable[nn.Module]) -> float:
    """Share of the parameters of all repeated modules that these hold; 0 if they hold none."""
    inside = {p for module in modules for p in module.parameters()}
    repeated = {
        p
        for holder in model.modules()
        if isinstance(holder, _CONTAINERS)
        for child in holder.children()
        if not _is_end(child)
        for p in child.parameters()
    }
    return sum(p.numel() for p in inside & repeated) / max(1, sum(p.numel() for p in repeated))


def _is_end(module: nn.Module) -> bool:
    """Whether a module begins or ends a stream, as an embedding or a head does, rather than carrying it on."""
    changes_width = isinstance(module, nn.Linear) and module.in_features != module.out_features
    return isinstance(module, nn.Embedding) or changes_width


def stream_axis_of(name: str, shape: tuple[int, ...], inputs: Any, stream: int) -> int:
    """The axis of states (batch, token, feature) with one axis more that counts streams, as hyper-connections have it.

    Args:
        name: Name of the stack.
        shape: Shape of the states.
        inputs: Inputs of the run.
        stream: Number of the stream that is wanted.

    Raises:
        AnatomyError: If there is no such axis, or more than one would fit, or it has fewer streams.
    """
    tokens = _token_shape(inputs)
    fitting = [a for a in range(len(shape) - 1) if len(shape) == 4 and (*shape[:a], *shape[a + 1 : -1]) == tokens]
    if len(fitting) != 1 or stream >= shape[fitting[0]]:
        raise AnatomyError(
            f"There is no stream {stream} in {name}: its states have shape {shape}, expected one axis beside those of "
            f"the tokens {tokens}, and no doubt which it is; pass another number, or sequences of another length."
        )
    return fitting[0]


def _token_shape(inputs: Any) -> tuple[int, ...] | None:
    """Shape of the token ids among the inputs."""
    values = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else [inputs]
    )
    ids = (v for v in values if isinstance(v, Tensor) and v.ndim == 2 and not v.is_floating_point())
    return next((tuple(v.shape) for v in ids), None)


def refuse_several_streams(chosen: Candidate, inputs: Any, record: Callable[[], Sequence[Call]]) -> int:
    """Refuse a state that is more than one vector per token, or whose features cannot be told.

    Args:
        chosen: Stack.
        inputs: Inputs of the run.
        record: As in `feature_axis_of`.

    Returns:
        Axis of the state that counts features, as `feature_axis_of`.

    Raises:
        AnatomyError: If it is one of these.
    """
    if len(streams := chosen.streams) > 1:
        raise AnatomyError(
            f"The stack {chosen.name} carries {len(streams)} residual streams side by side, of shapes "
            f"{' and '.join(map(str, streams))}, expected one; choose another model or, as stack=, another stack."
        )
    return feature_axis_of(chosen.name, chosen.shape, [call.module for call in chosen.calls], inputs, record)


def feature_axis_of(
    name: str,
    shape: tuple[int, ...],
    modules: Sequence[nn.Module],
    inputs: Any,
    record: Callable[[], Sequence[Call]],
) -> int:
    """The axis of states that counts features: the last, or the second of images; one of the modules' widths.

    Where the size of both axes is a width of the modules, the layers inside that get the state decide: a linear map
    takes features last, a convolution second.

    Args:
        name: Name of the stack.
        shape: Shape of the states.
        modules: Its blocks.
        inputs: Inputs of the run.
        record: Function that runs the model and gives the calls of all its modules; called where there is doubt.

    Raises:
        AnatomyError: If it is neither, if it remains in doubt, or a state is more than one vector per token.
    """
    tokens = _token_shape(inputs)
    if tokens is not None and len(shape) > 3:
        axes = [a for a in range(len(shape) - 1) if (*shape[:a], *shape[a + 1 : -1]) == tokens]
        n = shape[axes[0]] if len(axes) == 1 else 0
        remedy = f"choose one of them by its number, stack='{name}:0' to stack='{name}:{n - 1}'"
        raise AnatomyError(
            f"The stack {name} carries several residual streams at once: its state has shape {shape}, expected (batch, "
            f"token, feature); {remedy if n else 'choose another model, this one cannot be read'}."
        )
    widths = {size for module in modules for p in module.parameters() if p.ndim < 3 for size in p.shape}
    parts = {part for module in modules for part in module.modules()}
    may_be_second = (len(shape) == 4 and shape[1] in widths) or any(_axis_taken_by(p, shape) == 1 for p in parts)
    if not widths or shape[-1] in widths:
        axis = _axis_by_layers(shape, modules, record()) if may_be_second else -1
        if axis == -1 or (axis is None and len(shape) == 3):
            return -1
        if axis is None:
            raise AnatomyError(
                f"The states of {name} have shape {shape}, and its modules do not tell whether axis 1 or the last "
                "counts features, as both sizes are widths of theirs; pass images of another size."
            )
    if len(shape) == 4 and may_be_second:
        return 1
    raise AnatomyError(
        f"The last dimension of the state of {name}, shape {shape}, is not its feature dimension; only streams with "
        "features last, or images (batch, feature, height, width), can be read."
    )


def _axis_by_layers(shape: tuple[int, ...], modules: Sequence[nn.Module], calls: Sequence[Call]) -> int | None:
    """The axis that layers inside of blocks take for features: those that get the state itself, else its shape.

    Of states of three axes only the former count: with as many tokens as features, what is transposed has that shape
    too.
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
    """The axis of a tensor of some shape that a layer of torch takes for features; None if it is no such layer.

    Norms of features last count in torch's own class alone: subclasses for images turn the axes around.
    """
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
