"""Scales and rank weights that explain projections of received gradients, up to rounding errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from workbench.probes.gradient_agreement import ProjectedGradients

#: A random-sign projection is sub-Gaussian: the root mean square of N projections exceeds 1 + s / sqrt(N) times the
#: norm with a probability below exp(-s^2 / 2), here 1e-14 (Laurent and Massart 2000, lemma 1).
N_DEVIATIONS = 8.0
#: Roundings of a gradient other than those of sums: division by the number of ranks, unscaling, clipping, and one more.
_N_SCALINGS = 4
#: Rounding error of a projection itself over 2^-53 sqrt(elements): float64 sums in chains of at most 64^2 additions.
_SUMMING = 64.0
#: Relative difference below which gradients are alike. Eight projections of different gradients are alike by chance
#: once in ten thousand cases.
_LARGEST_DIFFERENCE = 0.25
#: Largest number of scales that are tried as the common one.
_N_CANDIDATES = 64


@dataclass(frozen=True)
class Rounding:
    """Bound of the rounding error by parameter: a part relative to the norms that were added, and one from underflow.

    Attributes:
        size: Mean over ranks of the norms that were added, shape (parameter,), in units of the gradient.
        relative: Norm of the rounding error over ``size``, in the same shape, unit 1.
        underflow: Norm of the error of numbers too small for the format, in units of the gradient.
        n_elements: Number of elements of each parameter.
        factor: Practically certain bound of the root mean square over the projections of a parameter, over its norm.
    """

    size: np.ndarray
    relative: np.ndarray
    underflow: np.ndarray
    n_elements: np.ndarray
    factor: float

    @classmethod
    def of(cls, step: ProjectedGradients) -> Rounding:
        """Return the bound for a step."""
        n_roundings = step.n_passes + step.n_ranks + _N_SCALINGS
        formats = [torch.finfo(getattr(torch, name)) for name in step.formats]
        eps = np.array([each.eps for each in formats])
        # Devices may flush numbers below the smallest normal one to 0, but not in float16.
        least = np.array([each.tiny * (each.eps if each.dtype == "float16" else 1) for each in formats])
        roots = np.sqrt(step.n_elements)
        relative = n_roundings * eps / 2 + _SUMMING * roots * 2.0**-53
        n_projections = step.computed.shape[2]
        factor = 1 + N_DEVIATIONS / math.sqrt(n_projections)
        return cls(step.size.mean(0), relative, n_roundings * least * roots, step.n_elements, factor)

    def tolerance(self, scale: float | np.ndarray) -> np.ndarray:
        """Return the largest root mean square over projections that rounding explains, for gradients times a scale."""
        return self.factor * (np.abs(scale) * (self.relative * self.size + self.underflow) + self.underflow)


@dataclass(frozen=True)
class Fit:
    """One scale for many parameters; all arrays have the shape (parameter,).

    Attributes:
        scale: The scale; NaN if no parameter determines one.
        is_explained: Whether rounding explains the difference between expected gradients times the scale and those
            received.
        is_close: Whether they are also alike, so that a different gradient would have been detected.
        is_parallel: Whether both conditions hold at the parameter's individual scale.
        is_vague: Whether rounding explains the difference at the individual scale, but would explain almost any.
    """

    scale: float
    is_explained: np.ndarray
    is_close: np.ndarray
    is_parallel: np.ndarray
    is_vague: np.ndarray


def rms(values: np.ndarray) -> np.ndarray:
    """Return the root mean square over the last axis."""
    return np.sqrt(np.square(values).mean(-1))


def is_single(gradients: np.ndarray) -> np.ndarray:
    """Return whether a gradient has one dominant element, so that its projections have equal sizes, (parameter,)."""
    return np.ptp(np.abs(gradients), axis=1) <= 1e-4 * np.abs(gradients).max(1)


def own_scales(expected: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Return the least-squares scale of each parameter, shape (parameter,); 0 if the expected gradient is 0."""
    square = np.square(expected).sum(1)
    return (expected * received).sum(1) / np.where(square > 0, square, 1.0)


