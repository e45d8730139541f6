"""One measurement of a model before training, and the plans for which it is valid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.models.losses import token_loss
from workbench.sweeps import measure_case, replan

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr
    from torch import Tensor

    from workbench.risk.risk_model import RiskModel
    from workbench.widgets.risk.model_choice import Choice

#: Features measured by trial updates, which depend on optimizer and clipping.
_OF_A_TRIAL = ("overshoot_rate", "breaking_rate", "rehearsed_rate")
_OF_AN_UPDATE = ("optimizer", "optimizer_options", "clip_norm")


class Efforts(NamedTuple):
    """The effort of the measurement of a model, as `measure_case` takes it."""

    takes_gradients: bool
    runs_pilot: bool

    @classmethod
    def of(cls, risk: RiskModel) -> Efforts:
        """The measurements that a risk model needs."""
        takes_gradients = bool({"initial_grad_norm", *_OF_A_TRIAL} & set(risk.features))
        return cls(takes_gradients, "rehearsed_rate" in risk.features)


class Measured(NamedTuple):
    """A case, and how it was measured."""

    case: xr.Dataset
    settings: dict[str, Any]
    efforts: Efforts

    def suits(self, risk: RiskModel, settings: dict[str, Any]) -> bool:
        """Whether a risk model can judge a plan by it, with nothing measured again."""
        wanted = Efforts.of(risk)
        if any(asked and not done for asked, done in zip(wanted, self.efforts, strict=True)):
            return False
        return not is_trial_asked(risk) or update_of(settings) == update_of(self.settings)

    def planned(self, settings: dict[str, Any]) -> xr.Dataset:
        """The case under another plan."""
        changes = {name: value for name, value in settings.items() if value != self.settings[name]}
        return replan(self.case, **changes) if changes else self.case


def measure(choice: Choice, settings: dict[str, Any], efforts: Efforts, check: Callable[[], None]) -> Measured:
    """Build or open the chosen model, and measure it.

    Args:
        choice: Model and task.
        settings: Settings of the plan.
        efforts: Effort of the measurement.
        check: Called at every evaluation of the loss, of which a pilot run takes a hundred; what it raises ends it all.

    Raises:
        WorkbenchError: If there is no such checkpoint, the task does not fit, or the model cannot be read.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        check()
        return token_loss(logits, targets)

    model, task, name = choice.make()
    check()
    case = measure_case(model, task, architecture=name, seed=choice.seed, loss=loss, **efforts._asdict(), **settings)
    return Measured(case, settings, efforts)


def is_trial_asked(risk: RiskModel) -> bool:
    """Whether optimizer and clipping decide what has to be measured."""
    return bool(set(_OF_A_TRIAL) & set(risk.features))


def update_of(settings: dict[str, Any]) -> list[Any]:
    """The settings that decide a trial update."""
    return [settings[name] for name in _OF_AN_UPDATE]
