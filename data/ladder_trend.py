"""Trends over a ladder of sizes: a line in the logarithms, its uncertainty, and whether it can be extrapolated.

Beyond the ladder only the explosion edge is predicted. Spectra and flow of untrained models may saturate or change
direction in ways that a ladder does not show: in the recorded study their values at the target lay within the intervals
too rarely.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from workbench.formatting import counted

if TYPE_CHECKING:
    import xarray as xr

EDGE = "explosion_edge"
#: Quantities whose trends held beyond the ladders of the recorded study (`make_scaling.py`).
EXTRAPOLATED = (EDGE,)
#: Spectral quantities, as means over layers, with scale and bounds.
SPECTRAL = {
    "near_unit_mass": ("linear", (0.0, 1.0)),
    "expansive_mass": ("linear", (0.0, 1.0)),
    "contractive_mass": ("linear", (0.0, 1.0)),
    "spectral_radius": ("log", (0.0, math.inf)),
    "nonlinearity_ratio": ("log", (0.0, math.inf)),
}
#: Scalars of `workbench.flow.summarize`, with scale and bounds; some models lack some of them.
FLOW = {
    "total_signal_gain": ("log", (0.0, math.inf)),
    "total_gradient_gain": ("log", (0.0, math.inf)),
    "branch_ratio_mean": ("log", (0.0, math.inf)),
    "token_cosine_end": ("linear", (-1.0, 1.0)),
    "effective_rank_end": ("linear", (0.0, 1.0)),
    "attention_entropy_share_smallest": ("linear", (0.0, 1.0)),
}

#: Attributes of the variables of the dataset.
ATTRS = {
    "n_weights": {"long_name": "number of parameters", "units": "1"},
    "width": {"long_name": "width of the residual stream", "units": "1"},
    "depth": {"long_name": "number of residual blocks", "units": "1"},
    "step": {"long_name": "number of updates", "units": "1"},
    "measured": {"long_name": "value of each quantity for each rung and seed", "units": "1"},
    "initial_size": {"long_name": "initial RMS of the output of a layer group", "units": "1"},
    "update_size": {"long_name": "RMS of the change of the output of a layer group", "units": "1"},
    "update_size_of_seed": {"long_name": "RMS of the change of the output of a layer group, by seed", "units": "1"},
    "coordinate_exponent": {"long_name": "exponent of the width in the change of the output", "units": "1"},
    "initial_exponent": {"long_name": "exponent of the width in the initial output", "units": "1"},
    EDGE: {
        "long_name": "explosion edge",
        "units": "1",
        "meaning": "learning rate at which runs diverge, geometric mean over seeds",
    },
    "edge_low": {"long_name": "largest rate without divergence for every seed", "units": "1"},
    "edge_high": {"long_name": "smallest rate with divergence for every seed", "units": "1"},
    "slope": {"long_name": "exponent of the width, or change per factor e in width", "units": "1"},
    "depth_slope": {"long_name": "exponent of the depth, or change per factor e in depth", "units": "1"},
    "curve": {"long_name": "trend from the smallest rung to the target", "units": "1"},
    "at_target": {"long_name": "value predicted at the target size", "units": "1"},
    "measured_at_target": {"long_name": "value measured at the target size, mean over seeds", "units": "1"},
    "is_supported": {"long_name": "whether the ladder supports the value at the target"},
}

_N_CURVE = 13
_ENDS = ("", "_low", "_high")
#: Variables of the dataset that describe the trend of each quantity.
_COLUMNS = (
    "scale", *(f"{name}{end}" for name in ("slope", "depth_slope", "at_target") for end in _ENDS), "is_supported",
    "reason",
)  # fmt: skip
#: Minimum number of widths or depths for an extrapolation.
N_SIZES = 3
#: A prediction is too uncertain if the ends of its interval differ by more than this factor (of a fraction: by more
#: than this difference).
_MAX_FACTOR, _MAX_DIFFERENCE = 10.0, 0.5
#: A bend counts if it is significant at this level and changes the value at the target by more than this factor (on a
#: linear scale: by more than this difference).
_BEND_LEVEL, _BEND_FACTOR, _BEND_DIFFERENCE = 0.05, 2.0, 0.2
_MIN_SPREAD = 1e-9


@dataclass(frozen=True)
class TrendLine:
    """The slope of a straight line through values against one coordinate.

    Attributes:
        slope: The slope; NaN if it cannot be fitted.
        slope_low: Lower end of its interval; NaN without degrees of freedom.
        slope_high: Upper end of its interval; NaN without degrees of freedom.
    """

    slope: float
    slope_low: float
    slope_high: float


@dataclass(frozen=True)
class Trend:
    """The dependence of a quantity on the size, and its prediction at the target.

    Attributes:
        scale: ``"log"`` if the logarithm of the quantity is linear in the logarithms of width and depth, so that the
            slopes are exponents; ``"linear"`` if the quantity itself is, so that the slopes are its change per factor
            e.
        width: Slope against the width.
        depth: Slope against the depth.
        at_target: Value at the target size; NaN if there is no prediction.
        at_target_low: Lower end of the prediction interval of a mean over the number of seeds of a rung.
        at_target_high: Upper end of the prediction interval.
        is_supported: Whether the ladder supports the value at the target.
        reason: Why it does not; empty if it does.
    """

    scale: str
    width: TrendLine
    depth: TrendLine
    at_target: float
    at_target_low: float
    at_target_high: float
    is_supported: bool
    reason: str


_NO_LINE = TrendLine(math.nan, math.nan, math.nan)


def line_through(x: np.ndarray, values: np.ndarray, *, level: float = 0.95) -> TrendLine:
    """Fit the least-squares line through values of several seeds, with a t-interval of its slope.

    Args:
        x: Coordinate of each rung, shape (rung,).
        values: Values, shape (rung, seed); NaN values are ignored.
        level: float of the interval.
    """
    fit = _Fit.of(np.asarray(x, float)[:, None], np.asarray(values, float))
    return _NO_LINE if fit is None or not np.ptp(fit.x[:, 1]) else fit.line(1, level)


def fit_trend(
    values: np.ndarray,
    widths: np.ndarray,
    depths: np.ndarray,
    target: tuple[int, int],
    *,
    scale: str = "log",
    bounds: tuple[float, float] = (-math.inf, math.inf),
    largest_reach: float = 4.0,
    level: float = 0.95,
) -> Trend:
    """Fit the trend of a quantity over a ladder and extrapolate it to the target size.

    The trend is fitted by least squares to all rungs and seeds. The interval at the target is a prediction interval
    from Student's t distribution, with the scatter of seeds and rungs about the line. If the rungs are significantly
    curved, it is extended to the value of a parabola through them. Width and depth are assumed to act independently.

    Args:
        values: Values, shape (rung, seed). NaN if not measured; infinite or, with ``scale="log"``, not positive if the
            value lies outside the range that was tried, in which case the trend is not supported.
        widths: Width of each rung.
        depths: Depth of each rung.
        target: Target width and depth.
        scale: As in `Trend`.
        bounds: Bounds of the quantity, to which the value at the target is clipped.
        largest_reach: Largest factor between the target and the largest rung, in width and in depth, for a supported
            prediction; 1 allows none beyond the ladder.
        level: float of the intervals.
    """
    values = np.asarray(values, float)
    is_censored = _is_censored(values, scale)
    sizes = np.log(np.column_stack([widths, depths]).astype(float))
    goal = np.log(np.asarray(target, float))
    y = _uncensored(values, scale)
    fit = _Fit.of(sizes, y)
    if fit is None:
        problem = "lies outside the range that was tried" if is_censored.any() else "was not measured"
        return Trend(scale, _NO_LINE, _NO_LINE, math.nan, math.nan, math.nan, False, f"It {problem} on most rungs.")
    lines = [fit.line(column, level) if np.ptp(fit.x[:, column]) else _NO_LINE for column in (1, 2)]
    middle, _ = fit.at(goal, level, n_seeds=values.shape[1])
    along = along_trend(values, widths, depths, np.array([target]), scale=scale, bounds=bounds, level=level)
    at_target, low, high = along[:, 0].tolist()
    reason = (
        _censored(is_censored)
        or _out_of_reach(np.exp(sizes), target, largest_reach)
        or _bends(_parabolas(sizes, y, goal), middle, scale)
        or _uncertain(low, high, scale, level, is_fraction=bounds == (0.0, 1.0))
    )
    return Trend(scale, lines[0], lines[1], at_target, low, high, not reason, reason)


def along_trend(
    values: np.ndarray,
    widths: np.ndarray,
    depths: np.ndarray,
    goals: np.ndarray,
    *,
    scale: str = "log",
    bounds: tuple[float, float] = (-math.inf, math.inf),
    level: float = 0.95,
) -> np.ndarray:
    """Evaluate the trend at several sizes, whether or not it is supported there.

    Args:
        values: Values as in `fit_trend`.
        widths: Width of each rung.
        depths: Depth of each rung.
        goals: Widths and depths at which the trend is evaluated, shape (goal, 2).
        scale: As in `Trend`.
        bounds: Bounds of the quantity.
        level: float of the intervals.

    Returns:
        Value, lower and upper end of its prediction interval, shape (3, goal); NaN if there is no trend.
    """
    sizes, y = np.log(np.column_stack([widths, depths]).astype(float)), _uncensored(values, scale)
    fit = _Fit.of(sizes, y)
    if fit is None:
        return np.full((3, len(goals)), np.nan)
    ends = np.empty((3, len(goals)))
    for i, goal in enumerate(np.log(np.asarray(goals, float))):
        middle, half = fit.at(goal, level, n_seeds=y.shape[1])
        others = list(_parabolas(sizes, y, goal).values())
        ends[:, i] = middle, min([middle - half, *others]), max([middle + half, *others])
    with np.errstate(over="ignore"):
        return np.clip(np.exp(ends) if scale == "log" else ends, *bounds)


@dataclass(frozen=True)
class _Fit:
    """A least-squares fit; the coefficients of constant columns are 0.

    Attributes:
        x: Design matrix, shape (point, 1 + column); its first column is 1.
        coefficients: Shape (1 + column,).
        covariance: Covariance of the coefficients, in units of the variance of a point.
        variance: Variance of a point; NaN without degrees of freedom.
        n_free: Degrees of freedom.
    """

    x: np.ndarray
    coefficients: np.ndarray
    covariance: np.ndarray
    variance: float
    n_free: int

    @classmethod
    def of(cls, sizes: np.ndarray, values: np.ndarray) -> _Fit | None:
        """Fit values (rung, seed) at sizes (rung, column); return None if fewer than two rungs have values."""
        values = values if values.ndim == 2 else values[:, None]
        is_there = np.isfinite(values)
        rows, _ = np.nonzero(is_there)
        if len(np.unique(rows)) < 2:
            return None
        x = np.column_stack([np.ones(len(rows)), sizes[rows]])
        used = [0, *(i for i in range(1, x.shape[1]) if np.ptp(x[:, i]) > _MIN_SPREAD)]
        inverse = np.linalg.pinv(x[:, used].T @ x[:, used])
        y = values[is_there]
        found = inverse @ x[:, used].T @ y
        n_free = len(y) - len(used)
        residual = y - x[:, used] @ found
        coefficients, covariance = np.zeros(x.shape[1]), np.zeros((x.shape[1], x.shape[1]))
        coefficients[used] = found
        covariance[np.ix_(used, used)] = inverse
        return cls(x, coefficients, covariance, float(residual @ residual / n_free) if n_free else math.nan, n_free)

    def line(self, column: int, level: float) -> TrendLine:
        """Return the line along one column."""
        slope = float(self.coefficients[column])
        half = self._quantile(level) * math.sqrt(self.variance * self.covariance[column, column])
        return TrendLine(slope, slope - half, slope + half)

    def at(self, sizes: np.ndarray, level: float, n_seeds: int) -> tuple[float, float]:
        """Return the value at a size, and half the width of its prediction interval for a mean over seeds."""
        x = np.concatenate([[1.0], sizes])
        spread = math.sqrt(self.variance * (1 / n_seeds + x @ self.covariance @ x))
        return float(x @ self.coefficients), self._quantile(level) * spread

    def p_value(self, column: int) -> float:
        """Return the p-value of the hypothesis that a coefficient is 0."""
        error = math.sqrt(self.variance * self.covariance[column, column])
        if not error > 0:
            return math.nan if math.isnan(error) else 0.0
        return float(2 * stats.t.sf(abs(self.coefficients[column]) / error, self.n_free))

    def _quantile(self, level: float) -> float:
        return float(stats.t.ppf((1 + level) / 2, self.n_free)) if self.n_free else math.nan


def _is_censored(values: np.ndarray, scale: str) -> np.ndarray:
    """Return which values are only known to lie outside the range that was tried."""
    values = np.asarray(values, float)
    return np.isinf(values) | ((values <= 0) if scale == "log" else False)


def _uncensored(values: np.ndarray, scale: str) -> np.ndarray:
    """Return the values, or their logarithms; NaN where they are unknown."""
    y = np.where(_is_censored(values, scale), np.nan, np.asarray(values, float))
    return np.log(y) if scale == "log" else y


def _censored(is_censored: np.ndarray) -> str:
    """Return a sentence if some values lie outside the range that was tried; empty otherwise."""
    n = int(is_censored.any(1).sum())
    return f"It lies outside the range that was tried on {n} of {len(is_censored)} rungs." if n else ""


def _out_of_reach(sizes: np.ndarray, target: tuple[int, int], largest_reach: float) -> str:
    """Return a sentence if the target is too far beyond the ladder; empty otherwise."""
    for name, column, goal in zip(("width", "depth"), sizes.T, target, strict=True):
        known = np.unique(column.round(6))
        if np.isclose(known, goal).any():
            continue
        if len(known) < N_SIZES:
            return (
                f"The ladder has {counted(len(known), name)}, but a prediction for another {name} needs at least "
                f"{N_SIZES}."
            )
        reach = max(goal / known[-1], known[0] / goal)
        if reach > largest_reach * (1 + 1e-9) and largest_reach <= 1:
            return (
                f"The target {name} lies beyond the ladder, where trends of this quantity did not hold; measure an "
                "untrained model of that size."
            )
        if reach > largest_reach * (1 + 1e-9):
            return (
                f"The target {name} differs from that of the nearest rung by a factor of {reach:.3g}, but predictions "
                f"are supported only up to a factor of {largest_reach:g}."
            )
    return ""


def _parabolas(sizes: np.ndarray, values: np.ndarray, goal: np.ndarray) -> dict[str, float]:
    """Return the value at a size of parabolas in width and depth, by name, where the curvature is significant."""
    found = {}
    for i, name in enumerate(("width", "depth")[: sizes.shape[1]]):
        if len(np.unique(sizes[:, i].round(6))) < N_SIZES:
            continue
        center = sizes[:, i].mean()
        curved = _Fit.of(np.column_stack([sizes, (sizes[:, i] - center) ** 2]), values)
        if curved is not None and curved.n_free and curved.p_value(sizes.shape[1] + 1) < _BEND_LEVEL:
            found[name], _ = curved.at(np.append(goal, (goal[i] - center) ** 2), 0.95, 1)
    return found


def _bends(parabolas: dict[str, float], middle: float, scale: str) -> str:
    """Return a sentence if a parabola yields a very different value; empty otherwise."""
    limit = math.log(_BEND_FACTOR) if scale == "log" else _BEND_DIFFERENCE
    for name, other in parabolas.items():
        if abs(other - middle) > limit:
            change = abs(other - middle)
            size = f"a factor of {math.exp(change):.3g}" if scale == "log" else f"{change:.2g}"
            return f"The trend bends with the {name}, which would change the value at the target by {size}."
    return ""


def _uncertain(low: float, high: float, scale: str, level: float, *, is_fraction: bool) -> str:
    """Return a sentence if the interval at the target is too wide or unknown; empty otherwise."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "There are too few runs to estimate the uncertainty of the trend; add rungs or seeds."
    if scale == "log" and not high <= _MAX_FACTOR * low:
        return f"The {level:.0%} interval at the target spans a factor of {high / low:.3g}; add rungs or seeds."
    if is_fraction and high - low > _MAX_DIFFERENCE:
        return f"The {level:.0%} interval at the target has a width of {high - low:.2g}; add rungs or seeds."
    return ""


