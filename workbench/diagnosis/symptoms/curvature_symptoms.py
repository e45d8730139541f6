"""Symptoms of the learning rate beside the sharpness of the loss, which does not depend on the scale of the model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.diagnosis.failed_run import Record, finite_log10
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.symptom import Symptom, ramp
from workbench.formatting import short

#: Product of rate and sharpness beyond which a quadratic diverges: as Adam scales it at beta1 = .9 (arXiv:2207.14484),
#: and under plain descent.
EDGES = {"preconditioned_sharpness_rate": 38.0, "sharpness_rate": 2.0}


def curvature_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """The largest product of rate and sharpness up to the failure, over the edge of stability of the optimizer."""
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
        f"At step {steps[at]} the learning rate was {short(found)} times the edge of stability by the sharpness.",
        path="/curvature",
        variable=name,
        step=int(steps[at]),
    )
