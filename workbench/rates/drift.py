"""From the rates that a pilot found to those for a longer training, with intervals.

Best rate and useful edge fall as runs grow longer; by how much is fitted to pilots of the recorded study of learning
rates (``data/fit_rates.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

from workbench.formatting import rounded
from workbench.rates.rate_search import Round
from workbench.training.training_plan import TrainingPlan

#: Rate of a training -> the rate of a pilot's round that it is extrapolated from.
SOURCES = {"slow_edge": "best_rate", "best_rate": "best_rate", "useful_edge": "useful_edge"}
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

    def at_most(self, limit: float) -> Estimate:
        """The rate and the lower end, no larger than a limit."""
        return Estimate(min(self.value, limit), min(self.low, limit), self.high)

    def at_least(self, limit: float) -> Estimate:
        """The rate and both ends, no smaller than a limit."""
        return Estimate(max(self.value, limit), max(self.low, limit), max(self.high, limit))

    def chance_below(self, rate: float) -> float:
        """Probability that what is estimated lies below a rate: normal in the logarithm on either side of the value."""
        distance = math.log(rate / self.value)
        reach = math.log(self.low / self.value) if distance < 0 else math.log(self.high / self.value)
        return NormalDist().cdf(distance / abs(reach) * NormalDist().inv_cdf(0.9)) if reach else float(distance >= 0)

    def __str__(self) -> str:
        return f"{rounded(self.value)} ({rounded(self.low)}-{rounded(self.high)})"


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def extrapolated(last: Round, plan: TrainingPlan, *, of_loop: bool = False) -> dict[str, Estimate]:
    """Slow edge, best rate and useful edge of a training, by name, from the last round of a pilot.

    The logarithm of each is that of the round's rate in `SOURCES` plus a linear function of `features`. The interval
    has the quantiles of what is left of it in the study, each family being predicted from the others; after a first
    round it is wider.

    Args:
        last: The last round with an edge.
        plan: The training.
        of_loop: Whether the pilot ran a loop of the user's own, whose losses are those of training.
    """
    fitted = _fitted_to(last, of_loop)
    values = features(last.n_updates, last.best_rate, last.useful_edge, plan)
    slow, best, edge = (_estimate(fitted[name], getattr(last, source), values) for name, source in SOURCES.items())
    best = best.at_most(edge.value)
    return {"slow_edge": slow.at_most(best.value), "best_rate": best, "useful_edge": edge}


def features(n_updates: int, best_rate: float, useful_edge: float, plan: TrainingPlan) -> dict[str, float]:
    """What the change of the rates from a pilot to a training is predicted from.

    Args:
        n_updates: Updates of the runs of the last round.
        best_rate: Best rate of that round.
        useful_edge: Its useful edge.
        plan: The training.
    """
    growth = math.log(plan.n_steps / n_updates)
    width = math.log(useful_edge / best_rate)
    return {"constant": 1.0, "growth": growth, "decays": float(decays(plan)), "width": width}


def decays(plan: TrainingPlan) -> bool:
    """Whether the rate of a training changes after its warm-up."""
    return callable(plan.schedule) or plan.schedule != "constant"


def furthest(last: Round, *, of_loop: bool = False) -> int:
    """The longest training to which the rates of a round may be extrapolated: the largest factor that was measured."""
    return round(_fitted_to(last, of_loop)["largest_growth"] * last.n_updates)


def longest_measured() -> int:
    """Updates of the longest trainings of the study."""
    return int(_fitted()["longest"])


def _estimate(fitted: Mapping[str, Any], rate: float, values: Mapping[str, float]) -> Estimate:
    change = sum(weight * values[name] for name, weight in fitted["weights"].items())
    return Estimate(*(rate * math.exp(change + by) for by in (0.0, fitted["low"], fitted["high"])))


def _fitted_to(last: Round, of_loop: bool) -> dict[str, Any]:
    """What was fitted to rounds of the same kind."""
    found: dict[str, Any] = _fitted()["loop" if of_loop else "model"]["coarse" if last.is_coarse else "fine"]
    return found


@cache
def _fitted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found
