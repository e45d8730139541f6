"""Shifts of the loss that a person sees in its curve: many of its own deviations, up or down out of its trend."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

#: Lengths of the windows, in measurements, and of the past that each is compared with.
_WINDOWS, _PAST, _LEAST_PAST = (10, 16, 25), 120, 60
#: A residual counts as at most this many deviations, by the median deviation.
_CLIP = 4.0
#: Largest correlation of successive residuals that is allowed for.
_LARGEST_CORRELATION = 0.98
#: Number of first losses, and fraction of their median that is the smallest deviation of later ones.
_N_FIRST, _FRACTION_OF_FIRST = 20, 0.02
#: Fraction of its level by which a loss must fall, since healthy learning is often faster than before for a while.
_LEAST_FALL = 0.25
_TINY = 1e-300


class Shift(NamedTuple):
    """How far the latest losses are from the trend before them, in deviations of the mean of a window.

    Attributes:
        rise: Largest shift up of any window; NaN if unknown yet.
        fall: Largest shift down, of windows that are below the trend by a quarter of its level; NaN if unknown yet.
        rise_window: Length of the window of the rise, in measurements.
        fall_window: Length of the window of the fall.
        level: Mean of the latest 10 losses.
    """

    rise: float = math.nan
    fall: float = math.nan
    rise_window: int = 0
    fall_window: int = 0
    level: float = math.nan


class LossShift:
    """Comparison of the latest 10, 16 and 25 losses with a straight line through the 120 before the latest 25.

    Outliers of the past are clipped. The deviation of a window's mean follows from the residuals and from their
    correlation, so that losses that wander need a larger shift. A window counts by its mean or its median, whichever is
    closer to the trend, so that single spikes do not count; and the trend is the line or its last value, whichever is
    closer to the window, so that neither the end of a fall is a rise, nor a steady fall a shift. A fall must also go
    below every earlier mean of 25 losses, so that a recovery is none. Factors of the loss have no effect; offsets have
    one only through the smallest deviation, 2 % of the first losses, and the smallest fall.

    Example:
        >>> import numpy as np
        >>> from workbench.callbacks.alarms.loss_shift import LossShift
        >>> shifts, noise = LossShift(), np.random.default_rng(0).normal(size=200)
        >>> found = [shifts.update(3 + 0.1 * each + 0.3 * (i >= 190)) for i, each in enumerate(noise)]
        >>> found[189].rise < 4, found[-1].rise > 7, found[-1].rise_window
        (True, True, 10)
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self.restart()

    def restart(self) -> None:
        """Forget the losses so far, but not the scale of the first ones."""
        self._losses: deque[float] = deque(maxlen=_PAST + _WINDOWS[-1])
        self._lowest = math.inf

    def update(self, loss: float) -> Shift:
        """Process a loss; one that is not finite counts as missing."""
        if not math.isfinite(loss):
            return Shift()
        if len(self._first) < _N_FIRST:
            self._first.append(loss)
        self._losses.append(loss)
        least = _FRACTION_OF_FIRST * abs(float(np.median(self._first)))
        losses = np.array(self._losses)
        past = losses[: -_WINDOWS[-1]]
        if len(past) < _LEAST_PAST:
            return Shift()
        self._lowest = min(self._lowest, float(past[-_WINDOWS[-1] :].mean()))
        found = _shifts(past, [losses[-window:] for window in _WINDOWS], least, self._lowest)
        (rise, rise_window), (fall, fall_window) = (max(zip(of, _WINDOWS, strict=True)) for of in found)
        return Shift(rise, fall, rise_window, fall_window, float(losses[-_WINDOWS[0] :].mean()))


def _shifts(
    past: np.ndarray, windows: list[np.ndarray], least: float, lowest: float
) -> tuple[list[float], list[float]]:
    """Return the shifts up and down of each window, in deviations of its mean."""
    n = len(past)
    at = np.arange(n) - (n - 1) / 2
    clipped = past
    for is_last in (False, True):
        level, slope = float(clipped.mean()), float(at @ clipped) / float(at @ at)
        residual = past - level - slope * at
        limit = _CLIP * 1.4826 * float(np.median(np.abs(residual - np.median(residual))))
        clipped = level + slope * at + np.clip(residual, -limit, limit)
        if is_last:
            residual = np.clip(residual, -limit, limit)
    square = float(residual @ residual)
    correlation = float(residual[1:] @ residual[:-1]) / square if square else 0.0
    correlation += (2 + 4 * correlation) / n  # the trend takes away this much of it (Kendall 1954)
    correlation = min(max(correlation, 0.0), _LARGEST_CORRELATION)
    # Residuals with correlation c are worth (1 - c) / (1 + c) as many independent ones; the end of a line through n
    # points has four times the variance of their mean.
    variance = max(square / (n - 2), least**2) * (1 + correlation) / (1 - correlation)
    end = level + slope * float(at[-1])
    rises, falls = [], []
    for latest in windows:
        extrapolated = end + slope * (len(windows[-1]) - (len(latest) - 1) / 2)
        low, high = sorted((end, extrapolated))
        mean, median = float(latest.mean()), float(np.median(latest))
        deviation = max(math.sqrt(variance * (1 / len(latest) + 4 / n)), _TINY)
        low = min(low, lowest)
        down = low - max(mean, median)
        rises.append((min(mean, median) - high) / deviation)
        falls.append(down / deviation if down >= _LEAST_FALL * abs(low) else min(down, 0.0) / deviation)
    return rises, falls
