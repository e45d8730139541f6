"""The tables of an assessment, from trees with known measurements."""

import math

import numpy as np
import pytest
import xarray as xr

from workbench.assessment.criteria import Sizes
from workbench.assessment.structure import ALL
from workbench.assessment.verdict import (
    CRITERIA,
    FAILURE_MODES,
    FIRST_STEP,
    HealthyBand,
    column_state,
    evaluate_criteria,
    summary_of,
    verdict_of,
)

BANDS = {c.name: HealthyBand(0.5, 2.0, 0.1, 10.0, 50) for c in CRITERIA if c.band is None}
#: The same bands, for models of a range of sizes.
SIZED = {name: HealthyBand(0.5, 2.0, 0.1, 10.0, 50, sizes={"width": (24, 96), "blocks": (2, 6)}) for name in BANDS}
INSIDE = Sizes(64, 4, 64, 4)
#: Sizes of a proxy model for a design of width 4,096 with 32 blocks.
PROXY = Sizes(4096, 32, 64, 4, is_stand_in=True)


def tree_with(*, rate=0.3, slow=30.0, broken=0.0, structure=None, sizes=None, reason=""):
    """Return the tree of a healthy design, except for the given values.

    ``rate`` and ``slow`` are relative to the edges.
    """
    numbers = dict.fromkeys(ALL, ((), 1.0)) | {"norm_eps_share": ((), 0.1)}
    numbers |= {f"{name}_error": ((), 0.0) for name in numbers}
    numbers |= {name: ((), value) for name, value in (structure or {}).items()}
    about = {"unseen": reason} if reason else {}
    pilot = {"rate_over_edge": ((), rate, about), "rate_over_slow_edge": ((), slow, about)}
    parts = {"structure": numbers, "pilot": pilot, "trials": {"share_broken": ((), broken)}}
    tree = xr.DataTree.from_dict({f"/{name}": xr.Dataset(part) for name, part in parts.items()})
    tree.attrs = {} if sizes is None else sizes.attributes
    return tree


def of(criteria, name):
    return criteria.sel(criterion=name)


def test_healthy_numbers_may_proceed():
    criteria, modes = evaluate_criteria(tree_with(), BANDS)
    assert verdict_of(criteria) == "proceed"
    assert {column_state(criteria, column) for column in ("structure", "pilot")} == {"healthy"}
    assert set(criteria["state"].values) == {"healthy"}
    assert list(modes["failure_mode"].values) == list(FAILURE_MODES)
    assert "may proceed" in summary_of("it", "proceed", criteria, modes)


@pytest.mark.parametrize(
    ("values", "mode", "verdict", "columns"),
    [
        ({"rate": 9.0}, "unsuitable_rate", "refuse", ("healthy", "failing")),
        ({"rate": 2.0}, "unsuitable_rate", "at risk", ("healthy", "at risk")),
        ({"slow": 0.5}, "unsuitable_rate", "at risk", ("healthy", "at risk")),
        ({"broken": 0.5}, "unsuitable_rate", "at risk", ("healthy", "at risk")),
        ({"broken": 1.0, "rate": math.nan}, "unsuitable_rate", "refuse", ("healthy", "failing")),
        ({"structure": {"gain_by_depth": 40.0}}, "gradient_flow_collapse", "refuse", ("failing", "healthy")),
        ({"structure": {"gain_by_depth": 4.0}}, "gradient_flow_collapse", "at risk", ("at risk", "healthy")),
        ({"structure": {"attention_entropy_share": 0.01}}, "attention_degeneracy", "refuse", ("failing", "healthy")),
        ({"structure": {"attention_logit_max": 30.0}}, "attention_degeneracy", "refuse", ("failing", "healthy")),
        ({"structure": {"norm_eps_share": 0.9}}, "initialization_out_of_band", "at risk", ("at risk", "healthy")),
        ({"structure": {"routing_entropy_share": 0.2}}, "routing_oscillation", "at risk", ("at risk", "healthy")),
        ({"structure": {"loss_over_guess": 5.0}}, "initialization_out_of_band", "at risk", ("at risk", "healthy")),
        ({"structure": {"function_change": math.inf}}, "scale_dependent_divergence", "refuse", ("failing", "healthy")),
    ],
)
def test_an_unhealthy_number_is_found_in_its_mode_and_column(values, mode, verdict, columns):
    criteria, modes = evaluate_criteria(tree_with(**values), BANDS)
    states = zip(modes["failure_mode"].values, modes["state"].values, strict=True)
    assert [name for name, state in states if state in ("at risk", "failing")] == [mode]
    assert verdict_of(criteria) == verdict
    assert tuple(column_state(criteria, column) for column in ("structure", "pilot")) == columns
    assert str(modes.sel(failure_mode=mode)["title"].values) in summary_of("it", verdict, criteria, modes)


