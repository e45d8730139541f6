"""Numbers of the whole model, one per step: spikes in a curve, and the normalizer of the output."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from workbench.errors import OptionError
from workbench.monitors.matrices import widened


def log_z(logits: Tensor) -> Tensor:
    """Root mean square over tokens, sqrt(mean(log(Z)^2)), of log Z, Z = sum exp(logits) the softmax's normalizer.

    Near 0 where a z-loss holds it (Chowdhery et al. 2022, arXiv:2204.02311); far from it, logits drift.

    Args:
        logits: Output logits, shape (..., class); every leading dimension counts tokens.

    Returns:
        0-dim, in nat; NaN where a logit is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.log_z(torch.zeros(5, 8)).item(), 3)
        2.079
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a vocabulary in float64 would double memory
    return widened(wide.logsumexp(-1)).square().mean().sqrt()


class SpikeScore:
    """`spike_score` of values that come one by one; memory is bounded by the window.

    Args:
        window: Number of latest values for mean and deviation.
        n_sigma: Number of standard deviations of a spike.
        n_least: Number of values needed before one is judged.

    Attributes:
        n_spikes: Number of spikes so far.
        n_judged: Number of values judged so far.

    Raises:
        OptionError: If an option is out of range.

    Example:
        >>> import workbench as wb
        >>> spikes = wb.monitors.SpikeScore(n_sigma=3.0, n_least=3)
        >>> [spikes.update(loss) for loss in (1.0, 1.1, 0.9, 1.0, 9.0)]
        [False, False, False, False, True]
        >>> spikes.score
        0.5
    """

    def __init__(self, *, window: int = 1000, n_sigma: float = 7.0, n_least: int = 100) -> None:
        if not 2 <= n_least <= window:
            raise OptionError(f"n_least is {n_least}, expected 2 or more and at most the window, {window}.")
        if not n_sigma > 0:
            raise OptionError(f"n_sigma is {n_sigma}, expected a positive number such as 7.")
        self.n_sigma, self.n_least = n_sigma, n_least
        self.n_spikes = self.n_judged = 0
        self._latest: deque[float] = deque(maxlen=window)

    @property
    def score(self) -> float:
        """Share of the judged values that were spikes; NaN before any was judged."""
        return self.n_spikes / self.n_judged if self.n_judged else math.nan

    def update(self, value: float) -> bool:
        """Add the next value; return whether it is a spike."""
        value, is_spike = float(value), False
        if not math.isfinite(value):
            is_spike, is_judged = True, True
        elif is_judged := len(self._latest) >= self.n_least:
            latest = np.array(self._latest)
            deviation = abs(value - latest.mean())
            is_spike = bool(deviation > 0 and deviation >= self.n_sigma * latest.std())
        if math.isfinite(value):
            self._latest.append(value)
        self.n_judged += is_judged
        self.n_spikes += is_spike
        return is_spike


def spike_score(values: Iterable[float], *, window: int = 1000, n_sigma: float = 7.0, n_least: int = 100) -> float:
    """Share of the values of a curve, such as loss or gradient norm, that are spikes (OLMo 2, arXiv:2501.00656).

    A value is a spike if it lies at least ``n_sigma`` standard deviations from the mean of the ``window`` finite values
    before it, or of all before it while there are fewer; the value itself is not among them, the deviation is theirs
    (dividing by their number). The first ``n_least`` finite values are not judged. A value that is not finite is a
    spike at any position, and enters no mean.

    Args:
        values: One per step, in order.
        window: Number of latest values for mean and deviation.
        n_sigma: Number of standard deviations of a spike.
        n_least: Number of values needed before one is judged.

    Returns:
        Between 0 and 1; the paper gives it in percent. NaN if there were too few values to judge any.

    Raises:
        OptionError: If an option is out of range.

    Example:
        >>> import workbench as wb
        >>> curve = [1.0, 1.1, 0.9] * 40 + [9.0]
        >>> round(wb.monitors.spike_score(curve), 3)
        0.048
    """
    tracker = SpikeScore(window=window, n_sigma=n_sigma, n_least=n_least)
    for value in values:
        tracker.update(value)
    return tracker.score
