"""Causal evidence that numbers differ from their own past, over windows of several lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from workbench.errors import OptionError

#: Lengths of the windows, in measurements. A window of n measurements is compared with the trend of the _BEFORE * n
#: measurements before it.
WINDOWS = np.array([1, 2, 4, 8, 16, 32, 64, 128])
_BEFORE = 8
#: Length of the remembered past, in windows; where steps are independent, also its smallest length in measurements.
_MEMORY, _LEAST_MEMORY = 30.0, 200.0
#: Where steps are independent, the past ends at least this many measurements before the latest one, since a change
#: would widen the spread of long windows.
_LEAST_LAG = 64
#: Number of past windows required before a window is evaluated; fewer suffice where steps are independent.
_LEAST, _LEAST_OF_NOISE = 6.0, 2.0
#: A past departure counts as at most this many standard deviations.
_CLIP = 8.0
#: Where steps are independent: weight, in windows, of the spread of the window half as long, and factor of its variance
#: that allows for dependence.
_PRIOR, _ALLOWANCE = 60.0, 1.2
#: Smallest degrees of freedom.
_LEAST_FREEDOM = 2.5
#: Smallest p value, and smallest squared variance, so that logarithms and ratios stay finite.
_TINY = 1e-300
#: Largest value and kurtosis, so that fourth powers stay finite; a run that learns reaches neither.
_LARGEST, _LARGEST_KURTOSIS = 1e60, 1e9
#: Measurements up to which contrasts are exact; later they are recomputed when the time has grown by this factor.
_EXACT_UNTIL, _GROWTH = 300, 1.01
#: Measurements that the longest window needs.
_LONGEST = (_BEFORE + 1) * int(WINDOWS[-1])


@dataclass(frozen=True)
class ChangeEvidence:
    """Evidence that the latest values differ from the past, for each series.

    All arrays have shape (series,); evidence is NaN if unknown yet.

    Attributes:
        rise: Evidence of a rise: -log10 of the smallest p value of any window, times the number of windows.
        fall: Evidence of a fall, computed in the same way.
        rise_window: Length of the window with the strongest evidence of a rise, in measurements.
        fall_window: Length of the window with the strongest evidence of a fall, in measurements.
    """

    rise: np.ndarray
    fall: np.ndarray
    rise_window: np.ndarray
    fall_window: np.ndarray


class OwnPast:
    """Test of whether the latest values of several series differ from each one's own past.

    For each window, the departure is the mean of the latest values minus the value that the earlier ones predict. The
    prediction is a line in the logarithm of time through eight times as many values, since training curves are nearly
    straight on that scale. The departure is compared with the earlier departures of the series: their mean removes the
    remaining drift, and their variance includes the correlation between steps. Departures whose windows overlap the
    latest one are excluded; where steps are independent, those of the latest 64 measurements.

    The p value is that of Student's t. Its degrees of freedom follow from the number of separate past windows and from
    the kurtosis of the departures, so that few or heavy-tailed departures require a larger one. No real series
    satisfies these assumptions exactly: `Calibration` measures how often healthy runs reach a p value. The cost is
    27 kB of memory for each series, and about 5 us for each series and measurement.

    Args:
        least_scale: Smallest standard deviation, in units of the values, shape (series,); may be changed at any time.
        is_noise: Whether the steps are independent apart from the trend, as metrics of random batches are, shape
            (series,). Long windows then also learn their spread from shorter ones, and are evaluated earlier.
    """

    def __init__(self, least_scale: np.ndarray, *, is_noise: np.ndarray) -> None:
        self.least_scale = np.array(least_scale, dtype=np.float64)
        self._is_noise = np.asarray(is_noise, dtype=bool)
        n = len(self.least_scale)
        length = WINDOWS[:, None]
        self._memory = _MEMORY * length
        self._memory = np.where(self._is_noise, np.maximum(self._memory, _LEAST_MEMORY), self._memory)
        self._lag = np.where(self._is_noise, np.maximum(length, _LEAST_LAG), length)
        self._mean, self._variance, self._fourth, self._n_learned = (np.zeros((len(WINDOWS), n)) for _ in range(4))
        self._least = np.where(self._is_noise, _LEAST_OF_NOISE, _LEAST)
        self._prior = np.where(self._is_noise, float(_PRIOR), 0.0)
        self._places = np.ogrid[: len(WINDOWS), :n]
        self._first, self._time = np.full(n, np.nan), 0
        self.restart()

    def restart(self) -> None:
        """Forget the latest values but not their spread, after an intended change."""
        n_windows, n = self._mean.shape
        # Twice the required length, so that the latest values are always one slice.
        self._values = np.zeros((2 * _LONGEST, n))
        self._departures = np.full((int(WINDOWS[-1]) + 1, n_windows, n), np.nan)
        self._last, self._n_of_series = np.zeros(n), np.zeros(n, dtype=np.int64)
        self._end = _LONGEST

    def update(self, values: np.ndarray) -> ChangeEvidence:
        """Process one measurement.

        Args:
            values: Shape (series,). A series begins with its first finite value; a later value that is not finite is
                replaced by the previous one.
        """
        if values.shape != self._first.shape:
            raise OptionError.of("values", values.shape, f"of shape {self._first.shape}, one value for each series")
        is_finite = np.isfinite(values)
        values = np.clip(values, -_LARGEST, _LARGEST)
        begins = is_finite & np.isnan(self._first)
        self._first[begins] = values[begins]
        # Values are relative to the first one, so that a series does not begin with a jump.
        self._last = np.where(is_finite, values - self._first, self._last)
        self._n_of_series += is_finite | (self._n_of_series > 0)
        self._time += 1
        if self._end == len(self._values):
            self._values[:_LONGEST] = self._values[-_LONGEST:]
            self._end = _LONGEST
        self._values[self._end] = self._last
        self._end += 1
        weights, per_unit = contrasts(_rounded(self._time))
        latest = torch.from_numpy(self._values[self._end - _LONGEST : self._end])
        # NumPy's product would start its own threads, whose busy waiting slows down those of the training.
        departure = (torch.from_numpy(weights) @ latest).numpy()
        departure[~weights.any(axis=1)] = np.nan
        departure[self._n_of_series < (_BEFORE + 1) * WINDOWS[:, None]] = np.nan
        found = self._evidence(departure, per_unit)
        self._departures[self._time % len(self._departures)] = departure
        self._learn(per_unit)
        return found

    def _evidence(self, departure: np.ndarray, per_unit: np.ndarray) -> ChangeEvidence:
        variance, n_past = self._variance.copy(), np.minimum(self._n_learned, self._memory) / WINDOWS[:, None]
        with np.errstate(over="ignore"):
            excess = np.clip(self._fourth / np.maximum(variance**2, _TINY) - 3, 0.0, _LARGEST_KURTOSIS)
        is_known = n_past >= self._least
        for k in range(1, len(WINDOWS)):
            prior = np.minimum(self._prior, n_past[k - 1])
            total = np.maximum(n_past[k] + prior, 1e-9)
            variance[k] = (n_past[k] * variance[k] + prior * _ALLOWANCE * variance[k - 1]) / total
            excess[k] = (n_past[k] * excess[k] + prior * excess[k - 1] / 2) / total
            n_past[k] = total
        scale = np.maximum(np.sqrt(variance), self.least_scale * per_unit)
        freedom = 1 / (1 / np.maximum(n_past - 1, 1) + excess / (6 + 4 * excess))
        studentized = (departure - self._mean) / scale
        studentized[~is_known] = np.nan
        freedom = np.maximum(freedom, _LEAST_FREEDOM)
        (rise, rise_window), (fall, fall_window) = _largest(studentized, freedom), _largest(-studentized, freedom)
        return ChangeEvidence(rise, fall, rise_window, fall_window)

    def _learn(self, per_unit: np.ndarray) -> None:
        """Update the moments with the departures whose windows ended right before the latest ones began."""
        past = self._departures[((self._time - self._lag) % len(self._departures), *self._places)]
        is_known = np.isfinite(past) & (self._time > self._lag)
        self._n_learned += is_known
        length = WINDOWS[:, None]
        fraction = 1 / np.maximum(np.minimum(self._n_learned, self._memory), 1)
        scale = np.maximum(np.sqrt(self._variance), self.least_scale * per_unit)
        limit = np.where(self._n_learned > _LEAST * length, _CLIP * scale, np.inf)
        left = np.where(is_known, np.clip(past - self._mean, -limit, limit), 0.0)
        fraction = np.where(is_known, fraction, 0.0)
        self._mean += fraction * left
        self._variance = (1 - fraction) * (self._variance + fraction * left**2)
        self._fourth = (1 - fraction) * self._fourth + fraction * left**4


@lru_cache(maxsize=32)
def contrasts(time: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of the latest values in the departure of each window.

    Each row sums to 0 and removes any line in the logarithm of time. Its squares sum to 1, so that departures of
    independent noise have the variance of the noise.

    Args:
        time: Number of measurements so far.

    Returns:
        Weights, shape (window, value), the latest value last, zero where the past is too short; and the departure
        caused by a step of height 1 between past and window, shape (window, 1).
    """
    weights, per_unit = np.zeros((len(WINDOWS), _LONGEST)), np.ones((len(WINDOWS), 1))
    for row, window in enumerate(WINDOWS.tolist()):
        n = _BEFORE * window
        if n + window > time:
            continue
        at = np.log(time - np.arange(n + window - 1, -1, -1)) - math.log(time)
        before, latest = at[:n] - at[:n].mean(), at[n:].mean() - at[:n].mean()
        spread = float(before @ before)
        weight = np.r_[-1 / n - latest * before / spread, np.full(window, 1 / window)]
        per_unit[row] = 1 / math.sqrt(float(weight @ weight))
        weights[row, _LONGEST - n - window :] = weight * per_unit[row]
    return weights, per_unit


def _rounded(time: int) -> int:
    """Round a time down to one of few values: the weights change more and more slowly."""
    if time <= _EXACT_UNTIL:
        return time
    return int(_EXACT_UNTIL * _GROWTH ** math.floor(math.log(time / _EXACT_UNTIL, _GROWTH)))


def _largest(departure: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return -log10 of the smallest p value of any window, times their number, and the length of that window."""
    from scipy.special import stdtr

    evidence = -np.log10(np.maximum(stdtr(freedom, -departure), _TINY)) - np.log10(len(WINDOWS))
    known = np.where(np.isnan(departure), -np.inf, evidence)
    largest = known.max(axis=0)
    return np.where(np.isneginf(largest), np.nan, largest), WINDOWS[known.argmax(axis=0)]
