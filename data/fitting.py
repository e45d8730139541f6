"""Fit and write the rules of the diagnosis and the attribution of alarms: both are multinomial logistic regressions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

from workbench.callbacks.alarms import WATCHED, Attributor
from workbench.callbacks.alarms.calibration import _row
from workbench.diagnosis import CAUSES, Rules
from workbench.diagnosis.ranking import COVERAGE
from workbench.io.atomic import write_json


def fit_rules(
    examples: Iterable[tuple[Mapping[str, float], str | Sequence[str]]], *, penalty: float = 1.0, about: str = ""
) -> Rules:
    """Fit rules to runs of known cause; the prior of a cause is its frequency among them.

    Args:
        examples: Strengths of the symptoms of a run by name, and its cause, or several causes that share its weight. A
            run may be given several times with different subsets of its symptoms.
        penalty: Coefficient of the squared weights.
        about: Description of the runs.
    """
    rows = [(strengths, (of,) if isinstance(of, str) else tuple(of)) for strengths, of in examples]
    found = {cause for _, of in rows for cause in of}
    causes = tuple(name for name in CAUSES if name in found)
    symptoms = tuple(sorted({name for strengths, _ in rows for name in strengths}))
    table = np.array([[strengths.get(name, math.nan) for name in symptoms] for strengths, _ in rows])
    usual = np.nanmean(table, axis=0)
    centered = np.where(np.isnan(table), 0.0, table - usual)
    place = [(row, causes.index(cause), 1 / len(of)) for row, (_, of) in enumerate(rows) for cause in of]
    chosen, labels, example_weights = (np.array(column) for column in zip(*place, strict=True))
    model = LogisticRegression(C=1 / penalty, max_iter=5000)
    weight, bias = coefficients(model.fit(centered[chosen], labels, sample_weight=example_weights))
    return Rules(causes, symptoms, weight - weight.mean(axis=0), usual, bias - bias.mean(), about=about)


def smallest_in_sets(scores: Iterable[float]) -> float:
    """Return the smallest score with which a cause is in a set.

    Args:
        scores: Probability of the actual cause of each run of that cause, under rules fitted without its family.

    Returns:
        The score of rank floor((1 - 0.9)(n + 1)) from below. If there are too few runs for that rank, 0, so that the
        cause is in every set.
    """
    ranked = np.sort(np.array(list(scores), dtype=float))
    rank = math.floor((1 - COVERAGE) * (len(ranked) + 1) + 1e-9)
    return float(ranked[rank - 1]) if rank >= 1 else 0.0


def save_rules(rules: Rules, path: Path | str) -> None:
    """Write rules as JSON, and replace an existing file."""
    content = {
        "about": rules.about,
        "causes": list(rules.causes),
        "symptoms": {
            name: {"usual": _short(rules.usual[i]), "weight": [_short(v) for v in rules.weight[:, i]]}
            for i, name in enumerate(rules.symptoms)
        },
        "bias": [_short(value) for value in rules.bias],
        "least": {view: [_short(0.9999 * value) for value in values] for view, values in rules.least.items()},
        "answers": [[_short(value) for value in row] for row in rules.answers],
        "unknown": dict(rules.unknown),
    }
    write_json(content, path, overwrite=True)


def fit_attributor(examples: Iterable[tuple[Mapping[str, float], str]], *, penalty: float = 1.0) -> Attributor:
    """Fit an attributor to scores of signals of runs, and the fault that was active in each."""
    examples = list(examples)
    seen = {name for scores, _ in examples for name in scores}
    features = tuple(watched.name for watched in WATCHED if watched.name in seen)
    table = np.array([_row(features, scores) for scores, _ in examples])
    model = LogisticRegression(C=1 / penalty, max_iter=5000, class_weight="balanced")
    weight, bias = coefficients(model.fit(table, [cause for _, cause in examples]))
    return Attributor(tuple(map(str, model.classes_)), features, weight, bias)


def save_attributor(attributor: Attributor, path: Path | str) -> None:
    """Write an attributor as JSON, and replace an existing file."""
    content = {
        "causes": list(attributor.causes),
        "features": list(attributor.features),
        "weight": [[_short(value) for value in row] for row in attributor.weight],
        "bias": [_short(value) for value in attributor.bias],
    }
    write_json(content, path, overwrite=True)


def coefficients(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (class, feature) and biases of a fitted model, also for two classes."""
    weight, bias = model.coef_, model.intercept_
    if len(model.classes_) == 2:
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return weight, bias


def _short(value: float) -> float:
    return float(f"{value:.5g}")
