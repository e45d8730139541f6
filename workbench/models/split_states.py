"""States that blocks pass on as two tensors, the last branch output and the sum before it, which the next norm adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from workbench.models.block_calls import Slot
from workbench.models.calling import run_model
from workbench.models.probing import undisturbed, watch
from workbench.models.residual_check import lack_of_residual, random_change
from workbench.models.stacks import Candidate

if TYPE_CHECKING:
    from workbench.models.site import Site

#: Fraction of the effect of changing one term that may remain after the opposite change of the other, due to rounding.
_ROUNDING = 1e-2


def sites_of_sums(model: nn.Module, inputs: Any, chosen: Candidate, sites: Sequence[Site]) -> tuple[Site, ...] | None:
    """Return sites whose states are sums of two tensors that every block receives and returns; None if there are none.

    Blocks must depend only on the sum: their output must not change if a change is added to one tensor and subtracted
    from the other. This distinguishes them from two streams that update each other, as in reversible networks.

    Args:
        model: Model to run; it is not changed.
        inputs: Inputs of the model.
        chosen: Stack that passes on two tensors.
        sites: Sites of the stack, each with one of the two tensors.
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
    if lack_of_residual(model, inputs, sums) or not all(_depends_on_sum(model, inputs, site) for site in tried):
        return None
    return sums


def _is_same(one: Any, other: Any, shape: tuple[int, ...]) -> bool:
    return one.shape == other.shape == shape and one.fingerprint == other.fingerprint


def _depends_on_sum(model: nn.Module, inputs: Any, site: Site) -> bool:
    """Return whether a block returns the same sum after opposite changes of the two terms that enter."""
    original, one, both = (_sum_that_leaves(model, inputs, site, n_changed=n) for n in range(3))
    return float((both - original).norm()) <= _ROUNDING * float((one - original).norm())


def _sum_that_leaves(model: nn.Module, inputs: Any, site: Site, *, n_changed: int) -> Tensor:
    """Return the sum that leaves a block, float64, after opposite random changes of the terms that enter.

    Args:
        model: Model to run.
        inputs: Inputs of the model.
        site: Site of the block.
        n_changed: Number of terms to change: 0, 1 or 2.
    """
    assert site.terms is not None
    first, second = (replace(site, input_slot=slot, terms=None) for slot in (site.input_slot, site.terms[0]))
    found: list[Tensor] = []
    n_calls = 0

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        nonlocal n_calls
        n_calls += 1
        if n_calls - 1 != site.call or not n_changed:
            return None
        state, rest = first.state_in(args, kwargs), second.state_in(args, kwargs)
        change = random_change(state) - state
        args, kwargs = first.with_state(args, kwargs, state + change)
        return second.with_state(args, kwargs, rest - change) if n_changed == 2 else (args, kwargs)

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if n_calls - 1 == site.call:
            found.append(site.state_out(output).detach().double().cpu())

    with undisturbed(model), watch([(site.module, enter, True), (site.module, leave, False)]):
        run_model(model, inputs)
    return found[0]
