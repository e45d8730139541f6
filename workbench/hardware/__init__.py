"""Effects of a plan's hardware on the numbers: read the plan, and emulate its reductions and formats on a model."""

from workbench.hardware.hardware_assessment import assess_hardware
from workbench.hardware.hazards import HAZARDS, Hazard
from workbench.hardware.plan_files import AssessmentPlan, read_plan
from workbench.models.model_sizes import ModelSizes, model_sizes

__all__ = ["HAZARDS", "AssessmentPlan", "Hazard", "ModelSizes", "assess_hardware", "model_sizes", "read_plan"]


def __dir__() -> list[str]:
    return sorted(__all__)
