"""Alarms: watched signals, detectors of changes, calibration on healthy runs, and attribution to faults."""

from workbench.callbacks.alarms.alarms import Alarm, Alarms
from workbench.callbacks.alarms.attribution import Attribution, Attributor
from workbench.callbacks.alarms.calibrating import calibrate, calibrate_paired
from workbench.callbacks.alarms.calibration import Calibration
from workbench.callbacks.alarms.detector import Detector
from workbench.callbacks.alarms.detector_options import DetectorOptions
from workbench.callbacks.alarms.lead_times import LeadTime, lead_time, recorded_alarms
from workbench.callbacks.alarms.replaying import observations, replay
from workbench.callbacks.alarms.watched import WATCHED, Watched

__all__ = [
    "WATCHED",
    "Alarm",
    "Alarms",
    "Attribution",
    "Attributor",
    "Calibration",
    "Detector",
    "DetectorOptions",
    "LeadTime",
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
