"""Residual streams that are added outside of modules, found from the states that enter each repeated branch.

Where a loop computes ``x = x + branch(norm(x))``, no module returns the stream. The state that enters layer i is then
the input of its first module, and the state that leaves it is the input of the next module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import AnatomyError
from workbench.models.block_calls import Call, Place, Site, State, has_matrix, record_calls
from workbench.models.stacks import MIN_COVERAGE, block_counts, fraction_of_repeated

Shape = tuple[int, ...]
#: Fraction of a state that a fit may leave unexplained in float32; in coarser formats, two units of their rounding.
_ROUNDING = 1e-5
#: A sum needs a state if the unexplained fraction without it is larger than the limit by this factor.
_NEEDED = 10.0
#: Maximum number of token states that a fit uses.
_MAX_ROWS = 512
#: Maximum number of stacks that a message names.
_MAX_LISTED = 6
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class OutsideStack:
    """Layers between which the residual is added."""

    name: str  # path of the container
    sites: tuple[Site, ...]  # one per visit of a member of the container
    shape: Shape  # shape of the state
    #: Whether the state that leaves each layer enters the next, either unchanged or, for at most half of them, through
    #: one module in between that merges it with an earlier state, as in a U-net.
    is_chain: bool
    end: int  # number of the event at which the last layer ended, in the order of the forward pass

    @property
    def modules(self) -> list[nn.Module]:
        """Members of the container, without duplicates."""
        return list(dict.fromkeys(site.module for site in self.sites))

    def is_disjoint(self, other: OutsideStack) -> bool:
        """Return whether two stacks share no module."""
        parts = {part for module in self.modules for part in module.modules()}
        return not any(part in parts for module in other.modules for part in module.modules())

    def __str__(self) -> str:
        return f"{self.name} ({len(self.sites)} layers, residuals added outside of modules)"


@dataclass(frozen=True, eq=False)
class _Exit:
    """A place where the state that leaves a layer may be read."""

    call: Call  # that receives or returns the state
    state: State  # the state, or a tensor that holds it next to another state
    is_output: bool
    start: int | None = None  # index of its first feature in that tensor; None if the tensor is the state


@dataclass(frozen=True, eq=False)
class _Visit:
    """The outermost calls inside one member of a container, and the states that enter and leave."""

    index: int
    calls: list[Call]
    entry: tuple[Call, State]
    exits: list[_Exit]

    @property
    def exit(self) -> _Exit:
        """The first place where the state that leaves may be read."""
        return self.exits[0]


def find_outside_stacks(
    model: nn.Module, inputs: Any, known: Collection[str] = ()
) -> tuple[list[OutsideStack], list[str]]:
    """Find containers whose members are branches of a residual stream that is added outside of modules.

    Up to rounding, the state that leaves a layer must be a linear combination of the state that entered, of the outputs
    of the layer's modules and possibly of earlier states; each has one factor, or one factor per feature. A norm may
    follow each sum. This is checked in every layer. Containers in ``known`` return the stream themselves. Also return
    the names of the containers whose members pass on a state that is no such sum.
    """
    calls = record_calls(model, inputs, everything=True)
    called = {call.module for call in calls}
    loops = {
        name: container
        for name, container in model.named_modules()
        if isinstance(container, _CONTAINERS) and container not in called and name not in known
    }
    names = {module: name for name, module in model.named_modules()}
    side_by_side = _side_by_side(loops, calls, names)
    found: list[tuple[str, nn.Module, Shape, list[_Visit]]] = []
    for name, container in [*loops.items(), *side_by_side.items()]:
        if name in side_by_side or not _is_grouping(container):
            shape, visits = _with_states(_visits(container, calls), calls)
            if visits:
                found.append((name, container, shape, visits))
    if not found:
        return [], []
    read = (call for *_, visits in found for v in visits for call in (*v.calls, *(e.call for e in v.exits)))
    modules = {call.module for call in read}
    values = {call.index: call for call in record_calls(model, inputs, everything=True, keep=modules)}
    stacks, others = [], []
    for name, container, shape, visits in found:
        checked = _checked(visits, shape, values)
        is_chain = _is_chain(checked or visits, calls)
        if checked:
            sites = _sites(checked, container, calls, names)
            stacks.append(OutsideStack(name, sites, shape, is_chain, visits[-1].calls[-1].end))
        elif is_chain and name not in side_by_side:
            others.append(name)
    return stacks, others


def choose_outside(model: nn.Module, stacks: Sequence[OutsideStack], stack: str | None) -> OutsideStack | None:
    """Return the stack of a given name or, without a name, the one that must be the model's residual stream.

    Without a name, the stack must be a chain with as many layers as the config states (or a multiple, where layers have
    several branches), and must hold at least half of the parameters of all repeated modules. Of several such stacks the
    longest is chosen, and of equally long ones the last to run.
    """
    if stack is not None:
        return next((s for s in stacks if s.name == stack), None)
    counts = block_counts(model)
    fitting = [
        s
        for s in stacks
        if s.is_chain
        and (not counts or any(len(s.sites) % count.n_blocks == 0 for count in counts))
        and fraction_of_repeated(model, s.modules) >= MIN_COVERAGE
    ]
    # A list by itself is preferred to the same list combined with others.
    return max(fitting, key=lambda s: (len(s.sites), "+" not in s.name, s.end), default=None)


def without_outside(
    model: nn.Module, stacks: Sequence[OutsideStack], others: Sequence[str], stack: str | None, refusal: AnatomyError
) -> AnatomyError:
    """Return the refusal of a model without complete blocks, with the stacks that can be chosen by name."""
    if stacks:
        listed = ", ".join(map(str, stacks[:_MAX_LISTED]))
        return AnatomyError(f"{refusal} These can also be passed as stack=: {listed}.")
    others = [
        name
        for name in others
        if stack == name
        or (stack is None and fraction_of_repeated(model, model.get_submodule(name).children()) >= MIN_COVERAGE)
    ]
    if others:
        return AnatomyError(
            f"{refusal} The members of {others[0]} are called in sequence, but the state that passes from one to the "
            "next is not the sum of the previous state and their outputs, so no residual stream can be read there."
        )
    return refusal


def _side_by_side(
    loops: Mapping[str, nn.Module], calls: Sequence[Call], names: dict[nn.Module, str]
) -> dict[str, nn.Module]:
    """Find lists of equal length under one parent whose members alternate, such as norms, attentions and MLPs.

    Return lists of layers, which are no modules of the model, by the names of the lists joined by ``+``. The layers are
    added to the names of modules, each under the path of its first member with a matrix.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for name, container in loops.items():
        if isinstance(container, nn.ModuleList) and len(container) == len([*container.children()]) > 1:  # no None
            groups.setdefault((name.rpartition(".")[0], len(container)), []).append(name)
    found: dict[str, nn.Module] = {}
    for group in groups.values():
        members = [list(parts) for parts in zip(*(loops[name].children() for name in group), strict=True)]
        layers = nn.ModuleList(nn.ModuleList(parts) for parts in members)
        if len(group) < 2 or [index for index, _ in _visits(layers, calls)] != list(range(len(layers))):
            continue
        for layer, parts in zip(layers, members, strict=True):
            names[layer] = next((names[part] for part in parts if has_matrix(part)), names[parts[0]])
        found["+".join([group[0], *(name.rpartition(".")[2] for name in group[1:])])] = layers
    return found


