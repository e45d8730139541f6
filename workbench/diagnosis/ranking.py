"""Rank causes by additive evidence from symptoms.

A multinomial logistic regression with a strong quadratic penalty (Hoerl and Kennard's ridge, on the logit), fitted to
recorded runs whose cause was planted. Each symptom adds ``weight[cause] * (strength - usual)`` to the log-odds of a
cause; a missing symptom adds nothing, so a log with few variables gives a less certain answer, not another one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.diagnosis.causes import CAUSES
from workbench.errors import OptionError, StoreError
from workbench.io.atomic import write_json

_SHIPPED = Path(__file__).parent / "shipped" / "rules.json"
#: The penalty is divided by the square of this factor. It is above 1 for symptoms that decide by definition, of which
#: there are few recorded runs each, and below 1 for those that may correlate with a cause only because of how the runs
#: were made.
TRUST: dict[str, float] = {
    "rate_jumps": 2.5, "rise_out_of_nothing": 2.5, "a_block_stands_out": 2.5, "routing_is_off": 2.5,
    "rate_is_spent": 2.0, "eps_rules": 2.0, "batches_shrink": 2.0, "logits_without_focus": 2.0,
    "few_rows": 1.5, "experts_die": 1.5, "updates_get_lost": 1.5, "updates_scatter": 1.5,
    "attention_outgrows_the_rest": 1.5, "peak_rate": 1.5, "weights_grow": 1.5,
    "gradient_noise": 0.7, "no_norm_setting": 0.7, "attention_narrows": 0.7,
    "starts_at_full_rate": 0.5, "near_unit_mass": 0.5, "first_gradient": 0.5, "no_warm_up_setting": 0.5,
    "no_clipping_setting": 0.3, "has_routers": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """Weights of symptoms for causes.

    Attributes:
        causes: Names, shape (cause,).
        symptoms: Names, shape (symptom,).
        weight: Shape (cause, symptom); adds up to 0 over the causes.
        usual: Strength at which each symptom is no evidence: its mean over the recorded runs, shape (symptom,).
        bias: Log-odds of each cause without symptoms, shape (cause,).
        about: Description of the runs they were fitted to.
    """

    causes: tuple[str, ...]
    symptoms: tuple[str, ...]
    weight: np.ndarray
    usual: np.ndarray
    bias: np.ndarray
    about: str = ""

    @classmethod
    def fit(
        cls, examples: Iterable[tuple[Mapping[str, float], str]], *, penalty: float = 1.0, about: str = ""
    ) -> Rules:
        """Fit rules to failed runs of known cause.

        Args:
            examples: Strengths of the symptoms of a run by name, and its cause; a run may be given several times, with
                fewer symptoms each time.
            penalty: Coefficient of the squared weights.
            about: Description of the runs.

        Raises:
            OptionError: If there are fewer than two causes among them.
        """
        from sklearn.linear_model import LogisticRegression

        examples = list(examples)
        found = {cause for _, cause in examples}
        causes = tuple(name for name in CAUSES if name in found)
        if len(causes) < 2:
            raise OptionError(
                f"The examples show {len(causes)} causes, expected at least 2; add runs of another cause."
            )
        symptoms = tuple(sorted({name for strengths, _ in examples for name in strengths}))
        table = np.array([[strengths.get(name, math.nan) for name in symptoms] for strengths, _ in examples])
        usual = np.nanmean(table, axis=0)
        centred = np.where(np.isnan(table), 0.0, table - usual)
        model = LogisticRegression(C=1 / penalty, max_iter=5000, class_weight="balanced")
        trust = np.array([TRUST.get(name, 1.0) for name in symptoms])
        model.fit(centred * trust, [causes.index(cause) for _, cause in examples])
        weight, bias = model.coef_ * trust, model.intercept_
        if len(causes) == 2:
            weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
        return cls(causes, symptoms, weight - weight.mean(axis=0), usual, bias - bias.mean(), about)

    def evidence(self, strengths: Mapping[str, float]) -> np.ndarray:
        """What each symptom adds to the log-odds of each cause, shape (cause, symptom); 0 for missing symptoms."""
        row = np.array([strengths.get(name, math.nan) for name in self.symptoms], dtype=np.float64)
        return self.weight * np.where(np.isnan(row), 0.0, row - self.usual)

    def probabilities(self, strengths: Mapping[str, float]) -> dict[str, float]:
        """Probability of each cause, in falling order; adds up to 1."""
        logits = self.evidence(strengths).sum(axis=1) + self.bias
        found = np.exp(logits - logits.max())
        found /= found.sum()
        return {self.causes[i]: float(found[i]) for i in np.argsort(-found, kind="stable")}

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write the rules as JSON."""
        content = {
            "about": self.about,
            "causes": list(self.causes),
            "signs": {
                name: {"usual": _short(self.usual[i]), "weight": [_short(v) for v in self.weight[:, i]]}
                for i, name in enumerate(self.symptoms)
            },
            "bias": [_short(value) for value in self.bias],
        }
        return write_json(content, path, overwrite=overwrite)

    @classmethod
    def open(cls, path: Path | str) -> Rules:
        """Read rules that `save` wrote.

        Raises:
            StoreError: If the file is missing or holds no rules.
        """
        try:
            content = json.loads(Path(path).read_text())
            symptoms = content["signs"]
            weight = np.array([one["weight"] for one in symptoms.values()], dtype=float).T
            usual = np.array([one["usual"] for one in symptoms.values()], dtype=float)
            bias, causes = np.array(content["bias"], dtype=float), tuple(content["causes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} holds no rules ({error}); pass a file from Rules.save().") from error
        if weight.shape != (len(causes), len(symptoms)) or bias.shape != (len(causes),):
            raise StoreError(f"{path} is damaged: its weights do not fit its causes and symptoms; write it again.")
        return cls(causes, tuple(symptoms), weight, usual, bias, str(content.get("about", "")))

    @classmethod
    def shipped(cls) -> Rules:
        """The rules fitted to the recorded runs; see data/README.md."""
        return cls.open(_SHIPPED)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
