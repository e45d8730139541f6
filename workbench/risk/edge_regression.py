"""Regression of an edge, the learning rate from which training fails, on features of designs; edges may be censored.

The logarithm of an edge is normally distributed around a linear function of the features. Of each design it is known
to lie between two logarithms, one of which may be infinite: most models with normalization never explode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Penalties of the weights of standardized features that are tried.
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SMALLEST_DEVIATION = 0.05


@dataclass(frozen=True)
class Edges:
    """Edges of designs, each between two logarithms.

    Attributes:
        low: Shape (design,); minus infinity: not known.
        high: Shape (design,); infinity: not known. At least ``low``; where both are equal the edge is known exactly.
    """

    low: Floats
    high: Floats

    def __getitem__(self, rows: np.ndarray) -> Edges:
        """Some of them."""
        return Edges(self.low[rows], self.high[rows])


@dataclass(frozen=True)
class EdgeFit:
    """A fitted regression.

    Attributes:
        center: Mean of each feature, shape (feature,).
        scale: Its standard deviation; 1 where it never varied.
        intercept: Mean of the logarithm of the edge where all features have their mean.
        weights: Change by one standard deviation of each feature, shape (feature,).
        deviation: Standard deviation of the logarithm of an edge around its mean.
    """

    center: Floats
    scale: Floats
    intercept: float
    weights: Floats
    deviation: float

    def mean(self, features: np.ndarray) -> Floats:
        """Mean of the logarithm of the edge of designs, shape (design,)."""
        found: Floats = self.intercept + ((features - self.center) / self.scale) @ self.weights
        return found


def fit_edges(features: np.ndarray, edges: Edges, *, penalty: float, weight: np.ndarray | None = None) -> EdgeFit:
    """Fit the regression by penalized maximum likelihood.

    Args:
        features: Shape (design, feature).
        edges: Their edges.
        penalty: Strength of the quadratic penalty of the weights of standardized features.
        weight: How often each design counts, shape (design,); None: once.
    """
    from scipy.optimize import minimize

    weight = np.ones(len(features)) if weight is None else np.asarray(weight, dtype=float)
    center = np.average(features, axis=0, weights=weight)
    scale = np.sqrt(np.average((features - center) ** 2, axis=0, weights=weight))
    scale = np.where(scale > 1e-9 * np.maximum(np.abs(center), 1), scale, 1.0)
    inputs = (features - center) / scale
    middle = _middle(edges)
    start = np.concatenate([[np.average(middle, weights=weight)], np.zeros(inputs.shape[1]), [0.0]])

    def loss(values: np.ndarray) -> float:
        mean = values[0] + inputs @ values[1:-1]
        terms = log_likelihood(mean, _SMALLEST_DEVIATION + np.exp(values[-1]), edges)
        return float(-(weight * terms).sum() + 0.5 * penalty * (values[1:-1] ** 2).sum())

    found = minimize(loss, start, method="L-BFGS-B").x
    return EdgeFit(center, scale, float(found[0]), found[1:-1], float(_SMALLEST_DEVIATION + np.exp(found[-1])))


def log_likelihood(mean: np.ndarray, deviation: float | np.ndarray, edges: Edges) -> Floats:
    """Logarithm of the probability (density, where it is known exactly) of each edge; shape (design,)."""
    from scipy.special import log_ndtr
    from scipy.stats import norm

    low, high = (edges.low - mean) / deviation, (edges.high - mean) / deviation
    is_exact = edges.low == edges.high
    # The mirrored side is as probable, and precise where both ends lie far above the mean.
    low, high = np.where(low > 0, -high, low), np.where(low > 0, -low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = log_ndtr(high) + np.log1p(-np.exp(log_ndtr(low) - log_ndtr(high)))
    exact = norm.logpdf(np.where(is_exact, high, 0.0)) - np.log(deviation)
    return np.where(is_exact, exact, between)


def out_of_group(features: np.ndarray, edges: Edges, groups: np.ndarray, *, penalty: float) -> tuple[Floats, float]:
    """Means of the edges of each group by a regression on the other groups, and the deviation around them.

    Args:
        features: Shape (design, feature).
        edges: Their edges.
        groups: Group of each design, shape (design,).
        penalty: As in `fit_edges`.

    Returns:
        Means, shape (design,), and the standard deviation of the logarithm of the edges around these, which contains
        what the regression does not know of a new group.
    """
    from scipy.optimize import minimize_scalar

    mean = np.full(len(features), np.nan)
    for group in np.unique(groups):
        is_out = groups == group
        mean[is_out] = fit_edges(features[~is_out], edges[~is_out], penalty=penalty).mean(features[is_out])

    def loss(log_deviation: float) -> float:
        return float(-log_likelihood(mean, np.exp(log_deviation), edges).sum())

    found = minimize_scalar(loss, bounds=(np.log(_SMALLEST_DEVIATION), np.log(20.0)), method="bounded")
    return mean, float(np.exp(found.x))


def _middle(edges: Edges) -> Floats:
    """The middle of what is known, or its only end."""
    is_open = np.isinf(edges.low) | np.isinf(edges.high)
    ends = np.where(np.isfinite(edges.low), edges.low, edges.high)
    with np.errstate(invalid="ignore"):
        return np.where(is_open, np.where(np.isfinite(ends), ends, 0.0), (edges.low + edges.high) / 2)
