"""Whether modules that a user named are residual blocks: what enters one must still be in what leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.models.probing import run_foreign, undisturbed, watch

if TYPE_CHECKING:
    from workbench.models.site import Site

#: Mean cosine between a small change of the state that enters and the change of what leaves. Residual blocks, Post-LN
#: included, were seen to have .5 and more; attention and MLP branches without their residual below .15.
_LEAST_COSINE = 0.3
_RELATIVE_SIZE = 1e-2


def why_no_blocks(model: nn.Module, inputs: Any, sites: Sequence[Site]) -> str:
    """Why modules are no residual blocks: their output does not carry their input on; empty if it does.

    A random direction, 1 % of the state in size, is added to the state that enters a block. A residual block hands it
    on, so the output changes in the same direction; a branch whose residual is added elsewhere maps it to an unrelated
    one.

    Args:
        model: The model, left as it was.
        inputs: What it runs on.
        sites: The modules; the first, the middle one and the last are looked at.

    Returns:
        One clause.
    """
    if norm := next((s.name for s in sites if all(p.ndim < 2 for p in s.module.parameters())), ""):
        return f"{norm} has no matrix among its parameters, so it only rescales what passes"
    for place in sorted({0, len(sites) // 2, len(sites) - 1}):
        cosine = _carried_on(model, inputs, sites[place])
        if not cosine >= _LEAST_COSINE:
            return (
                f"a change of the state that enters {sites[place].name} leaves it in an unrelated direction (cosine "
                f"{cosine:.2f}), so its residual is added outside of it"
            )
    return ""


def _carried_on(model: nn.Module, inputs: Any, site: Site) -> float:
    """Mean cosine, over tokens, between a change of the state that enters and that of the state that leaves."""
    before, _ = _state_after(model, inputs, site, None)
    generator = torch.Generator().manual_seed(0)
    after, change = _state_after(model, inputs, site, generator)
    return float(torch.cosine_similarity(after - before, change, dim=-1).nanmean())


def _state_after(
    model: nn.Module, inputs: Any, site: Site, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """The state that leaves a block, float64, where a random direction was added to what entered it; and that."""
    found: dict[str, Tensor] = {}
    counts = {"enter": 0, "leave": 0}

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        counts["enter"] += 1
        if counts["enter"] != site.call + 1 or generator is None:
            return None
        state = site.state_in(args, kwargs)
        scale = state.double().norm(dim=-1, keepdim=True) / state.shape[-1] ** 0.5
        noise = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state.device)
        changed = (state.double() + _RELATIVE_SIZE * scale * noise).to(state.dtype)
        found["change"] = (changed.double() - state.double()).cpu()
        return site.with_state(args, kwargs, changed)

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        counts["leave"] += 1
        if counts["leave"] == site.call + 1:
            found["out"] = site.state_out(output).detach().double().cpu().clone()

    with undisturbed(model):
        handle = site.module.register_forward_pre_hook(enter, with_kwargs=True)  # it gives the block other arguments
        try:
            with watch([(site.module, leave, False)]):
                run_foreign(model, inputs)
        finally:
            handle.remove()
    return found["out"], found.get("change")
