"""The evidence of all watched signals as rows of a run's part ``evidence``."""

from __future__ import annotations

import math

import numpy as np

from workbench.callbacks.alarms.watched import WATCHED
from workbench.callbacks.observation import Observation

#: Updates between two rows; an alarm ends a row immediately.
_EVERY = 10
_NAMES = np.array([watched.name for watched in WATCHED])
_PLACES = {str(name): place for place, name in enumerate(_NAMES)}


class EvidenceRows:
    """Largest evidence of each signal since the last row, so that no peak between two rows is missed.

    Attributes:
        latest: The latest row, an observation of the part ``evidence``; None if there is none yet.
    """

    def __init__(self) -> None:
        self.latest: Observation | None = None
        self._n_tens = 0
        self._has_alarm = False
        self._empty()

    def note(self, signal: str, ratio: float, *, is_alarm: bool) -> None:
        """Process the evidence of a signal over its threshold; NaN if unknown."""
        place = _PLACES[signal]
        if not ratio <= self._largest[place] and not math.isnan(ratio):
            self._largest[place] = ratio
        self._has_alarm |= is_alarm

    def end_update(self, step: int) -> None:
        """End an update, and the current row if it is due."""
        n_tens = (step + 1) // _EVERY
        if n_tens == self._n_tens and not self._has_alarm:
            return
        self._n_tens = n_tens
        self.latest = Observation(step, "evidence", {"evidence": self._largest}, {"signal": _NAMES})
        self._empty()

    def _empty(self) -> None:
        self._largest = np.full(len(_NAMES), math.nan)
        self._has_alarm = False
