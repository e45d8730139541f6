"""From the rates that a pilot found to those for a longer training, with intervals.

Best rate and useful edge fall as runs grow longer, more so where the loss rises slowly beyond the edge than where runs
break. By how much is fitted to pilots of the recorded study of learning rates (``data/fit_rates.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workbench.rates.rate_search import Round

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


def extrapolated(rounds: Sequence[Round], n_steps: int) -> tuple[Estimate, Estimate]:
    """Best rate and useful edge of a training, from the rounds of a pilot.

    The logarithm of each is that of the last round plus a linear function of `features`; the interval has the quantiles
    of what was left of it in the study, with each family predicted from the others.

    Args:
        rounds: The rounds of a pilot, each with an edge.
        n_steps: Updates of the training.
    """
    fitted = _fitted()
    values = features(rounds, n_steps)
    last = rounds[-1]
    return (
        _estimate(fitted["best_rate"], last.best_rate, values),
        _estimate(fitted["useful_edge"], last.useful_edge, values),
    )


def features(rounds: Sequence[Round], n_steps: int) -> dict[str, float]:
    """What the change of rates from the pilot to the training is predicted from.

    Args:
        rounds: As in `extrapolated`.
        n_steps: Updates of the training.
    """
    last = rounds[-1]
    growth = math.log(n_steps / last.n_updates)
    width = math.log(last.useful_edge / last.best_rate)
    return {"constant": 1.0, "growth": growth, "growth times width": growth * width}


def furthest(rounds: Sequence[Round]) -> int:
    """The longest training for which the change of rates was measured with a pilot of this length."""
    return round(_fitted()["largest_growth"] * rounds[-1].n_updates)


def _estimate(fitted: Mapping[str, Any], rate: float, values: Mapping[str, float]) -> Estimate:
    change = sum(weight * values[name] for name, weight in fitted["weights"].items())
    return Estimate(*(rate * math.exp(change + by) for by in (0.0, fitted["low"], fitted["high"])))


@cache
def _fitted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found
