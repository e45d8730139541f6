"""The recorded study of useful rates under KSS: consistent with the script that made it, and with a re-run."""

import importlib
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import FOLDER

pytestmark = pytest.mark.recorded


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("make_kss_rates")
    for name in ("rate_designs", "make_sweep", "make_kss_rates"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def runs():
    return wb.samples.kss_rates()


def test_its_runs_are_those_of_the_script(script, runs):
    assert {"call", "n_steps", "seeds", "versions", "core_minutes"} <= set(runs.attrs)
    assert runs["settings"].values.tolist() == [run.describe()["settings"] for run in script.runs()]
    assert (FOLDER / "kss_rates.nc").stat().st_size < 2e6


def test_every_architecture_learns_without_control_within_the_rates_tried(script, runs):
    outcomes = wb.rates.rate_outcomes(runs).set_index(cell=("architecture", "study")).unstack("cell")
    assert outcomes.sizes == {"architecture": len(script.ARCHITECTURES), "study": len(script.CONTROLS)}
    none = outcomes.sel(study="none")
    assert none["is_learned"].all()
    assert (none["best_rate"] > none["smallest_rate"]).all()
    assert (none["best_rate"] < none["largest_rate"]).all()


@pytest.mark.parametrize("control", ["none", "KSS, recommended"])
def test_a_run_done_again_gives_the_recorded_losses(script, runs, control):
    is_it = (runs["architecture"] == "Pre-LN").values & (runs["study"] == control).values
    i = int(np.flatnonzero(is_it)[4])
    run, row = script.runs()[i], runs.isel(run=i)
    assert run.as_dict() == json.loads(str(row["settings"].item()))
    n_steps = 3 * run.training["n_steps"] // run.n_evaluations  # at a constant rate the beginning is the same
    shorter = replace(run, training={**run.training, "n_steps": n_steps}, n_evaluations=3)
    found = wb.sweeps.make_run(shorter.as_dict())
    np.testing.assert_allclose(found["held_out_loss"], row["held_out_loss"].values[:3], rtol=0.02)
