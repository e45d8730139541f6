"""A criterion: one measured number, the band of healthy models, and the confidence of its state."""

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

#: Why a number could not be measured.
NOTHING_SEEN = "the model has no such part, or none that can be seen"


#: Shares are kept this far from 0 and 1 when they are compared as log-odds.
EDGE_OF_SHARE = 1e-4


def _log(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > 0, np.log(np.where(x > 0, x, 1.0)), -np.inf)


def _log_odds(x: np.ndarray) -> np.ndarray:
    x = np.clip(x, EDGE_OF_SHARE, 1 - EDGE_OF_SHARE)
    return np.log(x / (1 - x))


#: Scale on which numbers are compared -> the functions to it and back.
SCALES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "linear": (np.asarray, np.asarray),
    "log": (_log, np.exp),
    "share": (_log_odds, lambda x: 1 / (1 + np.exp(-x))),
}


@dataclass(frozen=True)
class HealthyBand:
    """The range of healthy values.

    Attributes:
        low, high: The band, inclusive; infinite where it is open.
        failing_low, failing_high: Beyond these a value is failing, not just at risk; infinite: it never is.
        n_reference: Number of healthy recorded models behind the band; 0: it follows from a rule instead.
        why: Origin of the limits, shown to the user.
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
        """The band with its other side open."""
        if bad_side == "high":
            return replace(self, low=-math.inf, failing_low=-math.inf)
        return replace(self, high=math.inf, failing_high=math.inf) if bad_side == "low" else self


@dataclass(frozen=True)
class CriterionReading:
    """A number found in the tree.

    Attributes:
        value: In the criterion's unit.
        spread: Standard error of the value over repeated measurements; 0: one measurement, or an exact one.
        selection: Dimension -> index of the number in the variable.
        layer: Block of the number; -1: none in particular.
        only_flags: Why a healthy value is no evidence of health; empty: it is evidence.
    """

    value: float
    spread: float = 0.0
    selection: Mapping[str, int] = field(default_factory=dict)
    layer: int = -1
    only_flags: str = ""


@dataclass(frozen=True)
class Criterion:
    """A number that indicates a failure mode.

    Attributes:
        name: Its id, also the name of its band in the healthy reference.
        failure_mode: The failure mode, by its name in `modes.FAILURE_MODES`.
        title: Title in tables.
        units: Units of the value.
        path, variable: Where the number is in the tree.
        reads: Function of the tree that returns the reading, or a sentence why there is none.
        meaning: Meaning of a value outside the band, shown to the user; one clause.
        band: The band, where the limits follow from a rule; None: that of the healthy reference.
        scale: Scale of ``SCALES`` on which value and limits are compared; the spread of a reading is that of its
            logarithm where this is "log", else of the value itself.
        bad_side: Side without healthy values: "low", "high" or "both"; the other side is open.
        acquits: Whether a healthy value excludes the failure mode; otherwise it is no evidence either way.
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
    """Judge a reading: its state, and the probability that another measurement would find the same state.

    The value is assumed normal with the reading's spread (of its logarithm, on that scale). A band from n healthy
    models is itself uncertain: the next healthy one lies beyond all of them with probability 2 / (n + 1), half of it at
    each end (exchangeability), so no confidence based on the band exceeds 1 minus this.

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
    """Find the largest or smallest entry of a variable, and its index.

    Args:
        data: Dataset with the variable.
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
    """A variable without dimensions as a reading; or why there is none, from its attribute ``unseen`` if it has one.

    An infinite value is a reading, because it was measured; NaN means that there is none.
    """
    if variable not in data:
        return f"{variable.replace('_', ' ')} was not measured"
    if np.isnan(float(data[variable])):
        return data[variable].attrs.get("unseen", NOTHING_SEEN)
    return CriterionReading(
        float(data[variable]), float(data[spread]) if spread is not None and spread in data else 0.0
    )
