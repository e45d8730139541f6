"""Alarms as data: signal, step, layer, head and score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alarm:
    """An alarm: one signal that has left the range of healthy runs.

    Attributes:
        step: Step at which it was raised.
        signal: Name of the signal, such as ``"effective_rank D2"``.
        layer: Layer with the worst value; -1 if the signal has no layers or lies outside the blocks.
        head: Head with the worst value; -1 if the signal has no heads.
        score: Evidence in multiples of the threshold.
        value: Value of the signal there, in its own unit.
        is_outcome: Whether the signal is the loss or the gradient norm.
        message: Description for readers.

    Example:
        >>> import workbench as wb
        >>> message = "One head turns only in one direction."
        >>> alarm = wb.alarms.Alarm(120, "effective_rank D2", 1, 2, 3.5, 1.1, is_outcome=False, message=message)
        >>> alarm.layer, alarm.head, alarm.message
        (1, 2, 'One head turns only in one direction.')

    See Also:
        `workbench.Alarms`: Raises alarms.
        `workbench.alarms.lead_time`: Steps between the first alarms of two kinds.
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
        """Return the fields of the alarm's event in a run, without step and kind."""
        return {
            "source": self.signal,
            "score": self.score,
            "message": self.message,
            "layer": self.layer,
            "head": self.head,
        }
