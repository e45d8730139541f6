"""Failure modes of training: for each, measured criteria, the healthy band, and the confidence of the verdict."""

from workbench.assessment.failure_modes.criteria_table import CRITERIA, judged
from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, HealthyBand, judge
from workbench.assessment.failure_modes.modes import FAILURE_MODES, FailureMode
from workbench.assessment.failure_modes.reference import band_of, healthy_bands

__all__ = [
    "CRITERIA",
    "FAILURE_MODES",
    "Criterion",
    "CriterionReading",
    "FailureMode",
    "HealthyBand",
    "band_of",
    "healthy_bands",
    "judge",
    "judged",
]


def __dir__() -> list[str]:
    return sorted(__all__)
