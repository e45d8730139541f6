"""Why did it fail? From a failed run's record to ranked causes, the evidence, and the experiment that decides."""

from workbench.diagnosis.causes import CAUSES, Cause
from workbench.diagnosis.diagnose import block_at_fault, diagnose
from workbench.diagnosis.experiments import Experiment
from workbench.diagnosis.failure import Failure, find_failure
from workbench.diagnosis.logs import read_log
from workbench.diagnosis.ranking import Rules
from workbench.diagnosis.record import Record, read_record
from workbench.diagnosis.replay import run_experiment
from workbench.diagnosis.signs import Sign, read_signs
from workbench.diagnosis.weights import check_fits

__all__ = [
    "CAUSES",
    "Cause",
    "Experiment",
    "Failure",
    "Record",
    "Rules",
    "Sign",
    "block_at_fault",
    "check_fits",
    "diagnose",
    "find_failure",
    "read_log",
    "read_record",
    "read_signs",
    "run_experiment",
]
