"""Scalar monitors of a model, one value per step: spikes of a curve, and the normalizer of the output."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from workbench.errors import OptionError
from workbench.monitors.matrices import widened
from workbench.option_checks import checked
from workbench.option_kinds import Measured, PositiveFloat, PositiveInt


def log_z(logits: Tensor) -> Tensor:
    """Return sqrt(mean(log(Z)^2)) over tokens, where Z = sum exp(logits) is the normalizer of the softmax.

    A z-loss keeps it near 0 (Chowdhery et al. 2022, arXiv:2204.02311); large values show that the logits drift.

    Args:
        logits: Output logits, shape (..., class); all leading dimensions count tokens.

    Returns:
        0-dim, in nat; NaN where a logit is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.log_z(torch.zeros(5, 8)).item(), 3)
        2.079

    See Also:
        `workbench.monitors.ModelProbe`: Measures it on fixed examples.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 logits would double the memory
    return widened(wide.logsumexp(-1)).square().mean().sqrt()


class SpikeScore:
    """Incremental `spike_score` of a stream of values, with memory bounded by the window."""

    @checked
    def __init__(self, *, window: PositiveInt = 1000, n_sigma: PositiveFloat = 7.0, n_least: PositiveInt = 100) -> None:
        if not 2 <= n_least <= window:
            raise OptionError.of("n_least", n_least, f"at least 2 and at most the window, {window}")
        self.n_sigma, self.n_least = n_sigma, n_least
        self.n_spikes = self.n_evaluated = 0
        self._latest, self._n_values = np.zeros(window), 0  # a ring

    @property
    def score(self) -> float:
        """Fraction of the evaluated values that were spikes; NaN if none was evaluated."""
        return self.n_spikes / self.n_evaluated if self.n_evaluated else math.nan

    def update(self, value: Measured) -> bool:
        """Add the next value, and return whether it is a spike."""
        value, is_spike = float(value), False
        if not math.isfinite(value):
            is_spike, is_evaluated = True, True
        elif is_evaluated := self._n_values >= self.n_least:
            latest = self._latest[: self._n_values]
            deviation = abs(value - latest.mean())
            is_spike = bool(deviation > 0 and deviation >= self.n_sigma * latest.std())
        if math.isfinite(value):
            self._latest[self._n_values % len(self._latest)] = value
            self._n_values += 1
        self.n_evaluated += is_evaluated
        self.n_spikes += is_spike
        return is_spike


def spike_score(
    values: Iterable[float], *, window: PositiveInt = 1000, n_sigma: PositiveFloat = 7.0, n_least: PositiveInt = 100
) -> float:
    """Return the fraction of spikes among the values of a curve, such as loss or gradient norm.

    Defined by OLMo 2 (arXiv:2501.00656): a value is a spike if it lies at least ``n_sigma`` standard deviations from
    the mean of the ``window`` finite values before it, or of all before it if there are fewer. Mean and (population)
    standard deviation do not include the value itself. The first ``n_least`` finite values are not evaluated. A value
    that is not finite is a spike at any position, and enters no mean.

    Args:
        values: One value per step, in order.
        window: Number of latest values for mean and standard deviation.
        n_sigma: Distance of a spike from the mean, in standard deviations.
        n_least: Number of values required before one is evaluated.

    Returns:
        Between 0 and 1; the paper states it in percent. NaN if there are too few values to evaluate any.

    Raises:
        OptionError: If an option is out of range.

    Example:
        >>> import workbench as wb
        >>> curve = [1.0, 1.1, 0.9] * 40 + [9.0]
        >>> round(wb.monitors.spike_score(curve), 3)
        0.048

    See Also:
        `workbench.rates.count_lasting_spikes`: Counts rises of the loss that do not recover.
    """
    tracker = SpikeScore(window=window, n_sigma=n_sigma, n_least=n_least)
    for value in values:
        tracker.update(value)
    return tracker.score
