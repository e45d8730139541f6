"""Censored regression of an edge, a learning rate at which the outcome of training changes, on features of designs.

The logarithm of an edge is normally distributed around a linear function of the features. For each design it is known
to lie between two logarithms, either of which may be infinite (a censored edge): most models with normalization do not
diverge at any rate that was tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.errors import OptionError

Floats = NDArray[np.float64]

#: Candidates for the penalty of the coefficients of standardized features.
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
#: Bounds of the standard deviation of the logarithm of an edge: 5 %, and a factor of e^20.
_MIN_DEVIATION, _MAX_DEVIATION = 0.05, 20.0


@dataclass(frozen=True)
class Edges:
    """Edges of designs, each known to lie between two natural logarithms of learning rates.

    Attributes:
        low: Lower ends, shape (design,); minus infinity if unknown.
        high: Upper ends, shape (design,), no smaller than ``low``; infinity if unknown. If both ends are equal, the
            edge is known exactly.

    Raises:
        OptionError: If an end is NaN, a lower end is above the upper one, or an edge is infinite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> edges = wb.risk.Edges(np.log([0.01, 0.1]), np.array([np.log(0.01), np.inf]))  # at 0.01; above 0.1
        >>> len(edges.low)
        2

    See Also:
        `workbench.risk.fit`: Fits a risk model to edges.
    """

    low: Floats
    high: Floats

    def __post_init__(self) -> None:
        if np.shape(self.low) != np.shape(self.high) or np.ndim(self.low) != 1:
            raise OptionError(
                f"high must have the shape of low, (design,), got {np.shape(self.high)} and {np.shape(self.low)}."
            )
        is_valid = (self.low <= self.high) & (self.low < np.inf) & (self.high > -np.inf)
        if not is_valid.all():
            i = int(np.argmin(is_valid))
            raise OptionError(
                f"low[{i}] must not exceed high[{i}], and an edge must not be infinite, got {self.low[i]:g} and "
                f"{self.high[i]:g}."
            )

    def __getitem__(self, index: np.ndarray) -> Edges:
        """Return the edges of selected designs."""
        return Edges(self.low[index], self.high[index])


@dataclass(frozen=True)
class EdgeFit:
    """A fitted regression of the natural logarithm of an edge.

    Attributes:
        center: Mean of each feature, shape (feature,).
        scale: Standard deviation of each feature, shape (feature,); 1 for a constant feature.
        intercept: Mean of the logarithm of the edge if all features have their mean.
        coefficients: Change of that mean for one standard deviation of each feature, shape (feature,).
    """

    center: Floats
    scale: Floats
    intercept: float
    coefficients: Floats

    def mean(self, features: np.ndarray) -> Floats:
        """Return the mean of the logarithm of the edge of designs, shape (design,)."""
        found: Floats = self.intercept + ((features - self.center) / self.scale) @ self.coefficients
        return found


def fit_edges(features: np.ndarray, edges: Edges, *, penalty: float, weight: np.ndarray | None = None) -> EdgeFit:
    """Fit the regression by penalized maximum likelihood.

    Args:
        features: Shape (design, feature).
        edges: Edges of the designs.
        penalty: Strength of the quadratic penalty of the coefficients of standardized features.
        weight: Sample weight of each design, shape (design,); None weights all equally.
    """
    from scipy.optimize import minimize

    weight = np.ones(len(features)) if weight is None else np.asarray(weight, dtype=float)
    center = np.average(features, axis=0, weights=weight)
    scale = np.sqrt(np.average((features - center) ** 2, axis=0, weights=weight))
    scale = np.where(scale > 1e-9 * np.maximum(np.abs(center), 1), scale, 1.0)
    inputs = (features - center) / scale
    start = np.concatenate([[np.average(_middle(edges), weights=weight)], np.zeros(inputs.shape[1]), [0.0]])

    def loss(values: np.ndarray) -> tuple[float, Floats]:
        mean, spread = values[0] + inputs @ values[1:-1], np.exp(values[-1])
        terms, by_mean, by_deviation = _with_derivatives(mean, _MIN_DEVIATION + spread, edges)
        by_mean, by_deviation = weight * by_mean, weight * by_deviation
        total = -(weight * terms).sum() + 0.5 * penalty * (values[1:-1] ** 2).sum()
        gradient = [-by_mean.sum(), *(penalty * values[1:-1] - by_mean @ inputs), -by_deviation.sum() * spread]
        return float(total), np.array(gradient)

    found = minimize(loss, start, jac=True, method="L-BFGS-B").x
    return EdgeFit(center, scale, float(found[0]), found[1:-1])


def log_likelihood(mean: np.ndarray, deviation: float, edges: Edges) -> Floats:
    """Return the log-likelihood of each edge: of its interval, or of its value if it is known exactly.

    Args:
        mean: Means of the logarithms of the edges, shape (design,).
        deviation: Standard deviation around the means.
        edges: The edges.

    Returns:
        Shape (design,); nat.
    """
    return _with_derivatives(mean, deviation, edges)[0]


def _with_derivatives(mean: np.ndarray, deviation: float, edges: Edges) -> tuple[Floats, Floats, Floats]:
    """Return the log-likelihood of each edge, and its derivatives with respect to the mean and the deviation."""
    from scipy.special import log_ndtr

    low, high = (edges.low - mean) / deviation, (edges.high - mean) / deviation
    is_exact = edges.low == edges.high
    # The mirrored interval has the same probability, and is computed precisely if both ends lie far above the mean.
    is_above = low > 0
    lower, upper = np.where(is_above, -high, low), np.where(is_above, -low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = log_ndtr(upper) + np.log1p(-np.exp(log_ndtr(lower) - log_ndtr(upper)))
        terms = np.where(is_exact, _log_density(high) - np.log(deviation), between)
        at_low, at_high = (np.exp(_log_density(end) - between) for end in (low, high))
        by_mean = np.where(is_exact, high, at_low - at_high) / deviation
        low, high = (np.where(np.isfinite(end), end, 0.0) for end in (low, high))  # The density there is 0.
        by_deviation = np.where(is_exact, high**2 - 1, low * at_low - high * at_high) / deviation
    return terms, by_mean, by_deviation


def _log_density(values: np.ndarray) -> Floats:
    """Return the logarithm of the density of the standard normal distribution."""
    return np.asarray(-0.5 * values**2 - 0.5 * np.log(2 * np.pi))


def out_of_group(features: np.ndarray, edges: Edges, groups: np.ndarray, *, penalty: float) -> tuple[Floats, float]:
    """Predict the edges of each group by a regression on the other groups, and estimate the deviation.

    Args:
        features: Shape (design, feature).
        edges: Edges of the designs.
        groups: Group of each design, shape (design,).
        penalty: As in `fit_edges`.

    Returns:
        Predicted means of the logarithms, shape (design,), and the standard deviation of the logarithms around them. It
        includes the error of the regression for a group that was not part of the fit.
    """
    from scipy.optimize import minimize_scalar

    mean = np.full(len(features), np.nan)
    for group in np.unique(groups):
        is_out = groups == group
        mean[is_out] = fit_edges(features[~is_out], edges[~is_out], penalty=penalty).mean(features[is_out])

    def loss(log_deviation: float) -> float:
        return float(-log_likelihood(mean, np.exp(log_deviation), edges).sum())

    found = minimize_scalar(loss, bounds=(np.log(_MIN_DEVIATION), np.log(_MAX_DEVIATION)), method="bounded")
    return mean, float(np.exp(found.x))


def best_penalty(features: np.ndarray, edges: Edges, groups: np.ndarray) -> tuple[float, float]:
    """Return the penalty with the largest likelihood for held-out groups, and the deviation of their edges."""
    found = {}
    for penalty in PENALTIES:
        mean, deviation = out_of_group(features, edges, groups, penalty=penalty)
        found[penalty] = log_likelihood(mean, deviation, edges).sum(), deviation
    best = max(found, key=lambda penalty: found[penalty][0])
    return best, found[best][1]


def _middle(edges: Edges) -> Floats:
    """Return the middle of each interval, its only finite end, or 0 if it has none."""
    is_open = np.isinf(edges.low) | np.isinf(edges.high)
    ends = np.where(np.isfinite(edges.low), edges.low, edges.high)
    with np.errstate(invalid="ignore"):
        return np.where(is_open, np.where(np.isfinite(ends), ends, 0.0), (edges.low + edges.high) / 2)
