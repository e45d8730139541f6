"""Score an answer to a practice case, with the evidence and with what the cure changes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xarray as xr

from workbench.course.case_files import Truth
from workbench.course.cures import Outcome, recovered_fraction
from workbench.course.failure_runs import Plant
from workbench.diagnosis import CAUSES
from workbench.diagnosis.diagnose import diagnose
from workbench.formatting import listed, percent

if TYPE_CHECKING:
    import pandas as pd

#: Largest number of points for the causes, for the cure, and for the unspent budget.
CAUSE_POINTS, CURE_POINTS, BUDGET_POINTS = 50, 30, 20
#: A cure works if it recovers this fraction of the lost progress.
WORKS = 0.5
#: Number of symptoms for and against a cause that are listed as evidence.
_N_FOR, _N_AGAINST = 4, 3
#: Kind of a fault -> what was done to the run.
_FAULTS = {
    "rate": "The learning rate was multiplied by {dose:.3g} at every step.",
    "jump": "At step {start} the learning rate was multiplied by {dose:.3g} and remained there.",
    "restarts": "The learning rate followed cosine waves of {start} steps, each higher than the one before.",
    "ends early": "The learning rate decayed to almost 0 within {start} steps.",
    "no warm-up": "There was no warm-up, and the learning rate was multiplied by {dose:.3g}.",
    "few rows": "From step {start} on, only {dose:.0f} examples of each batch were used.",
    "batch size": "The batch size was {dose:.0f}.",
    "eps": "The optimizer's eps was {dose:.2g}.",
    "large branch": "The update of {where} was multiplied by {dose:.3g}.",
    "large init": "The initial weights of {where} were multiplied by {dose:.3g}.",
    "no norm here": "The normalization of {where} was removed, and its initial weights were multiplied by {dose:.3g}.",
    "no norm": "All normalizations were removed.",
    "no skip": "The skip connection of {where} was removed.",
    "attention bits": "From step {start} on, attention was computed with {dose:.0f} bits of the mantissa.",
    "coarse weights": "From step {start} on, the parameters were rounded to {dose:.0f} bits of the mantissa.",
    "reduction": "From step {start} on, gradients of {dose:.0f} ranks were added with 8 bits of the mantissa.",
    "wrong sign": "The balance loss had the wrong sign, with a coefficient of {dose:.2g}.",
    "balance": "The coefficient of the balance loss was {dose:.3g}.",
    "router rate": "The learning rate of the routers was multiplied by {dose:.3g}, and from step {start} on the "
    "balance loss was missing.",
    "router init": "The initial weights of the routers were multiplied by {dose:.3g}.",
    "labels": "In {dose:.0f} batches from step {start} on, the labels were random.",
    "half of the labels": "In {dose:.0f} batches from step {start} on, half of the labels were random.",
    "tokens": "In {dose:.0f} batches from step {start} on, the tokens were random.",
}
_HOW = {
    "diverged": "it diverged",
    "spike": "its loss rose for a time, which undid much of what it had learned",
    "learned less": "it learned less than it should",
    "experts died": "at least half of the experts of a block no longer received tokens",
}


@dataclass(frozen=True, eq=False)
class Score:
    """The score of an answer to a practice case, and what was wrong with the run.

    Attributes:
        points: From 0 to 100.
        sentence: What the answer got right, and what happened to the run.
        parts: Table of the points, indexed by ``part`` ("causes", "cure", "budget"), with the columns ``points``,
            ``of`` (the most that is possible) and ``reason``.
        causes: The causes; ("nothing",) for a healthy run.
        evidence: Table with the columns ``kind`` ("injected", "loss", "for", "against"), ``cause``, ``sentence`` and
            ``weight`` (contribution to the log-odds of the cause by the rules of `workbench.diagnose`; NaN for other
            kinds): what was done to the run, what that cost, and what its complete record shows for and against the
            causes.
        are_causes_right: Whether exactly the causes were named.
        recovered: Fraction of the lost progress that the cure recovers, from 0 to 1; NaN for a healthy run.
        does_cure_work: Whether the cure recovers at least half of the lost progress; for a healthy run, whether it was
            left alone.

    Example:
        >>> import workbench as wb
        >>> patient = wb.course.patient(0, level=1)
        >>> score = patient.finish("nothing")
        >>> score.are_causes_right, score.parts["of"].sum().item()
        (False, 100)

    See Also:
        `workbench.course.Patient`: The case that is scored.
        `workbench.course.board`: Scores to compare with.
    """

    points: float
    sentence: str
    parts: pd.DataFrame
    causes: tuple[str, ...]
    evidence: pd.DataFrame
    are_causes_right: bool
    recovered: float
    does_cure_work: bool

    def __repr__(self) -> str:
        return f"Score({self.points:.0f} of 100): {self.sentence}"


@dataclass(frozen=True)
class Points:
    """The points of an answer, without sentences."""

    causes: float
    cure: float
    budget: float
    overlap: float
    recovered: float
    does_cure_work: bool

    @property
    def total(self) -> float:
        """Sum of the three parts."""
        return self.causes + self.cure + self.budget


def points_for(
    truth: Truth, named: Collection[str], cure: str | None, outcome: Outcome | None, unspent: float
) -> Points:
    """Return the points of an answer; ``outcome`` is the replay of its cure, ``unspent`` a fraction of the budget."""
    right, given = set(truth.causes), set(named)
    overlap = len(right & given) / len(right | given)
    if right == {"nothing"}:
        recovered, share, works = math.nan, float(cure is None), cure is None
    else:
        recovered = 0.0 if outcome is None else recovered_fraction(truth, outcome)
        # One change cures one fault, so that with two of them half of the progress is all that can be expected.
        share, works = min(1.0, len(right) * recovered), recovered >= WORKS
    return Points(
        CAUSE_POINTS * overlap, CURE_POINTS * share, BUDGET_POINTS * unspent * overlap, overlap, recovered, works
    )


def score(
    truth: Truth, run: xr.DataTree, named: Collection[str], cure: str | None, outcome: Outcome | None, unspent: float
) -> Score:
    """Score an answer, with reasons and evidence; the arguments are those of `points_for`."""
    import pandas as pd

    found = points_for(truth, named, cure, outcome, unspent)
    evidence = _evidence(truth, run, cure, outcome)
    strongest = next((sentence for kind, _, sentence, _ in evidence if kind == "for"), "")
    is_right = set(named) == set(truth.causes)
    reasons = {
        "causes": _about_causes(truth, named, strongest),
        "cure": _about_cure(truth, cure, outcome, found),
        "budget": f"{percent(unspent)} of the budget was not spent"
        + (", which counts only as far as the causes are right." if unspent and not found.overlap else "."),
    }
    rows = {
        "causes": (found.causes, CAUSE_POINTS),
        "cure": (found.cure, CURE_POINTS),
        "budget": (found.budget, BUDGET_POINTS),
    }
    parts = pd.DataFrame(
        [(name, round(points, 1), of, reasons[name]) for name, (points, of) in rows.items()],
        columns=["part", "points", "of", "reason"],
    ).set_index("part")
    return Score(
        points=round(found.total, 1),
        sentence=f"{reasons['causes']} {reasons['cure']}",
        parts=parts,
        causes=truth.causes,
        evidence=pd.DataFrame(evidence, columns=["kind", "cause", "sentence", "weight"]),
        are_causes_right=is_right,
        recovered=found.recovered,
        does_cure_work=found.does_cure_work,
    )


def in_words(plant: Plant) -> str:
    """Return what an injected fault did to a run, as a sentence."""
    where = f"block {plant.block}" if plant.block >= 0 else "every block"
    return _FAULTS[plant.kind].format(dose=plant.dose, start=plant.start, where=where)


def titles(causes: Collection[str]) -> str:
    """Return causes in words, such as "'schedule' and 'batch too small'"."""
    return listed(f"'{CAUSES[cause].title}'" for cause in causes)


def _about_causes(truth: Truth, named: Collection[str], strongest: str) -> str:
    right, given = set(truth.causes), set(named)
    if right == given:
        return f"{titles(truth.causes)} is right."
    if right == {"nothing"}:
        return (
            f"Nothing was wrong with this run, but you named {titles(named)}: it learned as much as the best run of "
            "its kind. A loss that fluctuates, or a setting that is unusual, is no failure."
        )
    failed = f"The run failed: {_HOW[truth.how]}{_in_numbers(truth)}."
    seen = f" In its record: {strongest}" if strongest else ""
    if given == {"nothing"}:
        return f"{failed} The cause was {titles(truth.causes)}.{seen}"
    hit = right & given
    missing, extra = [c for c in truth.causes if c not in given], [c for c in named if c not in right]
    words = f"{titles(hit)} is right" if hit else f"The cause was {titles(truth.causes)}, not {titles(extra)}"
    if hit and missing:
        words += f"; {titles(missing)} is missing"
    if hit and extra:
        words += f"; {titles(extra)} did no harm here"
    return f"{words}. {failed}{seen}"


def _in_numbers(truth: Truth) -> str:
    """Return the held-out losses of a failed run and its control, as a continuation of a sentence."""
    end, control = truth.result["final_loss"], truth.control["final_loss"]
    if truth.how == "diverged":
        return f", while without the fault it ended at {control:.2f} nat on held-out data"
    return f" (on held-out data it ended at {end:.2f} nat, without the fault at {control:.2f} nat)"


def _about_cure(truth: Truth, cure: str | None, outcome: Outcome | None, found: Points) -> str:
    if truth.causes == ("nothing",):
        if cure is None:
            return "No cure was needed."
        return f"The run needed no cure: the change for {titles([cure])} can only slow it down or leave it as it is."
    if cure is None or outcome is None:
        return "You tried no cure, although the run failed."
    if outcome.problem:
        return f"The cure has no effect: {outcome.problem}."
    if outcome.has_diverged:
        return f"With {outcome.title}, the replay diverges."
    words = f"With {outcome.title}, the replay recovers {percent(found.recovered)} of the lost progress"
    left = f" (held-out loss {outcome.final_loss:.2f} nat)"
    many = " One change cures one fault, so that half of it is enough here." if len(truth.causes) > 1 else ""
    return f"{words}{left}.{many}"


def _evidence(
    truth: Truth, run: xr.DataTree, cure: str | None, outcome: Outcome | None
) -> list[tuple[str, str, str, float]]:
    """Return what was done to a run, what it cost, and the strongest symptoms for and against its causes."""
    rows: list[tuple[str, str, str, float]] = []

    def add(kind: str, cause: str, sentence: str, weight: float = math.nan) -> None:
        rows.append((kind, cause, sentence, weight))

    for plant in truth.case.plants:
        harmless = "" if plant.cause in truth.causes else " Alone, this did no harm."
        add("injected", plant.cause, in_words(plant) + harmless)
    if not truth.case.plants:
        add("injected", "nothing", "No fault was injected.")
    start, control = truth.control["start_loss"], truth.control["final_loss"]
    ends = "diverged" if truth.how == "diverged" else f"ended at {truth.result['final_loss']:.2f} nat"
    first = truth.result["start_loss"]
    began = (
        f"the loss began at {first:.2f} nat" if math.isfinite(first) else "the loss was not finite from the start on"
    )
    words = f"On held-out data, {began}, and the run {ends}."
    if truth.case.plants:
        words += f" Without the fault, it went from {start:.2f} to {control:.2f} nat."
    add("loss", "", words)
    if outcome is not None and cure is not None and not outcome.problem:
        ends = "diverges" if outcome.has_diverged else f"ends at {outcome.final_loss:.2f} nat"
        add("loss", cure, f"With {outcome.title}, the replay {ends}.")
    seen = diagnose(run)["evidence"].to_dataset()
    columns = (seen[name].values.tolist() for name in ("cause", "weight", "sentence"))
    symptoms = sorted(zip(*columns, strict=True), key=lambda row: -abs(row[1]))
    for cause in truth.causes:
        mine = [(weight, sentence) for of, weight, sentence in symptoms if of == cause]
        for weight, sentence in [row for row in mine if row[0] > 0][:_N_FOR]:
            add("for", cause, sentence, weight)
        for weight, sentence in [row for row in mine if row[0] < 0][:_N_AGAINST]:
            add("against", cause, sentence, weight)
    return rows
