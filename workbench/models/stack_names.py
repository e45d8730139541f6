"""Names of the stacks of a model that can be read separately: stages, parallel streams, encoder and decoder."""

from __future__ import annotations

from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from torch import nn

from workbench.errors import AnatomyError
from workbench.models.anatomy import is_chain, read_anatomy
from workbench.models.batches import Batches
from workbench.models.block_calls import record_calls
from workbench.models.calling import on_device_of
from workbench.models.stacks import find_candidates, is_fragment, is_outer
from workbench.models.wrapping import runnable, subject_in

if TYPE_CHECKING:
    from workbench.models.subject import Subject


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
    try:
        anatomy = read_anatomy(model, inputs, batch_first=batch_first)
    except AnatomyError:
        stacks = _outer_stacks(model, inputs)
        names = [name for stack in stacks for name in _readable(model, inputs, stack, batch_first)]
        if not names:
            raise
        return names
    return [anatomy.stack, *anatomy.other_stacks]


def _outer_stacks(model: Subject | nn.Module, inputs: Any) -> list[str]:
    """Return the chains of blocks that are no parts of others, in the order in which they run."""
    subject, module = subject_in(model), runnable(model)
    probe, _ = Batches.of(inputs, subject).probe_and_all()
    chains = [c for c in find_candidates(module, record_calls(module, on_device_of(module, probe))) if is_chain(c)]
    found = [c for c in chains if is_outer(c, chains) and not any(is_fragment(c, other) for other in chains)]
    return list(dict.fromkeys(c.name for c in sorted(found, key=lambda c: c.calls[-1].end)))


def _readable(model: Subject | nn.Module, inputs: Any, stack: str, batch_first: bool | None) -> list[str]:
    """Return the name of a stack if its blocks carry one stream, else the names of their parallel streams."""

    def is_readable(name: str) -> bool:
        try:
            read_anatomy(model, inputs, stack=name, batch_first=batch_first)
        except AnatomyError:
            return False
        return True

    return [stack] if is_readable(stack) else list(takewhile(is_readable, (f"{stack}:{i}" for i in count())))
