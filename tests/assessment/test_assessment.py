"""An assessment end to end, on models small enough for a test: inside of what was recorded, outside, and a stand-in."""

import copy
import json

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from workbench.assessment.affordable_ladder import affordable_widths, ladder
from workbench.assessment.assess import conclude
from workbench.assessment.design_comparison import dominated
from workbench.assessment.plan_changes import possible_changes
from workbench.assessment.plan_risk import middle_rate, plan_risk
from workbench.errors import CheckpointError, OptionError
from workbench.reports.assessment_document import most_important
from workbench.reports.make_report import document_of
from workbench.reports.quantity import Numbers
from workbench.risk.edge_model import EdgeModel
from workbench.risk.edge_regression import EdgeFit
from workbench.scaling.width_matching import WIDTH_ERROR
from workbench.schema.statuses import DecisionKind, Verdict

pytestmark = pytest.mark.medium

#: As small as the smallest of the recorded models.
SIZE = {"d_model": 24, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16}
#: Smaller than any of them.
SMALLER = SIZE | {"d_model": 16}
CALM = {"training": {"learning_rate": 1e-3, "warmup": 10}, "hardware": {"data_parallel": 4, "gradient_dtype": "bf16"}}
WILD = {"training": {"learning_rate": 50.0}}


#: Edges of every model from 24 to 96 wide, and the factor e**DEVIATION that they are known to.
EDGES, DEVIATION = {"slow_edge": 1e-4, "useful_edge": 1e-2, "explosion_edge": 1.0}, 0.5


@pytest.fixture(scope="module", autouse=True)
def _planted_edges():
    """A risk that does not depend on what ships."""
    groups = tuple(f"{name} {kind} norm" for name in ("AdamW", "SGD") for kind in ("with", "without"))
    alike = np.zeros(len(groups)), np.ones(len(groups)), np.zeros(len(groups))
    fits = {name: (EdgeFit(*alike[:2], np.log(edge), alike[2]),) for name, edge in EDGES.items()}
    measured = {"d_model": (24, 96), "n_layers": (2, 6), "n_steps": (10, 2000)}
    planted = EdgeModel((), groups, {}, measured, fits, dict.fromkeys(EDGES, DEVIATION))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("risk.risk", "assessment.plan_risk"):
            patch.setattr(f"workbench.{module}.shipped", lambda: planted)
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


def test_a_calm_plan_is_not_refused_for_its_risk(calm):
    assert calm.attrs["kind"] == "assessment"
    modes = calm["failure_modes"].to_dataset()
    assert str(modes.sel(failure_mode="unsuitable_rate")["state"].values) == "healthy"
    assert "changes" not in calm


def test_a_small_model_inside_of_what_was_recorded_proceeds_with_its_risk(calm):
    assert (calm.attrs["verdict"], calm.attrs["exit_status"]) == ("proceed", 0)
    assert calm.attrs["is_stand_in"] == 0
    risk = calm["risk"].to_dataset()
    assert float(risk["failure"][0]) < 0.01
    assert float(risk["useful_edge"][0]) == pytest.approx(EDGES["useful_edge"])
    labels = [fact.label for fact in most_important(Numbers(calm))]
    assert labels[:2] == ["risk of not learning well", "largest useful rate"]
    curve = calm["risk_over_rates"].to_dataset()
    assert curve["learning_rate"].values[[0, -1]].tolist() == pytest.approx([1e-5, 0.1])
    assert float(curve["failure"].interp(learning_rate=1e-3)) == pytest.approx(float(risk["failure"][0]), abs=1e-6)
    assert curve["failure"].values[[0, -1]].min() > 0.99
    assert "stable" not in calm.attrs["summary"]


