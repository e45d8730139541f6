"""An assessment end to end, on models small enough for a test."""

import copy
import json

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from workbench.assessment.decisions import KINDS
from workbench.assessment.design_comparison import dominated
from workbench.assessment.ladder import affordable_widths
from workbench.errors import CheckpointError, ThresholdError
from workbench.scaling.matched_width import WIDTH_ERROR

SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16}
CALM = {"training": {"learning_rate": 1e-3, "warmup": 10}, "hardware": {"data_parallel": 4, "gradient_dtype": "bf16"}}
WILD = {"training": {"learning_rate": 50.0}}


@pytest.fixture(scope="module")
def model():
    return wb.zoo.transformer(**SIZE, norm="pre_ln", seed=3)


@pytest.fixture(scope="module")
def calm(model):
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tree = wb.assess(model, plan=CALM)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    return tree


@pytest.fixture(scope="module")
def wild(model):
    return wb.assess(model, plan=WILD)


def test_a_calm_plan_is_not_refused_for_its_risk(calm):
    assert calm.attrs["kind"] == "assessment"
    modes = calm["failure_modes"].to_dataset()
    assert str(modes.sel(failure_mode="divergence_risk")["state"].values) == "healthy"
    assert "changes" not in calm
    assert calm.attrs["exit_status"] == ("proceed", "at risk", "refuse").index(calm.attrs["verdict"])


def test_a_wild_plan_is_refused_and_what_would_help_was_tried(wild):
    assert (wild.attrs["verdict"], wild.attrs["exit_status"]) == ("refuse", 2)
    assert "divergence under the plan" in wild.attrs["summary"]
    changes = wild["changes"].to_dataset()
    assert set(changes["setting"].values) == {"clip_norm", "warmup", "kss", "learning_rate"}
    decisions = wild["decisions"].to_dataset()
    lower = decisions.isel(decision=decisions["setting"].values == "learning_rate")
    assert lower.sizes["decision"] == 1
    assert float(lower["proposed"].values[0]) < 50.0
    assert "proceed" not in decisions["kind"].values