def rule_of(name: str) -> tuple[str, tuple[float, float]]:
    """Return scale and bounds of a quantity."""
    return {**SPECTRAL, **FLOW}.get(name, ("log", (0.0, math.inf)))


def extrapolated(
    study: xr.Dataset, target: tuple[int, int], *, largest_reach: float = 4.0, level: float = 0.95
) -> xr.Dataset:
    """Extrapolate the trends of a study to another size without new measurements.

    Args:
        study: Study from `scaling_study`.
        target: Target width and depth.
        largest_reach: Largest factor of extrapolation for the explosion edge; see `fit_trend`.
        level: Level of the intervals.

    Returns:
        Dataset with dimension ``quantity``, as in `scaling_study`, and the trend from the smallest rung to the target,
        ``curve`` with ``_low`` and ``_high`` (quantity, curve_point) at ``curve_width`` and ``curve_depth``. Points
        with ``curve_along`` "width" lead to the target width at the smallest depth, those with "depth" to the target
        depth at the largest width.
    """
    import xarray as xr

    goals, along = _path(study["width"].values, study["depth"].values, target)
    widths, depths = study["width"].values, study["depth"].values
    columns, curves = [], []
    for name in study["quantity"].values.tolist():
        scale, bounds = rule_of(name)
        values = study["measured"].sel(quantity=name).values
        reach = largest_reach if name in EXTRAPOLATED else 1.0
        trend = fit_trend(values, widths, depths, target, largest_reach=reach, scale=scale, bounds=bounds, level=level)
        column: dict[str, Any] = asdict(trend)
        for key, line in (("slope", trend.width), ("depth_slope", trend.depth)):
            column |= {f"{key}{end}": value for end, value in zip(_ENDS, asdict(line).values(), strict=True)}
        columns.append(column)
        curves.append(along_trend(values, widths, depths, goals, scale=scale, bounds=bounds, level=level))
    found: dict[str, Any] = {key: ("quantity", [column[key] for column in columns]) for key in _COLUMNS}
    for i, end in enumerate(_ENDS):
        found[f"curve{end}"] = (("quantity", "curve_point"), np.array([curve[i] for curve in curves], dtype=np.float32))
    coords = {
        "quantity": study["quantity"].values,
        "curve_width": ("curve_point", goals[:, 0]),
        "curve_depth": ("curve_point", goals[:, 1]),
        "curve_along": ("curve_point", along),
    }
    return xr.Dataset(found, coords=coords)


def _path(widths: np.ndarray, depths: np.ndarray, target: tuple[int, int]) -> tuple[np.ndarray, list[str]]:
    """Return sizes along the width at the smallest depth, then along the depth at the largest width.

    A part is omitted if the ladder has only one width, or only one depth.
    """
    shallow, wide = depths.min(), widths.max()
    goals, along = [], []
    if len(np.unique(widths)) > 1:
        steps = np.geomspace(widths.min(), max(target[0], wide), _N_CURVE)
        goals += [(width, shallow) for width in steps]
        along += ["width"] * _N_CURVE
    if len(np.unique(depths)) > 1:
        steps = np.geomspace(shallow, max(target[1], depths.max()), _N_CURVE)
        goals += [(wide, depth) for depth in steps]
        along += ["depth"] * _N_CURVE
    return np.array(goals, float).reshape(-1, 2), along
