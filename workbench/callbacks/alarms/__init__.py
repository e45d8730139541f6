"""Alarms: watched signals, evidence of changes, calibration on healthy runs, and attribution to faults.

Example:
    >>> import workbench as wb
    >>> run = wb.open_run(wb.samples.failed_run("precision"))
    >>> alarms = wb.Alarms(false_alarms=1.0)
    >>> raised = wb.alarms.replay(run, alarms)
    >>> [alarm.signal for alarm in raised] == [alarm.signal for alarm in alarms.raised]
    True

See Also:
    `workbench.Alarms`: Raises alarms during a training run.
    `workbench.alarms.replay`: Passes a recorded run through alarms.
"""

# `Alarms` is imported for the library itself: its public name is `workbench.Alarms`.
from workbench.callbacks.alarms.alarms import Alarms as Alarms
from workbench.callbacks.alarms.calibration import Attribution, Attributor, Calibration, calibrate
from workbench.callbacks.alarms.replaying import LeadTime, evidence_of, lead_time, recorded_alarms, replay
from workbench.callbacks.alarms.run_evidence import observations
from workbench.callbacks.alarms.watched import WATCHED
from workbench.callbacks.observation import Alarm, Observation
from workbench.option_checks import publish

__all__ = [
    "WATCHED", "Alarm", "Attribution", "Attributor", "Calibration", "LeadTime", "Observation", "calibrate",
    "evidence_of", "lead_time", "observations", "recorded_alarms", "replay",
]  # fmt: skip

__dir__ = publish(__name__)
