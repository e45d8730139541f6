"""An alarm: what is wrong with a run, since when, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alarm:
    """An alarm: one signal that has left the range of healthy runs.

    Attributes:
        step: Updates done when it was raised.
        signal: Name of the signal, such as ``"effective_rank D2"``.
        layer: Layer with the worst value; -1: the signal has no layers, or it is outside the blocks.
        head: Head with the worst value; -1: the signal has no heads.
        score: Score in multiples of the threshold.
        value: Value of the signal there, in its own unit.
        is_outcome: Whether the signal is the loss or the norm of the gradients.
        message: Description in plain words.

    Example:
        >>> import workbench as wb
        >>> message = "One head turns only in one direction."
        >>> alarm = wb.alarms.Alarm(120, "effective_rank D2", 1, 2, 3.5, 1.1, is_outcome=False, message=message)
        >>> alarm.layer, alarm.head, alarm.message
        (1, 2, 'One head turns only in one direction.')
    """

    step: int
    signal: str
    layer: int
    head: int
    score: float
    value: float
    is_outcome: bool
    message: str

    def as_event(self) -> dict[str, Any]:
        """The fields of a run's event: everything but step and kind."""
        return {
            "source": self.signal,
            "score": self.score,
            "message": self.message,
            "layer": self.layer,
            "head": self.head,
        }
