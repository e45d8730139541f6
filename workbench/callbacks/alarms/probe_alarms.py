"""Alarms of the probes, which settle a question: no healthy start, no calibration, no threshold to choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.callbacks.alarms.alarm import Alarm
from workbench.probes.precision import broken_arithmetic

if TYPE_CHECKING:
    from workbench.callbacks.observation import Observation

#: Name of the signal of each part.
SIGNALS = {"precision": "arithmetic"}
#: Fault that an alarm of a signal proves.
CAUSES = {"arithmetic": "low_precision_attention"}


class ProbeAlarms:
    """Raises an alarm at the first measurement of a probe that finds a fault, and again after it was gone."""

    def __init__(self) -> None:
        self.standing: dict[str, Alarm] = {}

    def observe(self, observation: Observation) -> list[Alarm]:
        """Process an observation of any part.

        Args:
            observation: A `workbench.alarms.Observation`.

        Returns:
            The alarm that it raises, if it does.
        """
        signal = SIGNALS.get(observation.part)
        if signal is None:
            return []
        alarm = _arithmetic(observation)
        is_new = alarm is not None and signal not in self.standing
        self.standing.pop(signal, None)
        if alarm is not None:
            self.standing[signal] = alarm
        return [alarm] if alarm is not None and is_new else []


def _arithmetic(observation: Observation) -> Alarm | None:
    found = broken_arithmetic(observation.values)
    if found is None:
        return None
    return Alarm(
        step=observation.step,
        signal=SIGNALS["precision"],
        layer=found.layer,
        head=found.head,
        score=found.excess / float(observation.values["excess_limit"]),
        value=found.error,
        is_outcome=False,
        message=found.sentence,
    )
