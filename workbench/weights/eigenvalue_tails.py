"""The two ends of an eigenvalue density: the power law of its tail, and the bulk that a random matrix would have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from workbench.errors import OptionError

#: Fewer eigenvalues give neither an exponent nor a bulk; Clauset et al. (2009, section 3.2) ask for as many in a tail.
FEWEST_EIGENVALUES = 50
#: A tail whose eigenvalues differ by less, relatively, consists of one value and rounding.
_ROUNDING = 1e-6
#: 99 % quantile of the Tracy-Widom law of real matrices (beta = 1).
_TRACY_WIDOM_99 = 2.0234


@dataclass(frozen=True)
class PowerLaw:
    """Power law p(x) ~ x^-alpha of the largest of some values.

    Attributes:
        alpha: Exponent.
        error: Standard error of alpha, (alpha - 1) / sqrt(n_tail).
        distance: Kolmogorov-Smirnov distance between tail and power law.
        start: Smallest value of the tail.
        n_tail: Number of values in the tail.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> wb.weights.power_law_tail(np.ones(100))  # all values are equal
        PowerLaw(alpha=nan, error=nan, distance=nan, start=nan, n_tail=nan)
    """

    alpha: float = np.nan
    error: float = np.nan
    distance: float = np.nan
    start: float = np.nan
    n_tail: float = np.nan


def power_law_tail(values: np.ndarray) -> PowerLaw:
    """Fit a power law to the tail of positive values.

    The exponent is the maximum-likelihood one for continuous values, and the tail starts where the Kolmogorov-Smirnov
    distance is smallest (Clauset, Shalizi and Newman 2009, arXiv:0706.1062, equations 3.1, 3.2 and 3.9), as in the
    packages ``powerlaw`` and WeightWatcher (Martin and Mahoney 2021, arXiv:1810.01075).

    Args:
        values: Eigenvalues, in any order; zeros are left out.

    Returns:
        The fit; all NaN if fewer than 50 values are above 0, or all of them are equal within 1e-6.

    Raises:
        OptionError: If a value is negative or not finite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> quantiles = (np.arange(2000) + 0.5) / 2000
        >>> fit = wb.weights.power_law_tail((1 - quantiles) ** (-1 / 2))  # p(x) ~ x^-3 from 1 on
        >>> round(fit.alpha, 1), fit.n_tail > 1000
        (3.0, True)
    """
    values = np.asarray(values, float).ravel()
    if not (np.isfinite(values) & (values >= 0)).all():
        raise OptionError("Some of the values are negative or not finite; pass eigenvalues of W'W.")
    values = np.sort(values[values > 0])
    if len(values) < FEWEST_EIGENVALUES:
        return PowerLaw()
    # Relative to the largest value: the sums of a tail are then free of cancellation.
    log = np.log(values / values[-1])
    starts = np.unique(log, return_index=True)[1]
    starts = starts[log[starts] < -_ROUNDING]
    if not len(starts):
        return PowerLaw()
    n = len(log) - starts
    alphas = 1 + n / (np.cumsum(log[::-1])[::-1][starts] - n * log[starts])
    distances = np.empty(len(starts))
    share = np.arange(len(log))
    for i, (start, alpha) in enumerate(zip(starts, alphas, strict=True)):
        predicted = -np.expm1((1 - alpha) * (log[start:] - log[start]))
        distances[i] = np.abs(predicted - share[: n[i]] / n[i]).max()
    best = distances.argmin()
    alpha = float(alphas[best])
    error = (alpha - 1) / np.sqrt(n[best])
    return PowerLaw(alpha, float(error), float(distances[best]), float(values[starts[best]]), float(n[best]))


@dataclass(frozen=True)
class Bulk:
    """The bulk of the eigenvalues of W'W / N, as a random matrix would have it.

    Attributes:
        variance: Variance of the entries of that random matrix.
        edge: 99 % quantile of its largest eigenvalue.
        n_spikes: Number of eigenvalues above the edge.

    Example:
        >>> import workbench as wb
        >>> wb.weights.random_bulk([3.0] * 60, n_rows=60, n_columns=60).n_spikes  # an orthogonal matrix
        0.0
    """

    variance: float = np.nan
    edge: float = np.nan
    n_spikes: float = np.nan


def random_bulk(eigenvalues: np.ndarray, n_rows: int, n_columns: int) -> Bulk:
    """Compare eigenvalues with those of a matrix of independent entries (Marchenko-Pastur).

    The variance is that of the random matrix with the same median eigenvalue, which few spikes hardly move (Gavish and
    Donoho 2014, arXiv:1305.5870, section 3.2). The edge is not the limit (1 + sqrt(M / N))^2 of the Marchenko-Pastur
    law, which the largest eigenvalue of a finite random matrix exceeds often, but the 99 % quantile of its Tracy-Widom
    law (Johnstone 2001, theorem 1.1), a margin of relative order N^(-2/3): one random matrix in a hundred has a spike.

    Args:
        eigenvalues: All min(n_rows, n_columns) eigenvalues of W'W / N, N the longer side of W, in any order.
        n_rows: Rows of W.
        n_columns: Columns of W.

    Returns:
        The bulk; all NaN if there are fewer than 50 eigenvalues, or all of them are 0. Where more than half of them
        are 0, variance and edge are 0 and every other eigenvalue is a spike.

    Raises:
        OptionError: If the eigenvalues are not those of such a matrix.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> W = np.random.default_rng(0).normal(size=(400, 100))
        >>> W[:, 0] += 3.0
        >>> bulk = wb.weights.random_bulk(np.linalg.svd(W, compute_uv=False) ** 2 / 400, 400, 100)
        >>> round(bulk.variance, 1), bulk.n_spikes
        (1.0, 1.0)
    """
    eigenvalues = np.asarray(eigenvalues, float).ravel()
    short, long = sorted((n_rows, n_columns))
    if len(eigenvalues) != short or not (np.isfinite(eigenvalues) & (eigenvalues >= 0)).all():
        raise OptionError(
            f"A matrix of {n_rows} rows and {n_columns} columns has {short} eigenvalues of W'W / N, finite and not "
            f"negative; got {len(eigenvalues)} values that are not; pass squared singular values over {long}."
        )
    if short < FEWEST_EIGENVALUES or not eigenvalues.any():
        return Bulk()
    variance = float(np.median(eigenvalues)) / _median(short / long)
    root = np.sqrt(long - 1), np.sqrt(short)
    center, scale = sum(root) ** 2, sum(root) * (1 / root[0] + 1 / root[1]) ** (1 / 3)
    edge = variance * (center + _TRACY_WIDOM_99 * scale) / long
    return Bulk(variance, float(edge), float((eigenvalues > edge).sum()))


@lru_cache
def _median(ratio: float) -> float:
    """Median of the Marchenko-Pastur law of unit variance, M / N = ``ratio``."""
    # With x = 1 + ratio + 2 sqrt(ratio) cos(angle) the density has no singular ends.
    angle = np.linspace(np.pi, 0, 20_001)[1:-1]
    x = 1 + ratio + 2 * np.sqrt(ratio) * np.cos(angle)
    mass = np.cumsum(np.sin(angle) ** 2 / x)
    return float(np.interp(0.5, mass / mass[-1], x))
