"""Cumulative sums of numbers that are far above their own past; causal."""

from __future__ import annotations

import numpy as np

#: Standard deviations above the mean beyond which a number counts, and up to which it does.
_SLACK, _LARGEST = 2.0, 8.0
#: Numbers over which mean and variance are learned, the first ones from which they are begun, and how far above the
#: mean, in standard deviations, a number counts in them at most.
_MEMORY, _N_FIRST, _CLIP = 200, 20, 4.0
#: A sum grows no further, so that it is soon over when the numbers are as before.
_LARGEST_SUM = 100.0


class CumulativeSum:
    """One-sided cumulative sums of several series, each by its own past (Page 1954, doi:10.1093/biomet/41.1-2.100).

    s_t = max(0, s_{t-1} + min(z_t, 8) - 2), where z_t is the number minus the mean of its past, in its standard
    deviations; both forget over 200 numbers. A slack of two deviations lets drift pass and accumulates jumps: one of
    eight deviations adds 6 at each step. It has no p value; `Calibration` measures how often healthy runs reach a sum.

    Args:
        least_scale: Standard deviations below this count as this, in units of the values, shape (series,).

    Attributes:
        value: The sums, shape (series,).
        n_since: Numbers since each sum was 0, shape (series,).

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
        self._mean, self._variance, self._n = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.int64)
        self.restart()

    def restart(self) -> None:
        """Begin the sums anew, but keep what is known of the past."""
        self.value = np.zeros(len(self._least))
        self.n_since = np.zeros(len(self._least), dtype=np.int64)

    def update(self, values: np.ndarray) -> np.ndarray:
        """Process one number of each series; one that is not finite counts as missing.

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
        share = np.where(is_known, 1 / np.clip(self._n, 1, _MEMORY), 0.0)
        self._mean = self._mean + share * counted
        self._variance = (1 - share) * (self._variance + share * counted**2)
        return self.value