@pytest.fixture(scope="module")
def thin():
    """A design that is called too large to be measured whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.assessment.measured_model.MOST_WEIGHTS", 1000)
        patch.setattr("workbench.assessment.measured_model.THIN_WIDTH", 16)
        wide = SIZE | {"d_model": 64, "n_heads": 8, "n_layers": 6}
        said = []
        tree = wb.assess({"family": "transformer", **wide}, plan=CALM, progress=said.append)
    assert "a ladder of sizes: part 1 of" in " ".join(said)
    assert "number formats and devices: Rounding" in " ".join(said)
    return tree


def test_a_large_design_is_measured_thin_with_the_variances_of_its_width(thin):
    sizes = ("width", "depth", "measured_width", "measured_depth")
    assert [thin.attrs[name] for name in sizes] == [64, 6, 16, 4]
    at_depth = thin["depth_flow"].to_dataset()
    assert at_depth["depth"].values.tolist() == [3, 6]
    assert float(at_depth["gradient_gain_total_error"].min()) >= WIDTH_ERROR
    states = thin["criteria"]["state"].to_series().set_axis(thin["criteria"]["criterion"].values)
    assert states["initial_grad_norm"] == "not measured"
    reasons = thin["criteria"]["reason"].to_series().set_axis(thin["criteria"]["criterion"].values)
    assert "a thin model stood in" in reasons["initial_grad_norm"]
    assert states["gradient_gain_total"] != "not measured"
    spread = float(thin["initialization"]["logit_std"])
    whole = wb.zoo.transformer(**SIZE | {"d_model": 64, "n_heads": 8, "n_layers": 4})
    with torch.no_grad():
        expected = float(whole(torch.arange(16).reshape(1, 16)).std(-1).mean())
    assert spread == pytest.approx(expected, rel=0.3)
    is_known = np.isfinite(float(thin["scaling"]["rate_over_edge"]))
    assert is_known or "is not known" in thin.attrs["summary"]


@pytest.mark.parametrize("name", ["calm", "wild", "thin"])
def test_every_number_that_is_cited_stands_in_the_tree(name, request):
    tree = request.getfixturevalue(name)
    criteria = tree["criteria"].to_dataset()
    for table in (criteria, tree["decisions"].to_dataset()):
        for path, variable, selection in zip(
            *(table[key].values for key in ("path", "variable", "selection")), strict=True
        ):
            if path:
                value = tree[str(path)].to_dataset()[str(variable)].isel(json.loads(str(selection)))
                assert value.ndim == 0
    decisions = tree["decisions"].to_dataset()
    assert set(decisions["kind"].values) <= set(KINDS)
    assert {"monitor", "stop rule"} <= set(decisions["kind"].values)
    assert set(decisions["criterion"].values) - {""} <= set(criteria["criterion"].values)


def test_the_hardware_plan_is_judged(calm):
    criteria = calm["criteria"].to_dataset()
    hazards = criteria.isel(criterion=criteria["failure_mode"].values == "precision_headroom")
    assert hazards.sizes["criterion"] >= 1
    assert np.isfinite(hazards["value"].values).any()


def test_an_assessment_is_saved_and_read_back(calm, tmp_path):
    for save, name in ((wb.save, "a.zarr"), (wb.export_netcdf, "a.nc")):
        back = wb.open_run(save(calm, tmp_path / name))
        assert back.attrs["verdict"] == calm.attrs["verdict"]
        for node in calm.children:
            xr.testing.assert_equal(back[node].to_dataset().load(), calm[node].to_dataset())


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"training": {"learning_rat": 1.0}}, "'learning_rat'; the nearest is 'learning_rate'"),
        ({"hardware": {"tensor_parallel": 3}}, r"tensor_parallel is 3.*the nearest is"),
        ({"hardware": {"pipeline_parallel": 5}}, r"pipeline_parallel is 5.*nearest is 2"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_is_measured(plan, sentence, model):
    with pytest.raises(ThresholdError, match=sentence):
        wb.assess(model, plan=plan, progress=lambda text: pytest.fail("something was measured"))


def test_an_unknown_design_is_refused():
    with pytest.raises(CheckpointError, match="gpt2"):
        wb.assess("gtp2")


def test_the_ladder_stays_below_a_quarter_of_the_target():
    assert affordable_widths(wb.design("gpt2"), 128) == [32, 64, 128]
    assert max(affordable_widths(wb.design({"family": "transformer", "d_model": 256, "n_heads": 16}), 128)) == 64


def test_a_design_is_dominated_where_another_is_nowhere_worse():
    table = xr.Dataset(
        {
            "verdict": ("design", ["proceed", "proceed", "at risk"]),
            "probability": ("design", [0.1, 0.1, 0.6]),
            "flops_per_token": ("design", [10.0, 20.0, 5.0]),
            "loss_on_trial": ("design", [2.0, 2.0, np.nan]),
        }
    )
    assert dominated(table).tolist() == [False, True, False]
    table["loss_on_trial"][1] = 1.5  # the dearer one learns more
    assert dominated(table).tolist() == [False, False, False]


def test_a_comparison_needs_two_designs_with_usable_names(model):
    with pytest.raises(ThresholdError, match="at least two"):
        wb.compare_designs({"one": model})
    with pytest.raises(ThresholdError, match="choose a name"):
        wb.compare_designs({"a/b": model, "c": model})


def test_designs_are_compared_under_one_plan_and_a_repeated_call_gives_the_same_numbers(model, calm):
    other = wb.zoo.transformer(**SIZE, norm="none", seed=3)
    tree = wb.compare_designs({"Pre-LN": model, "No-Norm": other}, plan=CALM)
    table = tree["designs"].to_dataset()
    assert table["verdict"].values.tolist() == [tree[name].attrs["verdict"] for name in ("Pre-LN", "No-Norm")]
    assert str(table["verdict"][0].values) == calm.attrs["verdict"]
    assert float(table["relative_step_time"].min()) == 1.0
    assert set(tree.children) == {"designs", "Pre-LN", "No-Norm"}
    assert float(table["rate_margin"][0]) == pytest.approx(float(table["largest_stable_rate"][0]) / 1e-3)
    for node in ("spectra", "flow", "risk", "rehearsal", "hardware", "criteria"):
        xr.testing.assert_equal(tree["Pre-LN"][node].to_dataset(), calm[node].to_dataset())
