"""The numerical hazards of a plan: the setting that causes each, its measurement, its limits and their reasons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.hardware.loss_scale import activation_overflow, gradient_overflow, gradient_range, gradient_underflow
from workbench.hardware.lost_updates import lost_updates
from workbench.hardware.parallel import compute_rounding, pipeline_boundaries, tensor_parallel
from workbench.hardware.reduction import (
    accumulation_error,
    accumulation_shrinkage,
    allreduce_error,
    allreduce_shrinkage,
    bucket_layout,
    reduction_order,
)
from workbench.hardware.staleness import late_gradients
from workbench.option_checks import Measured
from workbench.schema.statuses import CriterionState

if TYPE_CHECKING:
    from workbench.hardware.emulation import Emulation, Finding
    from workbench.hardware.plan_files import AssessmentPlan

# The reasons of the limits.
_NOISE = (
    "An independent error of r times the sampling noise increases the variance of the gradient by a factor of 1 + r^2, "
    "as if the batch were smaller by this factor: by a tenth at r = 1/3, by half at r = 1."
)
_SHRINKAGE = (
    "The fraction that is missing along the gradient is missing in every update and does not average out. A hundredth "
    "is less than the precision to which learning rates are tuned; a tenth is an unplanned reduction of the learning "
    "rate, which differs between parameters."
)
_LOST = (
    "The lost fraction acts like a smaller learning rate: a twentieth is within the precision to which learning rates "
    "are tuned; beyond a half the run makes little progress."
)
_UNDERFLOW = (
    "Optimizers such as Adam divide each gradient by its magnitude, so that small gradients have the same weight as "
    "large ones; a parameter whose gradient becomes zero is not trained. A hundredth of the entries is the tail of the "
    "distribution, a tenth is a part of the model."
)
_MARGIN = "Gradients and activations may grow by factors of tens in training; a factor of 64, six octaves, is reserved."
_RANGE = "Six of the 40 octaves of float16, or 0.15 of them, are reserved for changes while a dynamic scale adapts."
_RATE = (
    "A factor of two below the largest learning rate that decreases the loss is the usual margin; above that rate the "
    "loss increases."
)


@dataclass(frozen=True)
class Hazard:
    """A setting of a plan that may cause numerical errors.

    Attributes:
        id: Name of the hazard.
        title: Title in tables and figures.
        setting: Key of the plan that causes it.
        applies: Function that returns whether the hazard applies to a plan.
        measure: Function that measures the effect in an emulation.
        unit: Unit of the effect.
        healthy_limit: Effects above it are at risk.
        failing_limit: Effects above it are failing.
        reason: Reason of these limits.
        remedy_setting: Key of the plan to change.
        remedy_value: Proposed value of that key.
    """

    id: str
    title: str
    setting: str
    applies: Callable[[AssessmentPlan], bool]
    measure: Callable[[Emulation], Finding]
    unit: str
    healthy_limit: float
    failing_limit: float
    reason: str
    remedy_setting: str
    remedy_value: str

    def state_of(self, effect: Measured) -> CriterionState:
        """Return the state of an effect relative to the limits; NaN counts as not measured."""
        if math.isnan(effect):
            return CriterionState.NOT_MEASURED
        if effect <= self.healthy_limit:
            return CriterionState.HEALTHY
        return CriterionState.AT_RISK if effect <= self.failing_limit else CriterionState.FAILING


def _has_ranks(plan: AssessmentPlan) -> bool:
    return plan.hardware.data_parallel > 1


def _accumulates(plan: AssessmentPlan) -> bool:
    return plan.hardware.accumulation > 1


def _computes_low(plan: AssessmentPlan) -> bool:
    return plan.compute_dtype is not torch.float32


def _has_low_gradients(plan: AssessmentPlan) -> bool:
    hardware = plan.hardware
    return _computes_low(plan) or {hardware.gradient_dtype, hardware.accumulation_dtype} != {"float32"}


def _has_fixed_scale(plan: AssessmentPlan) -> bool:
    hardware = plan.hardware
    is_half = plan.compute_dtype is torch.float16 or "float16" in (hardware.gradient_dtype, hardware.accumulation_dtype)
    return is_half and hardware.loss_scale != "dynamic"


def _loses_updates(plan: AssessmentPlan) -> bool:
    return plan.hardware.weight_dtype != "float32" and not plan.hardware.master_weights


_OF_NOISE = "of the batch's sampling noise"

HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "allreduce_error", "Rounding of the gradient reduction", "gradient_dtype", _has_ranks, allreduce_error,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "gradient_dtype", "float32",
    ),
    Hazard(
        "allreduce_shrinkage", "Gradient shortened by the reduction", "gradient_dtype", _has_ranks, allreduce_shrinkage,
        "of the gradient", 0.01, 0.1, _SHRINKAGE, "gradient_dtype", "float32",
    ),
    Hazard(
        "reduction_order", "Order of the gradient reduction", "reduction_order", _has_ranks, reduction_order,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "gradient_dtype", "float32",
    ),
    Hazard(
        "bucket_layout", "Buckets of the gradient reduction", "bucket_mb", _has_ranks, bucket_layout,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "gradient_dtype", "float32",
    ),
    Hazard(
        "accumulation_error", "Rounding of the gradient accumulation", "accumulation_dtype", _accumulates,
        accumulation_error, _OF_NOISE, 1 / 3, 1.0, _NOISE, "accumulation_dtype", "float32",
    ),
    Hazard(
        "accumulation_shrinkage", "Gradient shortened by the accumulation", "accumulation_dtype", _accumulates,
        accumulation_shrinkage, "of the gradient", 0.01, 0.1, _SHRINKAGE, "accumulation_dtype", "float32",
    ),
    Hazard(
        "lost_updates", "Updates lost in low-precision parameters", "master_weights", _loses_updates, lost_updates,
        "of the intended change", 0.05, 0.5, _LOST, "master_weights", "true",
    ),
    Hazard(
        "compute_rounding", "Gradient computed in low precision", "precision", _computes_low, compute_rounding,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "precision", "float32",
    ),
    Hazard(
        "gradient_underflow", "Gradients that become zero", "loss_scale", _has_low_gradients, gradient_underflow,
        "of nonzero entries", 0.01, 0.1, _UNDERFLOW, "precision", "bfloat16",
    ),
    Hazard(
        "gradient_range", "Range of the gradients", "precision", _has_low_gradients, gradient_range,
        "of the format's octaves", 0.85, 1.0, _RANGE, "precision", "bfloat16",
    ),
    Hazard(
        "gradient_overflow", "Gradients near overflow", "loss_scale", _has_fixed_scale, gradient_overflow,
        "of the largest number", 1 / 64, 1.0, _MARGIN, "loss_scale", "dynamic",
    ),
    Hazard(
        "activation_overflow", "Activations near overflow", "precision", _computes_low, activation_overflow,
        "of the largest number", 1 / 64, 1.0, _MARGIN, "precision", "bfloat16",
    ),
    Hazard(
        "late_gradients", "Late gradients", "staleness", lambda plan: plan.hardware.delay > 0, late_gradients,
        "of the largest rate that decreases the loss", 0.5, 1.0, _RATE, "reduction", "synchronous",
    ),
    Hazard(
        "tensor_parallel", "Partial sums of split matrices", "tensor_parallel",
        lambda plan: plan.hardware.tensor_parallel > 1, tensor_parallel,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "tensor_parallel", "1",
    ),
    Hazard(
        "pipeline_boundaries", "States sent between stages", "pipeline_parallel",
        lambda plan: plan.hardware.pipeline_parallel > 1, pipeline_boundaries,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "pipeline_parallel", "1",
    ),
)  # fmt: skip
