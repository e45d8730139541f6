"""ChangeEvidence that numbers have left their own past, over windows of several lengths; causal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy.special import stdtr

#: Windows in measurements; each is compared with the trend of the _BEFORE times as many measurements before it.
WINDOWS = np.array([1, 2, 4, 8, 16, 32, 64, 128])
_BEFORE = 8
#: Windows of the past that are remembered; and, where steps are independent, at least so many measurements of it.
_MEMORY, _LEAST_MEMORY = 30.0, 200.0
#: There the past ends so many measurements before the latest one, as a change would widen the spread of long windows.
_LEAST_LAG = 64
#: Windows that there must be before one is judged; fewer are enough where steps are independent.
_LEAST, _LEAST_OF_NOISE = 6.0, 2.0
#: A past departure counts as at most this many standard deviations.
_CLIP = 8.0
#: Weight, in windows, of the spread of half a window where steps are independent, and its allowance for dependence.
_PRIOR, _ALLOWANCE = 60.0, 1.2
#: Smallest degrees of freedom.
_LEAST_FREEDOM = 2.5
#: Smallest p value, and smallest squared variance, so that logarithms and ratios stay finite.
_TINY = 1e-300
#: Largest value and kurtosis, so that fourth powers stay finite; neither is met in a run that learns.
_LARGEST, _LARGEST_KURTOSIS = 1e60, 1e9
#: Measurements until which contrasts are exact; later they are computed anew when the time grew by this factor.
_EXACT_UNTIL, _GROWTH = 300, 1.01
#: Measurements that the longest window needs.
_LONGEST = (_BEFORE + 1) * int(WINDOWS[-1])


@dataclass(frozen=True)
class ChangeEvidence:
    """How unlikely the latest values are by the past, for each series, shape (series,); NaN: not known yet.

    Attributes:
        rise: -log10 of the p value of a rise: of the window where it is smallest, times the number of windows.
        fall: The same of a fall.
        rise_window: Length of that window, in measurements.
        fall_window: The same of the fall.
    """

    rise: np.ndarray
    fall: np.ndarray
    rise_window: np.ndarray
    fall_window: np.ndarray


class OwnPast:
    """How unlikely the latest values of several series are, by each one's own past.

    For each window, the departure is the mean of the latest values minus what the values before predict: a line in the
    logarithm of the time, through eight times as many, since curves of a training are nearly straight there. It is
    compared with what such departures were so far in this series: their mean, which removes what is left of the drift,
    and their variance, which contains the correlation between steps. Departures whose windows overlap the latest one
    are left out; where steps are independent, those of the latest 64 measurements. The p value is that of Student's t;
    its degrees of freedom follow from the number of separate windows in the past and from the kurtosis of the
    departures, so that few or heavy-tailed ones need a larger departure. No real series fulfils its assumptions:
    `Calibration` measures how often healthy runs reach a p value. Cost: 27 kB of memory for each series, and some 5 us
    for each in every measurement.

    Args:
        least_scale: Standard deviations below this count as this, in units of the values, shape (series,); may be
            changed at any time.
        is_noise: Whether the steps are independent but for the trend, as numbers of random batches are, shape
            (series,); then long windows learn their spread from shorter ones too, and are judged earlier.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> past = wb.alarms.OwnPast(np.array([0.01]), is_noise=np.array([True]))
        >>> noise = np.random.default_rng(0).normal(size=300)
        >>> found = [past.update(np.array([value])) for value in [*noise, 9.0]]
        >>> bool(found[-2].rise < 3), bool(found[-1].rise > 6), int(found[-1].rise_window[0])
        (True, True, 1)
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
        self._first, self._time = np.full(n, np.nan), 0
        self.restart()

    def restart(self) -> None:
        """Forget the latest values, but not how they spread: after a change that was meant."""
        n_windows, n = self._mean.shape
        # Twice as long as what is needed, so that the latest values are one slice.
        self._values = np.zeros((2 * _LONGEST, n))
        self._departures = np.full((int(WINDOWS[-1]) + 1, n_windows, n), np.nan)
        self._last, self._n_of_series = np.zeros(n), np.zeros(n, dtype=np.int64)
        self._end = _LONGEST

    def update(self, values: np.ndarray) -> ChangeEvidence:
        """Process one measurement.

        Args:
            values: Shape (series,). A series begins with its first finite value; later a value that is not finite
                counts as the one before.

        Returns:
            The evidence.
        """
        is_finite = np.isfinite(values)
        values = np.clip(values, -_LARGEST, _LARGEST)
        begins = is_finite & np.isnan(self._first)
        self._first[begins] = values[begins]
        # Relative to the first value: before it there is no jump.
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
        # NumPy's product would start threads of its own, which wait busily beside those of the training.
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
        is_known = n_past >= np.where(self._is_noise, _LEAST_OF_NOISE, _LEAST)
        for k in range(1, len(WINDOWS)):
            prior = np.where(self._is_noise, np.minimum(_PRIOR, n_past[k - 1]), 0.0)
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
        """Take in the departures whose windows ended right before the latest ones began."""
        row, series = np.ogrid[: len(WINDOWS), : len(self._first)]
        past = self._departures[(self._time - self._lag) % len(self._departures), row, series]
        is_known = np.isfinite(past) & (self._time > self._lag)
        self._n_learned += is_known
        length = WINDOWS[:, None]
        share = 1 / np.maximum(np.minimum(self._n_learned, self._memory), 1)
        scale = np.maximum(np.sqrt(self._variance), self.least_scale * per_unit)
        limit = np.where(self._n_learned > _LEAST * length, _CLIP * scale, np.inf)
        left = np.where(is_known, np.clip(past - self._mean, -limit, limit), 0.0)
        share = np.where(is_known, share, 0.0)
        self._mean += share * left
        self._variance = (1 - share) * (self._variance + share * left**2)
        self._fourth = (1 - share) * self._fourth + share * left**4


@lru_cache(maxsize=32)
def contrasts(time: int) -> tuple[np.ndarray, np.ndarray]:
    """The weights of the latest values in the departure of each window.

    Each row sums to 0 and leaves out any line in the logarithm of the time; its squares sum to 1, so that independent
    noise gives departures with its own variance.

    Args:
        time: Measurements so far.

    Returns:
        Weights, shape (window, value), the latest value last, zeros where the past is too short; and the departure of
        a step of 1 between past and window, shape (window, 1).
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
    """A time not far below, of which there are few: the weights change ever more slowly."""
    if time <= _EXACT_UNTIL:
        return time
    return int(_EXACT_UNTIL * _GROWTH ** math.floor(math.log(time / _EXACT_UNTIL, _GROWTH)))


def _largest(departure: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-log10 of the smallest p value of any window, times their number, and the length of that window."""
    evidence = -np.log10(np.maximum(stdtr(freedom, -departure), _TINY)) - np.log10(len(WINDOWS))
    known = np.where(np.isnan(departure), -np.inf, evidence)
    best = known.argmax(axis=0)
    largest = np.take_along_axis(known, best[None], axis=0)[0]
    return np.where(np.isneginf(largest), np.nan, largest), WINDOWS[best]
