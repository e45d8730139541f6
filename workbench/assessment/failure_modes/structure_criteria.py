"""Criteria of the structure: what fresh models of a design show, whatever the scale of their residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, number
from workbench.assessment.structure import NUMBERS, OUTPUTS

if TYPE_CHECKING:
    import xarray as xr

#: Number -> its failure mode, the side without healthy values, and the meaning of a value there.
_ABOUT = {
    "gain_by_depth": (
        "gradient_flow_collapse", "high", "gradients explode or vanish with depth, whatever the scale of the stream",
    ),
    "growth_by_depth": (
        "gradient_flow_collapse", "high", "the stream grows or shrinks with depth as in no design that trained",
    ),
    "attention_entropy_share": ("attention_degeneracy", "low", "a fresh head looks at little but one token"),
    "routing_entropy_share": ("routing_oscillation", "low", "the fresh router is sure of its choices"),
    "loss_over_guess": ("initialization_out_of_band", "high", "the fresh model is far worse than a guess"),
    "function_change": (
        "scale_dependent_divergence", "both",
        "the first update at the planned rate changes the predictions far more or less than in any design that trained",
    ),
}  # fmt: skip


def _read(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    def read(tree: xr.DataTree) -> CriterionReading | str:
        data = tree["/structure"].to_dataset()
        found = number(data, name, spread=f"{name}_error")
        return found if isinstance(found, str) else replace(found, layer=int(data[name].attrs.get("block", -1)))

    return read


def _criterion(name: str) -> Criterion:
    title, scale = NUMBERS[name][:2] if name in NUMBERS else OUTPUTS[name]
    mode, bad_side, meaning = _ABOUT[name]
    return Criterion(name, mode, title, "1", "/structure", name, _read(name), meaning, scale=scale, bad_side=bad_side)


STRUCTURE = tuple(_criterion(name) for name in _ABOUT)
