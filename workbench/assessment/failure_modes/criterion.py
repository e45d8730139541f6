"""One measured number against what healthy runs show: a criterion, its reading, and how sure its verdict is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from workbench.assessment.failure_modes.size_ranges import Ranges
from workbench.schema.statuses import CriterionState

if TYPE_CHECKING:
    import xarray as xr

#: Why there is no number where one was looked for.
NOTHING_SEEN = "the model has no such part, or none that can be seen"


#: Shares are kept this far from 0 and 1 when they are compared as log-odds.
EDGE_OF_SHARE = 1e-4


def _log(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > 0, np.log(np.where(x > 0, x, 1.0)), -np.inf)


def _log_odds(x: np.ndarray) -> np.ndarray:
    x = np.clip(x, EDGE_OF_SHARE, 1 - EDGE_OF_SHARE)
    return np.log(x / (1 - x))


#: Scale on which numbers are compared -> to it and back.
SCALES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "linear": (np.asarray, np.asarray),
    "log": (_log, np.exp),
    "share": (_log_odds, lambda x: 1 / (1 + np.exp(-x))),
}


@dataclass(frozen=True)
class HealthyBand:
    """Where healthy values lie.

    Attributes:
        low, high: The band, inclusive; infinite where it is open.
        failing_low, failing_high: Beyond these a value is failing, not just at risk; infinite: it never is.
        n_reference: Healthy recorded models behind the band; 0: it follows from a rule instead.
        why: Where the limits come from, for people.
        sizes: Size ("width", "blocks", "experts") -> the smallest and the largest of those models, beyond which the
            band judges nothing; empty: it holds for every size.
    """

    low: float = -math.inf
    high: float = math.inf
    failing_low: float = -math.inf
    failing_high: float = math.inf
    n_reference: int = 0
    why: str = ""
    sizes: Ranges = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether no finite value lies outside."""
        return self.low == -math.inf and self.high == math.inf

    def open_but(self, bad_side: str) -> HealthyBand:
        """The band with the side open that is not bad."""
        if bad_side == "high":
            return replace(self, low=-math.inf, failing_low=-math.inf)
        return replace(self, high=math.inf, failing_high=math.inf) if bad_side == "low" else self


@dataclass(frozen=True)
class CriterionReading:
    """A number found in the tree.

    Attributes:
        value: In the criterion's unit.
        spread: Standard error of the value over repeated measurements; 0: one measurement, or an exact one.
        selection: Dimension -> index, at which the number stands in the variable.
        layer: Block that it is about; -1: none in particular.
    """

    value: float
    spread: float = 0.0
    selection: Mapping[str, int] = field(default_factory=dict)
    layer: int = -1


@dataclass(frozen=True)
class Criterion:
    """A number that tells whether a failure mode is near.

    Attributes:
        name: Identifies it; names its band in the healthy reference.
        failure_mode: Which one, by its name in `modes.FAILURE_MODES`.
        title: For tables.
        units: Of the value.
        path, variable: Where the number stands in the tree.
        reads: From the tree to the reading, or to the sentence why there is none.
        meaning: What a value outside the band means, for people; one clause.
        band: Where the limits follow from a rule; None: from the healthy reference.
        scale: On which value and limits are compared, of ``SCALES``; the spread of a reading is one of its logarithm
            where this is "log", else of the value itself.
        bad_side: Where no healthy value lies: "low", "high" or "both"; the other side is open.
        acquits: Whether a healthy value says that the failure mode is far; otherwise it only does not say that it is
            near.
    """

    name: str
    failure_mode: str
    title: str
    units: str
    path: str
    variable: str
    reads: Callable[[xr.DataTree], CriterionReading | str]
    meaning: str
    band: HealthyBand | None = None
    scale: str = "linear"
    bad_side: str = "both"
    acquits: bool = True


def judge(reading: CriterionReading, band: HealthyBand, *, scale: str = "linear") -> tuple[CriterionState, float]:
    """State of a reading, and the probability that another measurement would find the same state.

    The value is taken as normal with the reading's spread (of its logarithm, on that scale). A band from n healthy
    models is itself uncertain: the next healthy one lies beyond all of them with probability 2 / (n + 1), one for each
    end (exchangeability), so no verdict that rests on it is surer than the rest.

    Args:
        reading: Value and spread.
        band: The limits.
        scale: "log": compare logarithms, and a value of 0 lies below every limit; otherwise the values themselves.

    Returns:
        The state, which is never "not measured", and a confidence in [0, 1]. A value that is not finite is failing for
        certain.
    """
    from scipy.stats import norm

    if not math.isfinite(reading.value):
        return CriterionState.FAILING, 1.0
    value, limits = reading.value, np.array([band.failing_low, band.low, band.high, band.failing_high])
    spread = reading.spread
    if scale == "log":
        value = math.log(value) if value > 0 else -math.inf
        limits = np.array([-math.inf if limit <= 0 else math.log(limit) for limit in limits])
    limits = np.clip(limits, [limits[0], -math.inf, -math.inf, limits[3]], math.inf)
    if value < limits[0] or value > limits[3]:
        state = CriterionState.FAILING
    elif value < limits[1] or value > limits[2]:
        state = CriterionState.AT_RISK
    else:
        state = CriterionState.HEALTHY
    if spread > 0 and math.isfinite(value):
        below = norm.cdf(limits, loc=value, scale=spread)
        inside, within = below[2] - below[1], below[3] - below[0]
        shares = {
            CriterionState.HEALTHY: inside,
            CriterionState.AT_RISK: within - inside,
            CriterionState.FAILING: 1 - within,
        }
        share = shares[state]
    else:
        share = 1.0
    surest = 1.0 if not band.n_reference else 1 - 2 / (band.n_reference + 1)
    return state, float(np.clip(share, 0.0, 1.0) * surest)


def worst_of(data: xr.Dataset, variable: str, *, largest: bool) -> CriterionReading | str:
    """The largest or smallest entry of a variable, and where it stands.

    Args:
        data: Holds the variable.
        variable: Its name.
        largest: Whether large values are the bad ones.

    Returns:
        The reading; or why there is none, if the variable is missing or nowhere finite.
    """
    if variable not in data:
        return f"{variable.replace('_', ' ')} was not measured"
    values = np.asarray(data[variable].values, dtype=float)
    if not np.isfinite(values).any():
        return NOTHING_SEEN
    flat = int(np.nanargmax(values) if largest else np.nanargmin(values))
    at = (int(i) for i in np.unravel_index(flat, values.shape))
    place = dict(zip(map(str, data[variable].dims), at, strict=True))
    return CriterionReading(float(values.flat[flat]), 0.0, place, place.get("layer", -1))


def number(data: xr.Dataset, variable: str, *, spread: str | None = None) -> CriterionReading | str:
    """A variable without dimensions as a reading; or why there is none, which its attribute ``unseen`` may say.

    What is infinite is a reading, for it was measured; NaN says that there is no such thing.
    """
    if variable not in data:
        return f"{variable.replace('_', ' ')} was not measured"
    if np.isnan(float(data[variable])):
        return data[variable].attrs.get("unseen", NOTHING_SEEN)
    return CriterionReading(
        float(data[variable]), float(data[spread]) if spread is not None and spread in data else 0.0
    )
