"""The band of useful learning rates, and the sensitivity of the loss to the learning rate.

A run diverges if its loss or gradient norm exceeds RKSP's limits (``has_diverged``). Most models with normalization
never diverge: at too large a learning rate they stop learning. Therefore the useful band is defined by the loss on
held-out examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from workbench.errors import OptionError
from workbench.option_checks import n_dims

#: Fraction of the updates after which the best rate has the loss that a useful rate must reach after all updates.
REFERENCE_SHARE = 0.8
#: Difference of held-out losses below which two runs count as equal; nat.
RESOLUTION = 0.01


@dataclass(frozen=True)
class UsefulBand:
    """The learning rates at which a design learns about as well as at the best one.

    Attributes:
        best_rate: Learning rate of the lowest mean loss.
        best_loss: The lowest mean loss; nat.
        slow_edge: Lower end of the band; smaller rates are too slow for the number of updates. NaN if it lies outside
            the rates tried.
        useful_edge: Upper end of the band; NaN if it lies outside the rates tried.
        excess: Mean loss less the largest useful loss for each rate, shape (rate,); nat; infinite if not finite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> loss = np.array([[2.6], [2.0], [2.1]])
        >>> wb.rates.useful_band(np.array([1e-3, 2e-3, 4e-3]), loss, loss + 0.2).best_loss
        2.0

    See Also:
        `workbench.rates.useful_band`: Returns it.
    """

    best_rate: float
    best_loss: float
    slow_edge: float
    useful_edge: float
    excess: np.ndarray


def useful_band(
    rate: np.ndarray,
    loss: Annotated[np.ndarray, n_dims(2)],
    earlier: np.ndarray,
    *,
    reference: np.ndarray | None = None,
) -> UsefulBand:
    """Find the band of useful learning rates of one design.

    A rate is useful if its held-out loss after all updates is no larger than that of the best rate after four fifths of
    them, so that it costs less than a quarter more updates. A loss within 0.01 nat of the best is useful too. Losses
    are compared for each seed separately, with the best rate determined from the other seeds, and the differences are
    averaged. Only rates tried with the largest number of seeds can be the best. The band is the contiguous one around
    the best rate; its ends are interpolated linearly in the logarithm of the rate.

    Args:
        rate: Learning rates, increasing, shape (rate,).
        loss: Held-out loss after all updates, shape (rate, seed); nat; infinite if not finite, NaN if not tried.
        earlier: The same after four fifths of the updates. With a schedule that decays to 0 these are separate runs
            with this number of updates.
        reference: Largest useful loss of each seed, shape (seed,), for example that of another design; None computes it
            from ``loss`` and ``earlier``. The edges are NaN if not even the best rate reaches it.

    Returns:
        The band.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> rate = np.array([0.001, 0.002, 0.004, 0.008])
        >>> loss = np.array([[2.6], [2.0], [2.1], [3.0]])
        >>> band = wb.rates.useful_band(rate, loss, loss + 0.2)
        >>> band.best_rate, round(band.slow_edge, 5), round(band.useful_edge, 5)
        (0.002, 0.00159, 0.00432)

    See Also:
        `workbench.rates.rate_outcomes`: Finds the bands of a sweep.
        `workbench.find_rate`: Estimates the band of a planned training.
    """
    for name, values, axes in (
        ("rate", rate, loss.shape[:1]),
        ("earlier", earlier, loss.shape),
        ("reference", reference, loss.shape[1:]),
    ):
        _require_shape(name, values, axes)
    n_tried = (~np.isnan(loss)).sum(axis=1)
    mean = mean_over_seeds(loss)
    compared = np.where(np.isfinite(mean) & (n_tried == n_tried.max()), mean, math.inf)
    is_own = reference is None
    reference = largest_useful_loss(loss, earlier) if reference is None else reference
    if not (np.isfinite(compared).any() and np.isfinite(reference).any()):
        return UsefulBand(math.nan, math.nan, math.nan, math.nan, mean)
    best = int(np.argmin(compared))
    excess = mean_over_seeds((loss - reference)[:, np.isfinite(reference)])
    is_useful = is_own or not excess[best] > 0
    ends = [_end(np.log(rate), excess, best, step) if is_useful else math.nan for step in (-1, 1)]
    return UsefulBand(float(rate[best]), float(mean[best]), math.exp(ends[0]), math.exp(ends[1]), excess)


def _require_shape(name: str, values: np.ndarray | None, shape: tuple[int, ...]) -> None:
    if values is not None and values.shape != shape:
        raise OptionError.of(name, values.shape, f"of shape {shape}, like loss")


def largest_useful_loss(loss: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Return the largest useful loss of each seed, shape (seed,); NaN if unknown. Arguments as in `useful_band`."""
    return np.array([_reference(loss, earlier, seed) for seed in range(loss.shape[1])])


