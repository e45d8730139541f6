"""When a run has settled: after its first steps and its warm-up, which is read from the recorded learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from workbench.callbacks.alarms.detector_options import DetectorOptions

#: Rates that differ by less than this share count as equal, because of rounding.
_TOLERANCE = 1e-6
#: A rate that has risen twice with pauses of no more than _SHORT steps ends its warm-up with one of more than _LONG.
_SHORT, _LONG = 5, 10


class Settling:
    """The step at which a run's healthy start begins: after `DetectorOptions.settle` steps and after its warm-up.

    A run warms up from its first step on, for as long as its learning rate keeps rising. The rate may pause, because
    it is rounded, or rises once an epoch, for as long as the healthy start lasts (`DetectorOptions.start`); once it has
    risen at nearly every step, for ten steps. A longer pause, or a rate that falls, ends the warm-up for good: a rate
    that rises later is a fault or a second warm-up. A run that records no rate has no warm-up.

    Causal: ``end`` moves on while the rate rises, and never after the first comparison with the healthy start.

    Args:
        options: Options of the detectors.

    Attributes:
        end: First step of the healthy start, as far as it is known so far.
    """

    def __init__(self, options: DetectorOptions) -> None:
        self.options = options
        self.end = options.settle
        self._is_over = False
        self._highest: float | None = None
        self._rose_at = self._seen_at = self._longest_pause = self._n_rises = 0

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Process the numbers of one update, those of the part ``monitors``.

        Args:
            step: Step of the update; rising. Steps before 0 are ignored.
            values: Numbers of the update, of which ``learning_rate`` is used; missing or NaN: not known at this step.
        """
        rate = float(np.asarray(values.get("learning_rate", math.nan)))
        if self._is_over or step < 0 or not math.isfinite(rate):
            return
        if self._highest is None:
            self._highest, self._rose_at, self._seen_at = rate, step, step
            return
        # Only while the rate is known to be constant: it may be recorded at some steps only.
        pause = self._seen_at - self._rose_at
        if (
            rate < self._highest * (1 - _TOLERANCE)
            or pause > self._allowed_pause()
            or step - self._rose_at > self.options.start
        ):
            self._is_over = True
        elif rate > self._highest * (1 + _TOLERANCE):
            self._longest_pause = max(self._longest_pause, pause)
            self._highest, self._rose_at, self._n_rises = rate, step, self._n_rises + 1
            self.end = max(self.options.settle, step + 1)
        self._seen_at = step

    def _allowed_pause(self) -> int:
        # The first pause may have begun before the first measurement, so the second rise decides.
        is_smooth = self._n_rises > 1 and self._longest_pause <= _SHORT
        return min(_LONG, self.options.start) if is_smooth else self.options.start
