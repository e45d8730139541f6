"""The scripts of the study of learning rates."""

import importlib
import itertools
import json
import os
import shutil
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import workbench as wb
from tests.about import about
from tests.data_scripts import FOLDER, load_script


@pytest.fixture
def scripts(monkeypatch):
    """The designs and the script, imported as by the command line, also in other processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    return [load_script(name) for name in ("rate_designs", "make_rates")]


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
def test_designs_that_only_the_study_has_build_and_train(scripts):
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
def test_the_script_records_all_stages_of_small_designs(scripts, monkeypatch, tmp_path, capsys):
    module, script = scripts
    chosen = [one for one in module.designs() if one.architecture.name == "Pre-LN" or one.set != "fit"]
    small = [
        replace(one, training={**one.training, "n_steps": 10, "warmup": 2, "schedule": schedule})
        for one, schedule in zip(chosen, itertools.cycle(["cosine", "cosine", "constant", "constant"]))
        if one.architecture.name in ("Pre-LN", "SubLN", "DyT")
    ][::2]
    monkeypatch.setattr(script, "designs", lambda: small)
    for name, value in {"LONG_STEPS": 20, "N_EVALUATIONS": 5, "N_SNAPSHOTS": 64, "REACH": 1, "N_WIDER": 1}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setitem(script.EVALUATED, "n_evaluations", 5)
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
    for store in tmp_path.glob("*.zarr"):
        shutil.rmtree(store)
    before = (tmp_path / "rates.nc").read_bytes()
    script.main()  # nothing is missing
    assert (tmp_path / "rates.nc").read_bytes() == before
    monkeypatch.setattr(script, "designs", lambda: small[1:])
    with pytest.raises(wb.errors.SweepError, check=about("stage")):
        script.main()
    capsys.readouterr()


def _recorded(store, runs):
    for index in store.missing():
        store.write(index, wb.sweeps.make_run(runs[index].as_dict()))
    return wb.open_sweep(store.path)


@pytest.fixture
def fit_rates(scripts):
    return importlib.import_module("fit_rates")


def known_rows(n=60, seed=0):
    """Return rows of a table of pilots whose edges change by known amounts, with little noise."""
    random = np.random.default_rng(seed)
    rows = pd.DataFrame(
        {
            "set": np.where(np.arange(n) < n - 20, "fit", "choose"),
            "key": [f"design {i}" for i in range(n)],
            "family": [f"family {i // 4}" for i in range(n)],
            "optimizer": np.where(np.arange(n) % 3 == 0, "SGD", "AdamW"),
            "kind": "model",
            "budget": 1000,
            "round": np.where(np.arange(n) % 5 == 0, "coarse", "fine"),
            "updates": np.where(np.arange(n) % 5 == 0, 36.0, 200.0),
            "horizon": np.where(np.arange(n) % 2 == 0, 480, 240),
            "schedule": np.where(np.arange(n) % 4 == 0, "cosine", "constant"),
            "is_last": True,
        }
    )
    rows["best_rate_pilot"] = 10 ** random.uniform(-3.5, -1, n)
    rows["useful_edge_pilot"] = rows["best_rate_pilot"] * np.exp(random.uniform(0.2, 1.5, n))
    change = -0.2 * np.log(rows["horizon"] / rows["updates"]) + 0.5 * (rows["schedule"] == "cosine")
    rows["useful_edge"] = rows["useful_edge_pilot"] * np.exp(change + 0.01 * random.normal(size=n))
    rows["best_rate"] = rows["best_rate_pilot"] * np.exp(change)
    rows["slow_edge"] = rows["best_rate"] / 3
    return rows


@pytest.mark.slow
def test_known_changes_of_rates_are_found_and_evaluated(fit_rates):
    rows = known_rows()
    names = {"model": ("constant", "growth", "decays", "width")}
    drift = fit_rates.drift_of(rows[rows["set"] == "fit"], names)
    expected = {"constant": 0.0, "growth": -0.2, "decays": 0.5, "width": 0.0}
    assert drift["model"]["fine"]["useful_edge"]["weights"] == pytest.approx(expected, abs=0.03)
    assert drift["model"]["fine"]["slow_edge"]["weights"]["constant"] == pytest.approx(-np.log(3), abs=0.02)
    assert -0.05 < drift["model"]["fine"]["useful_edge"]["low"] < drift["model"]["fine"]["useful_edge"]["high"] < 0.05
    assert drift["model"]["fine"]["largest_growth"] == 2.4
    assert drift["model"]["coarse"]["largest_growth"] == 13.3
    assert drift["longest"] == 480
    found = fit_rates.accuracy(fit_rates.judged(rows, names), ["set"]).set_index("set")
    assert found.loc["choose", "designs"] == 20
    assert (found[["1.6", "2.5"]] == 1.0).all(axis=None)
    assert (found["one rate, 1.6"] < 0.5).all()


@pytest.mark.slow
def test_the_chosen_features_are_the_informative_ones(fit_rates):
    assert {"growth", "decays"} <= set(fit_rates.best_features(known_rows(), "model"))


def test_copies_of_one_seed_predict_their_edges_exactly(fit_rates):
    study = wb.samples.open("rate_study", "fit")
    of = study.isel(
        run=(study.cell == study.cell[0]).values & (study.seed == 1).values & (study.stage != "long").values
    )
    copies = [of.assign_coords(seed=("run", np.full(of.sizes["run"], seed))) for seed in (1, 2, 3)]
    found = fit_rates.by_one_seed(xr.concat(copies, "run"))
    found = found[found["n_steps"] == 480]  # for shorter runs the change would be fitted to other families
    assert len(found) == 3
    assert (found["error"] == 0).all()
    assert fit_rates.accuracy(found, ["set"]).iloc[0].to_dict() == {
        "set": "fit", "designs": 1, "no answer": 0.0, "1.6": 1.0, "2.5": 1.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_family_is_evaluated_by_a_fit_to_the_others(fit_rates):
    rows = known_rows()
    names = {"model": ("constant", "growth", "decays")}
    before = fit_rates.judged(rows, names)
    is_it = (rows["family"] == "family 0") & (rows["round"] == "fine")
    rows.loc[is_it, "useful_edge"] *= 3
    after = fit_rates.judged(rows, names)
    assert after["error"][is_it].to_numpy() == pytest.approx(before["error"][is_it] - np.log(3), abs=1e-6)
    assert not after["is_in_interval"][is_it].any()
    others = after["error"][~is_it] - before["error"][~is_it]
    assert others.abs().max() < 0.05


@pytest.mark.slow
def test_a_pilot_without_an_answer_counts_as_wrong_and_is_counted(fit_rates):
    rows = known_rows()
    chosen = rows[rows["set"] == "choose"].copy()
    silent = chosen.index[:5]
    chosen.loc[silent, "round"] = ""
    chosen.loc[silent, ["updates", "best_rate_pilot", "useful_edge_pilot"]] = np.nan
    all_rows = pd.concat([rows[rows["set"] == "fit"], chosen])
    judged = fit_rates.judged(all_rows, {"model": ("constant", "growth", "decays")})
    found = fit_rates.accuracy(judged, ["set"]).set_index("set").loc["choose"]
    assert found["no answer"] == 0.25
    assert found["1.6"] == 0.75


def recorded_pilot(design, kind, budget):
    rounds = [
        {"is_coarse": coarse, "n_updates": n, "rate": [1e-3, 4e-3], "loss": [[2.0], [3.0]], "best_rate": 1e-3,
         "useful_edge": edge}
        for coarse, n, edge in [(True, 36, 4e-3), (False, 200, 3e-3), (False, 200, 2e-3)]
    ]  # fmt: skip
    about = {"n_updates": budget - 3, "seconds": 1.0, "is_learned": True, "trivial_loss": 4.0, "curvature": 2.0}
    return {"cell": design.run(0, 1).cell, "kind": kind, "budget": budget, "rounds": rounds, **about}


def test_recorded_pilots_are_not_repeated_and_an_incomplete_line_is_dropped(scripts, tmp_path):
    make_pilots = importlib.import_module("make_pilots")
    designs = [one for one in scripts[0].designs() if one.set == "locked"]
    rows = [recorded_pilot(one, *kind) for one in designs for kind in make_pilots.KINDS]
    file = tmp_path / "pilots.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"call": ""}, *rows]) + '{"cell": "ab')
    assert make_pilots.make(file, ["locked"], n_workers=1) == rows
    about, *lines = file.read_text().splitlines()
    assert {"call", "seed", "versions"} <= set(json.loads(about))
    assert [json.loads(line) for line in lines] == rows


def test_a_pilot_answers_from_its_last_round_with_an_edge(fit_rates, monkeypatch):
    designs = fit_rates.designs()[:2]
    rows = [recorded_pilot(one, "model", 1000) for one in designs]
    rows[1]["rounds"] = rows[1]["rounds"][:1]
    rows[1]["is_learned"] = False
    keys = [wb.rates.outcomes.design_key(one.run(0, 1).as_dict()) for one in designs]
    monkeypatch.setattr(fit_rates, "truths", lambda rates: pd.DataFrame({"key": keys, "horizon": 480}))
    found = fit_rates.table(xr.Dataset(), rows)
    assert found["round"].tolist() == ["coarse", "fine", ""]
    assert found["useful_edge_pilot"].tolist()[:2] == [4e-3, 2e-3]
    assert found["is_last"].tolist() == [False, True, True]
