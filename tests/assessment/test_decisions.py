"""Decisions that follow from known numbers in a tree."""

import math

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from workbench.assessment.criteria import Sizes
from workbench.assessment.decisions import decide
from workbench.assessment.verdict import FIRST_STEP


def tree_of(loss, grad_norm, *, state="healthy", name="rate_over_edge", best=1e-3):
    """Return a tree with two healthy trials, a pilot, and at most the planned rate at fault."""
    names = [name, "trials_broken", "gain_by_depth"]
    states = [state, "healthy", "healthy"]
    modes = xr.Dataset(
        {
            "state": ("failure_mode", [state]),
            "confidence": ("failure_mode", [1.0]),
            "worst_criterion": ("failure_mode", [name]),
        },
        {"failure_mode": ["unsuitable_rate"]},
    )
    criteria = xr.Dataset(
        {
            "failure_mode": ("criterion", ["unsuitable_rate"] * 2 + ["gradient_flow_collapse"]),
            "state": ("criterion", states),
            "confidence": ("criterion", [math.nan if state == "not measured" else 1.0, math.nan, 1.0]),
            "value": ("criterion", [math.nan if state == "not measured" else 0.1, 0.0, 1.0]),
            "is_outside": ("criterion", [False] * 3),
        },
        {"criterion": names},
    )
    other = "rate_over_slow_edge" if name == "rate_over_edge" else "rate_over_edge"
    criteria = xr.concat([criteria, criteria.isel(criterion=[1]).assign_coords(criterion=[other])], "criterion")
    trials = xr.Dataset(
        {
            "loss": (("trial", "step"), loss),
            "grad_norm": (("trial", "step"), grad_norm),
            "has_diverged": ("trial", [False] * len(loss)),
        },
        attrs={"n_updates": 3},
    )
    pilot = xr.Dataset(
        {
            "best_rate": best, "best_rate_low": best / 2, "best_rate_high": best * 2, "useful_edge_high": 0.02,
            "loss_at_best": ((), 2.5, {"n_updates": 80}),
            "loss": (("n_updates", "rate", "seed"), [[[3.4], [3.5]], [[2.5], [2.75]]]),
        },
        {"n_updates": [40, 80], "rate": [1e-3, 0.1]},
    )  # fmt: skip
    return xr.DataTree.from_dict({"failure_modes": modes, "criteria": criteria, "trials": trials, "pilot": pilot})


def decided(kind, *, sizes=None, rate=None, changes=None, **options):
    fixed = {name: options.pop(name) for name in ("state", "name", "best") if name in options}
    plan = wb.hardware.read_plan({"training": {"n_steps": 1000} | ({} if rate is None else {"learning_rate": rate})})
    tree = tree_of([[4.0, 4.4, 3.0], [5.0, 4.0, 3.0]], [[1.0, 3.0, 1.0], [2.0, 2.0, math.nan]], **fixed)
    if changes is not None:
        tree["changes"] = xr.DataTree(changes)
    tree.attrs = {} if sizes is None else sizes.attributes
    table = decide(tree, plan, **options).to_dataframe()
    return table[table["kind"] == kind]


def test_a_run_is_stopped_where_its_loss_is_far_above_that_of_the_pilot():
    own, always = decided("stop rule").to_dict("records")
    assert own["text"] == (
        "the training loss exceeds 3.3 nat after 80 updates, which is 0.8 nat above the loss of the pilot's best rate"
    )
    assert (own["path"], own["variable"], own["proposed"]) == ("/pilot", "loss_at_best", "3.3 nat")
    assert "not finite" in always["text"]


def test_the_first_step_is_to_find_the_useful_rates_if_they_are_unknown():
    assert decided("proceed")["text"].tolist() == ["start the run as planned, with the stop rules below"]
    assert decided("measure").empty
    (first,) = decided("measure", state="not measured").to_dict("records")
    assert (first["text"], first["criterion"]) == (FIRST_STEP, "rate_over_edge")
    assert decided("proceed", state="not measured").empty


