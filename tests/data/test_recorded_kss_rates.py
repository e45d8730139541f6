"""The recorded study of useful rates under KSS is consistent with its script and with a re-run."""

import json
from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import FOLDER, load_script

pytestmark = pytest.mark.recorded

CONTROLS = ["clipped at 1", "KSS, published", "KSS, recommended"]


@pytest.fixture(scope="module")
def script():
    return load_script("make_kss_rates")


@pytest.fixture(scope="module")
def runs():
    return wb.samples.open("kss_rates")


def test_its_runs_are_those_of_the_script(script, runs):
    assert {"call", "n_steps", "seeds", "versions", "core_minutes"} <= set(runs.attrs)
    assert runs["settings"].values.tolist() == [run.describe()["settings"] for run in script.runs()]
    assert (FOLDER / "kss_rates.nc").stat().st_size < 2e6


def test_every_architecture_learns_without_control_at_some_tried_rates(script, runs):
    outcomes = wb.rates.rate_outcomes(runs).set_index(cell=("architecture", "study")).unstack("cell")
    assert outcomes.sizes == {"architecture": len(script.ARCHITECTURES), "study": len(script.CONTROLS)}
    none = outcomes.sel(study="none")
    assert none["is_learned"].all()
    assert (none["best_rate"] > none["smallest_rate"]).all()
    assert (none["best_rate"] < none["largest_rate"]).all()


def compared(runs, seed=None):
    """Return outcomes by architecture and control, relative to training without control."""
    own = runs if seed is None else runs.isel(run=(runs["seed"] == seed).values)
    return wb.rates.rate_outcomes(own, against="none").set_index(cell=("architecture", "study")).unstack("cell")


def test_the_page_of_results_states_what_both_seeds_show(runs):
    edges = {seed: compared(runs, seed)["useful_edge"] for seed in (1, 2)}
    none = {seed: edge.sel(study="none") for seed, edge in edges.items()}
    assert np.median(np.exp(abs(np.log(none[1] / none[2])))) == pytest.approx(1.5, abs=0.05)
    raised = {
        control: {
            name
            for name in none[1]["architecture"].values.tolist()
            if all(
                edges[seed].sel(study=control, architecture=name) > none[seed].sel(architecture=name) for seed in edges
            )
        }
        for control in CONTROLS
    }
    five = {"Pre-LN", "RMSNorm", "MoE", "KAN", "Mamba"}
    assert raised == {"clipped at 1": five, "KSS, published": set(), "KSS, recommended": {"ViT"}}
    last = runs["held_out_loss"].isel(evaluation=-1).to_series()
    best = last.groupby([runs[name].values for name in ("architecture", "study", "seed")]).min().unstack()
    assert 0.08 < (best[1] - best[2]).abs().max() < 0.11
    lower = (best.xs("clipped at 1", level=1) < best.xs("none", level=1)).all(axis=1)
    assert set(lower[lower].index) == five
    same = (best.xs("KSS, recommended", level=1) == best.xs("none", level=1)).all(axis=1)
    assert set(same[same].index) == five
    assert (best.xs("KSS, published", level=1).mean(axis=1) > best.xs("none", level=1).mean(axis=1)).all()


@pytest.mark.parametrize("control", ["none", "KSS, recommended"])
def test_a_repeated_run_has_the_recorded_losses(script, runs, control):
    is_it = (runs["architecture"] == "Pre-LN").values & (runs["study"] == control).values
    i = int(np.flatnonzero(is_it)[4])
    run, row = script.runs()[i], runs.isel(run=i)
    assert run.as_dict() == json.loads(str(row["settings"].item()))
    n_steps = 3 * run.training["n_steps"] // run.n_evaluations  # at a constant rate the beginning is the same
    shorter = replace(run, training={**run.training, "n_steps": n_steps}, n_evaluations=3)
    found = wb.sweeps.make_run(shorter.as_dict())
    np.testing.assert_allclose(found["held_out_loss"], row["held_out_loss"].values[:3], rtol=0.02)
