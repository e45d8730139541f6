"""The stability controls that the KSS paper compares with (arXiv:2602.22988), each usable with `workbench.train`.

    for name, control in wb.baselines.controls().items():
        model, settings = control.prepare(make_model, 0.007)
        records = list(wb.train(model, task, n_steps=250, warmup=100, **settings))

Gradient clipping needs nothing from here: it is ``train(clip_norm=)``.
"""

from workbench.training.baselines.controls import Control, controls
from workbench.training.baselines.mup import MuP
from workbench.training.baselines.optimizers import LAMB, SAM, Lion
from workbench.training.baselines.penalties import (
    ActivationVariance,
    GradientPenalty,
    JacobianPenalty,
    Penalty,
    RandomL2,
)
from workbench.training.baselines.stream import PenaltyTerms, Stream
from workbench.training.baselines.weights import SpectralNorm, WeightNorm, plain_copy

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
