"""Extrapolation of learning rates from a pilot to a longer training, with intervals.

Best rate and useful edge decrease with the length of a run; the amount is fitted to pilots of the recorded study of
learning rates (``data/fit_rates.py``).
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
from workbench.option_checks import PositiveFloat
from workbench.rates.rate_search import Round
from workbench.training.training_plan import TrainingPlan

#: Rate of a training -> the rate of a round of the pilot from which it is extrapolated.
SOURCES = {"slow_edge": "best_rate", "best_rate": "best_rate", "useful_edge": "useful_edge"}
_FILE = Path(__file__).parent / "shipped" / "drift.json"


@dataclass(frozen=True)
class Estimate:
    """An estimated learning rate and an interval that contains the true value in about 80 % of cases; NaN if unknown.

    Attributes:
        value: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Example:
        >>> import workbench as wb
        >>> print(wb.rates.Estimate(0.004, 0.003, 0.006))
        0.004 (0.003-0.006)

    See Also:
        `workbench.find_rate`: Returns estimates.
    """

    value: float
    low: float
    high: float

    def times(self, factor: PositiveFloat, *, error: PositiveFloat = 1.0) -> Estimate:
        """Return the estimate multiplied by a factor.

        Args:
            factor: The factor.
            error: Uncertainty of the factor: the interval is widened by this factor on either side.
        """
        return Estimate(self.value * factor, self.low * factor / error, self.high * factor * error)

    def at_most(self, limit: float) -> Estimate:
        """Return the estimate with its value and lower end limited from above."""
        return Estimate(min(self.value, limit), min(self.low, limit), self.high)

    def at_least(self, limit: float) -> Estimate:
        """Return the estimate with its value and both ends limited from below."""
        return Estimate(max(self.value, limit), max(self.low, limit), max(self.high, limit))

    def probability_below(self, rate: float) -> float:
        """Return the probability that the estimated rate lies below a given one.

        On either side of the value the logarithm of the rate is normally distributed, with the end of the interval as
        its 10 % or 90 % quantile.

        Args:
            rate: A learning rate.
        """
        distance = math.log(rate / self.value)
        reach = math.log(self.low / self.value) if distance < 0 else math.log(self.high / self.value)
        return NormalDist().cdf(distance / abs(reach) * NormalDist().inv_cdf(0.9)) if reach else float(distance >= 0)

    def __str__(self) -> str:
        return f"{rounded(self.value)} ({rounded(self.low)}-{rounded(self.high)})"


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def extrapolated(last: Round, plan: TrainingPlan, *, of_loop: bool = False) -> dict[str, Estimate]:
    """Extrapolate slow edge, best rate and useful edge of a training, by name, from the last round of a pilot.

    The logarithm of each rate is the logarithm of the round's rate in `SOURCES` plus a linear function of `features`.
    The interval is given by quantiles of the residuals in the study, with each family predicted from the others; it is
    wider after a first round.

    Args:
        last: The last round with a useful edge.
        plan: Plan of the training.
        of_loop: Whether the pilot ran a custom training loop, whose losses are training losses.
    """
    fitted = _fitted_to(last, of_loop)
    values = features(last.n_updates, last.best_rate, last.useful_edge, plan)
    slow, best, edge = (_estimate(fitted[name], getattr(last, source), values) for name, source in SOURCES.items())
    best = best.at_most(edge.value)
    return {"slow_edge": slow.at_most(best.value), "best_rate": best, "useful_edge": edge}


def features(n_updates: int, best_rate: float, useful_edge: float, plan: TrainingPlan) -> dict[str, float]:
    """Return the features from which the change of the rates between pilot and training is predicted.

    Args:
        n_updates: Updates of the runs of the last round.
        best_rate: Best rate of that round.
        useful_edge: Useful edge of that round.
        plan: Plan of the training.
    """
    growth = math.log(plan.n_steps / n_updates)
    width = math.log(useful_edge / best_rate)
    return {"constant": 1.0, "growth": growth, "decays": float(decays(plan)), "width": width}


def decays(plan: TrainingPlan) -> bool:
    """Return whether the learning rate of a training changes after the warm-up."""
    return callable(plan.schedule) or plan.schedule != "constant"


def furthest(last: Round, *, of_loop: bool = False) -> int:
    """Return the largest number of updates to which the rates of a round can be extrapolated."""
    return round(_fitted_to(last, of_loop)["largest_growth"] * last.n_updates)


def longest_measured() -> int:
    """Return the number of updates of the longest runs of the study."""
    return int(_fitted()["longest"])


def _estimate(fitted: Mapping[str, Any], rate: float, values: Mapping[str, float]) -> Estimate:
    change = sum(weight * values[name] for name, weight in fitted["weights"].items())
    return Estimate(*(rate * math.exp(change + by) for by in (0.0, fitted["low"], fitted["high"])))


def _fitted_to(last: Round, of_loop: bool) -> dict[str, Any]:
    """Return the coefficients that were fitted to rounds of the same kind."""
    found: dict[str, Any] = _fitted()["loop" if of_loop else "model"]["coarse" if last.is_coarse else "fine"]
    return found


@cache
def _fitted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found
