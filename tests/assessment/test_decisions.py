"""Decisions that follow from numbers planted in a tree."""

import math

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from workbench.assessment.decisions import decide
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.verdict import FIRST_STEP


def tree_of(loss, grad_norm, *, risk="healthy", useful=(1e-4, 1e-2)):
    """Two healthy trials under a plan that nothing but its risk speaks against, and the useful rates."""
    modes = xr.Dataset(
        {
            "state": ("failure_mode", ["healthy"]),
            "confidence": ("failure_mode", [1.0]),
            "worst_criterion": ("failure_mode", ["failure_probability"]),
        },
        {"failure_mode": ["unsuitable_rate"]},
    )
    criteria = xr.Dataset(
        {
            "failure_mode": ("criterion", ["unsuitable_rate"] * 2),
            "state": ("criterion", [risk, "healthy"]),
            "value": ("criterion", [0.1 if risk == "healthy" else math.nan, 0.0]),
            "is_outside": ("criterion", [False, False]),
        },
        {"criterion": ["failure_probability", "trials_broken"]},
    )
    rehearsal = xr.Dataset(
        {
            "loss": (("trial", "step"), loss),
            "grad_norm": (("trial", "step"), grad_norm),
            "has_diverged": ("trial", [False] * len(loss)),
        },
        attrs={"n_updates": 3},
    )
    edges = {"slow_edge": useful[0], "useful_edge": useful[1], "useful_edge_high": 4 * useful[1]}
    rates = xr.Dataset({name: ("run", [edge]) for name, edge in edges.items()})
    parts = {"failure_modes": modes, "criteria": criteria, "rehearsal": rehearsal, "risk": rates}
    return xr.DataTree.from_dict(parts)


def decided(kind, *, sizes=None, rate=None, changes=None, **options):
    planted = {name: options.pop(name) for name in ("risk", "useful") if name in options}
    plan = wb.hardware.read_plan({"training": {"n_steps": 1000} | ({} if rate is None else {"learning_rate": rate})})
    tree = tree_of([[4.0, 4.4, 3.0], [5.0, 4.0, 3.0]], [[1.0, 3.0, 1.0], [2.0, 2.0, math.nan]], **planted)
    if changes is not None:
        tree["changes"] = xr.DataTree(changes)
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
    assert (first["text"], first["criterion"]) == (FIRST_STEP, "failure_probability")
    assert decided("proceed", risk="not measured").empty


@pytest.mark.parametrize(
    ("rate", "text", "proposed"),
    [
        (1e-5, "raise the peak rate to the middle of those predicted to learn well", "0.001"),
        (0.1, "lower the peak rate to the middle of those predicted to learn well", "0.001"),
        (1.1e-3, None, None),  # both ends are near, and no other rate is better
    ],
)
@pytest.mark.parametrize("risk", ["at risk", "failing"])
def test_a_rate_that_is_predicted_to_fail_is_moved_to_the_middle_of_the_useful_ones(rate, text, proposed, risk):
    (first,) = decided("measure", risk=risk, rate=rate).to_dict("records")
    assert "wb.find_rate" in first["text"]
    assert first["criterion"] == "failure_probability"
    found = decided("change", risk=risk, rate=rate).to_dict("records")
    assert [(each["text"], each["current"], each["proposed"]) for each in found] == (
        [(text, f"{rate:g}", proposed)] if text else []
    )
    assert decided("change", risk="healthy", rate=rate).empty


def test_no_rate_is_proposed_where_none_is_known_or_one_was_tried():
    assert decided("change", risk="failing", useful=(math.nan, math.nan)).empty
    columns = {"setting": ["learning_rate"], "current": ["0.1"], "proposed": ["0.02"], "n_trials": [2], "n_broken": [0]}
    changes = xr.Dataset({name: ("change", column) for name, column in columns.items()})
    (only,) = decided("change", risk="failing", rate=0.1, changes=changes).to_dict("records")
    assert (only["proposed"], only["effect"]) == ("0.02", "2 of 2 trials with it did not break")


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