def _is_grouping(container: nn.Module) -> bool:
    """Return whether the members only group layers of one kind, as stages do, and are not layers themselves."""
    for member in container.children():
        kinds = [tuple(sorted(tuple(p.shape) for p in part.parameters())) for part in member.children()]
        kinds = [kind for kind in kinds if kind]
        if not isinstance(member, _CONTAINERS) or len(kinds) < 2 or len(set(kinds)) > 1:
            return False
    return True


def _visits(container: nn.Module, calls: Sequence[Call]) -> list[tuple[int, list[Call]]]:
    """Return the outermost calls inside the members, in order, grouped by member."""
    owners: dict[nn.Module, list[int]] = {}
    for index, member in enumerate(container.children()):
        for module in member.modules():
            owners.setdefault(module, []).append(index)
    visits: list[tuple[int, list[Call]]] = []
    end = -1
    for call in calls:
        if call.module not in owners or call.index < end:
            continue
        end = call.end
        among = owners[call.module]
        if visits and visits[-1][0] in among and visits[-1][1][0].module is not call.module:
            visits[-1][1].append(call)
        else:  # members may share modules: take the next one in order
            last = visits[-1][0] if visits else -1
            visits.append((next((i for i in among if i > last), among[0]), [call]))
    return visits


def _with_states(visits: list[tuple[int, list[Call]]], calls: Sequence[Call]) -> tuple[Shape, list[_Visit]]:
    """Return the shape that enters every visit, and the visits with their states; none if there is no such shape."""
    if len(visits) < 2:
        return (), []
    shapes = [{s.shape for call in inside for s in call.inputs} for _, inside in visits]
    common = set.intersection(*shapes)
    first = dict.fromkeys(s.shape for call in visits[0][1] for s in call.inputs if s.shape in common)
    shape = next(iter(first), ())
    if not shape:
        return (), []
    entries = [next(call for call in inside if any(s.shape == shape for s in call.inputs)) for _, inside in visits]
    usual = Counter(s.slot for call in entries for s in call.inputs if s.shape == shape)
    entering = [max((s for s in call.inputs if s.shape == shape), key=lambda s: usual[s.slot]) for call in entries]
    found: list[_Visit] = []
    next_entries = {call.index: state for call, state in zip(entries, entering, strict=True)}
    for (index, inside), entry, state in zip(visits, entries, entering, strict=True):
        exits = _exits(inside, calls, shape, next_entries)
        if inside is visits[-1][1]:  # the module that follows may receive more than the last sum
            exits += [_Exit(inside[-1], s, True) for s in inside[-1].outputs if s.shape == shape]
        if not exits:
            return (), []
        found.append(_Visit(index, inside, (entry, state), exits))
    return shape, found


