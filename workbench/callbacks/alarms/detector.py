"""Detectors of changes: one number per measurement, causal, for every layer and head of a signal at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.callbacks.alarms.detector_options import DetectorOptions
from workbench.callbacks.alarms.settling import Settling

#: Smallest number of measurements on either side of a change.
_LEAST_LEVEL = 3


@dataclass(frozen=True)
class Departure:
    """How far a signal has departed from its past, in the bad direction; on the scale of `Watched.badness`.

    Attributes:
        level: Difference to the run's healthy start (or a paired run at the same step), shape of the signal; NaN: not
            known.
        change: Difference to the run's own recent past, shape of the signal; NaN: not known yet.
    """

    level: np.ndarray
    change: np.ndarray


class Detector:
    """Measures the departures of one signal.

    Args:
        options: See `DetectorOptions`.
        part: Part of the run that holds the signal.
        has_pair: Whether values come as differences from a paired healthy run, so that 0 is healthy.
        settling: Settling of the run, which its owner keeps up to date; None: after ``options.settle`` steps, whatever
            the learning rate does.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> detector = wb.alarms.Detector(wb.alarms.DetectorOptions(settle=0, start=20, lag=5, past=20))
        >>> departures = [detector.update(step, np.array([5.0 if step > 50 else 0.0])) for step in range(60)]
        >>> departures[10] is None, departures[-1] is None
        (True, False)
    """

    def __init__(
        self,
        options: DetectorOptions,
        *,
        part: str = "monitors",
        has_pair: bool = False,
        settling: Settling | None = None,
    ) -> None:
        self.options = options
        self._settling = Settling(options) if settling is None else settling
        self._settled_at = self._settling.end
        self._smooth = options.smooth_of(part)
        self._has_pair = has_pair
        self._start: list[np.ndarray] = []
        self._start_level: np.ndarray | None = None
        # The remembered recent past: the rows from _first to _end of two tables.
        self._steps, self._values = np.empty(0, dtype=np.int64), np.empty(0)
        self._first = self._end = 0

    def update(self, step: int, values: np.ndarray) -> Departure | None:
        """Process the values of one measurement.

        Args:
            step: Step of the measurement; rising.
            values: Values from `Watched.badness`, of any shape, the same every time.

        Returns:
            None while the run settles and its healthy start is being learned.
        """
        options = self.options
        values = np.asarray(values, dtype=np.float64)
        if self._settling.end != self._settled_at:  # the start learned so far belongs to the warm-up
            self._settled_at = self._settling.end
            self._start.clear()
            self.forget_past()
        if step < self._settled_at:
            return None
        if step < self._settled_at + options.start and not self._has_pair:
            self._start.append(values)
        self._remember(step, values)
        if step < self._settled_at + options.start:
            return None
        if self._start_level is None:
            self._start_level = _middle(np.stack(self._start)) if self._start else np.zeros_like(values)
            self._start.clear()
        steps, remembered = self.past()
        n_past = int(np.searchsorted(steps, step - self._smooth - options.lag, side="right"))
        n_before = int(np.searchsorted(steps, step - self._smooth, side="right"))
        latest = _mean(remembered[n_before:])
        level = latest - self._start_level
        change = latest - _middle(remembered[:n_past]) if n_past > 1 else np.full_like(level, np.nan)
        return Departure(level, change)

    def past(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps, shape (measurement,), and values, shape (measurement, ...), as far back as they are kept."""
        return self._steps[self._first : self._end], self._values[self._first : self._end]

    def forget_past(self) -> None:
        """Drop the recent past; the healthy start stays."""
        self._first = self._end

    def _remember(self, step: int, values: np.ndarray) -> None:
        options = self.options
        if self._end == len(self._steps):
            steps, remembered = self.past()
            n = len(steps)
            self._steps, self._values = np.empty(2 * n + 64, np.int64), np.empty((2 * n + 64, *values.shape))
            if n:
                self._steps[:n], self._values[:n] = steps, remembered
            self._first, self._end = 0, n
        self._steps[self._end], self._values[self._end] = step, values
        self._end += 1
        oldest = step - self._smooth - options.lag - options.past
        while self._steps[self._first] <= oldest:
            self._first += 1


def _middle(values: np.ndarray) -> np.ndarray:
    return np.median(values, axis=0) if np.isfinite(values).all() else _ignoring_nan(np.nanmedian, values)


def _mean(values: np.ndarray) -> np.ndarray:
    return values.mean(axis=0) if np.isfinite(values).all() else _ignoring_nan(np.nanmean, values)


def _ignoring_nan(function: Callable[..., np.ndarray], values: np.ndarray) -> np.ndarray:
    known = np.isfinite(values).any(axis=0)
    return np.where(known, function(np.where(known, values, 0.0), axis=0), np.nan)


def onset(step: np.ndarray, value: np.ndarray) -> int | None:
    """The step at which a signal's level most likely changed: one break, by least squares (ruptures).

    Args:
        step: Steps of the measurements, shape (measurement,); rising.
        value: Values of the signal, on a scale on which differences mean the same everywhere, such as
            `Watched.badness`; NaN is left out.

    Returns:
        The last step before the change; None if there are fewer than six measurements.
    """
    import ruptures

    known = np.isfinite(value)
    step, value = np.asarray(step)[known], np.asarray(value, dtype=np.float64)[known]
    if len(value) < 2 * _LEAST_LEVEL:
        return None
    breaks = ruptures.Binseg(model="l2", min_size=_LEAST_LEVEL, jump=1).fit(value[:, None]).predict(n_bkps=1)
    return int(step[breaks[0] - 1])
