"""The compute cost of a run, and the number of updates within a budget."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench.models.model_sizes import model_sizes

if TYPE_CHECKING:
    from workbench.assessment.measured_model import MeasuredModel
    from workbench.hardware.plan_files import AssessmentPlan


def flops_per_token(measured: MeasuredModel, plan: AssessmentPlan) -> float:
    """Return the compute cost of one token, forward and backward, in floating-point operations.

    The usual count: 6 operations for each parameter that a token uses, and 12 x blocks x width x length for the
    attention scores (PaLM, arXiv:2204.02311, Appendix B). Only those experts are counted to which a token is routed.
    """
    sizes = model_sizes(measured.design or measured.model)
    n_weights = measured.n_weights - _idle_weights(measured)
    length = plan.training.sequence_length or 0
    scores = 12 * (sizes.depth or 0) * (sizes.width or 0) * length if sizes.n_heads else 0
    return float(6 * n_weights + scores)


def _idle_weights(measured: MeasuredModel) -> int:
    """Return the number of expert parameters that a token does not use.

    The fraction of expert parameters is that of the measured model.
    """
    sizes = model_sizes(measured.design or measured.model)
    config = getattr(measured.model, "config", None)
    top_k = next((getattr(config, n) for n in ("top_k", "num_experts_per_tok") if getattr(config, n, None)), None)
    if not sizes.n_experts or not top_k:
        return 0
    n_of_experts = sum(
        weight.numel()
        for name, weight in measured.model.named_parameters()
        if "expert" in name and weight.numel() >= sizes.n_experts
    )
    n_all = sum(weight.numel() for weight in measured.model.parameters())
    return int(measured.n_weights * n_of_experts / n_all * (1 - top_k / sizes.n_experts))


def steps_in_budget(plan: AssessmentPlan, flops: float) -> float:
    """Return the number of updates within the budget of a plan; NaN if it sets no budget."""
    length = plan.training.sequence_length
    if length is None or (plan.budget.tokens is None and plan.budget.flops is None):
        return math.nan
    tokens = plan.batch_size * length
    of_tokens = math.inf if plan.budget.tokens is None else plan.budget.tokens / tokens
    of_flops = math.inf if plan.budget.flops is None else plan.budget.flops / (flops * tokens)
    return float(math.floor(min(of_tokens, of_flops)))
