"""The recorded designs: what is claimed of the verdicts, and one trial made anew."""

import json
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import load_script
from workbench.assessment.failure_modes import CRITERIA, healthy_bands
from workbench.assessment.pilot_run import N_TRIALS, N_UPDATES
from workbench.assessment.plan_risk import plan_risk
from workbench.schema.statuses import Verdict

pytestmark = pytest.mark.recorded

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def designs():
    return wb.samples.assessed_designs()


@pytest.fixture(scope="module")
def script():
    return load_script("make_assessed_designs")


def counts(verdicts):
    return {verdict: int((verdicts == verdict).sum()) for verdict in Verdict}


def test_the_published_counts_are_those_of_the_recorded_designs(designs):
    """Beside the dumbest rule there is: a design is bad if a trial of it broke."""
    held_out = designs.isel(design=designs["study"].values == "held out")
    share, verdicts = held_out["share_diverged"].values, held_out["verdict"].values
    a_trial_broke = held_out["share_broken"].values > 0
    assert counts(verdicts[share == 1]) == {"proceed": 0, "cannot say": 0, "at risk": 0, "refuse": 60}
    assert counts(verdicts[share == 0]) == {"proceed": 0, "cannot say": 64, "at risk": 7, "refuse": 28}
    assert (a_trial_broke[share == 1].sum(), a_trial_broke[share == 0].sum()) == (60, 3)
    text = " ".join((ROOT / "README.md").read_text().split())
    for words in (
        "all 60 whose every run diverged are refused",
        "35 of the 99 of which none did are flagged",
        '64 of the 99 end with "cannot say"',
        "60 of 60 and 3 of 99",
    ):
        assert words in text, words


def test_a_design_whose_risk_is_not_known_never_proceeds(designs):
    is_unknown = np.isnan(designs["failure"].values)
    np.testing.assert_array_equal(is_unknown, np.isnan(designs["explosion"].values))
    assert "proceed" not in designs["verdict"].values[is_unknown]
    has_broken = designs["share_broken"].values > 0
    assert set(designs["verdict"].values[has_broken]) == {"at risk", "refuse"}


def test_each_design_has_the_outcome_of_its_recorded_runs(designs, script):
    rows = script.designs()
    chosen = script.to_try(rows)
    assert designs["settings"].values.tolist() == rows["settings"].values[chosen].tolist()
    assert designs["share_diverged"].values.tolist() == rows["share_diverged"].values[chosen].tolist()
    assert (designs.attrs["n_updates"], designs.attrs["n_trials"]) == (N_UPDATES, N_TRIALS)


def test_the_risk_is_that_of_the_recorded_case(designs, script):
    rows = script.designs()
    place = {settings: i for i, settings in enumerate(rows["settings"].values.tolist())}
    for i in np.random.default_rng(0).choice(designs.sizes["design"], 5, replace=False):
        row = rows.isel(design=[place[str(designs["settings"].values[i])]]).rename(design="run")
        risk = plan_risk(row)
        for name in ("failure", "explosion"):
            assert float(risk[name][0]) == pytest.approx(float(designs[name].values[i]), rel=1e-4, nan_ok=True)


@pytest.mark.slow
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
