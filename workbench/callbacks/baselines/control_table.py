"""One table of all stability controls, for sweeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.callbacks.baselines.mup import MuP
from workbench.callbacks.baselines.optimizers import LAMB, SAM, Lion
from workbench.callbacks.baselines.penalties import ActivationVariance, GradientPenalty, JacobianPenalty, RandomL2
from workbench.errors import OptionError
from workbench.models.parametrizations import LinearParametrization, SpectralNorm, WeightNorm

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Control:
    """A stability control, ready to be applied to a run.

    Attributes:
        name: Name of the control, for tables.
        settings: Arguments of `workbench.train` that make up the control.
        parametrization: Parametrization of the fresh model; None: none.
        rate_factor: Ratio of the learning rate to the nominal one.

    Example:
        >>> import workbench as wb
        >>> control = wb.baselines.controls()["Lion"]
        >>> model, settings = control.prepare(lambda: wb.zoo.transformer(d_model=16, n_layers=1), 1e-3)
        >>> sorted(settings)
        ['learning_rate', 'optimizer']
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    parametrization: LinearParametrization | MuP | None = None
    rate_factor: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.rate_factor, str) or not 0 < self.rate_factor < math.inf:
            raise OptionError(f"The rate factor of {self.name} is {self.rate_factor}, expected a positive number.")

    def prepare(self, make_model: Callable[[], nn.Module], rate: float) -> tuple[nn.Module, dict[str, Any]]:
        """A model and the arguments of `workbench.train` to train it with under this control.

        Args:
            make_model: Function that makes a fresh model of the zoo (for muP, a transformer), in a comparison always
                the same.
            rate: Nominal peak learning rate.

        Returns:
            The model, parametrized if the control does that, and the settings including the learning rate; add
            ``n_steps``, ``warmup``, ``kss`` and the like.

        Raises:
            OptionError: If the control does not fit the model.
        """
        model, rate = make_model(), self.rate_factor * rate
        if self.parametrization is not None:
            self.parametrization.apply(model)
        if isinstance(self.parametrization, MuP):
            return model, {**self.settings, "optimizer": self.parametrization.optimizer(model, rate)}
        return model, {**self.settings, "learning_rate": rate}


def controls(*, base_width: int = 16, rate_factors: Mapping[str, float] | None = None) -> dict[str, Control]:
    """The controls of the KSS paper's tables, by name, in their order; with AdamW unless the control is an optimizer.

    The paper does not say at which rates it compares optimizers. Here the nominal rate is the rate for all of them:
    Lion takes longer steps than Adam, LAMB's are a share of the size of each tensor, and muP's is the rate at the base
    width.

    Args:
        base_width: Base width of muP. The paper gives none; at the model's own width muP would change nothing.
        rate_factors: Name -> rate over the nominal rate, such as ``{"Lion": 0.1}``; 1 if not given.

    Raises:
        OptionError: If a name is unknown or a factor is not positive.

    Example:
        >>> import workbench as wb
        >>> list(wb.baselines.controls())[:5]
        ['none', 'clip 0.5', 'clip 1.0', 'spectral norm', 'weight norm']
    """
    made = [
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
    table = {control.name: control for control in made}
    for name, factor in (rate_factors or {}).items():
        if name not in table:
            raise OptionError(f"There is no control '{name}'; choose from {', '.join(table)}.")
        table[name] = Control(name, table[name].settings, table[name].parametrization, factor)
    return table
