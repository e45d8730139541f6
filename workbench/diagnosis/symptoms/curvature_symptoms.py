"""Symptoms of the learning rate relative to the sharpness of the loss, independent of the scale of the model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.diagnosis.failed_run import Record, finite_log10
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.symptom import Symptom, ramp
from workbench.formatting import short

#: Product of learning rate and sharpness above which a quadratic loss diverges: preconditioned by Adam at beta1 = 0.9
#: (arXiv:2207.14484), and under gradient descent.
EDGES = {"preconditioned_sharpness_rate": 38.0, "sharpness_rate": 2.0}


def curvature_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the largest product of rate and sharpness before the failure, relative to the edge of stability."""
    name = next((name for name in EDGES if record.has("curvature", name)), None)
    if name is None:
        return
    steps = record.steps_of("curvature")
    values = record.values("curvature", name)[: failure.last_row(steps) + 1] / EDGES[name]
    if not np.isfinite(values).any():
        return
    at = int(np.nanargmax(values))
    found = float(values[at])
    yield Symptom(
        "rate_over_edge",
        ramp(finite_log10(found), -0.5, 1.0, low=-1, high=2),
        found,
        1.0,
        f"At step {steps[at]} the learning rate was {short(found)} times the edge of stability that follows from the "
        "sharpness.",
        path="/curvature",
        variable=name,
        step=int(steps[at]),
    )
