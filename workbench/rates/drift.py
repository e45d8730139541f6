"""From the rates that a pilot found to those for a longer training, with intervals.

Best rate and useful edge fall as runs grow longer, more so where the loss rises slowly beyond the edge than where runs
break. By how much is fitted to pilots of the recorded study of learning rates (``data/fit_rates.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workbench.rates.rate_search import Round
from workbench.training.training_plan import TrainingPlan

_FILE = Path(__file__).parent / "shipped" / "drift.json"


@dataclass(frozen=True)
class Estimate:
    """An estimated learning rate and an interval that contains it in about 80 % of cases; NaN: not known.

    Attributes:
        value: The estimate.
        low: Lower end.
        high: Upper end.

    Example:
        >>> import workbench as wb
        >>> wb.rates.Estimate(0.004, 0.003, 0.006).times(0.5).high
        0.003
    """

    value: float
    low: float
    high: float

    def times(self, factor: float, *, error: float = 1.0) -> Estimate:
        """The rate times a factor that is itself known up to a factor of ``error``."""
        return Estimate(self.value * factor, self.low * factor / error, self.high * factor * error)


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def extrapolated(last: Round, plan: TrainingPlan) -> tuple[Estimate, Estimate]:
    """Best rate and useful edge of a training, from the last round of a pilot.

    The logarithm of each is that of the round plus a linear function of `features`. The interval has the quantiles of
    what is left of it in the study, each family being predicted from the others.

    Args:
        last: The last round with an edge.
        plan: The training.
    """
    fitted, values = _fitted(), features(last.n_updates, plan)
    return (
        _estimate(fitted["best_rate"], last.best_rate, values),
        _estimate(fitted["useful_edge"], last.useful_edge, values),
    )


def features(n_updates: int, plan: TrainingPlan) -> dict[str, float]:
    """What the change of the rates from a pilot to a training is predicted from.

    Args:
        n_updates: Updates of the runs of the last round.
        plan: The training.
    """
    decays = float(callable(plan.schedule) or plan.schedule != "constant")
    growth = math.log(plan.n_steps / n_updates)
    return {"constant": 1.0, "growth": growth, "decays": decays, "growth, decays": growth * decays}


def furthest(n_updates: int) -> int:
    """The longest training for which the change of rates was measured, for runs of so many updates in a pilot."""
    return round(_fitted()["largest_growth"] * n_updates)


def _estimate(fitted: Mapping[str, Any], rate: float, values: Mapping[str, float]) -> Estimate:
    change = sum(weight * values[name] for name, weight in fitted["weights"].items())
    return Estimate(*(rate * math.exp(change + by) for by in (0.0, fitted["low"], fitted["high"])))


@cache
def _fitted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found
