"""Rank causes by additive evidence from symptoms, and form a set that holds the cause with a stated coverage.

The rules are a multinomial logistic regression with a quadratic penalty (Hoerl and Kennard's ridge, on the logit). They
were fitted to recorded runs with injected faults and to healthy runs. Each symptom adds
``weight[cause] * (strength - usual)`` to the log-odds of a cause. A missing symptom adds nothing, so a log with few
variables yields a less certain answer rather than a different one. Sets are conformal by class (Vovk et al. 2005,
Algorithmic Learning in a Random World, section 4.5): a cause is in the set if its probability reaches the value that it
reached in 90 % of the recorded runs of that cause, under rules fitted without their family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from workbench.diagnosis.causes import CAUSES, UNKNOWN
from workbench.diagnosis.symptoms import Symptom
from workbench.io.files import FileKind
from workbench.schema.statuses import SymptomKind

_SHIPPED = Path(__file__).parent / "shipped" / "rules.json"
_FILE = FileKind("a file of rules", "pass a file of this version")
#: Fraction of runs of each cause whose set contains the cause.
COVERAGE = 0.9
#: View of a record -> its kinds of symptoms, and whether it holds measurements of the model besides the curves. Sets
#: are calibrated for each view; the view of a record is the first one for which it has all data.
VIEWS: dict[str, tuple[tuple[SymptomKind, ...], bool]] = {
    "store": ((SymptomKind.MECHANISM, SymptomKind.LOG, SymptomKind.CONFIGURATION), True),
    "recorder": ((SymptomKind.MECHANISM, SymptomKind.LOG), True),
    "mechanism": ((SymptomKind.MECHANISM,), True),
    "log": ((SymptomKind.MECHANISM, SymptomKind.LOG), False),
    "curves": ((SymptomKind.MECHANISM,), False),
}
#: Cause, symptom, and the range of strengths of the symptom that exclude the cause.
_EXCLUDED = (
    ("routing", "has_routers", -math.inf, 0.0),
    ("nothing", "diverges", 1.0, math.inf),
    ("nothing", "ends_above_its_best", 1.0, math.inf),
    ("nothing", "experts_die", 1.0, math.inf),
)
#: Name of the calibration of sets after one replay, and of views without a calibration.
REPLAYED, OTHER = "replayed", "other"
#: Parts of a record that only a measured model has.
_OF_MODEL = ("/optimizer", "/activations", "/attention", "/router", "/spectra")


def view_of(symptoms: Mapping[str, Symptom]) -> str:
    """Return the view of a record from its symptoms; a record without curves has no calibrated view."""
    kinds = {symptom.kind for symptom in symptoms.values()}
    if SymptomKind.MECHANISM not in kinds:
        return OTHER
    has_model = any(symptom.path in _OF_MODEL for symptom in symptoms.values())
    for view, (needed, needs_model) in VIEWS.items():
        if set(needed) <= kinds and (has_model or not needs_model):
            return view
    return "curves"


@dataclass(frozen=True)
class Rules:
    """Weights of symptoms for causes, thresholds of the sets, and frequencies of replay outcomes.

    ``weight``, (cause, symptom), adds up to 0 over the causes; ``usual`` is the strength of each symptom that is no
    evidence, and ``bias`` the log-odds without symptoms. ``least`` maps a view to the smallest probability with which
    each cause is in a set; in other views, a tenth of that of the first suffices. ``answers``, (change, cause), is the
    probability that a replay supports the changed cause given the actual one; empty if none were recorded. ``unknown``
    maps a view to the log-odds of "another cause", which no symptom changes, set on runs of kinds that the rules were
    not fitted to.
    """

    causes: tuple[str, ...]
    symptoms: tuple[str, ...]
    weight: np.ndarray
    usual: np.ndarray
    bias: np.ndarray
    least: Mapping[str, np.ndarray] = field(default_factory=dict)
    answers: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    about: str = ""
    unknown: Mapping[str, float] = field(default_factory=dict)

    def evidence(self, strengths: Mapping[str, float]) -> np.ndarray:
        """Return what each symptom adds to the log-odds of each cause, (cause, symptom); 0 where missing."""
        row = np.array([strengths.get(name, math.nan) for name in self.symptoms], dtype=np.float64)
        return self.weight * np.where(np.isnan(row), 0.0, row - self.usual)

    def probabilities(self, strengths: Mapping[str, float], view: str = "") -> dict[str, float]:
        """Return the probability of each cause in decreasing order; the probabilities add up to 1.

        Routing is excluded if the model has no routers. "nothing" is excluded if the run diverged, if half of the
        decrease of the loss was undone by the end, or if half of the experts of a block receive no tokens.

        Args:
            strengths: Strengths of the symptoms by name.
            view: View from `view_of` whose probability of "unknown" is included; by default none is.
        """
        logits = dict(zip(self.causes, (self.evidence(strengths).sum(axis=1) + self.bias).tolist(), strict=True))
        for cause, symptom, least, most in _EXCLUDED:
            if least <= strengths.get(symptom, math.nan) <= most and cause in logits:
                logits[cause] = -math.inf
        if view in self.unknown:
            logits[UNKNOWN] = self.unknown[view]
        top = max(logits.values())
        return _in_order({cause: math.exp(value - top) for cause, value in logits.items()})

    def set_of(self, probability: Mapping[str, float], view: str) -> tuple[str, ...]:
        """Return the causes that are not excluded, by decreasing probability; always contains the most likely one."""
        first = next(iter(probability))
        if view not in self.least:
            return tuple(cause for cause, p in probability.items() if p >= 0.1 * probability[first])
        least = dict.fromkeys(probability, 0.1 * probability[first])
        known = math.fsum(p for cause, p in probability.items() if cause in self.causes)  # thresholds are among these
        least |= {cause: known * p for cause, p in zip(self.causes, self.least[view].tolist(), strict=True)}
        return tuple(cause for cause, p in probability.items() if (p >= least[cause] and p > 0) or cause == first)

    def answer(self, change: str, cause: str) -> float:
        """Return the probability that the replay with the change for one cause supports it if ``cause`` is present."""
        if not self.answers.size:
            return 0.5
        row, at = self.answers[self.causes.index(change)], self.causes.index(change)
        return float(row[self.causes.index(cause)] if cause in self.causes else np.delete(row, at).mean())

    def information(self, probability: Mapping[str, float], change: str) -> float:
        """Return the mutual information of the cause and the outcome of a replay, in bits."""
        supports = math.fsum(p * self.answer(change, cause) for cause, p in probability.items())
        given = math.fsum(p * _entropy(self.answer(change, cause)) for cause, p in probability.items())
        return max(_entropy(supports) - given, 0.0)

    def after(self, probability: Mapping[str, float], change: str, *, supports: bool) -> dict[str, float]:
        """Return the probabilities, in decreasing order, after a replay that did or did not support a cause (Bayes)."""
        found = {}
        for cause, p in probability.items():
            likelihood = self.answer(change, cause)
            found[cause] = p * (likelihood if supports else 1 - likelihood)
        return _in_order(found)

    @classmethod
    def open(cls, path: Path | str) -> Rules:
        """Read rules from a file that ``data/fitting.py`` wrote, or raise StoreError."""
        content = _FILE.json(path)
        with _FILE.reading(path):
            symptoms = content["symptoms"] if "symptoms" in content else content["signs"]  # of older versions
            weight = np.array([one["weight"] for one in symptoms.values()], dtype=float).T
            usual = np.array([one["usual"] for one in symptoms.values()], dtype=float)
            bias, causes = np.array(content["bias"], dtype=float), tuple(content["causes"])
            least = {view: np.array(values, dtype=float) for view, values in content.get("least", {}).items()}
            answers = np.array(content.get("answers") or np.zeros((0, 0)), dtype=float)
            unknown = {view: float(value) for view, value in content.get("unknown", {}).items()}
        n = len(causes)
        is_complete = weight.shape == (n, len(symptoms)) and bias.shape == (n,) and answers.shape in ((0, 0), (n, n))
        if not is_complete or any(values.shape != (n,) for values in least.values()):
            raise _FILE.rejected(path, "its weights do not fit its causes and symptoms")
        return cls(causes, tuple(symptoms), weight, usual, bias, least, answers, str(content.get("about", "")), unknown)

    @classmethod
    def uniform(cls) -> Rules:
        """Return rules that read no symptom and assign every cause the same probability."""
        n = len(CAUSES)
        return cls(tuple(CAUSES), (), np.zeros((n, 0)), np.zeros(0), np.zeros(n))

    @classmethod
    def shipped(cls) -> Rules:
        """Return the rules fitted to the recorded runs; see data/README.md."""
        return cls.open(_SHIPPED)


def _in_order(weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights divided by their sum, in decreasing order."""
    total = math.fsum(weights.values())
    return {cause: weights[cause] / total for cause in sorted(weights, key=lambda cause: -weights[cause])}


def _entropy(p: float) -> float:
    return -math.fsum(q * math.log2(q) for q in (p, 1 - p) if q > 0)
