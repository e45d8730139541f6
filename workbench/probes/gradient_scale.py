"""Scales and weights of ranks that explain projections of received gradients, and what rounding explains of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from workbench.probes.gradient_agreement import ProjectedGradients

#: A random-sign projection is sub-Gaussian: the root mean square of N projections exceeds 1 + s / sqrt(N) times the
#: norm with a probability below exp(-s^2 / 2), here 1e-14 (Laurent and Massart 2000, lemma 1).
SURENESS = 8.0
#: Roundings of a gradient besides those of sums: division by the number of ranks, unscaling, clipping, and one more.
_N_SCALINGS = 4
#: Rounding of a projection itself over 2^-53 sqrt(elements): float64 sums in chains of at most 64^2 additions.
_SUMMING = 64.0
#: Gradients are alike that differ by less than this share. Of others, eight projections are so once in ten thousand.
_LARGEST_DIFFERENCE = 0.25
#: Scales that are tried at most as the common one.
_N_CANDIDATES = 64


@dataclass(frozen=True)
class Rounding:
    """What rounding explains, by parameter: a part relative to the norms that were added, and one of underflow.

    Attributes:
        size: Mean over ranks of the norms that were added, shape (parameter,), in units of the gradient.
        relative: Norm of the rounding error over ``size``, in the same shape, unit 1.
        underflow: Norm of the error of numbers too small for the format, in units of the gradient.
        n_elements: Number of elements of each parameter.
        factor: Root mean square over the projections of a parameter that no chance exceeds, over the norm.
    """

    size: np.ndarray
    relative: np.ndarray
    underflow: np.ndarray
    n_elements: np.ndarray
    factor: float

    @classmethod
    def of(cls, step: ProjectedGradients) -> Rounding:
        """The rounding of a step."""
        n_roundings = step.n_passes + step.n_ranks + _N_SCALINGS
        formats = [torch.finfo(getattr(torch, name)) for name in step.formats]
        eps = np.array([each.eps for each in formats])
        # Devices may flush what is below the smallest normal number to 0, but not in float16.
        least = np.array([each.tiny * (each.eps if each.dtype == "float16" else 1) for each in formats])
        roots = np.sqrt(step.n_elements)
        relative = n_roundings * eps / 2 + _SUMMING * roots * 2.0**-53
        n_projections = step.computed.shape[2]
        factor = 1 + SURENESS / math.sqrt(n_projections)
        return cls(step.size.mean(0), relative, n_roundings * least * roots, step.n_elements, factor)

    def tolerance(self, scale: float | np.ndarray) -> np.ndarray:
        """Largest root mean square over projections that rounding explains, of gradients times a scale."""
        return self.factor * (np.abs(scale) * (self.relative * self.size + self.underflow) + self.underflow)


@dataclass(frozen=True)
class Fit:
    """One scale for many parameters; all arrays have the shape (parameter,).

    Attributes:
        scale: The scale; NaN if no parameter gives one.
        is_explained: Whether rounding explains the difference between expected gradients times the scale and those
            received.
        is_close: Whether they are alike besides, so that another gradient would have been seen.
        is_parallel: Whether both hold of a scale of the parameter's own.
        is_vague: Whether rounding explains the difference at a scale of its own, as it explains almost any.
    """

    scale: float
    is_explained: np.ndarray
    is_close: np.ndarray
    is_parallel: np.ndarray
    is_vague: np.ndarray


def rms(values: np.ndarray) -> np.ndarray:
    """Root mean square over the last axis."""
    return np.sqrt(np.square(values).mean(-1))


def is_single(gradients: np.ndarray) -> np.ndarray:
    """Whether a gradient has but one number that counts, so that all its projections have one size, (parameter,)."""
    return np.ptp(np.abs(gradients), axis=1) <= 1e-4 * np.abs(gradients).max(1)


def own_scales(expected: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Least-squares scale of each parameter, shape (parameter,); 0 where nothing is expected."""
    square = np.square(expected).sum(1)
    return (expected * received).sum(1) / np.where(square > 0, square, 1.0)


def fit_scale(
    expected: np.ndarray, received: np.ndarray, rounding: Rounding, among: np.ndarray, is_telling: np.ndarray
) -> Fit:
    """Find the scale that the most parameters agree with.

    Args:
        expected: Projections of the gradients that are expected, shape (parameter, projection).
        received: Projections of those that were received, in the same shape.
        rounding: What rounding explains.
        among: Parameters to fit, shape (parameter,), truth values.
        is_telling: Parameters of which one at least must agree for there to be a scale, in the same shape; others agree
            with other gradients too.
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
        return int(members.sum()) if (members & is_telling).any() else 0

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


def tells_apart(expected: np.ndarray, usual: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Parameters whose gradients under one assumption are not parallel to those under the usual one, (parameter,).

    Args:
        expected: Projections under the assumption, shape (parameter, projection).
        usual: Projections of the mean over ranks, in the same shape.
        rounding: What rounding explains.
    """
    apart = rms(expected - own_scales(usual, expected)[:, None] * usual)
    is_independent = rounding.n_elements >= expected.shape[1]  # projections of fewer elements depend on each other
    return is_independent & ~is_single(expected) & (apart > 2 * rounding.tolerance(1.0))


@dataclass(frozen=True)
class RankWeights:
    """How often each rank counts in what was received.

    Attributes:
        scale: The common scale that they are relative to, unit 1; NaN if there is none.
        weights: Shape (rank,), unit 1; NaN for one rank alone, with too few parameters, or if the rank has no gradient.
        errors: Standard errors, in the same shape.
        explained_share: Share of the square of what was received that the weights explain, unit 1.
        left: What they leave over, shape (parameter, projection).
    """

    scale: float
    weights: np.ndarray
    errors: np.ndarray
    explained_share: float
    left: np.ndarray

    @property
    def are_counts(self) -> bool:
        """Whether they are known, some rank counts, and none negatively."""
        return bool((self.weights > 0.5).any() and not (self.weights < -0.25).any())

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose weight is certainly below a quarter, if the others count about equally and explain the most."""
        is_missing = self.weights + SURENESS * self.errors < 0.25
        others = self.weights[~is_missing & ~np.isnan(self.weights)]
        is_clear = self.explained_share >= 0.75 and len(others) > 0 and others.min() > max(0.5, 0.5 * others.max())
        return tuple(np.flatnonzero(is_missing).tolist()) if is_clear else ()


def fit_weights(
    local: np.ndarray, received: np.ndarray, rounding: Rounding, among: np.ndarray, scale: float
) -> RankWeights:
    """Least-squares weights of the ranks, over some parameters, each relative to its rounding error.

    What is fitted is the difference from equal weights, so that ranks with parallel gradients keep them. Parameters
    with fewer elements than projections are left out, as their projections depend on each other.

    Args:
        local: Projections of each rank's gradients, shape (rank, parameter, projection).
        received: Projections of what was received, shape (parameter, projection).
        rounding: What rounding explains.
        among: Parameters to fit, shape (parameter,), truth values.
        scale: The common scale; NaN: the median of the parameters' own, and the largest weight counts as 1.
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
