"""The recorded study of injected faults is consistent with itself, and with the names that the library uses."""

import json

import numpy as np
import pytest

import workbench as wb
from workbench.callbacks.alarms import WATCHED, Attributor, Calibration

pytestmark = pytest.mark.recorded

#: Causes of the attribution that no fault of the catalog makes.
DAMAGED = {"damaged_weights", "damaged_optimizer_state", "repeated_data"}


@pytest.fixture(scope="module")
def runs():
    return wb.samples.early_warning()


def test_it_holds_enough_runs_and_no_tuning_seed(runs):
    assert set(runs["seed"].values.tolist()).isdisjoint(json.loads(runs.attrs["tuning_seeds"]))
    is_healthy = runs["fault"].values == ""
    assert is_healthy.sum() >= 30
    assert (~is_healthy).sum() >= 60
    kinds = {kind for fault in runs["fault"].values.tolist() for kind in fault.split(" + ") if kind}
    assert kinds == set(wb.faults.catalog())


def test_it_does_not_contradict_itself(runs):
    has_diverged = runs["has_diverged"].values
    np.testing.assert_array_equal(np.isnan(runs["accuracy"].values), has_diverged)
    assert (runs["step"].values[~has_diverged] == runs.attrs["n_steps"] - 1).all()
    start = runs["start"].fillna(0)
    for name in ("mechanism_step", "loss_step", "grad_norm_step", "spike_score_step"):
        step = runs[name]
        assert ((step >= start) & (step <= runs["step"]) | step.isnull()).all()
    alarmed = np.any([runs[f"{name}_step"].notnull() for name in ("mechanism", "loss", "grad_norm", "spike_score")], 0)
    np.testing.assert_array_equal(runs["cause_later"].values != "", alarmed)
    assert not has_diverged[runs["fault"].values == ""].any()


def test_what_ships_was_fitted_to_many_healthy_steps():
    calibration = Calibration.shipped()
    assert calibration.n_steps >= 100_000
    assert set(calibration.tails) <= {watched.name for watched in WATCHED}
    assert {watched.name for watched in WATCHED if watched.part != "router"} <= set(calibration.tails)
    assert set(Attributor.shipped().causes) <= set(wb.faults.catalog()) | DAMAGED
