"""Measurement of a model before training, and the pilot of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.models.losses import token_loss
from workbench.rates.find_rate import FoundRates, find_rate
from workbench.sweeps import measure_case, replan

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr
    from torch import Tensor

    from workbench.risk.edge_model import EdgeModel
    from workbench.widgets.risk.model_choice import Choice

#: Features that a backward pass and trial updates measure.
_OF_GRADIENTS = ("initial_grad_norm", "overshoot_rate", "breaking_rate", "unit_change_rate")
_OF_TRIALS = ("rehearsed_rate",)
#: Snapshots of the spectra, of which the widget shows only a summary.
_N_SNAPSHOTS = 512


class Measured(NamedTuple):
    """A case, its choice of model and task, and the settings that it was measured with."""

    case: xr.Dataset
    choice: Choice
    settings: dict[str, Any]

    def planned(self, settings: dict[str, Any]) -> xr.Dataset:
        """Return the case with the settings of another plan."""
        changes = {name: value for name, value in settings.items() if value != self.settings[name]}
        return replan(self.case, **changes) if changes else self.case


def measure(choice: Choice, settings: dict[str, Any], model: EdgeModel, check: Callable[[], None]) -> Measured:
    """Build or open the chosen model, and measure the features of the risk model."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        check()
        return token_loss(logits, targets)

    module, task, name = choice.make()
    check()
    runs_pilot = any(name in model.features for name in _OF_TRIALS)
    takes_gradients = runs_pilot or any(name in model.features for name in _OF_GRADIENTS)
    case = measure_case(
        module, task, architecture=name, seed=choice.seed, loss=loss, n_snapshots=_N_SNAPSHOTS,
        takes_gradients=takes_gradients, runs_pilot=runs_pilot, **settings,
    )  # fmt: skip
    return Measured(case, choice, settings)


def run_pilot(
    choice: Choice, settings: dict[str, Any], budget: int, tell: Callable[[str], None]
) -> tuple[dict[str, Any], FoundRates]:
    """Run the pilot of a plan, and return the settings of the plan with the result.

    Args:
        choice: Model and task.
        settings: Settings of the plan; the learning rate is ignored.
        budget: Maximum number of updates.
        tell: Called with a text after each update; its exceptions end the pilot.
    """
    model, task, _ = choice.make()
    plan = {name: value for name, value in settings.items() if name != "learning_rate"}
    return plan, find_rate(model, task, budget=budget, progress=tell, **plan)
