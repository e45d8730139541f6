"""Detection of the residual stream of any model: run it once and find repeated modules that pass their output on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from workbench.errors import AnatomyError
from workbench.models.altered_streams import choose_altered
from workbench.models.batches import Batches
from workbench.models.block_calls import Call, Slot, has_matrix, record_calls
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import on_device_of, run_model
from workbench.models.layout import BATCH_FIRST, BatchLayout, layout_of
from workbench.models.outside_residuals import OutsideStack, choose_outside, find_outside_stacks
from workbench.models.probing import undisturbed
from workbench.models.residual_check import lack_of_matrix, lack_of_residual
from workbench.models.site import Site
from workbench.models.split_states import sites_of_sums
from workbench.models.stacks import (
    Candidate,
    choose,
    choose_by_name,
    feature_axis_of,
    find_candidates,
    is_outer,
    links_between,
    overlap,
    require_one_stream,
    stream_axis_of,
)
from workbench.models.wrapping import runnable, subject_in

if TYPE_CHECKING:
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
    stack, stream = _split_stream(stack)
    inputs, _ = Batches.of(inputs, subject).probe_and_all()
    inputs = on_device_of(model, inputs)
    calls = record_calls(model, inputs)
    candidates = find_candidates(model, calls)
    plausible = [
        c for c in candidates if len(c.calls) > 1 and 2 * c.n_links >= len(c.calls) - 1 and not c.alternates_with_norms
    ]

    def why_not(candidate: Candidate) -> str:
        """Return why the modules of a candidate are not residual blocks, as text; empty if they are."""
        kinds = {type(call.module) for call in candidate.calls}
        # A branch and the module that adds it to the stream may be a chain of two.
        is_certain = is_chain(candidate) and (len(candidate.calls) > 2 or len(kinds) == 1)
        if not is_certain:
            return lack_of_residual(model, inputs, _sites(candidate))
        is_known = any(has_matrix(call.module) for call in candidate.calls)  # flat or packed weights show no matrix
        return lack_of_matrix(_sites(candidate)) if is_known else ""

    def record_all() -> list[Call]:
        return record_calls(model, inputs, everything=True)

    def are_blocks(candidate: Candidate) -> bool:
        return not why_not(candidate)

    chosen: Candidate | OutsideStack
    try:
        if stack is None:
            chosen = choose(model, plausible, are_blocks)
        else:
            chosen = choose_by_name(candidates, stack, are_blocks)
            if reason := why_not(chosen):
                raise AnatomyError(
                    f"The modules of '{stack}' are not residual blocks: {reason}; choose a container of complete "
                    "blocks, or another model."
                )
    except AnatomyError as error:
        if stream is not None:
            raise
        if any(hasattr(parameter, "_is_flat_param") for parameter in model.parameters()):
            raise AnatomyError(
                f"{type(model).__name__} keeps the parameters of many modules in one flat parameter, so that they "
                "cannot be assigned to their modules; wrap the model with FSDP(..., use_orig_params=True), or pass "
                "the model before it was wrapped."
            ) from error
        outside, unread = find_outside_stacks(model, inputs, {c.name for c in candidates if is_chain(c)})
        try:
            chosen = choose_outside(model, outside, unread, stack, error)
        except AnatomyError:
            altered = choose_altered(model, inputs, candidates, are_blocks, _sites) if stack is None else None
            if altered is None:
                raise
            chosen = altered
        else:
            others = [s.name for s in outside if s.is_chain and s.is_disjoint(chosen)]
    name, shape, axis, streams = chosen.name, list(chosen.shape), -1, None
    if stream is not None and not isinstance(chosen, OutsideStack):
        streams = stream_axis_of(name, chosen.shape, inputs, stream), stream
        del shape[streams[0]]
        name = f"{name}:{stream}"
        sites, others = _sites(chosen), []
    elif isinstance(chosen, OutsideStack):
        axis = feature_axis_of(chosen.name, chosen.shape, chosen.modules, inputs, record_all)
        sites = chosen.sites
    else:
        sites = _sites(chosen)
        sums = sites_of_sums(model, inputs, chosen, sites) if len(set(chosen.streams)) < len(chosen.streams) else None
        if sums is None:
            axis = require_one_stream(chosen, inputs, record_all)
        else:
            modules = [call.module for call in chosen.calls]
            axis, sites = feature_axis_of(name, chosen.shape, modules, inputs, record_all), sums
        others = [
            c.name
            for c in plausible
            if c is not chosen and c.is_complete and not overlap(c, chosen) and is_outer(c, plausible)
        ]
    shape.append(shape.pop(axis))
    sites = tuple(replace(site, feature_axis=axis, stream=streams) for site in sites)
    layout = layout_of(
        model,
        inputs,
        tuple(shape[:-1]),
        batch_first=batch_first,
        state_for=lambda given: _last_state(model, sites[-1], given),
    )
    return Anatomy(name, sites, shape[-1], tuple(dict.fromkeys(others)), layout)


def _split_stream(stack: str | None) -> tuple[str | None, int | None]:
    """Split ``layers:2`` into the name of the stack, ``layers``, and the index of the stream, 2."""
    name, colon, number = (stack or "").rpartition(":")
    return (name, int(number)) if colon and number.isdecimal() else (stack, None)


def _last_state(model: nn.Module, site: Site, inputs: Any) -> Tensor:
    """Return the states that leave a block for these inputs, on the host."""
    found: list[Tensor] = []

    def leave(call: BlockCall) -> None:
        found.append(call.state_out.detach().cpu().clone())

    with undisturbed(model), BlockHooks([site], on_leave=leave):
        run_model(model, inputs)
    if not found:
        raise AnatomyError(
            f"{site.name} ran for the given inputs, but not when one token was changed, so that the axes of batch and "
            "token cannot be distinguished; pass wb.profile(..., batch_first=)."
        )
    return found[0]


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