def test_normalizations_that_work_do_not_prove_a_healthy_initialization():
    _, modes = evaluate_criteria(tree_with(structure={"loss_over_guess": math.nan}), BANDS)
    mode = modes.sel(failure_mode="initialization_out_of_band")
    assert str(mode["state"].values) == "not measured"
    assert math.isnan(float(mode["confidence"]))


def test_gains_between_blocks_flag_a_design_but_do_not_show_that_it_is_healthy():
    for gain, verdict, states in (
        (1.0, "cannot say", ("not measured", "healthy")),
        (4.0, "at risk", ("at risk", "healthy")),
    ):
        tree = tree_with(structure={"gain_by_depth": gain})
        tree["structure"].attrs["between_blocks"] = 1
        criteria, modes = evaluate_criteria(tree, BANDS)
        assert verdict_of(criteria) == verdict
        assert tuple(column_state(criteria, column) for column in ("structure", "pilot")) == states
        if verdict == "cannot say":
            assert "its residual stream cannot be read" in summary_of("it", verdict, criteria, modes)


def test_a_state_with_low_confidence_does_not_decide():
    tree = tree_with(structure={"gain_by_depth": 2.1, "gain_by_depth_error": 3.0})
    criteria, modes = evaluate_criteria(tree, BANDS)
    assert str(of(criteria, "gain_by_depth")["state"].values) == "at risk"
    assert float(of(criteria, "gain_by_depth")["confidence"]) < 0.5
    assert str(modes.sel(failure_mode="gradient_flow_collapse")["state"].values) == "healthy"
    assert verdict_of(criteria) == "proceed"


def test_without_a_healthy_reference_the_structure_is_not_evaluated():
    criteria, modes = evaluate_criteria(tree_with(), {})
    assert str(of(criteria, "gain_by_depth")["state"].values) == "not measured"
    assert "no healthy recorded run" in str(of(criteria, "gain_by_depth")["reason"].values)
    assert math.isnan(float(of(criteria, "gain_by_depth")["value"]))
    assert str(modes.sel(failure_mode="gradient_flow_collapse")["state"].values) == "not measured"
    assert verdict_of(criteria) == "cannot say"
    assert "the gradient gain along its depth was not measured" in summary_of("it", "cannot say", criteria, modes)


