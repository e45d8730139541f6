"""Attribution of alarms to a fault by an interpretable linear model of the scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.callbacks.alarms.watched import WATCHED
from workbench.formatting import percent
from workbench.io.files import FileKind

_SHIPPED = Path(__file__).parent / "shipped" / "attribution.json"
_FILE = FileKind("an attributor", "pass a file of this version")
#: Largest absolute score; larger ones are clipped.
_CLIP = 3.0
#: Largest number of signals named as evidence.
_N_EVIDENCE = 3
#: The cause if none of the known ones explains the alarms.
UNKNOWN = "unknown"
#: Smallest probability of a cause that is named, and smallest score of a signal that is evidence for one.
_LEAST_PROBABILITY, _LEAST_SCORE = 0.5, 0.5


@dataclass(frozen=True)
class Attribution:
    """The fault that the signals point to, with probabilities and evidence.

    Attributes:
        cause: The most probable fault; ``"unknown"`` if none of the known ones has a probability of one half, or no
            signal is evidence for it.
        probability: Probability of each fault, in decreasing order, with sum 1. It is conditional on one of the known
            faults having occurred; it is not the probability that there is a fault. Empty if there is no alarm.
        evidence: Strongest evidence for the cause, in words.

    Example:
        >>> import workbench as wb
        >>> attributor = wb.alarms.Attributor.shipped()
        >>> attributor.attribute({}).message
        'The cause is unknown: no signal stands out.'
        >>> round(sum(attributor.attribute({"label_entropy": 3.0}).probability.values()), 3)
        1.0

    See Also:
        `workbench.alarms.Attributor`: Computes attributions.
        `workbench.diagnose`: Ranks the causes of a failed run.
    """

    cause: str
    probability: Mapping[str, float]
    evidence: tuple[str, ...]

    @classmethod
    def of_unknown(cls, *evidence: str) -> Attribution:
        """Return an attribution to none of the known faults."""
        return cls(UNKNOWN, {}, evidence)

    @property
    def score(self) -> float:
        """Probability of the cause; NaN if it is unknown."""
        return self.probability.get(self.cause, math.nan)

    @property
    def summary(self) -> str:
        """The cause and its probability in a few words."""
        return UNKNOWN if self.cause == UNKNOWN else f"{self.cause.replace('_', ' ')} ({percent(self.score)})"

    @property
    def message(self) -> str:
        """The attribution as one sentence."""
        what = "The cause is unknown" if self.cause == UNKNOWN else f"This looks like {self.summary}"
        return f"{what}: {'; '.join(self.evidence)}."

    def as_event(self) -> dict[str, Any]:
        """Return the fields of the attribution's event in a run, without step and kind."""
        return {"source": self.cause, "score": self.score, "message": self.message}


@dataclass(frozen=True)
class Attributor:
    """Multinomial logistic regression from scores to faults.

    Attributes:
        causes: The faults, shape (cause,).
        features: Names of the signals, shape (feature,).
        weight: Weights, shape (cause, feature).
        bias: Biases, shape (cause,).

    Example:
        >>> import workbench as wb
        >>> attributor = wb.alarms.Attributor.shipped()
        >>> attributor.causes[0]
        'corrupted_data'

    See Also:
        `workbench.Alarms`: Uses an attributor.
        `workbench.alarms.Attribution`: The result.
    """

    causes: tuple[str, ...]
    features: tuple[str, ...]
    weight: np.ndarray
    bias: np.ndarray

    def attribute(self, scores: Mapping[str, float], *, excluded: Collection[str] = ()) -> Attribution:
        """Return the most probable fault, with the probability of each; ``"unknown"`` if none is likely.

        Args:
            scores: Score of each signal: its evidence over the threshold, negative if it changed in the opposite
                direction. Missing signals count as 0.
            excluded: Faults that are known not to be the cause.
        """
        row = _row(self.features, scores)
        logits = self.weight @ row + self.bias
        is_possible = np.array([cause not in excluded for cause in self.causes])
        logits = np.where(is_possible | ~is_possible.any(), logits, -np.inf)
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        best = int(probability.argmax())
        # Contribution of each feature to the logit of the cause, relative to the mean over all causes.
        lift = (self.weight[best] - self.weight.mean(axis=0)) * row
        telling = [i for i in np.argsort(-lift)[:_N_EVIDENCE] if lift[i] > 0 and abs(row[i]) >= _LEAST_SCORE]
        is_named = telling and is_possible[best] and probability[best] >= _LEAST_PROBABILITY
        return Attribution(
            self.causes[best] if is_named else UNKNOWN,
            {self.causes[i]: float(probability[i]) for i in np.argsort(-probability)},
            tuple(_words(self.features[i], float(row[i])) for i in telling) or ("no signal stands out",),
        )

    @classmethod
    def open(cls, path: str | Path) -> Attributor:
        """Read a file written by ``data/fitting.py``.

        Raises:
            StoreError: If the file does not exist or has other content.
        """
        content = _FILE.json(path)
        with _FILE.reading(path):
            weight, bias = np.array(content["weight"], float), np.array(content["bias"], float)
            causes, features = tuple(content["causes"]), tuple(content["features"])
        if weight.shape != (len(causes), len(features)) or bias.shape != (len(causes),):
            raise _FILE.rejected(path, "its weights do not fit its causes and features")
        return cls(causes, features, weight, bias)

    @classmethod
    def shipped(cls) -> Attributor:
        """Return the attributor fitted to the recorded study; see data/README.md."""
        return cls.open(_SHIPPED)


def _row(features: tuple[str, ...], scores: Mapping[str, float]) -> np.ndarray:
    row = np.array([scores.get(name, 0.0) for name in features], dtype=float)
    row = np.where(np.isnan(row), 0.0, row)
    return np.clip(row, -_CLIP, _CLIP)


def _words(name: str, value: float) -> str:
    watched = next(w for w in WATCHED if w.name == name)
    has_fallen = watched.is_bad_low == (value > 0)
    way = "changed" if watched.is_bad_both_ways else "fallen" if has_fallen else "risen"
    return f"{name} has {way} ({abs(value):.2g} times the evidence of an alarm)"
