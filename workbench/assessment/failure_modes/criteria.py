"""The criteria of the structure, and those of the plan, measured by the pilot and the trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, HealthyBand, number
from workbench.assessment.structure import ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr


#: Measurement -> its failure mode, the side without healthy values, and the meaning of a value there.
_ABOUT = {
    "gain_by_depth": (
        "gradient_flow_collapse", "high", "gradients explode or vanish with depth",
    ),
    "growth_by_depth": (
        "gradient_flow_collapse", "high",
        "the residual stream grows or shrinks with depth more than in any design that trained",
    ),
    "attention_entropy_share": (
        "attention_degeneracy", "low", "a head attends almost entirely to a single token at initialization",
    ),
    "attention_logit_max": (
        "attention_degeneracy", "high", "attention logits at initialization exceed those of all designs that trained",
    ),
    "routing_entropy_share": ("routing_oscillation", "low", "the router is confident in its choices at initialization"),
    "norm_eps_share": (
        "initialization_out_of_band", "high", "eps exceeds the variance of the states, so they are hardly normalized",
    ),
    "loss_over_guess": ("initialization_out_of_band", "high", "the initial loss is far above that of a uniform guess"),
    "function_change": (
        "scale_dependent_divergence", "both",
        "the first update at the planned rate changes the predictions far more or less than in any design that trained",
    ),
}  # fmt: skip

#: Measurements of the residual stream, and why those between blocks can flag a design but not show that it is healthy.
_OF_STREAM = ("gain_by_depth", "growth_by_depth")
BETWEEN_BLOCKS = (
    "its residual stream cannot be read, and gains between its blocks can reveal a fault but not exclude one"
)
#: Measurement -> its band, if the limits follow from a rule.
_BANDS = {"norm_eps_share": HealthyBand(high=0.5, why="above one half, eps exceeds the variance that it is added to")}


def _read(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    def read(tree: xr.DataTree) -> CriterionReading | str:
        data = tree["/structure"].to_dataset()
        found = number(data, name, spread=f"{name}_error")
        if isinstance(found, str):
            return found
        is_between_blocks = name in _OF_STREAM and bool(data.attrs.get("between_blocks", 0))
        return replace(
            found,
            layer=int(data[name].attrs.get("block", -1)),
            only_flags=BETWEEN_BLOCKS if is_between_blocks else "",
        )

    return read


def _criterion(name: str) -> Criterion:
    title, scale = ALL[name]
    mode, bad_side, meaning = _ABOUT[name]
    return Criterion(
        name, mode, title, "1", "/structure", name, _read(name), meaning, _BANDS.get(name), scale, bad_side,
        rules_out=name not in _BANDS,
    )  # fmt: skip


STRUCTURE = tuple(_criterion(name) for name in _ABOUT)


#: The criteria that decide about the planned learning rate.
RATE, SLOW_RATE, BROKEN_TRIALS = "rate_over_edge", "rate_over_slow_edge", "trials_broken"
#: Variable of the pilot: the limit of the planned rate.
LIMIT = "upper_rate_limit"
#: Beyond this factor a rate is failing, not just at risk, because it is then certainly above the useful edge.
_FAILING = 3.0
#: A larger fraction means that every trial diverged.
ALL_BROKEN = 0.999


def _of_pilot(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    def read(tree: xr.DataTree) -> CriterionReading | str:
        if "/pilot" not in tree.groups:
            return "no pilot was run"
        found = number(tree["/pilot"].to_dataset(), name)
        return found[:1].lower() + found[1:].rstrip(".") if isinstance(found, str) else found

    return read


def _broken_trials(tree: xr.DataTree) -> CriterionReading | str:
    if "/trials" not in tree.groups:
        return "no trials were run"
    return number(tree["/trials"].to_dataset(), "share_broken")


PILOT = (
    Criterion(
        RATE, "unsuitable_rate", "planned rate over its upper limit", "1", "/pilot", RATE, _of_pilot(RATE),
        "the planned rate is too large to learn well",
        HealthyBand(
            high=1.0, failing_high=_FAILING,
            why="the limit is the upper end of the 80 % interval of the useful edge; for a proxy model, three times it",
        ),
        scale="log",
    ),
    Criterion(
        SLOW_RATE, "unsuitable_rate", "planned rate over its lower limit", "1", "/pilot", SLOW_RATE,
        _of_pilot(SLOW_RATE), "the planned rate is too small to learn well within the planned updates",
        HealthyBand(low=1.0, why="the limit is the lower end of the 80 % interval of the slow edge"), scale="log",
        rules_out=False,
    ),
    # Diverged trials are evidence against a plan. Trials of the first updates without divergence do not exclude
    # divergence after thousands of updates, so they are no evidence for a plan.
    Criterion(
        BROKEN_TRIALS, "unsuitable_rate", "fraction of trials of the plan that diverged", "1", "/trials",
        "share_broken", _broken_trials, "trials of the first updates diverged",
        HealthyBand(high=0.0, failing_high=ALL_BROKEN, why="no trial of a good plan diverges"),
        rules_out=False,
    ),
)  # fmt: skip
