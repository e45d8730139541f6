"""From the rates that a pilot found to those for a longer training, with intervals.

Best rate and useful edge fall as runs grow longer; by how much is fitted to pilots of the recorded study of learning
rates (``data/fit_rates.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from workbench.formatting import rounded
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

    def __str__(self) -> str:
        return f"{rounded(self.value)} ({rounded(self.low)}-{rounded(self.high)})"


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def extrapolated(last: Round, plan: TrainingPlan) -> tuple[Estimate, Estimate]:
    """Best rate and useful edge of a training, from the last round of a pilot.

    The logarithm of each is that of the round plus a linear function of `features`. The interval has the quantiles of
    what is left of it in the study, each family being predicted from the others; after a first round it is wider.

    Args:
        last: The last round with an edge.
        plan: The training.
    """
    fitted = _fitted()["coarse" if last.is_coarse else "fine"]
    values = features(last.n_updates, plan)
    edge = _estimate(fitted["useful_edge"], last.useful_edge, values)
    best = _estimate(fitted["best_rate"], last.best_rate, values)
    return replace(best, value=min(best.value, edge.value), low=min(best.low, edge.value)), edge


def features(n_updates: int, plan: TrainingPlan) -> dict[str, float]:
    """What the change of the rates from a pilot to a training is predicted from.

    Args:
        n_updates: Updates of the runs of the last round.
        plan: The training.
    """
    decays = float(callable(plan.schedule) or plan.schedule != "constant")
    return {"constant": 1.0, "growth": math.log(plan.n_steps / n_updates), "decays": decays}


def furthest(last: Round) -> int:
    """The longest training to which the rates of a round may be extrapolated: the largest factor that was measured."""
    return round(_fitted()["coarse" if last.is_coarse else "fine"]["largest_growth"] * last.n_updates)


def longest_measured() -> int:
    """Updates of the longest trainings of the study."""
    return int(_fitted()["longest"])


def _estimate(fitted: Mapping[str, Any], rate: float, values: Mapping[str, float]) -> Estimate:
    change = sum(weight * values[name] for name, weight in fitted["weights"].items())
    return Estimate(*(rate * math.exp(change + by) for by in (0.0, fitted["low"], fitted["high"])))


@cache
def _fitted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found
