"""Everything that is shown of one planned run: its risk, the risk at other rates, what drives it, and runs like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.risk.rate_grid import over_rates

if TYPE_CHECKING:
    import xarray as xr

    from workbench.risk.neighbours import Neighbours
    from workbench.risk.risk_model import RiskModel

#: Largest risk that counts as low, and smallest at which divergence is likely.
LOW, HIGH = 0.20, 0.80
#: Points of the curve, and recorded cells to compare with.
_N_RATES, _N_CELLS = 97, 5


@dataclass(frozen=True)
class Forecast:
    """The prediction of the risk model for a case.

    Attributes:
        case: The run as it is planned.
        prediction: Result of `RiskModel.predict`.
        stable: Result of `RiskModel.largest_stable_rate`.
        curve: The risk over learning rates, of `workbench.risk.rate_grid.over_rates`.
        drivers: Result of `RiskModel.drivers`.
        nearest: Every recorded run of the cells that are most like the case.
        recorded_steps: Fewest and most steps of the recorded runs.
    """

    case: xr.Dataset
    prediction: xr.Dataset
    stable: xr.Dataset
    curve: xr.Dataset
    drivers: xr.DataArray
    nearest: xr.Dataset
    recorded_steps: tuple[int, int]

    @property
    def rate(self) -> float:
        """The planned learning rate."""
        return float(self.case["learning_rate"].values[0])

    @property
    def is_familiar(self) -> bool:
        """Whether the model has seen anything like the case."""
        return bool(self.prediction["is_familiar"].values[0])

    @property
    def starts_diverged(self) -> bool:
        """Whether the fresh model counts as diverged, so that no plan helps it."""
        return bool(self.prediction["starts_diverged"].values[0])

    @property
    def is_shown(self) -> bool:
        """Whether there is a number: the case is familiar, or starts diverged."""
        return bool(np.isfinite(self.prediction["probability"].values[0]))


def forecast(model: RiskModel, neighbours: Neighbours, case: xr.Dataset, *, before: Forecast | None = None) -> Forecast:
    """Ask the risk model everything about a case.

    Args:
        model: The risk model.
        neighbours: Neighbours by the same model.
        case: Case of one run.
        before: A forecast of a case that differs in its learning rate alone; what does not depend on that is taken
            over.
    """
    prediction = model.predict(case)
    stable = before.stable if before else model.largest_stable_rate(case, below=LOW)
    nearest = before.nearest if before else neighbours.cells(case, _N_CELLS)
    rates = rates_around(float(case["learning_rate"].values[0]), stable, nearest["learning_rate"].values)
    if before is not None and np.array_equal(before.curve["learning_rate"].values, rates):
        curve = before.curve
    else:
        curve = over_rates(model, case, rates.tolist(), names=[""], below=LOW)
    steps = neighbours.sweep["n_steps"].values
    return Forecast(case, prediction, stable, curve, model.drivers(case), nearest, (int(steps.min()), int(steps.max())))


def rates_around(rate: float, stable: xr.Dataset, recorded: np.ndarray) -> np.ndarray:
    """Learning rates over whole decades to draw the risk over.

    Args:
        rate: The present one, which is among them.
        stable: Result of `RiskModel.largest_stable_rate`; they hold the edge and its interval.
        recorded: Rates of runs to compare with; where no edge is known, they hold the middle half of these.
    """
    edge, *interval = (np.log10(float(stable[name].values[0])) for name in ("largest_stable_rate", "low", "high"))
    ends = [np.log10(rate) - 0.5, np.log10(rate) + 0.5]
    if np.isnan(edge):
        ends += np.quantile(np.log10(recorded), [0.25, 0.75]).tolist()
    else:  # an interval of many decades says no more than one of four
        wide = np.clip([end for end in interval if not np.isnan(end)], edge - 2, edge + 2)
        ends += [edge - 1, edge + 1, *wide]
    return np.logspace(np.floor(min(ends) + 1e-9), np.ceil(max(ends) - 1e-9), _N_RATES)
