"""Derive the verdict and a summary from the judged criteria and failure modes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from workbench.assessment.failure_modes.criteria_table import LEAST_CONFIDENCE
from workbench.assessment.failure_modes.pilot_criteria import BROKEN_TRIALS, PILOT, RATE, SLOW_RATE
from workbench.assessment.failure_modes.structure_criteria import BETWEEN_BLOCKS, STRUCTURE
from workbench.formatting import clause, fine_percent, listed, rounded, short
from workbench.schema.statuses import BAD_STATES, CriterionState, Verdict

if TYPE_CHECKING:
    import xarray as xr

    from workbench.assessment.failure_modes.size_ranges import Sizes

#: The recommended step if an assessment cannot decide.
FIRST_STEP = (
    "find the useful rates at its full size with wb.find_rate, or train it there at the planned rate for the first few "
    "hundred updates, with wb.Recorder and wb.Alarms, before the rest is paid for"
)
#: The criteria of each column of the verdict: what the design is, and what the pilot says of its plan.
COLUMNS = {
    "structure": tuple(criterion.name for criterion in STRUCTURE),
    "pilot": tuple(criterion.name for criterion in PILOT),
}
#: The criterion of each column without which nothing is healthy: what passes along depth, and the rate.
DECIDES = {"structure": "gain_by_depth", "pilot": RATE}


def column_state(criteria: xr.Dataset, column: str) -> CriterionState:
    """The state of a column: the worst of its criteria that are certain enough.

    Args:
        criteria: From `failure_modes.judged`.
        column: "structure" or "pilot".

    Returns:
        "not measured" if nothing is bad, but the criterion of ``DECIDES`` was not judged, or another was not because of
        the design's size.
    """
    own = criteria.sel(criterion=[name for name in criteria["criterion"].values if name in COLUMNS[column]])
    states = [CriterionState(state) for state in own["state"].values]
    bad = [
        state if sure >= LEAST_CONFIDENCE else CriterionState.AT_RISK
        for state, sure in zip(states, own["confidence"].values, strict=True)
        if state == CriterionState.FAILING or (state == CriterionState.AT_RISK and sure >= LEAST_CONFIDENCE)
    ]
    if bad:
        return max(bad, key=lambda state: state.severity)
    is_decided = str(own["state"].sel(criterion=DECIDES[column]).values) != CriterionState.NOT_MEASURED
    return CriterionState.HEALTHY if is_decided and not own["is_outside"].any() else CriterionState.NOT_MEASURED


def verdict_of(criteria: xr.Dataset) -> Verdict:
    """The verdict: that of the worst criterion with enough confidence, else whether the measurements suffice.

    Args:
        criteria: From `failure_modes.judged`.

    Returns:
        "refuse" if a criterion is failing with a confidence of at least .5, "at risk" if one is at risk with as much,
        or failing with less. Otherwise "cannot say" if structure or pilot were not measured; else "proceed".
    """
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
    """Summarize the verdict in a sentence or two.

    Args:
        name: Name of the subject.
        verdict: Verdict from `verdict_of`.
        criteria: Criteria from `failure_modes.judged`.
        modes: Failure modes from `failure_modes.judged`.
        sizes: Sizes of the subject and of the model that was run; None: not known.
        pilot: The pilot, whose rates are named where the planned one is the fault; None: there is none.
    """
    if verdict == Verdict.PROCEED:
        return (
            f"{name} may proceed: its structure is like that of designs that trained, and the pilot finds nothing "
            "against the planned rate."
        )
    if verdict == Verdict.CANNOT_SAY:
        return (
            f"Whether {name} will train as planned cannot be said: {_why_open(criteria)}. Nothing that was "
            f"measured failed; for an answer, {FIRST_STEP}."
        )
    bad = modes.isel(failure_mode=[i for i, s in enumerate(modes["state"].values) if s in BAD_STATES])
    order = sorted(
        range(bad.sizes["failure_mode"]),
        key=lambda i: (-CriterionState(str(bad["state"].values[i])).severity, -float(bad["confidence"].values[i])),
    )
    first = bad.isel(failure_mode=order[0])
    reason = _with_its_number(criteria.sel(criterion=str(first["worst_criterion"].values)), sizes, pilot)
    others = [str(bad["title"].values[i]).lower() for i in order[1:]]
    more = (
        f", and {listed(others)} is likely too" if len(others) == 1 else f"; so are {listed(others)}" if others else ""
    )
    word = "should not start as planned" if verdict == Verdict.REFUSE else "is at risk as planned"
    return f"{name} {word}: {str(first['title'].values).lower()} ({reason}){more}."


def _why_open(criteria: xr.Dataset) -> str:
    """Why neither a fault nor health was found."""
    outside = criteria["is_outside"].values
    if outside.any():
        first = criteria.isel(criterion=int(np.flatnonzero(outside)[0]))
        return f"{first['title'].values} was not judged, for {first['reason'].values}"
    if column_state(criteria, "structure") is CriterionState.NOT_MEASURED:
        reason = str(criteria.sel(criterion=DECIDES["structure"])["reason"].values)
        if reason == BETWEEN_BLOCKS:
            return reason
        return f"what passes along its depth was not measured ({clause(reason)})"
    return f"its useful rates are not known ({criteria.sel(criterion=RATE)['reason'].values})"


def _with_its_number(row: xr.Dataset, sizes: Sizes | None, pilot: xr.Dataset | None) -> str:
    """Why a criterion is not healthy, with the value, the exceeded limit, and the model that was measured."""
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    say = partial(fine_percent, digits=3) if str(row["criterion"].values) == BROKEN_TRIALS else short
    limit = f", healthy up to {say(high)}" if value > high else f", healthy from {say(low)}" if value < low else ""
    where = ""
    if sizes is not None and sizes.is_stand_in and str(row["criterion"].values) in COLUMNS["pilot"]:
        where = f", measured on {sizes.stand_in}"
    ends = {RATE: ("largest", "useful_edge"), SLOW_RATE: ("smallest", "slow_edge")}
    if pilot is not None and (end := ends.get(str(row["criterion"].values))) and end[1] in pilot:
        planned, edge, least, most = (
            rounded(float(pilot[name])) for name in ("planned_rate", end[1], f"{end[1]}_low", f"{end[1]}_high")
        )
        useful = f"the {end[0]} useful rate is about {edge} ({least} to {most})"
        return f"{row['reason'].values}: {planned}, where {useful}{where}"
    place = f" in block {int(row['layer'])}" if int(row["layer"]) >= 0 else ""
    return f"{row['reason'].values}: {say(value)}{place}{limit}{where}"
