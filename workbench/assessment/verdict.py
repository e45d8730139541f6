"""Derive the verdict and a summary from the judged criteria and failure modes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from workbench.assessment.failure_modes.criteria_table import LEAST_CONFIDENCE
from workbench.assessment.failure_modes.plan_criteria import BROKEN_TRIALS, RISK, RISK_OPEN
from workbench.formatting import fine_percent, listed, percent, short
from workbench.schema.statuses import BAD_STATES, CriterionState, Verdict

if TYPE_CHECKING:
    import xarray as xr

    from workbench.assessment.failure_modes.size_ranges import Sizes

#: The recommended step if an assessment cannot decide.
FIRST_STEP = (
    "find the useful rates at its full size with wb.find_rate, or train it there at the planned rate for the first few "
    "hundred updates, with wb.Recorder and wb.Alarms, before the rest is paid for"
)
#: Criteria whose values are shares of 1.
_SHARES = (RISK, BROKEN_TRIALS)
#: Part of the tree -> where its numbers were measured, where it is not on the model that was run.
_ELSEWHERE = {"/scaling": "extrapolated from smaller models of its design"}


def verdict_of(criteria: xr.Dataset, modes: xr.Dataset) -> Verdict:
    """The verdict: that of the worst failure mode with enough confidence, else whether the measurements suffice.

    Args:
        criteria: Criteria from `failure_modes.judged`.
        modes: Likewise.

    Returns:
        "refuse" if a mode is failing with a confidence of at least .5, "at risk" if one is at risk or failing with
        less. Otherwise "cannot say" if the risk of not learning well is not known, or no band applies to a model of
        this size; else "proceed".
    """
    found = [Verdict.PROCEED]
    for state, confidence in zip(modes["state"].values, modes["confidence"].values, strict=True):
        if state not in BAD_STATES:
            continue
        is_failing, is_sure = state == CriterionState.FAILING, confidence >= LEAST_CONFIDENCE
        if is_failing and is_sure:
            found.append(Verdict.REFUSE)
        elif is_failing or is_sure:
            found.append(Verdict.AT_RISK)
    verdict = max(found, key=lambda each: each.severity)
    return Verdict.CANNOT_SAY if verdict is Verdict.PROCEED and _left_open(criteria) else verdict


def summary_of(name: str, verdict: str, criteria: xr.Dataset, modes: xr.Dataset, sizes: Sizes | None = None) -> str:
    """Summarize the verdict in a sentence or two.

    Args:
        name: Name of the subject.
        verdict: Verdict from `verdict_of`.
        criteria: Criteria from `failure_modes.judged`.
        modes: Failure modes from `failure_modes.judged`.
        sizes: Sizes of the subject and of the model that was run; None: not known.
    """
    if verdict == Verdict.PROCEED:
        return f"{name} may proceed: nothing that was measured lies where runs have failed."
    if verdict == Verdict.CANNOT_SAY:
        return (
            f"Whether {name} will train as planned cannot be said: {_why_open(criteria, sizes)}. Nothing that was "
            f"measured failed; for an answer, {FIRST_STEP}."
        )
    bad = modes.isel(failure_mode=[i for i, s in enumerate(modes["state"].values) if s in BAD_STATES])
    order = sorted(
        range(bad.sizes["failure_mode"]),
        key=lambda i: (-CriterionState(str(bad["state"].values[i])).severity, -float(bad["confidence"].values[i])),
    )
    first = bad.isel(failure_mode=order[0])
    reason = _with_its_number(criteria.sel(criterion=str(first["worst_criterion"].values)), sizes)
    others = [str(bad["title"].values[i]).lower() for i in order[1:]]
    more = (
        f", and {listed(others)} is likely too" if len(others) == 1 else f"; so are {listed(others)}" if others else ""
    )
    word = "should not start as planned" if verdict == Verdict.REFUSE else "is at risk as planned"
    return f"{name} {word}: {str(first['title'].values).lower()} ({reason}){more}."


def _left_open(criteria: xr.Dataset) -> list[str]:
    """The undecided criteria that prevent the verdict "proceed"; the risk first."""
    names, states = criteria["criterion"].values.tolist(), criteria["state"].values.tolist()
    is_outside = criteria["is_outside"].values.tolist()
    risk = [
        name
        for name, state, value in zip(names, states, criteria["value"].values.tolist(), strict=True)
        if name == RISK and (state == CriterionState.NOT_MEASURED or value > RISK_OPEN)
    ]
    return risk + [name for name, is_it in zip(names, is_outside, strict=True) if is_it]


def _why_open(criteria: xr.Dataset, sizes: Sizes | None) -> str:
    if sizes is not None and sizes.is_stand_in:
        return (
            f"only {sizes.stand_in} could be tried out, which says nothing about the risk or the useful rates of "
            "the design"
        )
    first = criteria.sel(criterion=_left_open(criteria)[0])
    reason = str(first["reason"].values)
    if str(first["criterion"].values) == RISK:
        if float(first["value"]) > RISK_OPEN:
            return f"its risk of not learning well is {percent(float(first['value']))}"
        return f"its risk is not known, for {reason}"
    return f"{first['title'].values} was not judged, for {reason}"


def _with_its_number(row: xr.Dataset, sizes: Sizes | None) -> str:
    """Why a criterion is not healthy, with the value, the exceeded limit, and the model that was measured."""
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    say = partial(fine_percent, digits=3) if str(row["criterion"].values) in _SHARES else short
    limit = f", healthy up to {say(high)}" if value > high else f", healthy from {say(low)}" if value < low else ""
    where = ""
    if sizes is not None and sizes.is_stand_in:
        where = f", {_ELSEWHERE.get(str(row['path'].values), f'measured on {sizes.stand_in}')}"
    return f"{row['reason'].values}: {say(value)}{limit}{where}"
