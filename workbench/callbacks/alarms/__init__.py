"""Alarms: watched signals, detectors of changes, calibration on healthy runs, and attribution to faults."""

# `Alarms` is for the library's own imports: its public name is `workbench.Alarms`.
from workbench.callbacks.alarms.alarm import Alarm
from workbench.callbacks.alarms.alarms import Alarms as Alarms
from workbench.callbacks.alarms.attribution import Attribution, Attributor
from workbench.callbacks.alarms.calibrating import calibrate, calibrate_paired
from workbench.callbacks.alarms.calibration import Calibration
from workbench.callbacks.alarms.detector import Detector
from workbench.callbacks.alarms.detector_options import DetectorOptions
from workbench.callbacks.alarms.lead_times import LeadTime, lead_time, recorded_alarms
from workbench.callbacks.alarms.replaying import observations, replay
from workbench.callbacks.alarms.watched import WATCHED, Watched
from workbench.callbacks.observation import Observation

__all__ = [
    "WATCHED",
    "Alarm",
    "Attribution",
    "Attributor",
    "Calibration",
    "Detector",
    "DetectorOptions",
    "LeadTime",
    "Observation",
    "Watched",
    "calibrate",
    "calibrate_paired",
    "lead_time",
    "observations",
    "recorded_alarms",
    "replay",
]


def __dir__() -> list[str]:
    return sorted(__all__)
