"""Assessments end to end on small models: within the recorded sizes, outside of them, and with a proxy model."""

import copy
import json

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from tests.about import about, says
from workbench.assessment.assess import conclude, dominated
from workbench.assessment.plan_trials import possible_changes, rate_pilot
from workbench.assessment.structure import WIDTH_ERRORS
from workbench.assessment.verdict import HealthyBand, healthy_bands
from workbench.errors import OptionError
from workbench.reports.assessment_document import most_important
from workbench.reports.document import Numbers
from workbench.reports.make_report import document_of
from workbench.schema.statuses import DecisionKind, Verdict

pytestmark = pytest.mark.medium

#: As small as the smallest designs of the bands of these tests.
SIZE = {"d_model": 24, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16}
#: Smaller than all of them.
SMALLER = SIZE | {"d_model": 16}
CALM = {
    "training": {"learning_rate": 3e-3, "warmup": 10, "n_steps": 300},
    "hardware": {"data_parallel": 4, "gradient_dtype": "bf16"},
}
WILD = {"training": {"learning_rate": 50.0, "n_steps": 300}}


@pytest.fixture(scope="module", autouse=True)
def _fixed_bands():
    """Bands for a range of sizes that does not depend on the shipped reference."""
    bands = {
        name: HealthyBand(**{**vars(band), "sizes": {"width": (24, 96), "blocks": (2, 6)}})
        for name, band in healthy_bands().items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.assessment.verdict.healthy_bands", lambda: bands)
        patch.setattr("workbench.assessment.plan_trials.SECONDS", 1e9)
        yield


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


def test_a_sound_model_at_a_useful_rate_proceeds(calm):
    assert calm.attrs["kind"] == "assessment"
    assert (calm.attrs["verdict"], calm.attrs["exit_status"]) == ("proceed", 0)
    assert (calm.attrs["structure_state"], calm.attrs["pilot_state"]) == ("healthy", "healthy")
    assert calm.attrs["is_stand_in"] == 0
    assert "changes" not in calm
    pilot = calm["pilot"].to_dataset()
    assert float(pilot["useful_edge_low"]) < float(pilot["useful_edge"]) < float(pilot["useful_edge_high"])
    assert float(pilot["upper_rate_limit"]) == float(pilot["useful_edge_high"])
    assert float(pilot["rate_over_edge"]) == pytest.approx(3e-3 / float(pilot["upper_rate_limit"]))
    assert most_important(Numbers(calm))[0].label == "largest useful rate"
    assert "stable" not in calm.attrs["summary"]


@pytest.mark.parametrize(
    ("factor", "verdict", "word", "meaning"),
    [
        (("rate_over_edge", 5.0), "refuse", "lower", "the planned rate is too large to learn well"),
        (("rate_over_edge", 2.0), "at risk", "lower", "the planned rate is too large to learn well"),
        (("rate_over_slow_edge", 0.5), "at risk", "raise", "the planned rate is too small to learn well"),
    ],
)
def test_a_rate_outside_of_the_useful_ones_is_found_without_diverged_trials(calm, factor, verdict, word, meaning):
    tree, plan = calm.copy(deep=True), wb.hardware.read_plan(CALM)
    pilot = tree["pilot"].to_dataset()
    tree["pilot"] = xr.DataTree(pilot.assign({factor[0]: ((), factor[1])}))
    conclude(tree, plan, try_changes=lambda tree: pytest.fail("no trial diverged"))
    assert tree.attrs["verdict"] == verdict
    assert meaning in tree.attrs["summary"]
    decisions = tree["decisions"].to_dataset().to_dataframe()
    (change,) = decisions[decisions["setting"] == "learning_rate"].to_dict("records")
    assert change["text"].startswith(word)
    assert change["proposed"].startswith(f"{float(pilot['best_rate']):.2g} (")


def pilot_of(plan, **options):
    found = wb.zoo.transformer(**SIZE, norm="pre_ln", seed=3)
    task = wb.tasks.synthetic_lm(length=16, vocab_size=32, batch_size=8)
    return rate_pilot(found, task, wb.TrainingPlan(**plan), budget=200, **options)


@pytest.fixture(scope="module")
def own_pilot():
    return pilot_of({"n_steps": 300, "learning_rate": 3e-3})


@pytest.mark.slow
def test_rates_of_a_wider_target_are_smaller_by_the_ratio_and_less_certain(own_pilot):
    wide = pilot_of({"n_steps": 300, "learning_rate": 3e-3}, width_ratio=16.0)
    assert float(wide["useful_edge"]) == pytest.approx(float(own_pilot["useful_edge"]) / 16)
    spread = [float(each["useful_edge_high"] / each["useful_edge"]) for each in (own_pilot, wide)]
    assert spread[1] == pytest.approx(spread[0] * 1.5**2)  # 1.5 for each factor of 4 in the width
    assert float(wide["upper_rate_limit"]) == pytest.approx(3 * float(wide["useful_edge_high"]))
    assert float(wide["rate_over_edge"] * wide["upper_rate_limit"]) == pytest.approx(3e-3)
    assert (own_pilot.attrs["rate_factor"], wide.attrs["rate_factor"]) == (1, 1 / 16)


def test_a_training_beyond_the_measured_length_is_only_checked_for_rates_that_are_too_large(own_pilot):
    long = pilot_of({"n_steps": 10**6, "learning_rate": 3e-3})
    assert long.attrs["n_steps"] < 10**6
    assert not long.attrs["reason"]
    assert float(long["rate_over_edge"]) > float(own_pilot["rate_over_edge"])
    assert np.isnan(float(long["rate_over_slow_edge"]))


def test_the_width_rule_of_adam_is_not_applied_to_other_optimizers():
    plan = {"n_steps": 300, "learning_rate": 0.1, "optimizer": "SGD"}
    found = pilot_of(plan, width_ratio=4.0)
    assert "SGD" in found.attrs["reason"]
    assert np.isnan(float(found["rate_over_edge"]))


def test_a_pilot_that_takes_too_long_ends_with_a_reason():
    found = pilot_of({"n_steps": 300, "learning_rate": 3e-3}, seconds=0.0)
    assert found.attrs["reason"].startswith("No round of the pilot finished within 0 seconds")
    assert np.isnan(float(found["useful_edge"]))
    assert float(found["planned_rate"]) == 3e-3


@pytest.fixture(scope="module")
def smaller():
    return wb.assess(
        wb.zoo.transformer(**SMALLER, norm="pre_ln", seed=3), plan={"training": {"learning_rate": 3e-3, "n_steps": 300}}
    )


@pytest.mark.slow
def test_a_model_smaller_than_all_recorded_ones_has_an_open_verdict_and_a_first_step(smaller):
    assert (smaller.attrs["verdict"], smaller.attrs["exit_status"]) == ("cannot say", 4)
    assert "models have width 24 to 96, while this model has width 16. No measured" in smaller.attrs["summary"]
    first = smaller["decisions"].to_dataset().isel(decision=0)
    assert str(first["kind"].values) == "measure"
    assert "wb.Recorder" in str(first["text"].values)
    document = document_of(smaller)
    assert (document.verdict, document.state) == ("cannot say", "not measured")
    assert document.actions[0].text.startswith("Find the useful learning rates at full size with wb.find_rate, or")
    modes = smaller["failure_modes"].to_dataset()
    assert np.isnan(modes["confidence"].values[modes["state"].values == "not measured"]).all()


@pytest.mark.slow
def test_a_bad_plan_is_refused_and_changes_are_tried(wild):
    assert (wild.attrs["verdict"], wild.attrs["exit_status"]) == ("refuse", 2)
    assert (wild.attrs["structure_state"], wild.attrs["pilot_state"]) == ("at risk", "failing")
    assert "Unsuitable learning rate: " in wild.attrs["summary"]
    changes = wild["changes"].to_dataset()
    assert set(changes["setting"].values) == {"clip_norm", "warmup", "kss", "learning_rate"}
    best = float(wild["pilot"]["best_rate"])
    (lower,) = np.flatnonzero(changes["setting"].values == "learning_rate")
    assert float(changes["proposed"].values[lower]) == pytest.approx(best, rel=0.06)  # two digits
    assert changes["n_broken"].values[lower] == 0
    assert "proceed" not in wild["decisions"]["kind"].values


@pytest.fixture(scope="module")
def proxy():
    """An assessment of a design that counts as too large to be measured at full size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.assessment.measured_model.MAX_PARAMETERS", 1000)
        patch.setattr("workbench.assessment.measured_model.PROXY_WIDTH", 16)
        wide = SIZE | {"d_model": 64, "n_heads": 8, "n_layers": 6}
        messages = []
        tree = wb.assess({"family": "transformer", **wide}, plan=CALM, progress=messages.append)
    assert messages[:3] == ["structure", "spectra", "useful rates"]
    assert "number formats and devices: Rounding" in " ".join(messages)
    return tree


@pytest.mark.slow
def test_the_proxy_of_a_large_design_has_all_blocks_and_the_variances_of_the_full_width(proxy):
    sizes = ("width", "depth", "measured_width", "measured_depth", "is_stand_in")
    assert [proxy.attrs[name] for name in sizes] == [64, 6, 16, 4, 1]
    assert proxy["flow"].sizes["layer"] == proxy["spectra"].sizes["layer"] == 6
    structure = proxy["structure"].to_dataset()
    assert float(structure["gain_by_depth_error"]) >= WIDTH_ERRORS["gain_by_depth"]
    assert float(proxy["trials"].attrs["learning_rate"]) == pytest.approx(4 * 3e-3)
    # The designs of the bands of these tests are wider than 16.
    states = proxy["criteria"]["state"].to_series().set_axis(proxy["criteria"]["criterion"].values)
    assert states["gain_by_depth"] == "not measured"
    assert proxy.attrs["verdict"] == "cannot say"


def test_divergence_of_a_proxy_model_is_reported_as_such_and_no_rate_of_it_is_proposed(proxy):
    tree, plan = proxy.copy(deep=True), wb.hardware.read_plan(WILD)
    trials = tree["trials"].to_dataset()
    trials["share_broken"][...], trials["has_diverged"][:], trials["divergence_step"][:] = 1.0, True, 3.0
    tree["trials"] = xr.DataTree(trials)

    def changes(judged):
        rows = [(each.setting, each.current, each.proposed) for each in possible_changes(plan.training_plan(), np.nan)]
        names = ("setting", "current", "proposed")
        data = {name: ("change", list(column)) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
        return xr.Dataset(data | {"n_trials": ("change", [2] * 4), "n_broken": ("change", [2, 2, 0, 0])})

    conclude(tree, plan, try_changes=changes)
    assert tree.attrs["verdict"] == "refuse"
    assert "measured on a proxy model of width 16 with 4 blocks" in tree.attrs["summary"]
    decisions = tree["decisions"].to_dataset().to_dataframe()
    (lower,) = decisions[(decisions["setting"] == "learning_rate") & (decisions["path"] == "/changes")].to_dict(
        "records"
    )
    assert lower["proposed"] == "below 50"
    assert (
        lower["effect"] == "2 of 2 trials of a proxy model of width 16 with 4 blocks with this change did not diverge"
    )
    (stop,) = decisions[decisions["kind"] == "stop rule"]["text"]
    assert "all trials of a proxy model of width 16 with 4 blocks diverged" in stop


@pytest.mark.parametrize("name", ["calm", "wild", "proxy", "smaller"])
def test_every_cited_number_is_in_the_tree(name, request):
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
    assert set(decisions["kind"].values) <= set(DecisionKind)
    assert {"monitor", "stop rule"} <= set(decisions["kind"].values)
    assert set(decisions["criterion"].values) - {""} <= set(criteria["criterion"].values)


def test_a_design_is_dominated_where_another_is_nowhere_worse():
    table = xr.Dataset(
        {
            "verdict": ("design", ["proceed", "proceed", "at risk"]),
            "flops_per_token": ("design", [10.0, 20.0, 5.0]),
            "loss_at_best": ("design", [2.0, 2.0, np.nan]),
        }
    )
    assert dominated(table).tolist() == [False, True, False]
    table["loss_at_best"][1] = 1.5  # the more expensive one learns more
    assert dominated(table).tolist() == [False, False, False]


def test_a_comparison_needs_two_designs_with_usable_names(model):
    with pytest.raises(OptionError, check=about("designs")):
        wb.compare_designs({"one": model})
    with pytest.raises(OptionError, check=says("is not allowed for a design; choose one without")):
        wb.compare_designs({"a/b": model, "c": model})


@pytest.mark.slow
def test_designs_are_compared_under_one_plan_and_a_repeated_call_gives_the_same_numbers(model, calm):
    other = wb.zoo.transformer(**SIZE, norm="none", seed=3)
    tree = wb.compare_designs({"Pre-LN": model, "No-Norm": other}, plan=CALM)
    table = tree["designs"].to_dataset()
    assert table["verdict"].values.tolist() == [tree[name].attrs["verdict"] for name in ("Pre-LN", "No-Norm")]
    assert str(table["verdict"][0].values) == calm.attrs["verdict"]
    assert all(
        tree[name].attrs["exit_status"] == Verdict(tree[name].attrs["verdict"]).exit_status
        for name in ("Pre-LN", "No-Norm")
    )
    assert float(table["relative_step_time"].min()) == 1.0
    assert set(tree.children) == {"designs", "Pre-LN", "No-Norm"}
    assert float(table["rate_margin"][0]) == pytest.approx(float(calm["pilot"]["useful_edge"]) / 3e-3)
    assert table["useful_edge_low"].attrs["long_name"] == "largest useful rate, lower end"
    for node in ("spectra", "flow", "structure", "pilot", "trials", "hardware", "criteria"):
        xr.testing.assert_equal(tree["Pre-LN"][node].to_dataset(), calm[node].to_dataset())
