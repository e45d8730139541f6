"""What measurements and alarms of a run pass on: observations, alarms, and functions that observe changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: Prefix of the signal of a broken contract.
OF_CONTRACT = "contract "


@dataclass(frozen=True)
class Observation:
    """The result of one measurement of one part of a run.

    Attributes:
        step: Update that it belongs to, counted from 0. Measurements are taken right after the update, spectra right
            before it.
        part: Name of the part: ``"monitors"`` (the metrics of the update itself), or one of the measured parts.
        values: Values of each variable, without the dimension ``step``; other dimensions as in `workbench.schema`.
        coords: Coordinates of these dimensions, such as ``layer``, ``head``, ``term`` and ``module``, and
            ``layer_name``.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> alarms = wb.Alarms()
        >>> for step in range(400):
        ...     loss = np.array(3.0 if step < 300 else 30.0 + step % 2)
        ...     raised = alarms.observe(wb.alarms.Observation(step, "monitors", {"loss": loss}))
        >>> alarms.raised[0].signal, alarms.raised[0].step >= 300
        ('loss', True)

    See Also:
        `workbench.Alarms`: Raises alarms on observations.
        `workbench.alarms.observations`: Reads the observations of a recorded run.
        `workbench.Recorder`: Takes the measurements.
    """

    step: int
    part: str
    values: Mapping[str, Any]
    coords: Mapping[str, Any] = field(default_factory=dict)


def changed_setting(step: int, setting: str, factor: float, message: str) -> Observation:
    """Return an observation of the part ``"settings"``: one setting has changed without a plan."""
    return Observation(
        step, "settings", {"factor": np.array(factor)}, {"setting": np.array(setting), "message": np.array(message)}
    )


def broken_contract(step: int, id: str, message: str) -> Observation:
    """Return an observation of the part ``"contracts"``: an experiment shows that a contract is broken."""
    return Observation(step, "contracts", {}, {"contract": np.array(id), "message": np.array(message)})


class Observers:
    """Functions that are called in the order in which they were added; a function may remove itself while it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: list[Callable[..., None]] = []

    def add(self, function: Callable[..., None]) -> Callable[[], None]:
        """Add a function."""
        with self._lock:
            self._functions.append(function)

        def remove() -> None:
            with self._lock:
                if function in self._functions:
                    self._functions.remove(function)

        return remove

    def call(self, *arguments: Any) -> None:
        """Call all functions in this thread; their exceptions are raised here."""
        with self._lock:
            functions = list(self._functions)
        for function in functions:
            function(*arguments)


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
