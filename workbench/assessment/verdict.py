"""Verdict and summary of an assessment, from the evaluated criteria and failure modes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from workbench.assessment.failure_modes.criteria import (
    BETWEEN_BLOCKS,
    BROKEN_TRIALS,
    LIMIT,
    PILOT,
    RATE,
    SLOW_RATE,
    STRUCTURE,
)
from workbench.assessment.failure_modes.criteria_table import LEAST_CONFIDENCE
from workbench.formatting import clause, fine_percent, listed, rounded, short
from workbench.schema.statuses import BAD_STATES, CriterionState, Verdict

if TYPE_CHECKING:
    import xarray as xr

    from workbench.assessment.failure_modes.criterion import Sizes

#: The recommended step if an assessment cannot decide, as a clause.
FIRST_STEP = (
    "find the useful learning rates at full size with wb.find_rate, or train at full size and the planned rate for a "
    "few hundred updates with wb.Recorder and wb.Alarms before committing the full budget"
)
#: The criteria of each column of the verdict: the structure of the design, and its plan in the pilot.
COLUMNS = {
    "structure": tuple(criterion.name for criterion in STRUCTURE),
    "pilot": tuple(criterion.name for criterion in PILOT),
}
#: The criterion that a column needs to be healthy: the gradient gain along depth, and the learning rate.
DECIDES = {"structure": "gain_by_depth", "pilot": RATE}


def column_state(criteria: xr.Dataset, column: str) -> CriterionState:
    """Return the state of a column, which is the worst state of its criteria with sufficient confidence."""
    own = criteria.sel(criterion=[name for name in criteria["criterion"].values if name in COLUMNS[column]])
    states = [CriterionState(state) for state in own["state"].values]
    bad = [
        state if confidence >= LEAST_CONFIDENCE else CriterionState.AT_RISK
        for state, confidence in zip(states, own["confidence"].values, strict=True)
        if state == CriterionState.FAILING or (state == CriterionState.AT_RISK and confidence >= LEAST_CONFIDENCE)
    ]
    if bad:
        return max(bad, key=lambda state: state.severity)
    is_decided = str(own["state"].sel(criterion=DECIDES[column]).values) != CriterionState.NOT_MEASURED
    return CriterionState.HEALTHY if is_decided and not own["is_outside"].any() else CriterionState.NOT_MEASURED


def verdict_of(criteria: xr.Dataset) -> Verdict:
    """Return the verdict, which follows from the worst criterion with sufficient confidence."""
    found = [column_state(criteria, column) for column in COLUMNS]
    known = {name for names in COLUMNS.values() for name in names}
    hazards = [name not in known for name in criteria["criterion"].values]
    found += [CriterionState(state) for state in criteria["state"].values[hazards] if state in BAD_STATES]
    worst = max(found, key=lambda state: state.severity)
    if worst in BAD_STATES:
        return Verdict.REFUSE if worst is CriterionState.FAILING else Verdict.AT_RISK
    return Verdict.CANNOT_SAY if CriterionState.NOT_MEASURED in found else Verdict.PROCEED


def summary_of(
    name: str, verdict: str, criteria: xr.Dataset, modes: xr.Dataset, sizes: Sizes | None = None,
    pilot: xr.Dataset | None = None,
) -> str:  # fmt: skip
    """Summarize the verdict in a few sentences.

    Args:
        name: Name of the subject.
        verdict: Verdict from `verdict_of`.
        criteria: Criteria from `failure_modes.evaluate_criteria`.
        modes: Failure modes from `failure_modes.evaluate_criteria`.
        sizes: Sizes of the subject and of the model that was run; None if unknown.
        pilot: The pilot, whose rates are stated if the planned rate is at fault; None if there is none.
    """
    if verdict == Verdict.PROCEED:
        return (
            f"{name} may proceed. Its structure is within the range of designs that trained, and the pilot found no "
            "evidence against the planned learning rate."
        )
    if verdict == Verdict.CANNOT_SAY:
        return (
            f"The assessment cannot say whether {name} will train as planned: {_why_open(criteria)}. No measured "
            f"criterion failed. As a next step, {FIRST_STEP}."
        )
    bad = modes.isel(failure_mode=[i for i, s in enumerate(modes["state"].values) if s in BAD_STATES])
    order = sorted(
        range(bad.sizes["failure_mode"]),
        key=lambda i: (-CriterionState(str(bad["state"].values[i])).severity, -float(bad["confidence"].values[i])),
    )
    first = bad.isel(failure_mode=order[0])
    reason = _with_value(criteria.sel(criterion=str(first["worst_criterion"].values)), sizes, pilot)
    others = [str(bad["title"].values[i]).lower() for i in order[1:]]
    more = f" Other likely failure modes: {listed(others)}." if others else ""
    words = (
        "should not be trained as planned" if verdict == Verdict.REFUSE else "is at risk if it is trained as planned"
    )
    return f"{name} {words}. {first['title'].values!s}: {reason}.{more}"


def _why_open(criteria: xr.Dataset) -> str:
    """Return the reason why the assessment found neither a fault nor a healthy state, as a clause."""
    outside = criteria["is_outside"].values
    if outside.any():
        first = criteria.isel(criterion=int(np.flatnonzero(outside)[0]))
        return f"the {first['title'].values} could not be evaluated, because {first['reason'].values}"
    if column_state(criteria, "structure") is CriterionState.NOT_MEASURED:
        reason = str(criteria.sel(criterion=DECIDES["structure"])["reason"].values)
        if reason == BETWEEN_BLOCKS:
            return reason
        return f"the gradient gain along its depth was not measured ({clause(reason)})"
    return f"its useful learning rates are unknown ({criteria.sel(criterion=RATE)['reason'].values})"


def _with_value(row: xr.Dataset, sizes: Sizes | None, pilot: xr.Dataset | None) -> str:
    """Return why a criterion is not healthy, with its value, the exceeded limit and the model that was measured."""
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    text_of = partial(fine_percent, digits=3) if str(row["criterion"].values) == BROKEN_TRIALS else short
    limit = f"; healthy: {text_of(high)} or less" if value > high else ""
    limit = f"; healthy: {text_of(low)} or more" if value < low else limit
    where = ""
    if sizes is not None and sizes.is_stand_in and str(row["criterion"].values) in COLUMNS["pilot"]:
        where = f"; measured on {sizes.proxy}"
    ends = {RATE: ("largest", "useful_edge"), SLOW_RATE: ("smallest", "slow_edge")}
    if pilot is not None and (end := ends.get(str(row["criterion"].values))) and end[1] in pilot:
        planned, edge, least, most = (
            rounded(float(pilot[name])) for name in ("planned_rate", end[1], f"{end[1]}_low", f"{end[1]}_high")
        )
        useful = f"{end[0]} useful rate: about {edge}, {least} to {most}"
        if where and end[0] == "largest" and LIMIT in pilot:
            useful += f"; flagged above three times that end, {rounded(float(pilot[LIMIT]))}"
        return f"{row['reason'].values} (planned: {planned}; {useful}{where})"
    place = f" in block {int(row['layer'])}" if int(row["layer"]) >= 0 else ""
    return f"{row['reason'].values} ({row['title'].values}: {text_of(value)}{place}{limit}{where})"
