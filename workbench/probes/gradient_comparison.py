"""Comparison of the gradients that the optimizer received with those that the ranks computed, from projections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from workbench.errors import OptionError
from workbench.probes.gradient_agreement import GradientAgreement, GradientVerdict, ProjectedGradients
from workbench.probes.gradient_scale import Rounding, distinguishes, fit_scale, fit_weights, is_single, rms

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
        >>> import numpy as np
        >>> import workbench as wb
        >>> computed = np.random.default_rng(0).normal(size=(2, 3, 8))
        >>> received = np.repeat(computed.mean(0, keepdims=True), 2, axis=0)
        >>> received[:, 1] = 0
        >>> step = wb.probes.ProjectedGradients(
        ...     computed, computed, received, np.ones((2, 3)), np.full(3, 10), ("float32",) * 3
        ... )
        >>> wb.probes.compare_gradients(step).sentence
        'The optimizer receives zeros although gradients were computed, in 1 of 3 parameters.'

    See Also:
        `workbench.probes.GradientProjections`: Computes the projections of a step.
        `workbench.probes.known_answer_all_reduce`: Checks the reduction without gradients.
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
        typical = rounding.size / np.sqrt(step.n_elements)
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
