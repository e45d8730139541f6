"""Decisions that follow from numbers planted in a tree."""

import math

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from workbench.assessment.decisions import decide


def tree_of(loss, grad_norm):
    """Two healthy trials under a plan that nothing speaks against."""
    modes = xr.Dataset(
        {"state": ("failure_mode", ["healthy"]), "worst_criterion": ("failure_mode", ["divergence_probability"])},
        {"failure_mode": ["divergence_risk"]},
    )
    criteria = xr.Dataset({"state": ("criterion", ["healthy"])}, {"criterion": ["divergence_probability"]})
    rehearsal = xr.Dataset(
        {
            "loss": (("trial", "step"), loss),
            "grad_norm": (("trial", "step"), grad_norm),
            "has_diverged": ("trial", [False] * len(loss)),
        },
        attrs={"n_updates": 3},
    )
    return xr.DataTree.from_dict({"failure_modes": modes, "criteria": criteria, "rehearsal": rehearsal})


def decided(kind, **options):
    plan = wb.hardware.read_plan({"training": {"n_steps": 1000}})
    tree = tree_of([[4.0, 4.4, 3.0], [5.0, 4.0, 3.0]], [[1.0, 3.0, 1.0], [2.0, 2.0, math.nan]])
    table = decide(tree, plan, **options).to_dataframe()
    return table[table["kind"] == kind]


def test_stop_rules_are_twice_the_most_that_trials_rose():
    rules = decided("stop rule").set_index("setting")
    assert rules.loc["loss", "proposed"] == "2.2 x first"
    assert rules.loc["grad_norm", "proposed"] == "6 x first"
    assert rules.loc["grad_norm", "selection"] == '{"trial": 0, "step": 1}'
    assert "exceeds 6 times its first value within the first 3 updates" in rules.loc["grad_norm", "text"]


@pytest.mark.parametrize(("affordable", "proposed"), [(900.0, ["900"]), (1000.0, []), (np.nan, []), (np.inf, [])])
def test_a_plan_beyond_its_budget_is_shortened(affordable, proposed):
    changes = decided("change", affordable=affordable)
    assert changes["proposed"].tolist() == proposed
    assert set(changes["setting"]) <= {"n_steps"}
