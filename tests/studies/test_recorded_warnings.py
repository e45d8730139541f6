"""The recorded study of injected faults: consistent with the script that made it, and with a re-run of a part."""

import json
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import load_script
from workbench.callbacks.alarms import WATCHED, Attributor, Calibration

pytestmark = pytest.mark.recorded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return load_script("make_early_warning")


@pytest.fixture(scope="module")
def runs():
    return wb.samples.early_warning()


def test_it_holds_every_reported_run_and_no_tuning_seed(script, runs):
    names = ("setup", "rate", "dose", "seed")
    found = set(zip(*(runs[name].values.tolist() for name in names), strict=True))
    wanted = {(c.setup, c.rate, c.dose, c.seed) for c in script.cases() if c.split == "reported"}
    assert found == wanted
    assert set(runs["seed"].values.tolist()).isdisjoint(script.TUNING_SEEDS)
    is_healthy = runs["fault"].values == ""
    assert is_healthy.sum() >= 30
    assert (~is_healthy).sum() >= 60
    assert runs.attrs["n_steps"] == script.N_STEPS
    assert runs.attrs["budget"] == script.BUDGET
    assert json.loads(runs.attrs["tuning_seeds"]) == list(script.TUNING_SEEDS)
    kinds = {kind for fault in runs["fault"].values.tolist() for kind in fault.split(" + ") if kind}
    assert kinds == set(wb.faults.catalog())


def test_it_does_not_contradict_itself(script, runs):
    has_diverged = runs["has_diverged"].values
    np.testing.assert_array_equal(np.isnan(runs["accuracy"].values), has_diverged)
    assert (runs["step"].values[~has_diverged] == script.N_STEPS - 1).all()
    start = runs["start"].fillna(0)
    for name in ("mechanism_step", "loss_step", "grad_norm_step", "spike_score_step"):
        step = runs[name]
        assert ((step >= start) & (step <= runs["step"]) | step.isnull()).all()
    alarmed = np.any([runs[f"{name}_step"].notnull() for name in ("mechanism", "loss", "grad_norm", "spike_score")], 0)
    np.testing.assert_array_equal(runs["cause_later"].values != "", alarmed)
    mechanisms = {watched.name for watched in WATCHED if not watched.is_outcome}
    assert set(runs["mechanism_signal"].values.tolist()) - {""} <= mechanisms
    assert not has_diverged[runs["fault"].values == ""].any()


def test_what_ships_was_fitted_to_the_runs_with_tuning_seeds(script):
    for calibration in (Calibration.shipped(), Calibration.shipped(paired=True)):
        n_healthy = sum(case.split == "tuning" and not case.dose for case in script.cases())
        assert len(calibration.highest["mechanism"]) == len(calibration.highest["outcome"]) == n_healthy
        assert str(n_healthy) in calibration.about
        assert set(calibration.scale) <= {watched.name for watched in WATCHED}
    assert set(Attributor.shipped().causes) <= set(wb.faults.catalog())


@pytest.mark.slow
def test_a_re_run_warns_as_recorded(script, runs, tmp_path, one_thread):
    """The run that diverged soonest, again from its seed: two faults, a warning 31 steps ahead."""
    dose, seed = "attention, 8 bits + rate x 10", 2
    case = next(c for c in script.cases() if (c.split, c.setup, c.dose, c.seed) == ("reported", "pre_ln", dose, seed))
    (tmp_path / "recorded").mkdir()
    script.record(case, tmp_path)
    again = script.judge(case, tmp_path)
    is_it = (runs["setup"] == case.setup) & (runs["dose"] == case.dose) & (runs["seed"] == case.seed)
    kept = runs.isel(run=np.flatnonzero(is_it)[0])
    assert again["has_diverged"] == bool(kept["has_diverged"])
    assert again["mechanism_step"] == pytest.approx(float(kept["mechanism_step"]), abs=10)
    assert again["mechanism_signal"] == str(kept["mechanism_signal"].item())
    assert again["accuracy"] == pytest.approx(float(kept["accuracy"]), abs=0.1, nan_ok=True)
    assert again["cause_later"] == str(kept["cause_later"].item())
