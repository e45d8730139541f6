"""The recorded designs: what is claimed of the verdicts, and one trial made anew."""

import json

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import load_script
from workbench.assessment.dress_rehearsal import N_TRIALS, N_UPDATES
from workbench.assessment.failure_modes import CRITERIA, healthy_bands


@pytest.fixture(scope="module")
def designs():
    return wb.samples.assessed_designs()


@pytest.fixture(scope="module")
def script():
    return load_script("make_assessed_designs")


def test_designs_that_diverge_are_flagged_and_healthy_ones_seldom(designs):
    held_out = designs.isel(design=designs["study"].values == "held out")
    share, is_flagged = held_out["share_diverged"].values, held_out["verdict"].values != "proceed"
    assert (share == 1).sum() >= 50
    assert (share == 0).sum() >= 80
    assert is_flagged[share == 1].mean() >= 0.95
    assert is_flagged[share == 0].mean() <= 0.05


def test_the_designs_are_those_that_the_script_chooses(designs, script):
    rows = script.designs()
    chosen = sorted(script.to_try(rows))
    assert designs["settings"].values.tolist() == rows["settings"].values[chosen].tolist()
    assert designs["share_diverged"].values.tolist() == rows["share_diverged"].values[chosen].tolist()
    assert (designs.attrs["n_updates"], designs.attrs["n_trials"]) == (N_UPDATES, N_TRIALS)


def test_a_verdict_follows_from_the_recorded_numbers(designs, script):
    """The risk after the trials, from what was recorded of them."""
    from workbench.assessment.plan_risk import after_trial

    for i in np.random.default_rng(0).choice(designs.sizes["design"], 20, replace=False):
        row = designs.isel(design=i)
        found = after_trial(row["probability"].values, float(row["share_broken"]))
        assert float(found) == pytest.approx(float(row["tried_probability"]), rel=1e-4)


def test_one_trial_made_anew_is_as_recorded(designs, script):
    narrow = [
        i
        for i, text in enumerate(designs["settings"].values)
        if json.loads(text)["model"].get("d_model") == 24 and json.loads(text)["model"].get("family") is None
    ]
    i = narrow[0]
    found = script.tried(str(designs["settings"].values[i]))
    for name, value in found.items():
        assert value == pytest.approx(float(designs[name].values[i]), rel=1e-3, nan_ok=True)


def test_every_criterion_that_needs_one_has_a_healthy_band():
    bands = healthy_bands()
    missing = {criterion.name for criterion in CRITERIA if criterion.band is None} - set(bands)
    assert not missing
    assert min(band.n_reference for band in bands.values()) >= 5
