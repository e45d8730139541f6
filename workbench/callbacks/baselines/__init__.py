"""The stability controls that the KSS paper compares with (arXiv:2602.22988), each usable with `workbench.train`.

    for name, control in wb.baselines.controls().items():
        model, settings = control.prepare(make_model, 0.007)
        records = list(wb.train(model, task, n_steps=250, warmup=100, **settings))

Gradient clipping is not in this package: it is ``train(clip_norm=)``.
"""

from workbench.callbacks.baselines.control_table import Control, controls
from workbench.callbacks.baselines.mup import MuP
from workbench.callbacks.baselines.optimizers import LAMB, SAM, Lion
from workbench.callbacks.baselines.penalties import (
    ActivationVariance,
    GradientPenalty,
    JacobianPenalty,
    Penalty,
    RandomL2,
    Stream,
)
from workbench.callbacks.baselines.penalty_terms import PenaltyTerms
from workbench.models.parametrizations import SpectralNorm, WeightNorm, plain_copy

__all__ = [
    "LAMB",
    "SAM",
    "ActivationVariance",
    "Control",
    "GradientPenalty",
    "JacobianPenalty",
    "Lion",
    "MuP",
    "Penalty",
    "PenaltyTerms",
    "RandomL2",
    "SpectralNorm",
    "Stream",
    "WeightNorm",
    "controls",
    "plain_copy",
]


def __dir__() -> list[str]:
    return sorted(__all__)
