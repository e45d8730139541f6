"""Comparison of the gradients that the optimizer received with those that the ranks computed, from projections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from workbench.errors import OptionError
from workbench.probes.gradient_agreement import GradientAgreement, GradientVerdict, ProjectedGradients

#: Root mean square error of rounding to t significant bits over 2^-t: for mantissas that are uniform in the logarithm,
#: sqrt(ln 2 / 4.5).
_RMS_ROUNDING = math.sqrt(math.log(2) / 4.5)
#: Largest ratio of the 90 % to the 10 % quantile of the errors of one number format over parameters. The random
#: variation of eight projections accounts for a factor of 2, cancellation between ranks for the remaining factor.
_EVENNESS = 8.0
#: Cosine of two gradients below which they have opposite aims.
_OPPOSED = -0.3


def compare_gradients(step: ProjectedGradients, earlier: Sequence[ProjectedGradients] = ()) -> GradientAgreement:
    """Compare the gradients that the optimizer received with the mean of those that the ranks computed.

    One scale, common to all parameters, is free: the scale with which most parameters agree, so that lost or corrupted
    parameters do not shift it. A parameter is "as computed" if rounding explains the difference at this scale. The
    others are explained, in this order, by an earlier step, by the mean without one rank or, in one process, without
    one backward pass, by zeros, by an individual scale, by weights of the ranks (least squares over all remaining
    parameters), or by a coarser number format (errors of similar relative size in most parameters). The remaining ones
    are "not what was computed".

    Error bound: m = passes + ranks + 4 additions and scalings each change a gradient by at most half the format's eps,
    relative to the norms that were added, and by the smallest normal number if numbers underflow. Random signs are
    independent of the gradients, so the root mean square of K projections exceeds 1 + 8 / sqrt(K) times that bound with
    a probability below 1e-14. In bfloat16 the bound is coarse, and only larger differences are detected.

    Not distinguished: which rank is missing if the gradients of the ranks are parallel; the step of a stale gradient
    without ``earlier``; a wrong factor of one parameter and clipping of individual parameters; in a model of one or two
    parameters, a small corruption and low precision.

    Cost: milliseconds for hundreds of parameters; if gradients disagree, the same again for each rank and earlier step.

    Args:
        step: Projections of the step.
        earlier: Projections of the steps before it, the latest first, of the same parameters and with the same signs.

    Returns:
        The verdict with its evidence.

    Raises:
        OptionError: If an earlier step has other parameters, ranks or projections.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = torch.nn.Linear(3, 2)
        >>> with wb.probes.GradientProjections(model.parameters()) as projections:
        ...     model(torch.ones(4, 3)).square().sum().backward()
        ...     model.bias.grad = torch.zeros(2)
        ...     step = projections.take()
        >>> wb.probes.compare_gradients(step).sentence
        'The optimizer receives zeros although gradients were computed, in 1 of 2 parameters.'

    See Also:
        `workbench.probes.GradientProjections`: Computes the projections of a step.
    """
    for age, before in enumerate(earlier, 1):
        if before.computed.shape != step.computed.shape:
            raise OptionError(
                f"The projections of {age} steps before have shape {before.computed.shape}, expected that of the step, "
                f"{step.computed.shape}; pass steps of the same parameters and ranks."
            )
    if not step.n_passes:
        return _not_measured(step, "no backward pass reached the parameters; the optimizer may update copies of them")
    if not (np.isfinite(step.computed).all() and np.isfinite(step.accumulated).all()):
        return _not_measured(step, "computed gradients are not finite")
    found = _on_all_ranks(step, step.computed, earlier)
    if found.verdict.is_fault and not np.array_equal(step.accumulated, step.computed):
        other = _on_all_ranks(step, step.accumulated, earlier)
        found = found if other.verdict.is_fault else _of_accumulated(step, found, other)
    return found


def _of_accumulated(step: ProjectedGradients, found: GradientAgreement, other: GradientAgreement) -> GradientAgreement:
    """Return why the optimizer received what ``.grad`` held although the passes of the step computed something else."""
    is_wrong = np.array([state.is_fault for state in found.states])
    nothing = np.zeros_like(is_wrong)
    if (is_wrong & (nothing if step.is_left_over is None else step.is_left_over)).any():
        verdict = GradientVerdict.NOT_CLEARED
    elif step.has_moved:  # SAM computes a second gradient elsewhere, and LBFGS several
        return other
    else:
        kept, lost = step.accumulated[:, is_wrong], (step.computed - step.accumulated)[:, is_wrong]
        # Losses with opposite aims, as of a generator and its discriminator, are no parts of one batch.
        is_opposed = (kept * lost).sum() < _OPPOSED * math.sqrt(float(np.square(kept).sum() * np.square(lost).sum()))
        is_alone = nothing if step.is_last_alone is None else step.is_last_alone
        if step.has_moved is None or is_opposed or not is_alone[is_wrong].all():
            return _not_measured(step, "the loop discards or keeps gradients of several passes, which may be meant")
        verdict = GradientVerdict.DISCARDED
    states = tuple(verdict if wrong else state for wrong, state in zip(is_wrong, other.states, strict=True))
    return replace(other, verdict=verdict, states=states)


def _not_measured(step: ProjectedGradients, reason: str) -> GradientAgreement:
    n_ranks, n_parameters, _ = step.computed.shape
    unknown, verdict = np.full(n_parameters, np.nan), GradientVerdict.NOT_MEASURED
    return GradientAgreement(
        verdict, (verdict,) * n_parameters, np.nan, unknown, unknown, np.full(n_ranks, np.nan), reason=reason
    )


def _on_all_ranks(
    step: ProjectedGradients, local: np.ndarray, earlier: Sequence[ProjectedGradients]
) -> GradientAgreement:
    """Return the most severe result on any rank; ranks that received identical gradients are compared once."""
    receivers: dict[bytes, list[int]] = {}
    for rank, received in enumerate(step.received):
        receivers.setdefault(received.tobytes(), []).append(rank)
    found = [
        replace(_compare(step, local, step.received[ranks[0]], earlier), receivers=tuple(ranks))
        for ranks in receivers.values()
    ]
    worst = max(found, key=lambda one: one.verdict.severity)
    return replace(
        worst, receivers=tuple(sorted(r for one in found if one.verdict == worst.verdict for r in one.receivers))
    )


def _compare(
    step: ProjectedGradients, local: np.ndarray, received: np.ndarray, earlier: Sequence[ProjectedGradients]
) -> GradientAgreement:
    rounding, mean, n_ranks = Rounding.of(step), local.mean(0), len(local)
    states = np.array([GradientVerdict.NOT_MEASURED] * len(mean), dtype=object)
    is_active = (rounding.size > 0) | (received != 0).any(1)
    rest = is_active.copy()
    missing, missing_passes, ages = set[int](), set[int](), Counter[int]()

    def claim(which: np.ndarray, state: GradientVerdict) -> int:
        taken = rest & which
        states[taken], rest[taken] = state, False
        return int(taken.sum())

    claim(~np.isfinite(received).all(1), GradientVerdict.NOT_COMPUTED)
    received = np.where(np.isfinite(received), received, 0.0)
    is_zero = (received == 0).all(1)
    is_decisive = ~is_single(mean) if (rest & ~is_single(mean)).any() else rest
    now = fit_scale(mean, received, rounding, rest, is_decisive)
    claim(now.is_explained & now.is_close, GradientVerdict.AS_COMPUTED)
    is_hidden = is_zero & (rms(mean) <= rounding.tolerance(1.0))
    claim(now.is_explained | now.is_vague | is_hidden, GradientVerdict.NOT_MEASURED)
    for age, before in enumerate(earlier, 1):
        expected, usual = before.computed.mean(0), Rounding.of(before)
        fit = fit_scale(expected, received, usual, rest, distinguishes(expected, mean, usual))
        ages[age] = claim(fit.is_explained, GradientVerdict.STALE)
    for rank in range(n_ranks) if n_ranks > 1 and rest.any() else ():
        expected = mean - local[rank] / n_ranks
        fit = fit_scale(expected, received, rounding, rest, distinguishes(expected, mean, rounding))
        if claim(fit.is_explained, GradientVerdict.RANK_MISSING):
            missing.add(rank)
    for i, of_pass in enumerate(() if step.passes is None or not rest.any() else step.passes):
        expected = mean - of_pass
        fit = fit_scale(expected, received, rounding, rest, distinguishes(expected, mean, rounding))
        if claim(fit.is_explained & fit.is_close, GradientVerdict.PASS_MISSING):
            missing_passes.add(i)
    claim(is_zero, GradientVerdict.PARAMETERS_MISSING)
    # A single number always has an individual scale, which is no evidence without a common scale to compare with.
    claim(now.is_parallel, GradientVerdict.SCALED if math.isfinite(now.scale) else GradientVerdict.NOT_MEASURED)
    # The remaining parameters are explained jointly. In coarse formats a missing rank shows only in this way.
    together = rest.copy() if rest.any() else is_active & (now.is_explained | now.is_vague)
    pooled = fit_weights(local, received, rounding, together, now.scale)
    n_bits = _significant_bits(mean[rest], received[rest], rounding.size[rest], pooled.scale)
    scale = now.scale
    if pooled.missing:
        missing |= {*pooled.missing}
        states[together] = GradientVerdict.RANK_MISSING
    elif pooled.are_counts and (rms(pooled.left) <= rounding.tolerance(pooled.scale))[rest].all():
        states[rest] = GradientVerdict.RANKS_UNEQUAL
    elif not math.isnan(n_bits) and rest.sum() > (states == GradientVerdict.AS_COMPUTED).sum():
        states[rest], scale = GradientVerdict.LOW_PRECISION, pooled.scale
        # If only the smallest gradients are zero, they underflow in the format.
        typical = rounding.size / np.sqrt(np.maximum(step.n_elements, 1))
        is_missing = states == GradientVerdict.PARAMETERS_MISSING
        states[is_missing & (typical < typical[rest].min())] = GradientVerdict.LOW_PRECISION
    else:
        states[rest] = GradientVerdict.NOT_COMPUTED
    verdict = max(states, key=lambda state: state.severity)
    if verdict == GradientVerdict.NOT_MEASURED:
        is_idle = not (rounding.size > 0).any()
        return _not_measured(step, "no parameter has a gradient" if is_idle else "rounding explains any difference")
    is_wrong = np.array([state.is_fault for state in states])
    shown = fit_weights(local, received, rounding, is_wrong if is_wrong.any() else states == verdict, scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = scale * np.where(rounding.size > 0, rounding.size, np.nan)
        residual, tolerance = rms(received - scale * mean) / unit, rounding.tolerance(scale) / unit
    return GradientAgreement(
        verdict,
        tuple(states),
        scale,
        residual,
        tolerance,
        shown.weights,
        missing_ranks=tuple(sorted(missing)),
        missing_passes=tuple(sorted(missing_passes)),
        delay=ages.most_common(1)[0][0] if ages.total() else None,
        n_bits=n_bits if verdict == GradientVerdict.LOW_PRECISION else math.nan,
    )


def _significant_bits(expected: np.ndarray, received: np.ndarray, size: np.ndarray, scale: float) -> float:
    """Return the significant bits of the number format whose rounding explains the residuals; NaN if none does."""
    if not (math.isfinite(scale) and len(size) and (size > 0).all()):
        return math.nan
    left = rms(received - scale * expected)
    low, typical, high = np.quantile(left / (scale * size), [0.1, 0.5, 0.9])
    is_small = np.median(left) <= 0.5 * np.median(scale * rms(expected))
    return float(np.log2(_RMS_ROUNDING / typical)) if is_small and 0 < high <= _EVENNESS * low else math.nan


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
    """Bound of the rounding error by parameter: relative to the norms that were added, and from underflow."""

    size: np.ndarray  # mean over ranks of the norms that were added, shape (parameter,), in units of the gradient
    relative: np.ndarray  # norm of the rounding error over ``size``, in the same shape, unit 1
    underflow: np.ndarray  # norm of the error of numbers too small for the format, in units of the gradient
    n_elements: np.ndarray  # number of elements of each parameter
    #: Practically certain bound of the root mean square over the projections of a parameter, over its norm.
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
    """One scale for many parameters; all arrays have the shape (parameter,)."""

    scale: float  # the scale; NaN if no parameter determines one
    #: Whether rounding explains the difference between expected gradients times the scale and those received.
    is_explained: np.ndarray
    is_close: np.ndarray  # whether they are also alike, so that a different gradient would have been detected
    is_parallel: np.ndarray  # whether both conditions hold at the parameter's individual scale
    #: Whether rounding explains the difference at the individual scale, but would explain almost any.
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

    Expected and received gradients are projections, (parameter, projection). The masks, (parameter,), say which
    parameters to fit, and of which at least one must agree with the scale; the others would agree with other gradients
    too.
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
    best, most = math.nan, 0
    for candidate in middle_first:
        if (n := n_members(candidate)) > most:
            best, most = candidate, n
        if most == len(candidates):  # usually at once
            break
    if not most:
        nothing = np.zeros_like(among)
        return Fit(math.nan, nothing, nothing, is_parallel, is_vague)
    members = is_parallel & is_explained(best)
    trust = rms(expected)[members] / rounding.tolerance(best)[members]
    scale = float(np.average(own[members], weights=np.square(trust)))
    return Fit(scale, is_explained(scale), is_close(scale), is_parallel, is_vague)


def distinguishes(expected: np.ndarray, usual: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Return which parameters are not parallel in two (parameter, projection), and so distinguish hypotheses."""
    apart = rms(expected - own_scales(usual, expected)[:, None] * usual)
    is_independent = rounding.n_elements >= expected.shape[1]  # projections of fewer elements depend on each other
    return is_independent & ~is_single(expected) & (apart > 2 * rounding.tolerance(1.0))


@dataclass(frozen=True)
class RankWeights:
    """Weights of the ranks in the received gradients."""

    scale: float  # the common scale to which the weights are relative, unit 1; NaN if there is none
    #: Shape (rank,), unit 1; NaN if there is only one rank, with too few parameters, or if the rank has no gradient.
    weights: np.ndarray
    errors: np.ndarray  # standard errors, in the same shape
    #: Fraction of the sum of squares of the received gradients that the weights explain, unit 1.
    explained_fraction: float
    left: np.ndarray  # residuals, shape (parameter, projection)

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
    ``local`` are the projections of each rank's gradients, (rank, parameter, projection). Without a common scale (NaN),
    the median of the individual scales is used and the largest weight is 1.
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
