"""The risk models that ship: what the script makes of the recorded sweep, and as good as their cards say."""

import json
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import load_script
from workbench.errors import OptionError, SchemaError

pytestmark = pytest.mark.recorded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return load_script("fit_risk")


@pytest.fixture(scope="module")
def held_out():
    return wb.samples.divergence_sweep("held out")


@pytest.mark.slow
@pytest.mark.parametrize("features", ["forward", "gradient", "pilot"])
def test_fitting_again_gives_the_shipped_model(script, features):
    shipped, again = wb.risk.shipped(features), script.fitted(features, n_bootstrap=0)
    assert shipped.features == again.features
    np.testing.assert_allclose(shipped.weights[0], again.weights[0], rtol=1e-4, atol=1e-5)
    assert shipped.about["n_runs"] == again.about["n_runs"]
    assert len(shipped.weights) == 201


@pytest.mark.parametrize("features", ["forward", "gradient", "pilot"])
def test_it_is_as_good_as_its_card_says(features, held_out):
    model = wb.risk.shipped(features)
    probability = model._extrapolated(held_out)["probability"].values
    label = held_out["has_diverged"].values
    figures = model.validation["configuration"]["all"]
    assert wb.risk.auroc(probability, label, n_bootstrap=0).value == pytest.approx(figures["auroc"][0], abs=1e-6)
    assert wb.risk.calibration_error(probability, label) == pytest.approx(figures["ece"], abs=1e-6)
    rates = model._extrapolated_rates(held_out)["expected_stable_rate"]
    ratio = wb.risk.stable_rate_accuracy(held_out, rates)["ratio"]
    assert wb.risk.share_within(ratio, 1.5) == pytest.approx(figures["stable_rates"]["share_within_1.5"], abs=1e-6)
    assert f"{figures['auroc'][0]:.3f}" in model.card()


def test_the_published_figures_hold_in_the_readme(held_out):
    readme = (ROOT / "README.md").read_text()
    for features in ("forward", "gradient", "pilot"):
        for by in ("configuration", "architecture"):
            value, low, high = wb.risk.shipped(features).validation[by]["all"]["auroc"]
            assert f"{value:.3f}"[1:] in readme
            assert f"[{low:.3f}, {high:.3f}]".replace("0.", ".") in readme


def test_its_file_is_small_text_without_code():
    for file in (Path(wb.risk.__file__).parent / "shipped").glob("risk_*.json"):
        assert file.stat().st_size < 300_000
        assert json.loads(file.read_text())["kind"] == "stability-workbench risk model"


@pytest.mark.parametrize("features", ["forward", "gradient", "pilot"])
def test_it_answers_for_no_model_of_another_size_than_its_runs(features, script, held_out):
    model, runs = wb.risk.shipped(features), wb.samples.divergence_sweep("fit")
    assert model.applicability.sizes == script.fitted(features, n_bootstrap=0).applicability.sizes
    assert model.applicability.sizes == {
        name: (float(runs[name].min()), float(runs[name].max())) for name in ("d_model", "n_layers")
    }
    case = held_out.isel(run=[0])
    assert model.predict(case)["is_familiar"].item()
    large = case.assign_coords(d_model=("run", [576]), n_layers=("run", [30]), n_weights=case["n_weights"])
    found = model.predict(large)
    assert np.isnan(found["probability"].item())
    assert found["farthest_feature"].item() == "d_model"
    assert "width (d_model), which is 576 where they had 24 to 96" in found.attrs["warning"]


def test_a_longer_run_is_told_how_far_the_model_sees(held_out):
    case = wb.sweeps.replan(held_out.isel(run=[3]), n_steps=5000)
    assert "first 120" in wb.risk.shipped("pilot").predict(case).attrs["note"]
    assert "120" not in wb.risk.shipped("pilot").predict(held_out.isel(run=[3])).attrs["note"]


def test_risk_over_rates_is_the_risk_at_each_of_them(held_out):
    model, cases = wb.risk.shipped("pilot"), held_out.isel(run=[0, 200])
    rates = [0.001, 0.1, 1.0]
    found = wb.risk.over_rates(model, cases, rates, names=["a", "b"])
    assert found["probability"].dims == ("architecture", "learning_rate")
    for i, name in enumerate(("a", "b")):
        for rate in rates:
            case = cases.isel(run=[i]).assign_coords(learning_rate=("run", [rate]))
            expected = model.predict(case)["probability"].item()
            assert found["probability"].sel(architecture=name, learning_rate=rate).item() == pytest.approx(expected)
    assert (found["probability"].diff("learning_rate") >= 0).all()
    with pytest.raises(SchemaError, match="2 cases need as many different names"):
        wb.risk.over_rates(model, cases, rates, names=["a", "a"])
    with pytest.raises(OptionError, match="There is no learning rate"):
        wb.risk.over_rates(model, cases, [], names=["a", "b"])
    with pytest.raises(OptionError, match="learning rate is 0"):
        wb.risk.over_rates(model, cases, [0.0], names=["a", "b"])
