"""Attribution of alarms to a fault by an interpretable linear model of the scores, with its evidence."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.callbacks.alarms.watched import WATCHED
from workbench.errors import OptionError, StoreError
from workbench.io.atomic import write_json

_SHIPPED = Path(__file__).parent / "shipped" / "attribution.json"
#: Scores are clipped to this.
_CLIP = 3.0
_N_EVIDENCE = 3


@dataclass(frozen=True)
class Attribution:
    """The fault that the signals point to, with probabilities and evidence.

    Attributes:
        cause: The likeliest fault.
        probability: Probability of each fault, descending, with sum 1: given that one of the known faults occurred, not
            the probability that there is a fault.
        evidence: Strongest evidence for the cause, in plain words.

    Example:
        >>> import workbench as wb
        >>> attributor = wb.alarms.Attributor.shipped()
        >>> attribution = attributor.attribute({})
        >>> attribution.cause in attributor.causes, round(sum(attribution.probability.values()), 3)
        (True, 1.0)
    """

    cause: str
    probability: Mapping[str, float]
    evidence: tuple[str, ...]

    @property
    def message(self) -> str:
        """One sentence."""
        because = "; ".join(self.evidence)
        return f"This looks like {self.cause.replace('_', ' ')} ({self.probability[self.cause]:.0%}): {because}."

    def as_event(self) -> dict[str, Any]:
        """The fields of a run's event: everything but step and kind."""
        return {"source": self.cause, "score": self.probability[self.cause], "message": self.message}


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
    """

    causes: tuple[str, ...]
    features: tuple[str, ...]
    weight: np.ndarray
    bias: np.ndarray

    @classmethod
    def fit(cls, examples: Iterable[tuple[Mapping[str, float], str]], *, penalty: float = 1.0) -> Attributor:
        """Fit a model to measurements of runs with faults.

        Args:
            examples: Scores of a measurement by name of the signal, each with the fault that was on.
            penalty: Strength of the quadratic penalty of the weights.

        Raises:
            OptionError: If there are fewer than two faults among the examples.
        """
        from sklearn.linear_model import LogisticRegression

        examples = list(examples)
        causes = sorted({cause for _, cause in examples})
        if len(causes) < 2:
            raise OptionError(f"The examples show {len(causes)} kinds of fault, expected at least 2.")
        seen = {name for scores, _ in examples for name in scores}
        features = tuple(watched.name for watched in WATCHED if watched.name in seen)
        table = np.array([_row(features, scores) for scores, _ in examples])
        model = LogisticRegression(C=1 / penalty, max_iter=5000, class_weight="balanced")
        model.fit(table, [cause for _, cause in examples])
        weight, bias = model.coef_, model.intercept_
        if len(causes) == 2:
            weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
        return cls(tuple(map(str, model.classes_)), features, weight, bias)

    def attribute(self, scores: Mapping[str, float], *, excluded: Collection[str] = ()) -> Attribution:
        """The likeliest fault.

        Args:
            scores: Score of each signal, its evidence over the threshold, negative in the opposite direction.
            excluded: Faults that cannot be the cause, by other knowledge.
        """
        row = _row(self.features, scores)
        logits = self.weight @ row + self.bias
        is_possible = np.array([cause not in excluded for cause in self.causes])
        if is_possible.any():
            logits = np.where(is_possible, logits, -np.inf)
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        best = int(probability.argmax())
        # Contribution of each feature to the score of the cause relative to the mean of the others.
        lift = (self.weight[best] - self.weight.mean(axis=0)) * row
        telling = [i for i in np.argsort(-lift)[:_N_EVIDENCE] if lift[i] > 0]
        order = np.argsort(-probability)
        return Attribution(
            self.causes[best],
            {self.causes[i]: float(probability[i]) for i in order},
            tuple(_words(self.features[i], float(row[i])) for i in telling) or ("nothing stands out",),
        )

    def save(self, path: Path, *, overwrite: bool = False) -> Path:
        """Write it as JSON."""
        content = {
            "causes": list(self.causes),
            "features": list(self.features),
            "weight": [[float(f"{value:.5g}") for value in row] for row in self.weight],
            "bias": [float(f"{value:.5g}") for value in self.bias],
        }
        return write_json(content, path, overwrite=overwrite)

    @classmethod
    def open(cls, path: Path) -> Attributor:
        """Read a file written by `save`.

        Raises:
            StoreError: If the file does not exist or has other content.
        """
        try:
            content = json.loads(Path(path).read_text())
            weight, bias = np.array(content["weight"], float), np.array(content["bias"], float)
            causes, features = tuple(content["causes"]), tuple(content["features"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is no attributor ({error}); pass one from Attributor.save().") from error
        if weight.shape != (len(causes), len(features)) or bias.shape != (len(causes),):
            raise StoreError(f"{path} is damaged: its weights do not fit its causes and features; write it again.")
        return cls(causes, features, weight, bias)

    @classmethod
    def shipped(cls) -> Attributor:
        """The attributor fitted to the recorded study; see data/README.md."""
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