def _exits(inside: list[Call], calls: Sequence[Call], shape: Shape, next_entries: dict[int, State]) -> list[_Exit]:
    """Return where the state may be in the first call after a visit that receives it, or around it that returns it."""
    begin, end, width = inside[0].index, inside[-1].end, shape[-1]
    after = [(call.index, call, call.inputs, False) for call in calls if call.index > end]
    around = [(call.end, call, call.outputs, True) for call in calls if call.index < begin and call.end > end]
    for _, call, states, is_output in sorted((*after, *around), key=lambda event: event[0]):
        if not is_output and call.index in next_entries:
            return [_Exit(call, next_entries[call.index], False)]
        if fitting := [_Exit(call, s, is_output) for s in states if s.shape == shape]:
            return fitting
        doubled = [s for s in states if s.shape == (*shape[:-1], 2 * width)]
        if doubled and not is_output:  # two concatenated states, as in a U-net
            return [_Exit(call, s, False, start) for s in doubled for start in (0, width)]
    return []


def _is_chain(visits: list[_Visit], calls: Sequence[Call]) -> bool:
    """Return whether each state that leaves enters the next layer; see `OutsideStack`."""
    merged = 0
    for before, after in pairwise(visits):
        left, entered = before.exit.state.fingerprint, after.entry[1].fingerprint
        if left == entered:
            continue
        between = [c for c in calls if before.calls[-1].end < c.index and c.end < after.entry[0].index]
        merging = [c for c in between if left in {s.fingerprint for s in c.inputs}]
        if not any(entered in {s.fingerprint for s in c.outputs} for c in merging):
            return False
        merged += 1
    return 2 * merged <= len(visits)


def _sites(
    visits: list[_Visit], container: nn.Module, calls: Sequence[Call], names: dict[nn.Module, str]
) -> tuple[Site, ...]:
    """Return the sites of the visits."""
    numbers: dict[int, int] = {}
    totals: Counter[nn.Module] = Counter()
    for call in calls:
        numbers[call.index] = totals[call.module]
        totals[call.module] += 1

    def place(call: Call, state: State, *, is_output: bool = False, start: int | None = None) -> Place:
        return Place(call.module, numbers[call.index], totals[call.module], state.slot, is_output, start)

    members, seen, sites = list(container.children()), Counter[int](), []
    for visit in visits:
        member, (entry, entering), leaving = members[visit.index], visit.entry, visit.exit
        branches = {call.module for call in visit.calls if has_matrix(call.module)}
        # Where a list alternates between branches, each branch is a layer and the name states its kind.
        kind = f"#{type(branches.pop()).__name__}" if len(branches) == 1 else ""
        repeated = f"#{seen[visit.index]}" if seen[visit.index] else ""
        site = Site(
            f"{names[member]}{kind}{repeated}",
            member,
            seen[visit.index],
            entering.slot,
            None,
            place(entry, entering),
            place(leaving.call, leaving.state, is_output=leaving.is_output, start=leaving.start),
        )
        sites.append(site)
        seen[visit.index] += 1
    return tuple(sites)


