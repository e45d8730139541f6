"""Failure modes of training: their measured criteria, healthy bands, and the confidence of each state."""

from workbench.assessment.failure_modes.criteria_table import (
    CRITERIA,
    FAILURE_MODES,
    FailureMode,
    band_of,
    evaluate_criteria,
    healthy_bands,
)
from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, HealthyBand, evaluate

__all__ = [
    "CRITERIA",
    "FAILURE_MODES",
    "Criterion",
    "CriterionReading",
    "FailureMode",
    "HealthyBand",
    "band_of",
    "evaluate",
    "evaluate_criteria",
    "healthy_bands",
]


def __dir__() -> list[str]:
    return sorted(__all__)
