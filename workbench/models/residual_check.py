"""Whether modules that a user named are residual blocks: what enters one must still be in what leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.models.block_calls import has_matrix
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import run_foreign
from workbench.models.probing import undisturbed

if TYPE_CHECKING:
    from workbench.models.site import Site

#: Mean cosine between a small change of the state that enters and the change of what leaves. Residual blocks, Post-LN
#: included, were seen to have .5 and more; attention and MLP branches without their residual below .15.
LEAST_COSINE = 0.3
_RELATIVE_SIZE = 1e-2


def why_no_blocks(model: nn.Module, inputs: Any, sites: Sequence[Site]) -> str:
    """Why modules are no residual blocks: their output does not contain their input; empty if it does.

    A random direction, 1 % of the state in size, is added to the state that enters a block. A residual block hands it
    on, so the output changes in the same direction; a branch whose residual is added elsewhere maps it to an unrelated
    one.

    Args:
        model: Model to run; it is not changed.
        inputs: Inputs of the model.
        sites: Sites of the modules; the first, the middle one and the last are tried.

    Returns:
        One clause.
    """
    if reason := without_matrix(sites):
        return reason
    for place in sorted({0, len(sites) // 2, len(sites) - 1}):
        cosine = _carried_on(model, inputs, sites[place])
        if not cosine >= LEAST_COSINE:
            return (
                f"a change of the state that enters {sites[place].name} leaves it in an unrelated direction (cosine "
                f"{cosine:.2f}), so its residual is added outside of it"
            )
    return ""


def without_matrix(sites: Sequence[Site]) -> str:
    """Why modules are no residual blocks: one of them has no matrix, as norms have none; empty if all have."""
    norm = next((s.name for s in sites if not has_matrix(s.module)), "")
    return f"{norm} has no matrix among its parameters, so it only rescales what passes" if norm else ""


def _carried_on(model: nn.Module, inputs: Any, site: Site) -> float:
    """Mean cosine, over tokens, between a change of the state that enters and that of the state that leaves."""
    plain, changed = (_states_of(model, inputs, site, is_changed=is_changed) for is_changed in (False, True))
    return float(torch.cosine_similarity(changed["out"] - plain["out"], changed["change"], dim=-1).nanmean())


def random_change(state: Tensor) -> Tensor:
    """A state with a random direction added, 1 % of it in size; the same every time."""
    scale = state.double().norm(dim=-1, keepdim=True) / state.shape[-1] ** 0.5
    noise = torch.randn(state.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(state.device)
    return (state.double() + _RELATIVE_SIZE * scale * noise).to(state.dtype)


def _states_of(model: nn.Module, inputs: Any, site: Site, *, is_changed: bool) -> dict[str, Tensor]:
    """What leaves a block, ``out``, float64; and the random ``change``, if any, that was added to what entered it."""
    found: dict[str, Tensor] = {}

    def enter(call: BlockCall) -> Tensor | None:
        if not is_changed:
            return None
        changed = random_change(call.state_in)
        found["change"] = (changed.double() - call.state_in.double()).cpu()
        return changed

    def leave(call: BlockCall) -> None:
        found["out"] = call.state_out.detach().double().cpu().clone()

    with undisturbed(model), BlockHooks([site], enter, leave):
        run_foreign(model, inputs)
    return found
