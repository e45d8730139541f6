"""States that blocks hand on as two terms, the last branch and the sum before it, which the next norm adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from workbench.models.block_calls import Slot
from workbench.models.calling import run_foreign
from workbench.models.probing import undisturbed, watch
from workbench.models.residual_check import random_change, why_no_blocks
from workbench.models.stacks import Candidate

if TYPE_CHECKING:
    from workbench.models.site import Site

#: Share of the effect of moving one term that may remain where the other moves against it: rounding.
_ROUNDING = 1e-2


def sites_of_sums(model: nn.Module, inputs: Any, chosen: Candidate, sites: Sequence[Site]) -> tuple[Site, ...] | None:
    """The sites whose states are sums of two tensors that every block gets and returns; None if they are not.

    Blocks must depend on the sum of both alone: what leaves them is the same where a change is added to one and taken
    from the other. Two streams that update each other, as in reversible networks, are told apart by this.

    Args:
        model: Model to run; it is not changed.
        inputs: Inputs of the model.
        chosen: Stack that carries two states side by side.
        sites: Its sites, with one of the two tensors.
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
    tried = [sums[place] for place in sorted({1, len(sums) // 2, len(sums) - 1})]
    if why_no_blocks(model, inputs, sums) or not all(_depends_on_sum(model, inputs, site) for site in tried):
        return None
    return sums


def _is_same(one: Any, other: Any, shape: tuple[int, ...]) -> bool:
    return one.shape == other.shape == shape and one.fingerprint == other.fingerprint


def _depends_on_sum(model: nn.Module, inputs: Any, site: Site) -> bool:
    """Whether a block returns the same sum where a change moves from one term that enters to the other."""
    plain, one, both = (_sum_that_leaves(model, inputs, site, n_moved=n) for n in range(3))
    return float((both - plain).norm()) <= _ROUNDING * float((one - plain).norm())


def _sum_that_leaves(model: nn.Module, inputs: Any, site: Site, *, n_moved: int) -> Tensor:
    """What leaves a block, float64, with a random change added to one term that enters and taken from the other."""
    assert site.terms is not None
    first, second = (replace(site, input_slot=slot, terms=None) for slot in (site.input_slot, site.terms[0]))
    found: list[Tensor] = []
    n_calls = 0

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        nonlocal n_calls
        n_calls += 1
        if n_calls - 1 != site.call or not n_moved:
            return None
        state, rest = first.state_in(args, kwargs), second.state_in(args, kwargs)
        change = random_change(state) - state
        args, kwargs = first.with_state(args, kwargs, state + change)
        return second.with_state(args, kwargs, rest - change) if n_moved == 2 else (args, kwargs)

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if n_calls - 1 == site.call:
            found.append(site.state_out(output).detach().double().cpu())

    with undisturbed(model), watch([(site.module, enter, True), (site.module, leave, False)]):
        run_foreign(model, inputs)
    return found[0]
