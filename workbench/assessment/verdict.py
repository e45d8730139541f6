"""From judged failure modes to one word and one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.assessment.failure_modes.criterion import NOT_MEASURED, STATES
from workbench.assessment.failure_modes.table import LEAST_CONFIDENCE
from workbench.in_words import short

if TYPE_CHECKING:
    import xarray as xr

VERDICTS = ("proceed", "at risk", "refuse")


def verdict_of(modes: xr.Dataset) -> str:
    """The verdict of the worst failure mode that is sure enough.

    Args:
        modes: From `failure_modes.judged`.

    Returns:
        "refuse" if a mode is failing with a confidence of at least .5, "at risk" if one is at risk or failing with
        less, else "proceed".
    """
    verdict = VERDICTS[0]
    for state, confidence in zip(modes["state"].values, modes["confidence"].values, strict=True):
        if state in (NOT_MEASURED, STATES[0]):
            continue
        is_sure = confidence >= LEAST_CONFIDENCE
        found = VERDICTS[2] if state == STATES[2] and is_sure else VERDICTS[1] if is_sure or state == STATES[2] else ""
        verdict = max(verdict, found or verdict, key=VERDICTS.index)
    return verdict


def summary_of(name: str, verdict: str, criteria: xr.Dataset, modes: xr.Dataset, *, thin: str = "") -> str:
    """One sentence for a decision-maker.

    Args:
        name: Of the subject.
        verdict: From `verdict_of`.
        criteria: From `failure_modes.judged`.
        modes: Likewise.
        thin: What was not measured because a smaller model stood for the subject; one clause.
    """
    if verdict == VERDICTS[0]:
        but = f"; but {thin}" if thin else ""
        return f"{name} may proceed: nothing that was measured lies where runs have failed{but}."
    bad = modes.isel(failure_mode=[i for i, s in enumerate(modes["state"].values) if s in STATES[1:]])
    order = sorted(
        range(bad.sizes["failure_mode"]),
        key=lambda i: (-STATES.index(str(bad["state"].values[i])), -float(bad["confidence"].values[i])),
    )
    first = bad.isel(failure_mode=order[0])
    reason = _with_its_number(criteria.sel(criterion=str(first["worst_criterion"].values)))
    others = [str(bad["title"].values[i]).lower() for i in order[1:]]
    more = (
        f", and {_listed(others)} is at hand too"
        if len(others) == 1
        else f"; so are {_listed(others)}"
        if others
        else ""
    )
    word = "should not start as planned" if verdict == VERDICTS[2] else "is at risk as planned"
    return f"{name} {word}: {str(first['title'].values).lower()} ({reason}){more}."


def _with_its_number(row: xr.Dataset) -> str:
    """Why a criterion is not healthy, with the value and the limit that it passed."""
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    limit = f", healthy up to {short(high)}" if value > high else f", healthy from {short(low)}" if value < low else ""
    return f"{row['reason'].values}: {short(value)}{limit}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
