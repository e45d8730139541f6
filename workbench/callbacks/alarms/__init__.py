"""Alarms: watched signals, evidence of changes, calibration on healthy runs, and attribution to faults."""

# `Alarms` is for the library's own imports: its public name is `workbench.Alarms`.
from workbench.callbacks.alarms.alarm import Alarm
from workbench.callbacks.alarms.alarms import Alarms as Alarms
from workbench.callbacks.alarms.attribution import Attribution, Attributor
from workbench.callbacks.alarms.calibration import Calibration, calibrate
from workbench.callbacks.alarms.lead_times import LeadTime, lead_time, recorded_alarms
from workbench.callbacks.alarms.own_past import OwnPast
from workbench.callbacks.alarms.recorded_observations import observations
from workbench.callbacks.alarms.replaying import evidence_of, replay
from workbench.callbacks.alarms.watched import WATCHED, Watched
from workbench.callbacks.observation import Observation

__all__ = [
    "WATCHED",
    "Alarm",
    "Attribution",
    "Attributor",
    "Calibration",
    "LeadTime",
    "Observation",
    "OwnPast",
    "Watched",
    "calibrate",
    "evidence_of",
    "lead_time",
    "observations",
    "recorded_alarms",
    "replay",
]


def __dir__() -> list[str]:
    return sorted(__all__)
