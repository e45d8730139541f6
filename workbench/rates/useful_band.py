"""The learning rates with which a design learns about as well as with the best one, and how sensitive it is to them.

A run explodes where its loss or gradient norm passes RKSP's limits (``has_diverged``). Most models with normalization
never do: at too large a rate they stop learning. So the useful band is defined by the loss on held-out examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

#: Share of the updates after which the best rate has the loss that a useful rate reaches with all of them.
REFERENCE_SHARE = 0.8
#: Difference of held-out losses below which two runs count as equal; nat.
RESOLUTION = 0.01


@dataclass(frozen=True)
class UsefulBand:
    """The learning rates with which a design learns about as well as with the best one.

    Attributes:
        best_rate: Rate of the lowest mean loss.
        best_loss: That loss; nat.
        slow_edge: Lower end of the band: smaller rates are too slow for the number of updates; NaN: not within the
            rates tried.
        useful_edge: Upper end of the band; NaN: not within the rates tried.
        excess: For each rate, by how much the mean loss exceeds the largest useful one; nat; infinite: not finite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> loss = np.array([[2.6], [2.0], [2.1]])
        >>> wb.rates.useful_band(np.array([1e-3, 2e-3, 4e-3]), loss, loss + 0.2).best_loss
        2.0
    """

    best_rate: float
    best_loss: float
    slow_edge: float
    useful_edge: float
    excess: np.ndarray


def useful_band(
    rate: np.ndarray, loss: np.ndarray, earlier: np.ndarray, *, reference: np.ndarray | None = None
) -> UsefulBand:
    """Find the band of useful learning rates of one design.

    A rate is useful if the held-out loss after all updates is no larger than that of the best rate after four fifths of
    them: the wrong rate costs less than a quarter more updates. A loss within .01 nat of the best is useful too. Losses
    are compared seed by seed, the best rate of each seed being that of the other seeds, and the differences averaged.
    Only rates tried with the most seeds can be the best. The band is the contiguous one around it; its ends are
    interpolated linearly in the logarithm of the rate.

    Args:
        rate: Learning rates, rising, shape (rate,).
        loss: Held-out loss after all updates, shape (rate, seed); nat; infinite: not finite; NaN: not tried.
        earlier: The same after four fifths of the updates. With a schedule that falls to 0 these are runs of their own,
            of so many updates.
        reference: Largest useful loss of each seed, where it is not the design's own, as another design's from
            `largest_useful_loss`; shape (seed,). The edges are NaN if not even the best rate is useful by it.

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
    """
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


def largest_useful_loss(loss: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """The largest useful loss of each seed, shape (seed,); NaN: not known. For the arguments see `useful_band`."""
    return np.array([_reference(loss, earlier, seed) for seed in range(loss.shape[1])])


def _reference(loss: np.ndarray, earlier: np.ndarray, seed: int) -> float:
    """The largest useful loss of a seed, from the rate that is the best for the other seeds; NaN: not known."""
    others = np.delete(loss, seed, axis=1) if loss.shape[1] > 1 else loss
    known = np.isfinite(loss[:, seed]) & np.isfinite(earlier[:, seed])
    if not known.any():
        return math.nan
    by_others = np.where(known, np.nan_to_num(mean_over_seeds(others), nan=math.inf), math.inf)
    if not np.isfinite(by_others).any():  # no other seed was tried at these rates
        by_others = np.where(known, loss[:, seed], math.inf)
    best = int(np.argmin(by_others))
    return max(float(earlier[best, seed]), float(loss[best, seed]) + RESOLUTION)


def mean_over_seeds(loss: np.ndarray) -> np.ndarray:
    """Mean over the seeds that were tried; NaN: none; infinite: one was not finite."""
    n_tried = (~np.isnan(loss)).sum(axis=1)
    total = np.where(np.isnan(loss), 0.0, loss).sum(axis=1)
    return np.where(n_tried > 0, total / np.maximum(n_tried, 1), np.nan)


def _end(log_rate: np.ndarray, excess: np.ndarray, best: int, step: int) -> float:
    """Logarithm of the rate at which the excess becomes positive on one side of the best; NaN: nowhere."""
    at = best
    while 0 <= at + step < len(excess):
        here, there = excess[at], excess[at + step]
        if np.isnan(there):
            return math.nan
        if there > 0:
            share = 0.5 if math.isinf(there) else max(0.0, -here) / (there - min(0.0, here))
            return float(log_rate[at] + share * (log_rate[at + step] - log_rate[at]))
        at += step
    return math.nan


def rate_sensitivity(rate: np.ndarray, loss: np.ndarray, *, start_loss: float, over: tuple[float, float]) -> float:
    """Learning-rate sensitivity: mean excess of the loss over the best one, over a fixed range of rates.

    The mean over the logarithm of the rate of min(loss, start_loss) - best loss (Wortsman et al. 2023,
    arXiv:2309.14322, Section 2.2), with the loss interpolated linearly.

    Args:
        rate: Learning rates, rising, shape (rate,).
        loss: Mean loss at each, shape (rate,); nat; infinite: not finite.
        start_loss: Loss that no run is charged more than; nat. At most that of a uniform guess.
        over: First and last rate of the range.

    Returns:
        The sensitivity; nat; NaN if the rates tried do not cover the range.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> rate, loss = np.array([1e-3, 1e-2, 1e-1]), np.array([2.0, 1.0, 9.0])
        >>> round(wb.rates.rate_sensitivity(rate, loss, start_loss=3.0, over=(1e-3, 1e-1)), 3)
        0.75
    """
    is_known = ~np.isnan(loss)
    rate, loss = rate[is_known], loss[is_known]
    if not len(rate):
        return math.nan
    log_rate, ends = np.log(rate), np.log(over)
    if log_rate[0] > ends[0] + 1e-6 or log_rate[-1] < ends[1] - 1e-6:
        return math.nan
    inner = log_rate[(log_rate > ends[0]) & (log_rate < ends[1])]
    grid = np.array([ends[0], *inner, ends[1]])
    shown = np.interp(grid, log_rate, np.minimum(loss, start_loss))
    return float(np.trapezoid(shown - shown.min(), grid) / (ends[1] - ends[0]))
