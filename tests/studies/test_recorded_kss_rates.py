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


def test_the_readme_has_the_recorded_figures(script, runs):
    outcomes = wb.rates.rate_outcomes(runs).set_index(cell=("architecture", "study")).unstack("cell")
    lines = (FOLDER.parent / "README.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| | useful edge, best loss without control"))
    controls = ["clipped at 1", "KSS, published", "KSS, recommended"]
    for name, line in zip(script.ARCHITECTURES, lines[first + 2 :], strict=False):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == name
        numbers = [[float(number) for number in cell.split(",")] for cell in cells[1:]]
        of = outcomes.sel(architecture=name)
        none = of.sel(study="none")
        assert numbers[0] == pytest.approx([none["useful_edge"].item(), none["best_loss"].item()], rel=0.03, abs=0.005)
        for found, control in zip(numbers[1:], controls, strict=True):
            ratio = (of.sel(study=control)["useful_edge"] / none["useful_edge"]).item()
            gained = (of.sel(study=control)["best_loss"] - none["best_loss"]).item()
            assert found[0] == pytest.approx(ratio, abs=0.006)
            assert found[1] == pytest.approx(gained, abs=6e-4)
    moved = outcomes["useful_edge"].sel(study=controls) / outcomes["useful_edge"].sel(study="none")
    medians = dict(zip(controls, moved.median("architecture").values, strict=True))
    assert medians["KSS, recommended"] == pytest.approx(1.04, abs=0.006)
    assert medians["clipped at 1"] == pytest.approx(1.14, abs=0.006)
    explosion = outcomes["explosion_edge"].sel(architecture="No norm")
    assert [explosion.sel(study=name).item() for name in ("KSS, recommended", "none")] == pytest.approx(
        [0.058, 0.011], rel=0.04
    )


def test_best_losses_differ_between_seeds_as_published_and_clipping_lowers_five_in_both(script, runs):
    last = runs["held_out_loss"].isel(evaluation=-1).to_series()
    keys = [runs[name].values for name in ("architecture", "study", "seed")]
    best = last.groupby(keys).min().unstack()
    assert 0.08 < (best[1] - best[2]).abs().max() < 0.11
    none, clipped = best.xs("none", level=1), best.xs("clipped at 1", level=1)
    is_lower = (clipped < none).all(axis=1)
    assert is_lower.drop("ViT").sum() == 5
    assert not is_lower["ViT"]


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
