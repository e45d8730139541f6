"""Criteria of the plan, measured by the pilot and the trials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, HealthyBand, number

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr

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
