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

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.callbacks.baselines.optimizers import LAMB, SAM, Lion, MuP
from workbench.callbacks.baselines.penalties import (
    ActivationVariance,
    GradientPenalty,
    JacobianPenalty,
    Penalty,
    RandomL2,
)
from workbench.errors import require_listed
from workbench.models.parametrizations import LinearParametrization, SpectralNorm, WeightNorm, plain_copy
from workbench.option_checks import checked, publish
from workbench.option_kinds import PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "LAMB", "SAM", "ActivationVariance", "Control", "GradientPenalty", "JacobianPenalty", "Lion", "MuP", "Penalty",
    "RandomL2", "SpectralNorm", "WeightNorm", "controls", "plain_copy",
]  # fmt: skip


@checked
@dataclass(frozen=True)
class Control:
    """A stability control for a training run.

    Attributes:
        name: Name of the control, for tables.
        settings: Arguments of `workbench.train` that define the control.
        parametrization: Parametrization of the new model; None if there is none.
        rate_factor: Ratio of the learning rate to the nominal one.

    Example:
        >>> import workbench as wb
        >>> control = wb.baselines.controls()["Lion"]
        >>> model, settings = control.prepare(lambda: wb.zoo.transformer(d_model=16, n_layers=1), 1e-3)
        >>> sorted(settings)
        ['learning_rate', 'optimizer']

    See Also:
        `workbench.baselines.controls`: Returns all controls of the paper.
        `workbench.train`: Takes the settings.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    parametrization: LinearParametrization | MuP | None = None
    rate_factor: PositiveFloat = 1.0

    def prepare(self, make_model: Callable[[], nn.Module], rate: PositiveFloat) -> tuple[nn.Module, dict[str, Any]]:
        """Create a model, and the arguments of `workbench.train` that train it under this control.

        Args:
            make_model: Function that creates a new model of the zoo (for muP, a transformer). In a comparison, all
                calls should return the same model.
            rate: Nominal peak learning rate.

        Returns:
            The model, with the parametrization of the control if it has one, and the settings, including the learning
            rate. ``n_steps``, ``warmup``, ``kss`` and other arguments may be added.

        Raises:
            OptionError: If the control cannot be applied to the model.
        """
        model, rate = make_model(), self.rate_factor * rate
        if self.parametrization is not None:
            self.parametrization.apply(model)
        if isinstance(self.parametrization, MuP):
            return model, {**self.settings, "optimizer": self.parametrization.optimizer(model, rate)}
        return model, {**self.settings, "learning_rate": rate}


def controls(*, base_width: PositiveInt = 16, rate_factors: Mapping[str, float] | None = None) -> dict[str, Control]:
    """Return the controls of the KSS paper by name, in the order of its tables.

    The optimizer is AdamW unless the control is an optimizer. The paper does not state the learning rates of the
    optimizers. Here all use the nominal rate by default, although their updates differ: Lion's are larger than Adam's,
    LAMB's are a fraction of the norm of each tensor, and muP takes the rate at the base width.

    Args:
        base_width: Base width of muP. The paper states none; at the width of the model muP would change nothing.
        rate_factors: Mapping from names of controls to the ratio of their learning rate to the nominal one, such as
            ``{"Lion": 0.1}``; 1 for all others.

    Raises:
        OptionError: If a name is unknown or a factor is not positive.

    Example:
        >>> import workbench as wb
        >>> list(wb.baselines.controls())[:5]
        ['none', 'clip 0.5', 'clip 1.0', 'spectral norm', 'weight norm']

    See Also:
        `workbench.baselines.Control`: Describes a control.
        `workbench.KSS`: The regularizer that they are compared with.
    """
    all_controls = [
        Control("none"),
        Control("clip 0.5", {"clip_norm": 0.5}),
        Control("clip 1.0", {"clip_norm": 1.0}),
        Control("spectral norm", parametrization=SpectralNorm()),
        Control("weight norm", parametrization=WeightNorm()),
        Control("gradient penalty 0.1", {"penalties": (GradientPenalty(0.1),)}),
        Control("random l2", {"penalties": (RandomL2(),)}),
        Control("Jacobian penalty", {"penalties": (JacobianPenalty(),)}),
        Control("activation variance", {"penalties": (ActivationVariance(),)}),
        Control("SAM 0.05", {"optimizer": SAM(0.05)}),
        Control("SAM 0.10", {"optimizer": SAM(0.10)}),
        Control("Lion", {"optimizer": Lion()}),
        Control("LAMB", {"optimizer": LAMB()}),
        Control("muP", parametrization=MuP(base_width)),
    ]
    table = {control.name: control for control in all_controls}
    require_listed("rate_factors", rate_factors or (), table)
    for name, factor in (rate_factors or {}).items():
        table[name] = Control(name, table[name].settings, table[name].parametrization, factor)
    return table


__dir__ = publish(__name__)
