"""Detection of the residual stream of any model: run it once and find repeated modules that pass their output on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import AnatomyError
from workbench.models.batches import Batches
from workbench.models.block_calls import Site, Slot, has_matrix, record_calls
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import on_device_of, runnable, subject_in
from workbench.models.layout import BATCH_FIRST, BatchLayout, layout_of
from workbench.models.outside_residuals import OutsideStack, choose_outside, find_outside_stacks, without_outside
from workbench.models.residual_check import MIN_COSINE, lack_of_matrix, lack_of_residual, random_change, states_of
from workbench.models.stacks import (
    MIN_COVERAGE,
    Candidate,
    Lack,
    block_counts,
    choose,
    choose_by_name,
    feature_axis_of,
    find_candidates,
    fraction_of_repeated,
    is_fragment,
    is_outer,
    links_between,
    overlap,
    require_one_stream,
    stream_axis_of,
)
from workbench.models.subject import Subject


@dataclass(frozen=True)
class Anatomy:
    """The residual blocks of a model, in the order in which the stream passes through them.

    Attributes:
        stack: Container of the blocks: a module path such as ``transformer.h``; with ``*`` for an index where the
            blocks are spread over several containers; ``path[Class]`` for blocks that are plain attributes of ``path``;
            ``path.a+b`` for lists ``a`` and ``b`` side by side.
        sites: Sites, one per block and call.
        width: Number of features of a state.
        other_stacks: Further complete stacks, such as the encoder when the decoder was chosen.
        layout: Axes of inputs and states that count sequences.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> [site.name for site in wb.read_anatomy(model, torch.arange(8)[None]).sites]
        ['blocks.0', 'blocks.1']

    See Also:
        `workbench.read_anatomy`: Returns it.
    """

    stack: str
    sites: tuple[Site, ...]
    width: int
    other_stacks: tuple[str, ...] = ()
    layout: BatchLayout = BATCH_FIRST


def read_anatomy(
    model: Subject | nn.Module, inputs: Any, *, stack: str | None = None, batch_first: bool | None = None
) -> Anatomy:
    """Find the residual blocks of a model by running it once.

    A stack is a set of modules in one container, or of one class under one parent. Each of them returns a state of the
    same shape as its input, and this state is bit for bit the input of the next. Stacks inside the members of another
    stack are dropped, and the longest of the others is chosen. Its length must be the one that ``model.config`` states,
    where there is a config. In an encoder-decoder model the decoder is chosen.

    In some models no module returns the stream, because a loop adds the residual (``x = x + branch(norm(x))``). There
    the layers are the members of the list that the loop iterates over, and states are read as they enter the next layer
    or the module after the last. Every state must be the sum of the previous one and of the outputs of the layer's
    modules, up to rounding. States of such layers can be read but not replaced. Parallel lists, such as norms,
    attentions and MLPs, whose members take turns are one list of layers, ``norms+attentions+mlps``.

    Where a loop changes the stream between complete blocks, by a factor, a norm, or by adding positions or earlier
    states, the states are those that enter and leave the blocks. A change of the first state shows that the blocks
    follow each other: in every token it must enter each block as it left the previous one, with a cosine of at least
    0.3.

    Where blocks pass on two tensors, the last branch and the sum before it, the state is their sum. A change that is
    added to one and subtracted from the other shows that blocks depend on the sum alone.

    The axis of the states that counts sequences is detected as well. If it is not documented for the model, one token
    is changed in a second run: the change spreads along the axis of tokens.

    The model runs in eval mode without gradients. Training flags, random states, parameters, buffers and hooks are
    restored, also if an exception is raised.

    Args:
        model: Module, or a subject from `open_checkpoint`.
        inputs: Inputs as for `workbench.profile`; one short sequence is enough. Of several batches the first is used.
        stack: Stack to read instead of the default, named as by `list_stacks`. Its blocks must keep the shape of the
            stream and add to it, but need not pass it on unchanged, and their number may differ from the config. Where
            a state consists of several parallel streams, as with hyper-connections, ``layers:2`` is stream 2 of
            ``layers``, counted from 0; the state that leaves a block in it depends on the other streams too.
        batch_first: Whether inputs have shape (batch, token) or (batch, token, feature), rather than tokens first; None
            detects it.

    Returns:
        The blocks.

    Raises:
        AnatomyError: If there is no stack, if the longest one is not complete, if its length is not that of the config,
            if it carries several residual streams at once, if the modules of ``stack`` are not residual blocks, or if
            the axes of batch and token cannot be distinguished.
        SnapshotError: If the model cannot run on the inputs.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=3, n_heads=2)
        >>> anatomy = wb.read_anatomy(model, torch.arange(8)[None])
        >>> anatomy.stack, len(anatomy.sites), anatomy.width
        ('blocks', 3, 16)

    See Also:
        `workbench.list_stacks`: Lists all stacks from which one can be chosen.
        `workbench.profile`: Measures the spectra of the blocks.
    """
    subject, model = subject_in(model), runnable(model)
    head, colon, number = (stack or "").rpartition(":")
    stream = int(number) if colon and number.isdecimal() else None
    stack = stack if stream is None else head
    inputs, _ = Batches.of(inputs, subject).probe_and_all()
    inputs = on_device_of(model, inputs)
    candidates = find_candidates(model, record_calls(model, inputs))
    plausible = [
        c for c in candidates if len(c.calls) > 1 and 2 * c.n_links >= len(c.calls) - 1 and not c.alternates_with_norms
    ]

    def lack(candidate: Candidate) -> str:
        return _lack_of_blocks(model, inputs, candidate)

    try:
        chosen = choose(model, plausible, lack) if stack is None else choose_by_name(candidates, stack, lack)
    except AnatomyError as refusal:
        if stream is not None:
            raise
        found, others = _choose_otherwise(model, inputs, candidates, lack, stack, refusal)
        if isinstance(found, OutsideStack):
            axis = feature_axis_of(model, inputs, found.name, found.shape, found.modules)
            return _anatomy_of(model, inputs, found, found.sites, axis, None, others, batch_first)
        chosen = found
    sites = _sites(chosen)
    if stream is not None:
        place = stream_axis_of(chosen.name, chosen.shape, inputs, stream)
        return _anatomy_of(model, inputs, chosen, sites, -1, (place, stream), (), batch_first)
    if len(set(chosen.streams)) < len(chosen.streams) and (sums := sites_of_sums(model, inputs, chosen, sites)):
        sites = sums
    else:
        require_one_stream(chosen)
    axis = feature_axis_of(model, inputs, chosen.name, chosen.shape, chosen.blocks)
    others = [
        c.name
        for c in plausible
        if c is not chosen and c.is_complete and not overlap(c, chosen) and is_outer(c, plausible)
    ]
    return _anatomy_of(model, inputs, chosen, sites, axis, None, others, batch_first)


def _anatomy_of(
    model: nn.Module,
    inputs: Any,
    chosen: Candidate | OutsideStack,
    sites: Sequence[Site],
    axis: int,
    stream: tuple[int, int] | None,
    others: Sequence[str],
    batch_first: bool | None,
) -> Anatomy:
    """Return the anatomy of a chosen stack, whose axis of sequences is determined here."""
    shape = list(chosen.shape)
    if stream is not None:
        del shape[stream[0]]
    shape.append(shape.pop(axis))
    sites = tuple(replace(site, feature_axis=axis, stream=stream) for site in sites)

    def last_state(given: Any) -> Tensor:
        if not (states := states_of(model, given, sites[-1:])):
            raise AnatomyError(
                f"{sites[-1].name} ran for the given inputs, but not when one token was changed, so that the axes of "
                "batch and token cannot be distinguished; pass wb.profile(..., batch_first=)."
            )
        return states[-1]

    layout = layout_of(model, inputs, tuple(shape[:-1]), batch_first=batch_first, state_for=last_state)
    name = chosen.name if stream is None else f"{chosen.name}:{stream[1]}"
    return Anatomy(name, sites, shape[-1], tuple(dict.fromkeys(others)), layout)


def _lack_of_blocks(model: nn.Module, inputs: Any, candidate: Candidate) -> str:
    """Return why the modules of a candidate are not residual blocks, as text; empty if they are."""
    kinds = {type(call.module) for call in candidate.calls}
    # A branch and the module that adds it to the stream may be a chain of two.
    is_certain = is_chain(candidate) and (len(candidate.calls) > 2 or len(kinds) == 1)
    if not is_certain:
        return lack_of_residual(model, inputs, _sites(candidate))
    is_known = any(has_matrix(call.module) for call in candidate.calls)  # flat or packed weights show no matrix
    return lack_of_matrix(_sites(candidate)) if is_known else ""


def _choose_otherwise(
    model: nn.Module, inputs: Any, candidates: Sequence[Candidate], lack: Lack, stack: str | None, refusal: AnatomyError
) -> tuple[Candidate | OutsideStack, list[str]]:
    """Return a stack whose residual is added outside of modules, with the other such stacks; else an altered one."""
    if any(hasattr(parameter, "_is_flat_param") for parameter in model.parameters()):
        raise AnatomyError(
            f"{type(model).__name__} keeps the parameters of many modules in one flat parameter, so that they cannot "
            "be assigned to their modules; wrap the model with FSDP(..., use_orig_params=True), or pass the model "
            "before it was wrapped."
        ) from refusal
    outside, unread = find_outside_stacks(model, inputs, {c.name for c in candidates if is_chain(c)})
    if chosen := choose_outside(model, outside, stack):
        return chosen, [s.name for s in outside if s.is_chain and s.is_disjoint(chosen)]
    if stack is None and (altered := choose_altered(model, inputs, candidates, lack)):
        return altered, []
    raise without_outside(model, outside, unread, stack, refusal) from None


def is_chain(candidate: Candidate) -> bool:
    """Return whether there are several blocks, each of which passes exactly the state it returns to the next."""
    return len(candidate.calls) > 1 and candidate.is_complete


def _sites(chosen: Candidate) -> tuple[Site, ...]:
    calls, shape = chosen.calls, chosen.shape
    into: list[list[Slot]] = [[s.slot for s in call.inputs if s.shape == shape] for call in calls]
    out: list[list[Slot]] = [[s.slot for s in call.changed if s.shape == shape] for call in calls]
    for position, (before, after) in enumerate(pairwise(calls)):
        if links := links_between(before, after, shape):
            out[position] = [a for a, _ in links]
            into[position + 1] = [b for _, b in links]
    sites: list[Site] = []
    n_calls: dict[nn.Module, int] = {}
    for call, input_slots, output_slots in zip(calls, into, out, strict=True):
        number = n_calls[call.module] = n_calls.get(call.module, -1) + 1
        name = f"{call.name}#{number}" if number else call.name
        sites.append(Site(name, call.module, number, _prevailing(input_slots, into), _prevailing(output_slots, out)))
    return tuple(sites)


def _prevailing(slots: list[Slot], all_slots: list[list[Slot]]) -> Slot:
    """Return the slot that occurs in most sites; of several, the first."""
    return max(dict.fromkeys(slots), key=lambda slot: sum(slot in others for others in all_slots))


#: Fraction of the effect of changing one term that may remain after the opposite change of the other, due to rounding.
_ROUNDING = 1e-2


def sites_of_sums(model: nn.Module, inputs: Any, chosen: Candidate, sites: Sequence[Site]) -> tuple[Site, ...] | None:
    """Return sites whose states are sums of two tensors that every block receives and returns; None if there are none.

    Blocks must depend only on the sum: their output must not change if a change is added to one tensor and subtracted
    from the other. This distinguishes them from two streams that update each other, as in reversible networks.
    """
    pairs = [
        {(out.slot, into.slot) for out in a.outputs for into in b.inputs if _is_same(out, into, chosen.shape)}
        for a, b in pairwise(chosen.calls)
    ]
    slots = set.union(*pairs)
    outs, ins = {out for out, _ in slots}, {into for _, into in slots}
    if not len(slots) == len(outs) == len(ins) == 2 or any(pair != slots for pair in pairs):
        return None
    if any(site.output_slot not in outs or site.input_slot not in ins for site in sites):
        return None

    def other(among: set[Slot], slot: Slot) -> Slot:
        return next(s for s in among if s != slot)

    sums = tuple(replace(s, terms=(other(ins, s.input_slot), other(outs, s.output_slot))) for s in sites)
    if lack_of_residual(model, inputs, sums):
        return None
    for site in (sums[place] for place in sorted({1, len(sums) // 2, len(sums) - 1})):
        original, one, both = (_sum_that_leaves(model, inputs, site, n_changed=n) for n in range(3))
        if not float((both - original).norm()) <= _ROUNDING * float((one - original).norm()):
            return None
    return sums


def _is_same(one: Any, other: Any, shape: tuple[int, ...]) -> bool:
    return one.shape == other.shape == shape and one.fingerprint == other.fingerprint


def _sum_that_leaves(model: nn.Module, inputs: Any, site: Site, *, n_changed: int) -> Tensor:
    """Return the sum that leaves a block, float64, after opposite random changes of 0, 1 or 2 terms that enter."""
    assert site.terms is not None
    first, second = (replace(site, input_slot=slot, terms=None) for slot in (site.input_slot, site.terms[0]))
    changes: list[Tensor] = []

    def add(call: BlockCall) -> Tensor:
        changes.append(random_change(call.state_in) - call.state_in)
        return call.state_in + changes[0]

    hooks = (BlockHooks([first], add), BlockHooks([second], lambda call: call.state_in - changes[0]))
    return states_of(model, inputs, [site], None, *hooks[:n_changed])[-1].double()


def choose_altered(model: nn.Module, inputs: Any, candidates: Sequence[Candidate], lack: Lack) -> Candidate | None:
    """Return the stack of complete blocks whose states the model changes between blocks; None if there is none.

    The blocks must be residual blocks, as many as the config states, and hold most parameters of all repeated modules.
    A change of the first state shows that they follow each other: it must enter every block as it left the previous
    one, token by token.
    """
    counts = block_counts(model)
    complete = [
        c
        for c in candidates
        if len(c.calls) > 1
        and c.shape
        and not c.is_complete
        and all(has_matrix(call.module) for call in c.calls)
        and (not counts or any(count.n_blocks == len(c.calls) for count in counts))
        and fraction_of_repeated(model, (call.module for call in c.calls)) >= MIN_COVERAGE
    ]
    for candidate in sorted(complete, key=lambda c: (-len(c.calls), -c.calls[-1].end)):
        if is_outer(candidate, complete) and not lack(candidate) and _is_followed(model, inputs, _sites(candidate)):
            return candidate
    return None


def _is_followed(model: nn.Module, inputs: Any, sites: Sequence[Site]) -> bool:
    """Return whether a change of the first state enters each block as it left the previous one."""
    original, changed = (states_of(model, inputs, sites, change) for change in (None, random_change))
    if len(original) != len(changed) or any(a.shape != b.shape for a, b in zip(original, changed, strict=True)):
        return False
    # entering, leaving, entering, leaving, ...
    differences = [b.double() - a.double() for a, b in zip(original, changed, strict=True)]
    return all(
        bool((torch.cosine_similarity(left, entered, dim=-1) >= MIN_COSINE).all())
        for left, entered in list(pairwise(differences))[1::2]
    )


def list_stacks(model: Subject | nn.Module, inputs: Any, *, batch_first: bool | None = None) -> list[str]:
    """Return the names of a model's stacks of residual blocks, each of which can be passed as ``stack=``.

    If `read_anatomy` can choose a stack, that one comes first, followed by others such as the encoder. If it cannot,
    because the width of the stream changes from stage to stage or there are several parallel streams, the names are
    those of the stages or streams in the order in which they run.

    Args:
        model: Module, or a subject from `open_checkpoint`.
        inputs: Inputs as for `workbench.profile`; one short sequence is enough.
        batch_first: As for `read_anatomy`.

    Returns:
        Names, at least one.

    Raises:
        AnatomyError: If no stack can be read.
        SnapshotError: If the model cannot run on the inputs.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=3, n_heads=2)
        >>> tokens = torch.arange(48).reshape(4, 12)
        >>> names = wb.list_stacks(model, tokens)
        >>> names
        ['blocks']
        >>> spectra = {name: wb.profile(model, tokens, stack=name, progress=False) for name in names}

    See Also:
        `workbench.read_anatomy`: Finds the blocks of one stack.
        `workbench.profile`: Computes the spectra of one stack.
    """

    def is_readable(name: str) -> bool:
        try:
            read_anatomy(model, inputs, stack=name, batch_first=batch_first)
        except AnatomyError:
            return False
        return True

    try:
        anatomy = read_anatomy(model, inputs, batch_first=batch_first)
    except AnatomyError:
        subject, module = subject_in(model), runnable(model)
        probe = on_device_of(module, Batches.of(inputs, subject).probe_and_all()[0])
        chains = [c for c in find_candidates(module, record_calls(module, probe)) if is_chain(c)]
        outer = [c for c in chains if is_outer(c, chains) and not any(is_fragment(c, other) for other in chains)]
        names: list[str] = []
        for stack in dict.fromkeys(c.name for c in sorted(outer, key=lambda c: c.calls[-1].end)):
            streams = (f"{stack}:{i}" for i in count())
            names += [stack] if is_readable(stack) else takewhile(is_readable, streams)
        if not names:
            raise
        return names
    return [anatomy.stack, *anatomy.other_stacks]