@pytest.mark.parametrize(("rate", "verdict", "word"), [(1e-5, "refuse", "raise"), (1e-4, "at risk", "raise")])
def test_a_rate_too_small_to_learn_well_is_found_without_broken_trials(calm, rate, verdict, word):
    tree, plan = calm.copy(deep=True), wb.hardware.read_plan({"training": {"learning_rate": rate}})
    case = wb.sweeps.replan(tree["case"].to_dataset(), learning_rate=rate * 0.99)
    tree["risk"] = xr.DataTree(plan_risk(case))
    conclude(tree, plan, try_changes=lambda tree: pytest.fail("no trial broke"))
    assert tree.attrs["verdict"] == verdict
    assert "probably too small or too large to learn well" in tree.attrs["summary"]
    decisions = tree["decisions"].to_dataset().to_dataframe()
    (change,) = decisions[decisions["setting"] == "learning_rate"].to_dict("records")
    assert change["text"].startswith(word)
    assert change["proposed"] == "0.001"


def test_the_risk_of_a_stand_in_is_that_of_nothing(calm):
    case = calm["case"].to_dataset()
    own, stand_in = plan_risk(case), plan_risk(case, stand_in="It is a stand-in.")
    assert set(own.data_vars) == set(stand_in.data_vars)
    assert np.isfinite(numbers_of(own)).all()
    assert own.attrs["warning"] == ""
    assert middle_rate(own) == pytest.approx(1e-3)
    for name, edge in EDGES.items():
        low, value, high = (float(own[f"{name}{end}"][0]) for end in ("_low", "", "_high"))
        assert value == pytest.approx(edge)
        assert high / value == pytest.approx(value / low) == pytest.approx(np.exp(1.2816 * DEVIATION), rel=1e-3)
    assert np.isnan(numbers_of(stand_in)).all()
    assert stand_in.attrs["warning"] == "It is a stand-in."
    assert np.isnan(middle_rate(stand_in))


@pytest.fixture(scope="module")
def smaller():
    return wb.assess(wb.zoo.transformer(**SMALLER, norm="pre_ln", seed=3), plan={"training": {"learning_rate": 1e-3}})


def numbers_of(data):
    return np.concatenate([np.ravel(v.values) for v in data.data_vars.values() if v.dtype.kind == "f"])


def test_a_model_smaller_than_all_recorded_ones_gets_no_risk_and_a_first_step(smaller):
    assert (smaller.attrs["verdict"], smaller.attrs["exit_status"]) == ("cannot say", 4)
    risk = smaller["risk"].to_dataset()
    assert np.isnan(numbers_of(risk)).all()
    assert risk.attrs["warning"].startswith("Too little was measured at a width")
    assert "of 16 (only 24 to 96). Nothing that was measured failed" in smaller.attrs["summary"]
    assert "risk_over_rates" not in smaller
    first = smaller["decisions"].to_dataset().isel(decision=0)
    assert str(first["kind"].values) == "measure"
    assert "wb.Recorder" in str(first["text"].values)
    told = document_of(smaller)
    assert (told.verdict, told.state) == ("cannot say", "not measured")
    assert not any(fact.label in ("risk of not learning well", "largest useful rate") for fact in told.facts)
    assert told.actions[0].text.startswith("Find the useful rates at its full size with wb.find_rate, or train it")
    modes = smaller["failure_modes"].to_dataset()
    assert np.isnan(modes["confidence"].values[modes["state"].values == "not measured"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "rate"), [("AdamW", 1.0), pytest.param("SGD", 100.0, marks=pytest.mark.slow)])
def test_an_absurd_rate_is_found_by_the_trials_where_no_risk_is_known(optimizer, rate):
    model = wb.zoo.transformer(**SMALLER, norm="none", seed=3)
    tree = wb.assess(model, plan={"training": {"learning_rate": rate, "optimizer": optimizer}})
    assert np.isnan(float(tree["risk"]["failure"][0]))
    assert float(tree["rehearsal"]["share_broken"]) == 1
    assert (tree.attrs["verdict"], tree.attrs["exit_status"]) == ("refuse", 2)
    assert "trials of the first updates broke: 100 %" in tree.attrs["summary"]
    changes = tree["changes"].to_dataset()
    (lower,) = np.flatnonzero(changes["setting"].values == "learning_rate")
    assert float(changes["proposed"].values[lower]) <= rate / 4


