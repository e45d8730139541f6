"""The compute cost of a run, compared with counts by hand."""

import numpy as np
import pytest

import workbench as wb
from workbench.assessment.measured_model import flops_per_token, measured_model, steps_in_budget

SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16}


def test_work_and_budget_follow_the_usual_count():
    plan = wb.hardware.read_plan({"training": {"batch_size": 32, "sequence_length": 16}, "budget": {"tokens": 51_200}})
    found = measured_model({"family": "transformer", **SIZE})
    n_weights = sum(weight.numel() for weight in found.model.parameters())
    assert flops_per_token(found, plan) == 6 * n_weights + 12 * 2 * 16 * 16
    assert steps_in_budget(plan, 1.0) == 100
    flops = wb.hardware.read_plan({"training": {"batch_size": 32, "sequence_length": 16}, "budget": {"flops": 512_000}})
    assert steps_in_budget(flops, 10.0) == 100
    assert np.isnan(steps_in_budget(wb.hardware.read_plan({}), 10.0))


def test_experts_that_a_token_does_not_use_have_no_cost():
    plan = wb.hardware.read_plan({})
    work = {
        top_k: flops_per_token(measured_model({"family": "moe", **SIZE, "n_experts": 4, "top_k": top_k}), plan)
        for top_k in (1, 2, 4)
    }
    assert work[1] < work[2] < work[4]
    assert work[4] - work[2] == pytest.approx(2 * (work[2] - work[1]), rel=1e-3)
