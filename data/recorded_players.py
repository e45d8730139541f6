"""Programs whose scores on the practice cases are recorded: `workbench.diagnose`, and simple baselines.

A player is a function of a `workbench.course.Patient` that returns the causes and the cure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from fitting import fit_rules

from workbench.course.patients import Patient, Player
from workbench.diagnosis import CAUSES, Rules, find_failure, read_record, read_symptoms
from workbench.diagnosis.diagnose import diagnose
from workbench.schema.statuses import SymptomKind
from workbench.studies import samples

#: Probability of a cause from which on `with_diagnose` takes no further measurement.
_SURE = 0.8
#: Symptoms that combine others, also measured ones.
_JOINT = ("a_block_stands_out", "routing_is_off", "rise_out_of_nothing")
#: Penalty of the rules of `workbench.diagnose`.
_PENALTY = 3.0
#: Sets of runs that the rules of `workbench.diagnose` were fitted to and chosen on.
_KNOWN = ("fit", "choose")


def with_diagnose(patient: Patient) -> tuple[str, str | None]:
    """Measure in the order of cost until a cause has a probability of 0.8 in `workbench.diagnose`, and return it.

    All measurements of the lowest cost are taken at once. If no cause reaches that probability, every measurement that
    the budget allows is taken, and the first cause is returned. The cure is the change for the cause.

    Args:
        patient: The case.
    """
    costs = patient.measurements["cost"].sort_values(kind="stable")
    _take(patient, costs.index[costs == costs.min()])
    cause, probability = _first_cause(patient)
    for name in costs.index[costs > costs.min()]:
        if probability >= _SURE:
            break
        if _take(patient, [name]):
            cause, probability = _first_cause(patient)
    return _with_cure(cause)


def settings_alone() -> Player:
    """Return a player that reads loss, log and settings, and ranks causes by learning rate, batch size and settings.

    Its rules are fitted like those of `workbench.diagnose`, to the same runs, without any measured quantity.
    """
    table = samples.open("failures")
    table = table.isel(run=np.isin(table["set"].values, _KNOWN))
    causes, fitted = table["ranked_cause"].values, dict[tuple[str, ...], Rules]()

    def fit(names: tuple[str, ...]) -> Rules:
        strengths = table["strength"].sel(symptom=list(names)).values
        rows = [{n: float(v) for n, v in zip(names, row, strict=True) if np.isfinite(v)} for row in strengths]
        true = [tuple(map(str, causes[is_cause])) for is_cause in table["is_cause"].values]
        return fit_rules(zip(rows, true, strict=True), penalty=_PENALTY)

    def play(patient: Patient) -> tuple[str, str | None]:
        _take(patient, ("loss", "log", "settings"))
        record = read_record(patient.record)
        read = read_symptoms(record, find_failure(record), kinds=[SymptomKind.LOG, SymptomKind.CONFIGURATION])
        names = tuple(sorted(set(read) - set(_JOINT)))
        if names not in fitted:
            fitted[names] = fit(names)
        return _with_cure(next(iter(fitted[names].probabilities({name: read[name].strength for name in names}))))

    return play


def most_frequent(patient: Patient) -> tuple[str, str | None]:
    """Return the most frequent cause of the runs that the rules of `workbench.diagnose` were fitted to, and its change.

    Args:
        patient: The case; nothing is measured.
    """
    del patient
    table = samples.open("failures")
    is_cause = table["is_cause"].values[np.isin(table["set"].values, _KNOWN)]
    n_runs = dict(zip(map(str, table["ranked_cause"].values), is_cause.sum(axis=0), strict=True))
    return _with_cure(max((cause for cause in n_runs if cause != "nothing"), key=lambda cause: n_runs[cause]))


def always_nothing(patient: Patient) -> tuple[str, str | None]:
    """Return that nothing is wrong, without a measurement.

    Args:
        patient: The case; nothing is measured.
    """
    del patient
    return "nothing", None


def at_random(patient: Patient) -> tuple[str, str | None]:
    """Return a random cause, or that nothing is wrong, without a measurement; the same for the same case.

    Args:
        patient: The case; nothing is measured.
    """
    draw = np.random.default_rng([patient.level, patient.seed])
    return _with_cure(str(draw.choice(list(CAUSES))))


#: Name on the board -> a function that makes the player.
RECORDED: dict[str, Callable[[], Player]] = {
    "wb.diagnose": lambda: with_diagnose,
    "settings alone": settings_alone,
    "most frequent cause": lambda: most_frequent,
    "always nothing": lambda: always_nothing,
    "random": lambda: at_random,
}


def _take(patient: Patient, names: Iterable[str]) -> bool:
    """Take the measurements that the budget allows, and return whether there were any."""
    costs, spent = patient.measurements["cost"], patient.spent
    for name in names:
        if costs[name] <= patient.remaining:
            patient.measure(name)
    return patient.spent > spent


def _first_cause(patient: Patient) -> tuple[str, float]:
    """Return the most probable cause by what was measured, and its probability."""
    causes = diagnose(patient.record)["causes"].to_dataset()
    causes = causes.isel(cause=np.isin(causes["cause"].values, [*CAUSES]))  # those that a case may have
    return str(causes["cause"].values[0]), float(causes["probability"][0] / causes["probability"].sum())


def _with_cure(cause: str) -> tuple[str, str | None]:
    return cause, None if cause == "nothing" else cause