def test_a_wild_plan_is_refused_and_what_would_help_was_tried(wild):
    assert (wild.attrs["verdict"], wild.attrs["exit_status"]) == ("refuse", 2)
    assert "unsuitable learning rate" in wild.attrs["summary"]
    changes = wild["changes"].to_dataset()
    assert set(changes["setting"].values) == {"clip_norm", "warmup", "kss", "learning_rate"}
    decisions = wild["decisions"].to_dataset()
    lower = decisions.isel(decision=decisions["setting"].values == "learning_rate")
    assert lower.sizes["decision"] == 1
    assert float(lower["proposed"].values[0]) == pytest.approx(1e-3)  # the middle of the useful rates
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


@pytest.mark.slow
def test_a_stand_in_gives_no_risk_no_rate_and_no_leave_to_proceed(thin):
    assert (thin.attrs["verdict"], thin.attrs["exit_status"]) == ("cannot say", 4)
    assert thin.attrs["is_stand_in"] == 1
    risk = thin["risk"].to_dataset()
    assert np.isnan(numbers_of(risk)).all()
    stand_in = "a stand-in 16 wide with 4 blocks"
    assert stand_in in risk.attrs["warning"]
    assert stand_in in thin.attrs["summary"]
    assert "risk_over_rates" not in thin
    document = document_of(thin)
    assert (document.verdict, document.state) == ("cannot say", "not measured")
    for fact in document.facts:
        assert "rate" not in fact.label.split()
        assert stand_in in fact.remark
    for section in document.sections[:2]:
        assert not any("confidence" in sentence.text for sentence in section.sentences)
    assert np.isnan(thin["failure_modes"]["confidence"].values).all()
    decisions = thin["decisions"].to_dataset()
    assert str(decisions["kind"].values[0]) == "measure"
    assert not set(decisions["setting"].values) & {"learning_rate", "loss", "grad_norm"}