def fit_scale(
    expected: np.ndarray, received: np.ndarray, rounding: Rounding, among: np.ndarray, is_decisive: np.ndarray
) -> Fit:
    """Find the scale with which most parameters agree.

    Args:
        expected: Projections of the expected gradients, shape (parameter, projection).
        received: Projections of the received gradients, in the same shape.
        rounding: Bound of the rounding error.
        among: Boolean mask of the parameters to fit, shape (parameter,).
        is_decisive: Boolean mask of the parameters of which at least one must agree with the scale, in the same shape;
            the others would agree with other gradients too.
    """

    def left(scale: float | np.ndarray) -> np.ndarray:
        return rms(received - np.expand_dims(scale, -1) * expected)

    def is_close(scale: float | np.ndarray) -> np.ndarray:
        return left(scale) < _LARGEST_DIFFERENCE * scale * rms(expected)

    def is_explained(scale: float | np.ndarray) -> np.ndarray:
        return among & (left(scale) <= rounding.tolerance(scale))

    own = own_scales(expected, received)
    is_parallel = is_explained(own) & is_close(own)
    is_coarse = rounding.tolerance(own) >= _LARGEST_DIFFERENCE * abs(own) * rms(expected)
    is_vague = is_explained(own) & is_coarse & (own != 0)

    def n_members(scale: float) -> int:
        members = is_parallel & is_explained(scale)
        return int(members.sum()) if (members & is_decisive).any() else 0

    candidates = np.sort(own[is_parallel])
    spread = np.linspace(0, len(candidates) - 1, min(len(candidates), _N_CANDIDATES)).round().astype(int)
    middle_first = candidates[spread[np.argsort(abs(spread - len(candidates) // 2), kind="stable")]]
    best = max(middle_first, key=n_members, default=math.nan)
    if not n_members(best):
        nothing = np.zeros_like(among)
        return Fit(math.nan, nothing, nothing, is_parallel, is_vague)
    members = is_parallel & is_explained(best)
    trust = rms(expected)[members] / rounding.tolerance(best)[members]
    scale = float(np.average(own[members], weights=np.square(trust)))
    return Fit(scale, is_explained(scale), is_close(scale), is_parallel, is_vague)


def distinguishes(expected: np.ndarray, usual: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Return which parameters distinguish a hypothesis from the usual case, (parameter,): those not parallel in both.

    Args:
        expected: Projections under the hypothesis, shape (parameter, projection).
        usual: Projections of the mean over ranks, in the same shape.
        rounding: Bound of the rounding error.
    """
    apart = rms(expected - own_scales(usual, expected)[:, None] * usual)
    is_independent = rounding.n_elements >= expected.shape[1]  # projections of fewer elements depend on each other
    return is_independent & ~is_single(expected) & (apart > 2 * rounding.tolerance(1.0))


@dataclass(frozen=True)
class RankWeights:
    """Weights of the ranks in the received gradients.

    Attributes:
        scale: The common scale to which the weights are relative, unit 1; NaN if there is none.
        weights: Shape (rank,), unit 1; NaN if there is only one rank, with too few parameters, or if the rank has no
            gradient.
        errors: Standard errors, in the same shape.
        explained_fraction: Fraction of the sum of squares of the received gradients that the weights explain, unit 1.
        left: Residuals, shape (parameter, projection).
    """

    scale: float
    weights: np.ndarray
    errors: np.ndarray
    explained_fraction: float
    left: np.ndarray

    @property
    def are_counts(self) -> bool:
        """Whether the weights are known, some of them large, and none negative."""
        return bool((self.weights > 0.5).any() and not (self.weights < -0.25).any())

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose weight is certainly below 1/4, if the others are about equal and explain most of the gradient."""
        is_missing = self.weights + N_DEVIATIONS * self.errors < 0.25
        others = self.weights[~is_missing & ~np.isnan(self.weights)]
        is_clear = self.explained_fraction >= 0.75 and len(others) > 0 and others.min() > max(0.5, 0.5 * others.max())
        return tuple(np.flatnonzero(is_missing).tolist()) if is_clear else ()


def fit_weights(
    local: np.ndarray, received: np.ndarray, rounding: Rounding, among: np.ndarray, scale: float
) -> RankWeights:
    """Fit weights of the ranks by least squares over some parameters, each relative to its rounding error.

    The fit is of the difference from equal weights, so that ranks with parallel gradients keep equal weights.
    Parameters with fewer elements than projections are excluded, since their projections depend on each other.

    Args:
        local: Projections of each rank's gradients, shape (rank, parameter, projection).
        received: Projections of the received gradients, shape (parameter, projection).
        rounding: Bound of the rounding error.
        among: Boolean mask of the parameters to fit, shape (parameter,).
        scale: The common scale; if NaN, the median of the individual scales is used and the largest weight is 1.
    """
    n_ranks, n_projections, mean, nothing = len(local), local.shape[2], local.mean(0), np.full(len(local), np.nan)
    own = own_scales(mean, received)[among]
    base = scale if math.isfinite(scale) else float(np.median(own[own > 0])) if (own > 0).any() else math.nan
    among = among & (rounding.n_elements >= n_projections) & ~is_single(mean)
    n_equations = int(among.sum()) * n_projections
    if n_ranks == 1 or n_equations < 2 * n_ranks or not math.isfinite(base):
        return RankWeights(base, nothing, nothing, 0.0, received)
    error = rounding.tolerance(base)[among, None]
    columns = (base * local[:, among] / (n_ranks * error)).reshape(n_ranks, -1).T
    difference = ((received - base * mean)[among] / error).ravel()
    length = np.sqrt(np.square(columns).sum(0))
    columns = columns / np.where(length > 0, length, 1.0)
    inverse = np.linalg.pinv(columns.T @ columns, rcond=1e-12, hermitian=True)
    change = inverse @ (columns.T @ difference)
    left = difference - columns @ change
    length = np.where(length > 0, length, np.nan)
    deviation = math.sqrt(float(left @ left) / (n_equations - n_ranks))
    weights, errors = 1 + change / length, deviation * np.sqrt(np.diag(inverse)) / length
    total = float(np.square(received[among] / error).sum())
    leftover = received - base * np.tensordot(np.nan_to_num(weights), local, 1) / n_ranks
    if not math.isfinite(scale):
        full = np.nanmax(weights)
        base, weights, errors = base * full, weights / full, errors / full
    return RankWeights(base, weights, errors, 1 - float(left @ left) / total if total else 0.0, leftover)
