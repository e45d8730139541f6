"""Causal cumulative sums of numbers that are far above their own past."""

from __future__ import annotations

import numpy as np

#: Standard deviations subtracted at each step, and largest number of them that counts.
_SLACK, _LARGEST = 2.0, 8.0
#: Numbers over which mean and variance are learned, first numbers for which no sum is formed, and largest distance from
#: the mean, in standard deviations, with which a number enters mean and variance.
_MEMORY, _N_FIRST, _CLIP = 200, 20, 4.0
#: Largest sum, so that a sum returns to 0 soon after the numbers are normal again.
_LARGEST_SUM = 100.0


class CumulativeSum:
    """One-sided cumulative sums of several series, each relative to its own past.

    s_t = max(0, s_{t-1} + min(z_t, 8) - 2), where z_t is the number minus the mean of its past, in standard deviations
    of its past (Page 1954, doi:10.1093/biomet/41.1-2.100); mean and variance forget over 200 numbers. The slack of two
    deviations tolerates drift and accumulates jumps: one of eight deviations adds 6 at each step. The sum has no
    p value; `Calibration` measures how often healthy runs reach a sum.

    Args:
        least_scale: Smallest standard deviation, in units of the values, shape (series,).

    Attributes:
        value: The sums, shape (series,).
        n_since: Numbers processed since each sum was 0, shape (series,).

    Example:
        >>> import numpy as np
        >>> from workbench.callbacks.alarms.cumulative_sum import CumulativeSum
        >>> sums = CumulativeSum(np.array([0.01]))
        >>> noise = np.random.default_rng(0).normal(size=(300, 1))
        >>> before = max(float(sums.update(row)[0]) for row in noise)
        >>> after = [float(sums.update(row + 6)[0]) for row in noise[:5]]
        >>> before < 5, after[-1] > 10
        (True, True)
    """

    def __init__(self, least_scale: np.ndarray) -> None:
        self._least = np.maximum(np.asarray(least_scale, dtype=np.float64), 1e-30)
        n = len(self._least)
        self._mean, self._variance = np.zeros(n), np.zeros(n)
        self._n, self._n_of_spread = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self.restart()

    def restart(self) -> None:
        """Reset the sums to 0 and learn the mean again, but keep the variance of the past."""
        self._n[:] = 0
        self.value = np.zeros(len(self._least))
        self.n_since = np.zeros(len(self._least), dtype=np.int64)

    def update(self, values: np.ndarray) -> np.ndarray:
        """Process one number of each series; numbers that are not finite count as missing.

        Returns:
            The sums, shape (series,).
        """
        is_known = np.isfinite(values)
        self._n += is_known
        scale = np.maximum(np.sqrt(self._variance), self._least)
        left = np.where(is_known, values - self._mean, 0.0)
        is_begun = is_known & (self._n > _N_FIRST)
        grown = self.value + np.minimum(left / scale, _LARGEST) - _SLACK
        self.value = np.where(is_begun, np.clip(grown, 0.0, _LARGEST_SUM), self.value)
        self.n_since = np.where(self.value > 0, self.n_since + 1, 0)
        counted = np.where(is_begun, np.clip(left, -_CLIP * scale, _CLIP * scale), left)
        fraction = np.where(is_known, 1 / np.clip(self._n, 1, _MEMORY), 0.0)
        self._mean = self._mean + fraction * counted
        # After a restart, the variance waits until the mean is known again.
        learns = is_known & (is_begun | (self._n_of_spread < _N_FIRST))
        self._n_of_spread += learns
        fraction = np.where(learns, 1 / np.clip(self._n_of_spread, 1, _MEMORY), 0.0)
        self._variance = (1 - fraction) * (self._variance + fraction * counted**2)
        return self.value
