"""The recorded sweep is consistent with its script, with itself and with a re-run of a part."""

import json
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.about import about
from tests.data_scripts import load_script
from workbench.schema.sweeps import MEASURES, OUTCOMES, SETTINGS

pytestmark = pytest.mark.recorded

ROOT = Path(__file__).parents[2]
LADDERS = ("fit", "held out")


@pytest.fixture(scope="module")
def script():
    return load_script("make_sweep")


@pytest.fixture(scope="module")
def runs():
    return wb.samples.open("divergence_sweep")


def ladders_of(script, runs, study):
    """Return the coarse and the fine runs of a study of ladders, in their order."""
    of_study = runs.isel(run=(runs["study"] == study).values)
    n_coarse = len(script.cells(study)) * script.N_COARSE
    return of_study.isel(run=slice(0, n_coarse)), of_study.isel(run=slice(n_coarse, None))


def test_it_is_large_enough_and_small_enough(runs):
    assert runs.sizes["run"] >= 1500
    assert (ROOT / "data" / "divergence_sweep.nc").stat().st_size < 10e6
    assert set(runs.coords) == set(SETTINGS)
    assert set(runs.data_vars) == {*MEASURES, *OUTCOMES} - {"unit_change_rate"}  # added to sweeps after the recording
    assert {"call", "seeds", "versions", "core_minutes", "minutes"} <= set(runs.attrs)


def test_its_runs_are_those_of_the_script(script, runs):
    def settings(of):
        return [json.loads(text) for text in of["settings"].values.tolist()]

    for study in ("norms", "scales"):
        expected = [run.as_dict() for run in script.norm_runs(study)]
        assert settings(runs.isel(run=(runs["study"] == study).values)) == expected
    for study in LADDERS:
        coarse, fine = ladders_of(script, runs, study)
        assert settings(coarse) == [run.as_dict() for run in script.ladder_runs(study)]
        assert settings(fine) == [run.as_dict() for run in script.ladder_runs(study, coarse)]


def test_held_out_runs_were_not_fitted_to(runs):
    by_study = {study: runs.isel(run=(runs["study"] == study).values) for study in (*LADDERS, "norms", "scales")}
    for name in ("configuration", "cell", "seed", "d_model", "init_std"):
        fitted, held_out = (set(by_study[study][name].values.tolist()) for study in LADDERS)
        assert fitted.isdisjoint(held_out), name
    assert set(by_study["norms"]["seed"].values) == set(range(11, 21))


def test_it_is_consistent_with_itself(runs):
    has_diverged = runs["has_diverged"].values
    np.testing.assert_array_equal(runs["cause"].values != "", has_diverged)
    np.testing.assert_array_equal(np.isfinite(runs["divergence_step"].values), has_diverged)
    np.testing.assert_array_equal(np.isnan(runs["accuracy"].values), has_diverged)
    assert (runs["divergence_step"].fillna(0) < runs["n_steps"]).all()
    masses = sum(runs[f"{kind}_mass"] for kind in ("near_unit", "expansive", "contractive", "intermediate"))
    np.testing.assert_allclose(masses.values[np.isfinite(masses.values)], 1, atol=1e-5)
    n_layers = np.isfinite(runs["spectral_radius"].values).sum(1)
    np.testing.assert_array_equal(n_layers, runs["n_layers"].values)
    radius = np.abs(runs["eigenvalue"]).max("mode").values
    is_there = np.isfinite(radius)
    np.testing.assert_allclose(radius[is_there], runs["spectral_radius"].values[is_there], rtol=1e-3, atol=2e-4)
    assert runs["overshoot_rate"].notnull().all()
    assert runs["breaking_rate"].notnull().all()


def test_a_larger_rate_diverges_more_often_in_every_study(runs):
    for study in LADDERS:
        of_study = runs.isel(run=(runs["study"] == study).values)
        for cell in np.unique(of_study["cell"].values):
            one = of_study.isel(run=(of_study["cell"] == cell).values)
            diverged = one["has_diverged"].values
            if diverged.all() or not diverged.any():
                continue
            rates = np.log(one["learning_rate"].values)
            assert rates[diverged].mean() > rates[~diverged].mean(), cell


@pytest.mark.slow
@pytest.mark.parametrize("which", ["converges", "diverges"])
def test_a_re_run_ends_as_recorded(runs, which):
    has_outcome = runs["has_diverged"].values if which == "diverges" else ~runs["has_diverged"].values
    chosen = (
        (runs["study"] == "held out").values
        & has_outcome
        & (runs["d_model"] == 32).values
        & (runs["family"] == "transformer").values
    )
    index = int(np.flatnonzero(chosen)[5])
    recorded = runs.isel(run=index)
    row = wb.sweeps.make_run(json.loads(recorded["settings"].item()))
    assert row["has_diverged"] == recorded["has_diverged"].item()
    assert row["cause"] == recorded["cause"].item()
    for name in ("near_unit_mass", "spectral_radius", "nonlinearity_ratio"):
        expected = recorded[name].values
        np.testing.assert_allclose(row[name], expected[np.isfinite(expected)], rtol=0.02, atol=0.02)
    for name in ("initial_loss", "logit_std", "initial_grad_norm", "breaking_rate", "stream_rms_last"):
        assert row[name] == pytest.approx(recorded[name].item(), rel=0.1), name
    if which == "diverges":
        assert row["divergence_step"] == pytest.approx(recorded["divergence_step"].item(), abs=5)


def test_studies_are_selected_by_name(runs):
    norms = wb.samples.open("divergence_sweep", "norms")
    assert set(norms["study"].values.tolist()) == {"norms"}
    with pytest.raises(wb.errors.StoreError, check=about("parts", "nothing")):
        wb.samples.open("divergence_sweep", "nothing")
