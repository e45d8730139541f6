"""The scripts that make the study of learning rates."""

import importlib
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.data_scripts import FOLDER

SCRIPTS = ("rate_designs", "make_sweep", "make_rates")


@pytest.fixture
def scripts(monkeypatch):
    """The designs and the script, as the command line would import them, also in other processes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    yield [importlib.import_module(name) for name in ("rate_designs", "make_rates")]
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def test_designs_are_different_and_families_are_in_one_set(scripts):
    module, _ = scripts
    runs = [design.run(0, 1) for design in module.designs()]
    assert len({run.cell for run in runs}) == len(runs) == 72
    assert len({architecture.name for architecture in module.ARCHITECTURES}) == 36
    families = [family for members in module.FAMILIES.values() for family in members]
    assert len(set(families)) == len(families) == 27
    assert {architecture.family for architecture in module.ARCHITECTURES} == set(families)
    assert {design.optimizer for design in module.designs()} == set(module.OPTIMIZERS)


@pytest.mark.medium
def test_designs_of_the_study_alone_build_and_train(scripts):
    module, _ = scripts
    trained = [one for one in module.designs() if "make" in one.architecture.options]
    assert {design.architecture.name for design in trained} == {"DyT", "nGPT"}
    train(trained)


@pytest.mark.slow
def test_every_design_builds_and_trains(scripts):
    module, _ = scripts
    train(module.designs())


def train(designs):
    for design in designs:
        run = design.run(0, 1, n_steps=2, n_snapshots=0, n_evaluations=1)
        row = wb.sweeps.make_run(run.as_dict())
        assert np.isfinite(row["held_out_loss"]).all(), design


@pytest.mark.slow
def test_the_script_makes_all_stages_of_small_designs(scripts, monkeypatch, tmp_path, capsys):
    module, script = scripts
    chosen = [one for one in module.designs() if one.architecture.name == "Pre-LN" or one.set != "fit"]
    small = [
        replace(one, training={**one.training, "n_steps": 10, "warmup": 2, "schedule": "cosine"})
        for one in chosen
        if one.architecture.name in ("Pre-LN", "SubLN", "DyT")
    ][::2]
    monkeypatch.setattr(script, "designs", lambda: small)
    for name, value in {"LONG_STEPS": 20, "N_EVALUATIONS": 5, "N_SNAPSHOTS": 64, "REACH": 1, "N_WIDER": 1}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(
        wb.sweeps, "run", lambda runs, path, n_workers: _recorded(wb.sweeps.SweepStore(path, runs), runs)
    )
    monkeypatch.setattr(sys, "argv", ["make_rates.py", "--folder", str(tmp_path), "--out", str(tmp_path / "rates.nc")])
    script.main()
    with xr.open_dataset(tmp_path / "rates.nc") as found:
        assert set(found["stage"].values.tolist()) >= {"coarse", "fine", "shorter", "long", "measures"}
        assert set(found["study"].values.tolist()) == {"fit", "choose", "locked"}
        assert {"call", "seeds", "families", "versions", "core_minutes"} <= set(found.attrs)
        coarse = found.isel(run=(found["stage"] == "coarse").values)
        assert np.isfinite(coarse["held_out_loss"].values[:, -1]).any()
        assert wb.rates.rate_outcomes(coarse).sizes["cell"] == 3
    script.main()  # nothing is missing: the stores are read
    capsys.readouterr()


def _recorded(store, runs):
    for index in store.missing():
        store.write(index, wb.sweeps.make_run(runs[index].as_dict()))
    return wb.open_sweep(store.path)
