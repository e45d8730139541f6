"""Settings of a run, read from its record: evidence for the attribution, never an alarm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from workbench.callbacks.alarms.settling import Settling

_FOLLOWED = ("learning_rate", "batch_size", "auxiliary_loss")
#: Number of latest steps from which settings are read; small, so that a change counts at once.
_N_LATEST = 5


class SettingsFollower:
    """How learning rate, batch size and auxiliary loss have changed since the run's healthy start.

    Args:
        settling: Settling of the run, which its owner keeps up to date.
    """

    def __init__(self, settling: Settling) -> None:
        self._settling = settling
        self._settled_at = settling.end
        self._start: dict[str, list[float]] = {name: [] for name in _FOLLOWED}
        self._latest: dict[str, deque[float]] = {name: deque(maxlen=_N_LATEST) for name in _FOLLOWED}

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Process the numbers of one step."""
        if self._settling.end != self._settled_at:  # the values read so far belong to the warm-up
            self._settled_at = self._settling.end
            for read in self._start.values():
                read.clear()
        in_start = self._settled_at <= step < self._settled_at + self._settling.options.start
        for name in _FOLLOWED:
            if name in values:
                self._latest[name].append(float(values[name]))
                if in_start:
                    self._start[name].append(float(values[name]))

    def changes(self) -> dict[str, float]:
        """Values for `Attributor.attribute`; unknown ones are left out."""
        found = {}
        for name, key in (("learning_rate", "rate_change"), ("batch_size", "batch_change")):
            before, now = _median(self._start[name]), _median(self._latest[name])
            if before > 0 and now > 0:
                found[key] = math.log(now / before)
        before, now = _median(self._start["auxiliary_loss"]), _median(self._latest["auxiliary_loss"])
        if before > 0:
            found["has_lost_auxiliary_loss"] = float(not now > 0)
        return found


def _median(values: Any) -> float:
    return float(np.median(list(values))) if len(values) else math.nan
