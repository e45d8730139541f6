"""Tail and bulk of an eigenvalue density: a power law of its tail, and the bulk of a random matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from workbench.errors import OptionError
from workbench.option_checks import PositiveInt

#: Minimum number of eigenvalues for an exponent and a bulk; Clauset et al. (2009, section 3.2) require it in a tail.
MIN_EIGENVALUES = 50
#: A tail whose eigenvalues differ by less than this, relatively, consists of one value and rounding.
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
    """

    alpha: float = np.nan
    error: float = np.nan
    distance: float = np.nan
    start: float = np.nan
    n_tail: float = np.nan


def power_law_tail(values: np.ndarray) -> PowerLaw:
    """Fit a power law to the tail of positive values.

    The exponent is the maximum likelihood estimate for continuous values, and the tail starts where the
    Kolmogorov-Smirnov distance is smallest (Clauset, Shalizi and Newman 2009, arXiv:0706.1062, equations 3.1, 3.2 and
    3.9), as in the packages ``powerlaw`` and WeightWatcher (Martin and Mahoney 2021, arXiv:1810.01075).

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

    See Also:
        `workbench.weights.random_bulk`: Compares the eigenvalues with those of a random matrix.
        `workbench.weights.weight_spectra`: Fits the tails of all matrices of a model.
    """
    values = _checked("values", values)
    values = np.sort(values[values > 0])
    if len(values) < MIN_EIGENVALUES:
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
    n_below = np.arange(len(log))
    for i, (start, alpha) in enumerate(zip(starts, alphas, strict=True)):
        predicted = -np.expm1((1 - alpha) * (log[start:] - log[start]))
        distances[i] = np.abs(predicted - n_below[: n[i]] / n[i]).max()
    best = distances.argmin()
    alpha = float(alphas[best])
    error = (alpha - 1) / np.sqrt(n[best])
    return PowerLaw(alpha, float(error), float(distances[best]), float(values[starts[best]]), float(n[best]))


@dataclass(frozen=True)
class Bulk:
    """Bulk of the eigenvalues of W'W / N according to a random matrix with the same median eigenvalue.

    Attributes:
        variance: Variance of the entries of that random matrix.
        edge: 99 % quantile of its largest eigenvalue.
        n_spikes: Number of eigenvalues above the edge.
    """

    variance: float = np.nan
    edge: float = np.nan
    n_spikes: float = np.nan


def random_bulk(eigenvalues: np.ndarray, n_rows: PositiveInt, n_columns: PositiveInt) -> Bulk:
    """Compare eigenvalues with those of a matrix of independent entries (Marchenko-Pastur).

    The variance is that of the random matrix with the same median eigenvalue, which a few spikes hardly change (Gavish
    and Donoho 2014, arXiv:1305.5870, section 3.2). The edge is the 99 % quantile of the Tracy-Widom law of the largest
    eigenvalue (Johnstone 2001, theorem 1.1), so that one random matrix in a hundred has a spike. It exceeds the limit
    (1 + sqrt(M / N))^2 of the Marchenko-Pastur law, above which the largest eigenvalue of a finite random matrix often
    is, by a margin of relative order N^(-2/3).

    Args:
        eigenvalues: All min(n_rows, n_columns) eigenvalues of W'W / N, in any order; N is the longer side of W.
        n_rows: Number of rows of W.
        n_columns: Number of columns of W.

    Returns:
        The bulk; all NaN if there are fewer than 50 eigenvalues, or all of them are 0. If more than half of them are 0,
        variance and edge are 0 and every other eigenvalue is a spike.

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

    See Also:
        `workbench.weights.power_law_tail`: Fits the tail of the eigenvalues.
        `workbench.weights.weight_spectra`: Finds the spikes of all matrices of a model.
    """
    eigenvalues = _checked("eigenvalues", eigenvalues)
    short, long = sorted((n_rows, n_columns))
    if len(eigenvalues) != short:
        raise OptionError(
            f"A matrix of {n_rows} rows and {n_columns} columns has {short} eigenvalues of W'W / N, got "
            f"{len(eigenvalues)}; pass all squared singular values divided by {long}."
        )
    if short < MIN_EIGENVALUES or not eigenvalues.any():
        return Bulk()
    variance = float(np.median(eigenvalues)) / _median(short / long)
    root = np.sqrt(long - 1), np.sqrt(short)
    center, scale = sum(root) ** 2, sum(root) * (1 / root[0] + 1 / root[1]) ** (1 / 3)
    edge = variance * (center + _TRACY_WIDOM_99 * scale) / long
    return Bulk(variance, float(edge), float((eigenvalues > edge).sum()))


def _checked(name: str, values: np.ndarray) -> np.ndarray:
    """Return values as a float array of one dimension; raise OptionError if one is negative or not finite."""
    values = np.asarray(values, float).ravel()
    is_wrong = ~(np.isfinite(values) & (values >= 0))
    if is_wrong.any():
        raise OptionError(f"Some of the {name} are negative or not finite; pass eigenvalues of W'W.")
    return values


@lru_cache
def _median(ratio: float) -> float:
    """Return the median of the Marchenko-Pastur law of unit variance with M / N = ``ratio``."""
    # With x = 1 + ratio + 2 sqrt(ratio) cos(angle) the density has no singular ends.
    angle = np.linspace(np.pi, 0, 20_001)[1:-1]
    x = 1 + ratio + 2 * np.sqrt(ratio) * np.cos(angle)
    mass = np.cumsum(np.sin(angle) ** 2 / x)
    return float(np.interp(0.5, mass / mass[-1], x))
