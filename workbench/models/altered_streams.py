"""Streams that a model changes between complete blocks: by a factor, positions, earlier states or a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.models.block_calls import has_matrix
from workbench.models.block_counts import block_counts
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import run_model
from workbench.models.probing import undisturbed
from workbench.models.residual_check import MIN_COSINE, random_change
from workbench.models.stacks import MIN_COVERAGE, AreBlocks, Candidate, fraction_of_repeated, is_outer

if TYPE_CHECKING:
    from workbench.models.site import Site


def choose_altered(
    model: nn.Module,
    inputs: Any,
    candidates: Sequence[Candidate],
    are_blocks: AreBlocks,
    sites_of: Callable[[Candidate], Sequence[Site]],
) -> Candidate | None:
    """Return the stack of complete blocks whose states the model changes between one block and the next.

    The blocks must be residual blocks, as many as the config states, and hold most parameters of all repeated modules.
    A change of the first state shows that they follow each other: it must enter every block as it left the previous
    one, token by token.

    Args:
        model: Model to run; it is not changed.
        inputs: Inputs of the model.
        candidates: Stacks found.
        are_blocks: Function that returns whether the members of a candidate are residual blocks.
        sites_of: Function from a candidate to its sites.

    Returns:
        The stack; None if there is none.
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
        if is_outer(candidate, complete) and are_blocks(candidate) and _is_followed(model, inputs, sites_of(candidate)):
            return candidate
    return None


def _is_followed(model: nn.Module, inputs: Any, sites: Sequence[Site]) -> bool:
    """Return whether a change of the first state enters each block as it left the previous one."""
    original, changed = (_states(model, inputs, sites, is_changed=is_changed) for is_changed in (False, True))
    if len(original) != len(changed) or any(a.shape != b.shape for a, b in zip(original, changed, strict=True)):
        return False
    differences = [b - a for a, b in zip(original, changed, strict=True)]  # entering, leaving, entering, leaving, ...
    return all(
        bool((torch.cosine_similarity(left, entered, dim=-1) >= MIN_COSINE).all())
        for left, entered in list(pairwise(differences))[1::2]
    )


def _states(model: nn.Module, inputs: Any, sites: Sequence[Site], *, is_changed: bool) -> list[Tensor]:
    """Return the states that enter and leave each block, alternately, in float64."""
    found: list[Tensor] = []

    def enter(call: BlockCall) -> Tensor | None:
        state = random_change(call.state_in) if is_changed and call.layer == 0 else None
        found.append((call.state_in if state is None else state).detach().double().cpu().clone())
        return state

    def leave(call: BlockCall) -> None:
        found.append(call.state_out.detach().double().cpu().clone())

    with undisturbed(model), BlockHooks(sites, enter, leave):
        run_model(model, inputs)
    return found
