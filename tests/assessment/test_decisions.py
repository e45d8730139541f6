"""Decisions that follow from numbers planted in a tree."""

import math

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from workbench.assessment.decisions import decide
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.verdict import FIRST_STEP


def tree_of(loss, grad_norm, *, risk="healthy"):
    """Two healthy trials under a plan that nothing speaks against."""
    modes = xr.Dataset(
        {
            "state": ("failure_mode", ["healthy"]),
            "confidence": ("failure_mode", [1.0]),
            "worst_criterion": ("failure_mode", ["divergence_probability"]),
        },
        {"failure_mode": ["divergence_risk"]},
    )
    criteria = xr.Dataset(
        {"state": ("criterion", [risk, "healthy"]), "is_outside": ("criterion", [False, False])},
        {"criterion": ["divergence_probability", "trials_broken"]},
    )
    rehearsal = xr.Dataset(
        {
            "loss": (("trial", "step"), loss),
            "grad_norm": (("trial", "step"), grad_norm),
            "has_diverged": ("trial", [False] * len(loss)),
        },
        attrs={"n_updates": 3},
    )
    return xr.DataTree.from_dict({"failure_modes": modes, "criteria": criteria, "rehearsal": rehearsal})


def decided(kind, *, risk="healthy", sizes=None, **options):
    plan = wb.hardware.read_plan({"training": {"n_steps": 1000}})
    tree = tree_of([[4.0, 4.4, 3.0], [5.0, 4.0, 3.0]], [[1.0, 3.0, 1.0], [2.0, 2.0, math.nan]], risk=risk)
    tree.attrs = {} if sizes is None else sizes.attributes
    table = decide(tree, plan, **options).to_dataframe()
    return table[table["kind"] == kind]


def test_stop_rules_are_twice_the_most_that_trials_rose():
    rules = decided("stop rule").set_index("setting")
    assert rules.loc["loss", "proposed"] == "2.2 x first"
    assert rules.loc["grad_norm", "proposed"] == "6 x first"
    assert rules.loc["grad_norm", "selection"] == '{"trial": 0, "step": 1}'
    assert "exceeds 6 times its first value within the first 3 updates" in rules.loc["grad_norm", "text"]


def test_the_first_step_is_to_find_out_where_the_risk_is_not_known():
    assert decided("proceed")["text"].tolist() == ["start the run as planned, with the stop rules below"]
    assert decided("measure").empty
    (first,) = decided("measure", risk="not measured").to_dict("records")
    assert (first["text"], first["criterion"]) == (FIRST_STEP, "divergence_probability")
    assert decided("proceed", risk="not measured").empty


def test_a_stop_rule_from_a_stand_in_has_no_number():
    sizes = Sizes(768, 12, 64, 4, is_stand_in=True)
    (rule,) = decided("stop rule", risk="not measured", sizes=sizes).to_dict("records")
    assert rule["text"] == "wb.Alarms sounds, or the loss or the gradient norm is not finite"
    assert (rule["setting"], rule["proposed"]) == ("", "")


@pytest.mark.parametrize(("affordable", "proposed"), [(900.0, ["900"]), (1000.0, []), (np.nan, []), (np.inf, [])])
def test_a_plan_beyond_its_budget_is_shortened(affordable, proposed):
    changes = decided("change", affordable=affordable)
    assert changes["proposed"].tolist() == proposed
    assert set(changes["setting"]) <= {"n_steps"}
