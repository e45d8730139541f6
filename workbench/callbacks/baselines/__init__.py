"""Stability controls that the KSS paper (arXiv:2602.22988) compares with, for training with `workbench.train`.

Gradient clipping is the argument ``clip_norm`` of `workbench.train`.

Example:
    >>> import workbench as wb
    >>> task = wb.tasks.associative_recall()
    >>> control = wb.baselines.controls()["random l2"]
    >>> model, settings = control.prepare(lambda: wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2), 1e-3)
    >>> [record.auxiliary_loss > 0 for record in wb.train(model, task, n_steps=2, **settings)]
    [True, True]

See Also:
    `workbench.KSS`: The regularizer that they are compared with.
    `workbench.train`: Trains with a control.
"""

from workbench.callbacks.baselines.control_table import Control, controls
from workbench.callbacks.baselines.mup import MuP
from workbench.callbacks.baselines.optimizers import LAMB, SAM, Lion
from workbench.callbacks.baselines.penalties import (
    ActivationVariance,
    GradientPenalty,
    JacobianPenalty,
    Penalty,
    PenaltyTerms,
    RandomL2,
    Stream,
)
from workbench.models.parametrizations import SpectralNorm, WeightNorm, plain_copy
from workbench.option_checks import publish

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

__dir__ = publish(__name__)