def test_unknown_rates_leave_the_verdict_open_and_no_number_anywhere():
    tree = tree_with(rate=math.nan, slow=math.nan, reason="No rate tried was too large.")
    criteria, modes = evaluate_criteria(tree, BANDS)
    assert verdict_of(criteria) == "cannot say"
    row, mode = of(criteria, "rate_over_edge"), modes.sel(failure_mode="unsuitable_rate")
    assert str(row["state"].values) == str(mode["state"].values) == "not measured"
    assert str(row["reason"].values) == "no rate tried was too large"
    assert np.isnan([float(row["value"]), float(row["confidence"]), float(mode["confidence"])]).all()
    assert "updates without divergence are no evidence" in str(mode["reason"].values)
    summary = summary_of("it", "cannot say", criteria, modes)
    assert "its useful learning rates are unknown (no rate tried was too large). No measured criterion" in summary
    assert summary.endswith(f"As a next step, {FIRST_STEP}.")


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (2.0, "(planned: 0.05; largest useful rate: about 0.02, 0.01 to 0.03)"),
        (None, "(planned rate over its upper limit: 2; healthy: 1 or less)"),
    ],
)
def test_a_rate_that_is_too_large_is_reported_with_the_useful_ones(rate, words):
    criteria, modes = evaluate_criteria(tree_with(rate=2.0), BANDS)
    ends = {"useful_edge": 0.02, "useful_edge_low": 0.01, "useful_edge_high": 0.03, "planned_rate": 0.05}
    summary = summary_of("it", "at risk", criteria, modes, pilot=None if rate is None else xr.Dataset(ends))
    assert f"Unsuitable learning rate: the planned rate is too large to learn well {words}." in summary


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes(768, 4, 768, 4), "the healthy reference models have width 24 to 96, while this model has width 768"),
        (Sizes(64, 32, 64, 32), "the healthy reference models have 2 to 6 blocks, while this model has 32 blocks"),
        (PROXY, "have width 24 to 96 and 2 to 6 blocks, while this model has width 4,096 and 32 blocks"),
    ],
)
def test_a_band_applies_only_to_the_sizes_of_its_models(sizes, words):
    far = tree_with(structure={"gain_by_depth": 1e4}, sizes=sizes)
    criteria, modes = evaluate_criteria(far, SIZED)
    names = [name for name in SIZED if bool(of(criteria, name)["is_outside"])]
    assert set(names) == set(SIZED)
    for name in names:
        row = of(criteria, name)
        assert str(row["state"].values) == "not measured"
        assert words in str(row["reason"].values)
        assert np.isnan(float(row["value"]))
    assert verdict_of(criteria) == "cannot say"
    assert "could not be evaluated, because the healthy" in summary_of("it", "cannot say", criteria, modes, sizes)
    inside, _ = evaluate_criteria(tree_with(structure={"gain_by_depth": 1e4}, sizes=INSIDE), SIZED)
    assert str(of(inside, "gain_by_depth")["state"].values) == "failing"
    assert verdict_of(inside) == "refuse"


def test_healthy_numbers_within_the_sizes_may_proceed():
    criteria, _ = evaluate_criteria(tree_with(sizes=INSIDE), SIZED)
    assert verdict_of(criteria) == "proceed"
    assert not criteria["is_outside"].values.any()
    unknown, _ = evaluate_criteria(tree_with(), SIZED)  # its size is unknown
    assert verdict_of(unknown) == "cannot say"
    assert "the size of the measured model is unknown" in str(of(unknown, "gain_by_depth")["reason"].values)


def test_a_value_that_is_not_finite_fails_at_any_size():
    criteria, modes = evaluate_criteria(tree_with(structure={"gain_by_depth": math.inf}, sizes=PROXY), SIZED)
    row = of(criteria, "gain_by_depth")
    assert (str(row["state"].values), float(row["confidence"])) == ("failing", 1.0)
    assert verdict_of(criteria) == "refuse"
    assert "gradients explode or vanish with depth" in summary_of("it", "refuse", criteria, modes, PROXY)


def test_hazards_are_evaluated_by_their_own_limits():
    hazards = xr.Dataset(
        {
            "title": ("hazard", ["sum", "idle"]),
            "applies": ("hazard", [True, False]),
            "effect": ("hazard", [0.3, 9.0]),
            "unit": ("hazard", ["1", "1"]),
            "healthy_limit": ("hazard", [0.1, 0.1]),
            "failing_limit": ("hazard", [1.0, np.nan]),
            "state": ("hazard", ["at risk", "healthy"]),
            "meaning": ("hazard", ["sums lose digits", ""]),
        },
        {"hazard": ["low_sum", "unused"]},
    )
    tree = tree_with()
    tree["hardware"] = xr.DataTree(hazards)
    criteria, modes = evaluate_criteria(tree, BANDS)
    assert "hazard_unused" not in criteria["criterion"].values
    assert float(of(criteria, "hazard_low_sum")["high"]) == 0.1
    assert str(modes.sel(failure_mode="precision_headroom")["state"].values) == "at risk"
    assert str(modes.sel(failure_mode="precision_headroom")["worst_criterion"].values) == "hazard_low_sum"