@pytest.mark.parametrize(("name", "word"), [("rate_over_edge", "lower"), ("rate_over_slow_edge", "raise")])
@pytest.mark.parametrize("state", ["at risk", "failing"])
def test_a_rate_that_is_not_useful_is_changed_to_the_best_one_of_the_pilot(name, word, state):
    (change,) = decided("change", state=state, name=name, rate=0.1).to_dict("records")
    assert change["text"] == f"{word} the peak learning rate from 0.1 to 0.001, the best rate of the pilot"
    assert (change["current"], change["proposed"]) == ("0.1", "0.001 (0.0005 to 0.002)")
    assert (change["criterion"], change["path"], change["variable"]) == (name, "/pilot", "best_rate")
    assert change["effect"] == "loss of the pilot after 80 updates: 2.75 → 2.5 nat"
    assert decided("change", state="healthy", rate=0.1).empty


def test_the_best_rate_of_a_narrower_model_is_not_proposed():
    sizes = Sizes(768, 12, 64, 4, is_stand_in=True)
    (change,) = decided("change", state="at risk", rate=0.1, sizes=sizes).to_dict("records")
    assert (change["proposed"], change["variable"], change["effect"]) == ("0.02", "useful_edge_high", "")
    assert change["text"] == (
        "lower the peak learning rate from 0.1 to below 0.02, the upper end of the useful edge's interval "
        "(wb.find_rate at full width estimates it more precisely)"
    )


def changes_of(settings):
    """Return changes that were tried in two trials each, none of which diverged."""
    columns = {name: [row[i] for row in settings] for i, name in enumerate(("setting", "current", "proposed"))}
    data = {name: ("change", column) for name, column in columns.items()}
    data |= {"n_broken": ("change", [0] * len(settings)), "n_trials": ("change", [2] * len(settings))}
    return xr.Dataset(data)


def test_a_change_names_the_value_that_was_tried():
    tried = changes_of([("learning_rate", "0.1", "0.025"), ("warmup", "50", "100"), ("clip_norm", "none", "1")])
    texts = dict(decided("change", state="not measured", rate=0.1, changes=tried)[["setting", "text"]].to_numpy())
    assert texts == {
        "learning_rate": "lower the peak learning rate to 0.025 (wb.find_rate finds the useful rates)",
        "warmup": "extend the warm-up to 100 updates",
        "clip_norm": "clip the gradient norm at 1",
    }
    sizes = Sizes(768, 12, 64, 4, is_stand_in=True)
    of_proxy = decided("change", state="not measured", rate=0.1, changes=tried.isel(change=[0]), sizes=sizes)
    assert of_proxy["text"].tolist() == [
        "lower the peak learning rate below 0.1 (wb.find_rate at full width estimates it more precisely)"
    ]


@pytest.mark.parametrize(("best", "texts"), [(1e-3, 0), (math.nan, 1)])
def test_if_no_rate_is_known_a_search_is_proposed(best, texts):
    tree = tree_of([[4.0, 4.4, 3.0]], [[1.0, 3.0, 1.0]], state="not measured", best=best)
    criteria = tree["criteria"].to_dataset()
    states = np.where(criteria["criterion"].values == "trials_broken", "failing", criteria["state"].values)
    tree["criteria"] = xr.DataTree(criteria.assign(state=("criterion", states)))
    found = decide(tree, wb.hardware.read_plan({"training": {"learning_rate": 0.1}})).to_dataframe()
    assert found[found["kind"] == "change"]["text"].tolist() == texts * [
        "then find a peak learning rate with wb.find_rate, because the trials at 0.1 diverged and no useful rate is "
        "known"
    ]


def test_a_stop_rule_from_a_proxy_model_has_no_number():
    sizes = Sizes(768, 12, 64, 4, is_stand_in=True)
    (rule,) = decided("stop rule", state="not measured", sizes=sizes).to_dict("records")
    assert rule["text"] == "wb.Alarms raises an alarm, or the loss or the gradient norm is not finite"
    assert (rule["setting"], rule["proposed"]) == ("", "")


@pytest.mark.parametrize(("affordable", "proposed"), [(900.0, ["900"]), (1000.0, []), (np.nan, []), (np.inf, [])])
def test_a_plan_beyond_its_budget_is_shortened(affordable, proposed):
    changes = decided("change", affordable=affordable)
    assert changes["proposed"].tolist() == proposed
    assert set(changes["setting"]) <= {"n_steps"}