def test_what_breaks_on_a_stand_in_is_told_of_it_and_no_rate_is_proposed(thin):
    tree, plan = thin.copy(deep=True), wb.hardware.read_plan(WILD)
    trials = tree["rehearsal"].to_dataset()
    trials["share_broken"][...], trials["has_diverged"][:], trials["divergence_step"][:] = 1.0, True, 3.0
    tree["rehearsal"] = xr.DataTree(trials)

    def changes(judged):
        possible = possible_changes(plan.training_plan(), np.nan, float(judged["case"]["rehearsed_rate"][0]))
        rows = [(each.setting, each.current, each.proposed) for each in possible]
        names = ("setting", "current", "proposed")
        data = {name: ("change", list(column)) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
        return xr.Dataset(data | {"n_trials": ("change", [2] * 4), "n_broken": ("change", [2, 2, 0, 0])})

    conclude(tree, plan, try_changes=changes)
    assert tree.attrs["verdict"] == "refuse"
    assert "measured on a stand-in 16 wide with 4 blocks" in tree.attrs["summary"]
    decisions = tree["decisions"].to_dataset().to_dataframe().set_index("setting")
    lower = decisions.loc["learning_rate"]
    assert lower["proposed"] == "below 50"
    assert lower["effect"] == "2 of 2 trials of a stand-in 16 wide with 4 blocks with it did not break"
    (stop,) = decisions[decisions["kind"] == "stop rule"]["text"]
    assert "all trials of a stand-in 16 wide with 4 blocks broke" in stop


@pytest.mark.slow
def test_a_model_of_ones_own_stands_for_no_larger_target(model):
    tree = wb.assess(model, plan=CALM | {"target": {"width": 768}})
    assert (tree.attrs["width"], tree.attrs["measured_width"], tree.attrs["is_stand_in"]) == (768, 24, 1)
    assert tree.attrs["verdict"] == "cannot say"
    assert np.isnan(numbers_of(tree["risk"].to_dataset())).all()


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
    # 16 wide: the healthy models were not so thin.
    assert states["gradient_gain_total"] == "not measured"
    assert "were 24 to 96 wide, this one is 16 wide" in reasons["gradient_gain_total"]
    spread = float(thin["initialization"]["logit_std"])
    whole = wb.zoo.transformer(**SIZE | {"d_model": 64, "n_heads": 8, "n_layers": 4})
    with torch.no_grad():
        expected = float(whole(torch.arange(16).reshape(1, 16)).std(-1).mean())
    assert spread == pytest.approx(expected, rel=0.3)


@pytest.mark.parametrize("name", ["calm", "wild", "thin", "smaller"])
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
    assert set(decisions["kind"].values) <= set(DecisionKind)
    assert {"monitor", "stop rule"} <= set(decisions["kind"].values)
    assert set(decisions["criterion"].values) - {""} <= set(criteria["criterion"].values)


def test_the_hardware_plan_is_judged(calm):
    criteria = calm["criteria"].to_dataset()
    hazards = criteria.isel(criterion=criteria["failure_mode"].values == "precision_headroom")
    assert hazards.sizes["criterion"] >= 1
    assert np.isfinite(hazards["value"].values).any()


@pytest.mark.slow
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
    with pytest.raises(OptionError, match=sentence):
        wb.assess(model, plan=plan, progress=lambda text: pytest.fail("something was measured"))


def test_an_unknown_design_is_refused():
    with pytest.raises(CheckpointError, match="gpt2"):
        wb.assess("gtp2")


def test_the_ladder_stays_below_a_quarter_of_the_target():
    assert affordable_widths(wb.design("gpt2"), 128) == [32, 64, 128]
    assert max(affordable_widths(wb.design({"family": "transformer", "d_model": 256, "n_heads": 16}), 128)) == 64


@pytest.mark.parametrize(("width", "edge"), [(512, "pilot"), (768, "none")])
def test_explosion_edges_are_not_looked_for_where_they_would_say_nothing_of_the_target(width, edge, monkeypatch):
    def study(design, widths, depths, **options):
        asked.append((max(widths), options["edge"]))
        return xr.Dataset(coords={"quantity": ["near_unit_mass"]})

    asked = []
    monkeypatch.setattr("workbench.assessment.affordable_ladder.scaling_study", study)
    plan = wb.hardware.read_plan({})
    found = ladder(wb.design("gpt2", width=width), None, plan.training_plan(), plan, seed=0)
    assert asked == [(128, edge)]
    assert np.isnan(float(found["rate_over_edge"]))
    assert ("6 times as wide as the widest rung" in found.attrs["unsupported"]) == (width == 768)


def test_a_design_is_dominated_where_another_is_nowhere_worse():
    table = xr.Dataset(
        {
            "verdict": ("design", ["proceed", "proceed", "at risk"]),
            "failure": ("design", [0.1, 0.1, 0.6]),
            "flops_per_token": ("design", [10.0, 20.0, 5.0]),
            "loss_on_trial": ("design", [2.0, 2.0, np.nan]),
        }
    )
    assert dominated(table).tolist() == [False, True, False]
    table["loss_on_trial"][1] = 1.5  # the dearer one learns more
    assert dominated(table).tolist() == [False, False, False]
    unknown = {"verdict": ["cannot say"] * 3, "failure": [np.nan] * 3, "loss_on_trial": [1.0, 2.0, 3.0]}
    table = table.assign({name: ("design", values) for name, values in unknown.items()})
    assert dominated(table).tolist() == [False, False, False]


def test_a_comparison_needs_two_designs_with_usable_names(model):
    with pytest.raises(OptionError, match="at least two"):
        wb.compare_designs({"one": model})
    with pytest.raises(OptionError, match="choose a name"):
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
    assert float(table["rate_margin"][0]) == pytest.approx(EDGES["useful_edge"] / 1e-3)
    assert float(table["failure"][0]) == float(calm["risk"]["failure"][0])
    assert (table["useful_edge_low"] < table["useful_edge"]).all()
    assert table["explosion"].attrs["long_name"] == "probability of an explosion"
    for node in ("spectra", "flow", "risk", "rehearsal", "hardware", "criteria"):
        xr.testing.assert_equal(tree["Pre-LN"][node].to_dataset(), calm[node].to_dataset())
