"""What a plan's hardware does to the numbers: read the plan, and emulate its reductions and formats on a model."""

from workbench.hardware.assessing import assess_hardware
from workbench.hardware.hazards import HAZARDS, Hazard
from workbench.hardware.plan import AssessmentPlan, read_plan
from workbench.hardware.sizes import ModelSizes, model_sizes

__all__ = ["HAZARDS", "AssessmentPlan", "Hazard", "ModelSizes", "assess_hardware", "model_sizes", "read_plan"]