def _reference(loss: np.ndarray, earlier: np.ndarray, seed: int) -> float:
    """Return the largest useful loss of a seed, at the rate that is best for the other seeds; NaN if unknown."""
    others = np.delete(loss, seed, axis=1) if loss.shape[1] > 1 else loss
    known = np.isfinite(loss[:, seed]) & np.isfinite(earlier[:, seed])
    if not known.any():
        return math.nan
    by_others = np.where(known, np.nan_to_num(mean_over_seeds(others), nan=math.inf), math.inf)
    if not np.isfinite(by_others).any():  # No other seed was tried at these rates.
        by_others = np.where(known, loss[:, seed], math.inf)
    best = int(np.argmin(by_others))
    return max(float(earlier[best, seed]), float(loss[best, seed]) + RESOLUTION)


def mean_over_seeds(loss: np.ndarray) -> np.ndarray:
    """Return the mean over the seeds that were tried; NaN if there is none, infinite if one was not finite."""
    n_tried = (~np.isnan(loss)).sum(axis=1)
    total = np.where(np.isnan(loss), 0.0, loss).sum(axis=1)
    return np.where(n_tried > 0, total / np.maximum(n_tried, 1), np.nan)


def _end(log_rate: np.ndarray, excess: np.ndarray, best: int, step: int) -> float:
    """Return the logarithm of the rate where the excess becomes positive on one side of the best; NaN if nowhere."""
    at = best
    while 0 <= at + step < len(excess):
        here, there = excess[at], excess[at + step]
        if np.isnan(there):
            return math.nan
        if there > 0:
            fraction = 0.5 if math.isinf(there) else max(0.0, -here) / (there - min(0.0, here))
            return float(log_rate[at] + fraction * (log_rate[at + step] - log_rate[at]))
        at += step
    return math.nan


def rate_sensitivity(
    rate: np.ndarray, loss: Annotated[np.ndarray, n_dims(1)], *, start_loss: float, over: tuple[float, float]
) -> float:
    """Compute the learning-rate sensitivity: the mean excess of the loss over the best one, over a range of rates.

    It is the mean of min(loss, start_loss) - best loss over the logarithm of the rate (Wortsman et al. 2023,
    arXiv:2309.14322, Section 2.2), with the loss interpolated linearly.

    Args:
        rate: Learning rates, increasing, shape (rate,).
        loss: Mean loss at each rate, shape (rate,); nat; infinite if not finite.
        start_loss: Upper limit of the loss; nat. At most the loss of a uniform guess.
        over: First and last rate of the range.

    Returns:
        The sensitivity; nat; NaN if the rates tried do not cover the range.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> rate, loss = np.array([1e-3, 1e-2, 1e-1]), np.array([2.0, 1.0, 9.0])
        >>> round(wb.rates.rate_sensitivity(rate, loss, start_loss=3.0, over=(1e-3, 1e-1)), 3)
        0.75

    See Also:
        `workbench.rates.rate_outcomes`: Computes the sensitivity of each cell of a sweep.
    """
    _require_shape("rate", rate, loss.shape)
    is_known = ~np.isnan(loss)
    rate, loss = rate[is_known], loss[is_known]
    if not len(rate):
        return math.nan
    log_rate, ends = np.log(rate), np.log(over)
    if log_rate[0] > ends[0] + 1e-6 or log_rate[-1] < ends[1] - 1e-6:
        return math.nan
    inner = log_rate[(log_rate > ends[0]) & (log_rate < ends[1])]
    grid = np.array([ends[0], *inner, ends[1]])
    limited = np.interp(grid, log_rate, np.minimum(loss, start_loss))
    return float(np.trapezoid(limited - limited.min(), grid) / (ends[1] - ends[0]))
