"""The ladder of sizes of an assessment: affordable sizes, and the planned rate over the predicted explosion edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from workbench.scaling.ladder_study import scaling_study
from workbench.scaling.quantities import EDGE
from workbench.training.training_plan import DEFAULT_RATE

if TYPE_CHECKING:
    import xarray as xr

    from workbench.hardware import AssessmentPlan
    from workbench.scaling.designs import Design
    from workbench.tasks import Task
    from workbench.training.training_plan import TrainingPlan

#: Largest width and depth of a rung, by thoroughness; a quarter of the target, if that is less wide.
WIDEST, DEEPEST = {"quick": 128, "full": 256}, {"quick": 4, "full": 12}
#: Largest factor of the width over which explosion edges are extrapolated (tested by ``data/make_scaling.py``).
LARGEST_REACH = 4.0
#: Updates of the runs of a thorough ladder; a quick one makes pilot runs of ten.
N_STEPS = 100
_Z95 = 1.96


def ladder(
    design: Design,
    task: Task,
    training: TrainingPlan,
    plan: AssessmentPlan,
    *,
    seed: int,
    progress: bool | Callable[[str], None] = False,
) -> xr.Dataset:
    """Study a ladder of sizes below the target, as `workbench.scaling_study` does.

    Explosion edges, which take most of the time, are not measured where they could not be extrapolated to the target.

    Args:
        design: The design at the target size.
        task: The task of the rungs.
        training: The plan of the run.
        plan: Its ``[assessment]`` may set widths, depths, seeds and thoroughness; by default "quick": three widths up
            to 128, at most 4 blocks, two seeds, edges found by pilot runs of ten updates.
        seed: Seed of the first models.
        progress: As in `workbench.scaling_study`.

    Returns:
        The dataset of `scaling_study`, and, 0-dim, ``rate_over_edge``: the planned rate over the predicted edge of the
        target, with ``rate_over_edge_error``, the standard error of its logarithm; NaN where the ladder does not
        support it; the attribute ``unsupported`` then gives the reason.
    """
    wanted = plan.assessment
    widths = sorted(wanted.widths) if wanted.widths else affordable_widths(design, WIDEST[wanted.thoroughness])
    depths = sorted(wanted.depths) if wanted.depths else [min(design.depth, DEEPEST[wanted.thoroughness])]
    seeds = wanted.seeds or (seed, seed + 1)
    rate = DEFAULT_RATE if training.learning_rate is None else training.learning_rate
    edge: Literal["trained", "pilot", "none"] = "trained" if wanted.thoroughness == "full" else "pilot"
    if design.width > LARGEST_REACH * max(widths):
        edge = "none"
    study = scaling_study(
        design, widths, depths, task=task, learning_rate=rate, n_steps=N_STEPS, seeds=seeds,
        edge=edge, largest_reach=LARGEST_REACH, n_coordinate_steps=5, progress=progress,
        warmup=min(training.warmup, N_STEPS // 2), schedule=training.schedule, optimizer=training.optimizer,
        optimizer_options=training.optimizer_options, clip_norm=training.clip_norm, precision=training.precision,
    )  # fmt: skip
    reason = _reason(study, design.width, max(widths))
    return study.assign(_against(study, rate)).assign_attrs(unsupported=reason)


def affordable_widths(design: Design, widest: int) -> list[int]:
    """Three widths, each twice the one before, up to a quarter of the target or the widest that is affordable."""
    largest = max(min(design.width // 4, widest), 16)
    return sorted({design.nearest_width(max(8, largest // share)) for share in (4, 2, 1)})


def _against(study: xr.Dataset, rate: float) -> dict[str, Any]:
    about = {"long_name": "planned rate over the explosion edge at the target size", "units": "1"}
    value, error = math.nan, math.nan
    if EDGE in study["quantity"].values:
        edge = study.sel(quantity=EDGE)
        low, middle, high = (float(edge[f"at_target{end}"]) for end in ("_low", "", "_high"))
        if bool(edge["is_supported"]) and middle > 0:
            value, error = rate / middle, float(np.log(high / low)) / (2 * _Z95)
    return {
        "rate_over_edge": ((), value, about),
        "rate_over_edge_error": ((), error, {"long_name": "standard error of its logarithm", "units": "1"}),
    }


def _reason(study: xr.Dataset, width: int, widest: int) -> str:
    if EDGE not in study["quantity"].values:
        return (
            f"The explosion edge was not looked for: the target is {width / widest:.3g} times as wide as the widest "
            f"rung, and it is carried on to {LARGEST_REACH:g} times."
        )
    return str(study.sel(quantity=EDGE)["reason"].values)
