"""Diagnosis of a failed run: ranked causes, their evidence, and the experiments that decide between them."""

from workbench.diagnosis.causes import CAUSES, Cause
from workbench.diagnosis.checkpoint_evidence import check_fits
from workbench.diagnosis.diagnose import block_at_fault
from workbench.diagnosis.experiments import Experiment
from workbench.diagnosis.facts import RunFact, read_facts
from workbench.diagnosis.failed_run import Failure, Record, contracts_of, find_failure, read_record
from workbench.diagnosis.ranking import Rules
from workbench.diagnosis.symptoms import Symptom, read_symptoms

__all__ = [
    "CAUSES", "Cause", "Experiment", "Failure", "Record", "Rules", "RunFact", "Symptom", "block_at_fault", "check_fits",
    "contracts_of", "find_failure", "read_facts", "read_record", "read_symptoms",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
