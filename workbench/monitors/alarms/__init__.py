"""Alarms: watched.py says what is watched, detector.py how, calibration.py what is healthy, attribution.py why."""

from workbench.monitors.alarms.alarms import Alarm, Alarms
from workbench.monitors.alarms.attribution import Attribution, Attributor
from workbench.monitors.alarms.calibration import Calibration
from workbench.monitors.alarms.detector import Detector, DetectorOptions
from workbench.monitors.alarms.fitting import calibrate, calibrate_paired
from workbench.monitors.alarms.lead_time import LeadTime, lead_time, recorded_alarms
from workbench.monitors.alarms.replay import observations, replay
from workbench.monitors.alarms.watched import WATCHED, Watched

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
