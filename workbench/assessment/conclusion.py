"""Conclude from the measured parts of an assessment: criteria, verdict, tried changes, decisions, a summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.assessment.decisions import decide
from workbench.assessment.failure_modes import judged
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.plan_risk import STABLE_BELOW
from workbench.assessment.verdict import summary_of, verdict_of

if TYPE_CHECKING:
    import xarray as xr

    from workbench.hardware import AssessmentPlan


def conclude(
    tree: xr.DataTree, plan: AssessmentPlan, *, try_changes: Callable[[xr.DataTree], xr.Dataset] | None = None
) -> None:
    """Judge the measurements and decide what to do, in place; earlier conclusions are replaced.

    Args:
        tree: The measured parts, with the attributes ``subject`` and ``steps_in_budget`` and the sizes.
        plan: The assessed plan.
        try_changes: Called with the judged tree where the plan may diverge; None: ``changes`` are left unchanged.

    Adds the nodes ``criteria``, ``failure_modes``, ``decisions`` and perhaps ``changes``, and the attributes
    ``verdict``, ``exit_status`` and ``summary``.
    """
    import xarray as xr

    criteria, modes = judged(tree)
    tree["criteria"], tree["failure_modes"] = xr.DataTree(criteria), xr.DataTree(modes)
    if try_changes is not None and may_break(tree):
        tree["changes"] = xr.DataTree(try_changes(tree))
    tree["decisions"] = xr.DataTree(decide(tree, plan, affordable=float(tree.attrs["steps_in_budget"])))
    verdict = verdict_of(criteria, modes)
    tree.attrs["verdict"], tree.attrs["exit_status"] = verdict.value, verdict.exit_status
    tree.attrs["summary"] = summary_of(str(tree.attrs["subject"]), verdict, criteria, modes, Sizes.of(tree))


def may_break(tree: xr.DataTree) -> bool:
    """Whether a trial of the plan diverged, or its risk is known and not small."""
    share = float(tree["rehearsal"]["share_broken"])
    risk = float(tree["risk"].to_dataset()["tried_probability"][0])
    return share > 0 or risk >= STABLE_BELOW