# --- sums ------------------------------------------------------------------------------------------------------------


def _checked(visits: list[_Visit], shape: Shape, values: dict[int, Call]) -> list[_Visit]:
    """Return the visits, each with the place where the state that leaves is a sum; none if one has no such place."""
    earlier: list[Tensor] = []
    checked = []
    for visit in visits:
        inside = [values[call.index] for call in visit.calls if call.index in values]
        entering = _value_of(values, _Exit(*visit.entry, is_output=False), shape)
        if entering is None or not any(has_matrix(call.module) for call in inside):
            return []
        # One of two concatenated states may be the state that entered, kept for the merge: try it last.
        places = [(place, _value_of(values, place, shape)) for place in visit.exits]
        places.sort(key=lambda p: p[0].start is not None and p[1] is not None and torch.equal(p[1], entering))
        for place, leaving in places:
            if leaving is not None and _is_reached(entering, leaving, inside, shape, earlier):
                checked.append(replace(visit, exits=[place]))
                break
        else:
            return []
        earlier.append(entering)
    return checked


def _value_of(values: dict[int, Call], place: _Exit, shape: Shape) -> Tensor | None:
    """Return the state at a place in the second forward pass; None if it was not kept."""
    call = values.get(place.call.index)
    states = (call.outputs if place.is_output else call.inputs) if call is not None else []
    value = next((s.value for s in states if s.slot == place.state.slot), None)
    return value if value is None or place.start is None else value.narrow(-1, place.start, shape[-1])


def _is_reached(entering: Tensor, leaving: Tensor, calls: list[Call], shape: Shape, earlier: list[Tensor]) -> bool:
    """Return whether sums, each possibly followed by a norm, lead from the state that enters to the one that leaves."""
    stream: list[Tensor] = [entering]
    returned: list[Tensor] = []
    for call in calls:
        given = [s.value for s in call.inputs if s.value is not None and s.shape == shape]
        for state in call.outputs:
            value = state.value
            if value is None or state.shape != shape or _is_among(value, stream):
                continue
            if _is_sum(value, stream, returned):
                stream.append(value)
            elif has_matrix(call.module):
                returned.append(value)
            elif any(_is_among(z, stream[1:]) or _is_sum(z, stream, returned) for z in given):
                stream.append(value)  # a norm of a sum
            elif not any(torch.equal(z, entering) for z in given):
                returned.append(value)  # a norm of a branch output; a norm of the entering state feeds the branch
    if _is_among(leaving, stream):
        return True
    returned = [value for value in returned if not torch.equal(value, leaving)]
    return _is_sum(leaving, stream, returned) or _is_sum(leaving, stream, [*returned, *earlier])


def _is_among(value: Tensor, others: list[Tensor]) -> bool:
    return any(torch.equal(value, other) for other in others)


def _is_sum(total: Tensor, stream: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether a state is a sum of other states that needs one of the stream."""
    rounding = max(_ROUNDING, 2 * torch.finfo(total.dtype).eps)
    for per_feature in (False, True):
        if _unexplained(total, [*stream, *others], per_feature=per_feature) <= rounding:
            return _unexplained(total, others, per_feature=per_feature) > _NEEDED * rounding
    return False


def _unexplained(total: Tensor, terms: list[Tensor], *, per_feature: bool) -> float:
    """Return the fraction of a state that the best sum with one factor per term, or per feature, leaves unexplained."""
    y, *xs = (t.double().flatten(0, -2)[:_MAX_ROWS] for t in (total, *terms))
    size = float(y.norm())
    if not xs or not size > 0:
        return 1.0
    if per_feature:
        if len(y) < 3 * len(xs):
            return 1.0
        matrix, right = torch.stack(xs, -1).transpose(0, 1), y.T[..., None]
    else:
        matrix, right = torch.stack([x.flatten() for x in xs], -1), y.flatten()[:, None]
    if not bool(torch.isfinite(matrix).all() & torch.isfinite(right).all()):
        return 1.0
    factors = torch.linalg.lstsq(matrix, right, driver="gelsd").solution
    return float((right - matrix @ factors).norm()) / size
