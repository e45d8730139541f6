"""Criteria of the plan: what the pilot and trials of the plan show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, HealthyBand, number

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr

#: The criteria that decide about the planned rate.
RATE, SLOW_RATE, BROKEN_TRIALS = "rate_over_edge", "rate_over_slow_edge", "trials_broken"
#: Beyond this factor a rate is failing, not just at risk: it is then beyond the useful edge for certain.
_FAILING = 3.0
#: A larger share means every trial.
ALL_BROKEN = 0.999


def _of_pilot(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    def read(tree: xr.DataTree) -> CriterionReading | str:
        if "/pilot" not in tree.groups:
            return "no pilot was made"
        found = number(tree["/pilot"].to_dataset(), name)
        return found[:1].lower() + found[1:].rstrip(".") if isinstance(found, str) else found

    return read


def _broken_trials(tree: xr.DataTree) -> CriterionReading | str:
    if "/trials" not in tree.groups:
        return "the plan was not tried out"
    return number(tree["/trials"].to_dataset(), "share_broken")


PILOT = (
    Criterion(
        RATE, "unsuitable_rate", "planned rate over the largest useful one", "1", "/pilot", RATE, _of_pilot(RATE),
        "the planned rate is too large to learn well",
        HealthyBand(
            high=1.0, failing_high=_FAILING,
            why="1 is the upper end of the useful edge's 80 % interval; of a thinner model, three times that",
        ),
        scale="log",
    ),
    Criterion(
        SLOW_RATE, "unsuitable_rate", "planned rate over the smallest useful one", "1", "/pilot", SLOW_RATE,
        _of_pilot(SLOW_RATE), "the planned rate is too small to learn well within the planned updates",
        HealthyBand(low=1.0, why="1 is the lower end of the slow edge's 80 % interval"), scale="log", acquits=False,
    ),
    # Diverged trials are evidence against a plan; trials of the first updates without divergence do not exclude one
    # after thousands, so they acquit no plan.
    Criterion(
        BROKEN_TRIALS, "unsuitable_rate", "share of trials of the plan that broke", "1", "/trials", "share_broken",
        _broken_trials, "trials of the first updates broke",
        HealthyBand(high=0.0, failing_high=ALL_BROKEN, why="no trial of a sound plan breaks, some of a bad one may"),
        acquits=False,
    ),
)  # fmt: skip
