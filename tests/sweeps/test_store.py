import errno
import json
import math
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

import workbench as wb
from tests.about import about, says
from tests.data_scripts import load_script
from tests.sweeps.small_sweeps import SIZE, TASK, run_sequentially, small_grid
from workbench.errors import StoreError
from workbench.schema.sweeps import CURVES, MEASURES, OUTCOMES, SETTINGS
from workbench.sweeps.execution import count_spikes, outcome

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def runs():
    return small_grid(seed=[0])


@pytest.fixture(scope="module")
def rows(runs):
    return [wb.sweeps.make_run(run.as_dict()) for run in runs]


def test_rows_are_read_unchanged(runs, rows, tmp_path):
    store = wb.sweeps.SweepStore(tmp_path / "a.zarr", runs)
    for index in (2, 0, 3, 1):  # in any order
        store.write(index, rows[index])
    sweep = wb.open_sweep(tmp_path / "a.zarr")
    assert set(sweep.coords) == set(SETTINGS)
    assert set(sweep.data_vars) == {*MEASURES, *OUTCOMES, *CURVES}
    assert sweep.attrs["n_missing"] == 0
    for index, row in enumerate(rows):
        for name, value in row.items():
            stored = sweep[name].isel(run=index)
            expected = np.asarray(value)
            if expected.dtype.kind in "US":
                assert stored.item() == value, name
            else:
                np.testing.assert_allclose(
                    stored.values[tuple(slice(n) for n in expected.shape)], expected, rtol=1e-6, err_msg=name
                )


def test_only_finished_rows_are_read(runs, rows, tmp_path):
    store = wb.sweeps.SweepStore(tmp_path / "a.zarr", runs)
    assert wb.open_sweep(tmp_path / "a.zarr").sizes["run"] == 0
    store.write(3, rows[3])
    store.write(1, rows[1])
    sweep = wb.open_sweep(tmp_path / "a.zarr")
    assert sweep["settings"].values.tolist() == [rows[1]["settings"], rows[3]["settings"]]
    assert sweep.attrs["n_missing"] == 2
    assert wb.sweeps.SweepStore(tmp_path / "a.zarr", runs).missing() == [0, 2]


@pytest.mark.slow
def test_joined_sweeps_keep_every_row(tmp_path):
    small = run_sequentially(small_grid(seed=[0])[:1], tmp_path / "a.zarr")
    deep = run_sequentially(small_grid(seed=[0], n_layers=3, d_model=8)[:2], tmp_path / "b.zarr")
    joined = load_script("make_sweep").join([small, deep])
    assert joined["settings"].values.tolist() == [*small["settings"].values, *deep["settings"].values]
    assert (joined.sizes["layer"], joined.sizes["mode"]) == (3, 16)
    np.testing.assert_array_equal(joined["eigenvalue"].values[1:, :, :8], deep["eigenvalue"].values)
    assert np.isnan(joined["eigenvalue"].values[1:, :, 8:]).all()
    assert np.isnan(joined["spectral_radius"].values[0, 2])
    assert set(joined.coords) == set(SETTINGS)


def test_a_partly_written_row_does_not_count(runs, rows, tmp_path, monkeypatch):
    store = wb.sweeps.SweepStore(tmp_path / "a.zarr", runs)
    original = zarr.Array.__setitem__
    names = []

    def full(array, selection, value):
        names.append(array.basename)
        if len(names) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(array, selection, value)

    monkeypatch.setattr(zarr.Array, "__setitem__", full)
    with pytest.raises(StoreError, check=says("cannot be written (No space left on device); its finished")):
        store.write(0, rows[0])
    monkeypatch.undo()
    assert wb.sweeps.SweepStore(tmp_path / "a.zarr", runs).missing() == [0, 1, 2, 3]


def test_a_store_of_other_runs_is_rejected_and_not_changed(runs, tmp_path):
    path = tmp_path / "a.zarr"
    wb.sweeps.SweepStore(path, runs)
    with pytest.raises(StoreError, check=says("pass the same runs, choose another path, or pass")):
        wb.sweeps.SweepStore(path, small_grid())
    with pytest.raises(StoreError, check=says("pass the same runs, choose another path, or pass")):
        wb.sweeps.SweepStore(path, small_grid(seed=[0], n_steps=6))
    assert wb.sweeps.SweepStore(path, runs).missing() == [0, 1, 2, 3]
    assert wb.sweeps.SweepStore(path, small_grid(), overwrite=True).missing() == list(range(8))


def test_other_stores_are_rejected(runs, tmp_path):
    xr.Dataset({"a": ("x", [1.0])}).to_zarr(tmp_path / "a.zarr", zarr_format=3, consolidated=False)
    for use in (wb.open_sweep, lambda path: wb.sweeps.SweepStore(path, runs)):
        with pytest.raises(StoreError, check=about("path", tmp_path / "a.zarr", "an undamaged sweep")):
            use(tmp_path / "a.zarr")
    with pytest.raises(StoreError, check=about("path", tmp_path / "b.zarr" / "zarr.json", "an undamaged sweep")):
        wb.open_sweep(tmp_path / "b.zarr")
    (tmp_path / "c.zarr").write_text("text")
    with pytest.raises(StoreError, check=about("path", tmp_path / "c.zarr" / "zarr.json")):
        wb.open_sweep(tmp_path / "c.zarr")


def test_a_sweep_of_a_newer_version_is_rejected(runs, tmp_path):
    wb.sweeps.SweepStore(tmp_path / "a.zarr", runs)
    zarr.open_group(tmp_path / "a.zarr").attrs["sweep_version"] = 99
    with pytest.raises(StoreError, check=says("but this workbench reads versions up to")):
        wb.open_sweep(tmp_path / "a.zarr")


def test_an_older_store_without_losses_can_be_continued(tmp_path):
    runs = small_grid(n_snapshots=0, n_steps=2, seed=[0])
    wb.sweeps.SweepStore(tmp_path / "sweep.zarr", runs)
    for name in CURVES:
        shutil.rmtree(tmp_path / "sweep.zarr" / name)
    sweep = run_sequentially(runs, tmp_path / "sweep.zarr")
    assert sweep.attrs["n_missing"] == 0
    assert "held_out_loss" not in sweep


def test_a_divergence_is_recorded(rows):
    diverged = rows[1]
    assert diverged["has_diverged"]
    assert diverged["cause"] in ("loss", "grad_norm", "non-finite")
    assert diverged["divergence_step"] < 5
    assert math.isnan(diverged["accuracy"])


def test_kss_acts_during_training():
    without, shaped = (small_grid(seed=[0], n_steps=12, kss=kss)[1] for kss in ("", "recommended"))
    ends = [wb.sweeps.make_run(run.as_dict()) for run in (without, shaped)]
    assert ends[0]["initial_loss"] == ends[1]["initial_loss"]
    assert ends[0]["final_loss"] != ends[1]["final_loss"]


def test_the_same_settings_yield_the_same_row(rows):
    run = small_grid(seed=[0])[2]
    n_threads = torch.get_num_threads()
    again = wb.sweeps.make_run(json.loads(json.dumps(run.as_dict())))
    assert torch.get_num_threads() == n_threads
    for name, value in rows[2].items():
        if name != "seconds":
            np.testing.assert_array_equal(value, again[name], err_msg=name)


@dataclass
class Record:
    step: int
    loss: float
    grad_norm: float
    accuracy: float = 0.5
    cause: str = ""

    @property
    def diverged(self):
        return bool(self.cause)


def test_predictors_of_table_2_against_their_definition():
    rng = np.random.default_rng(0)
    norms = rng.uniform(1, 2, 130)
    found = outcome([Record(i, 1.0, norm, accuracy=float(i >= 120)) for i, norm in enumerate(norms)])
    assert found["grad_norm_step_100"] == norms[100]
    assert found["grad_norm_variance"] == pytest.approx(np.var(norms[1:101]))
    assert found["n_loss_spikes"] == 0
    assert found["accuracy"] == pytest.approx(10 / 16)  # the last eighth are 16 of 130 steps


def test_the_predictors_of_a_run_that_ends_in_nan_are_infinite():
    found = outcome([Record(0, 1.0, 1.0), Record(1, math.nan, math.nan, math.nan, "non-finite")])
    assert found["grad_norm_step_100"] == math.inf
    assert found["grad_norm_variance"] == math.inf
    assert found["n_loss_spikes"] == 1
    assert found["divergence_step"] == 1
    assert math.isnan(found["final_loss"])


def test_injected_spikes_are_counted():
    rng = np.random.default_rng(1)
    loss = 3 + 0.01 * rng.uniform(-1, 1, 300)  # no value deviates by more than three standard deviations
    assert count_spikes(loss) == 0
    for place in (50, 120, 250):
        loss[place] += 1
    assert count_spikes(loss) == 3
    loss[280] = np.inf
    assert count_spikes(loss) == 4


def test_losses_along_the_run_are_those_of_training():
    runs = small_grid(n_steps=25, n_evaluations=5, n_snapshots=0, learning_rate=[1e-2], seed=[0])
    row = wb.sweeps.make_run(runs[0].as_dict())
    task = runs[0].make_task()
    model = runs[0].make_model()
    losses, held_out = [], []
    for record in wb.train(model, task, n_steps=25, learning_rate=1e-2):
        losses.append(record.loss)
        if record.step % 5 == 4:
            inputs, targets = task.held_out(4096)
            with torch.no_grad():
                logits = model.eval()(inputs)
            held_out.append(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())))
    np.testing.assert_allclose(row["held_out_loss"], held_out, rtol=1e-5)
    assert row["evaluation_step"].tolist() == [5, 10, 15, 20, 25]
    windows = [np.mean(losses[:10]), np.mean(losses[10:20]), np.mean(losses[20:])]
    np.testing.assert_allclose(row["training_loss"], windows, rtol=1e-5)


def test_without_snapshots_only_the_settings_are_recorded():
    row = wb.sweeps.make_run(small_grid(n_snapshots=0)[0].as_dict())
    assert np.isnan(row["eigenvalue"]).all()
    assert np.isnan(row["near_unit_mass"]).all()
    assert np.isnan(row["rehearsed_rate"])
    assert row["n_layers"] == 2
    assert np.isnan(row["held_out_loss"]).all()


def test_a_run_that_continues_after_a_divergence_counts_as_diverged():
    training = {"n_steps": 6, "learning_rate": 1e-3, "loss_limit": 1e-3, "stops_at_divergence": False}
    run = wb.sweeps.RunSettings(architecture="a", model=SIZE, task=TASK, training=training, n_snapshots=0)
    row = wb.sweeps.make_run(run.as_dict())
    assert row["has_diverged"]
    assert row["divergence_step"] == 0
    assert row["cause"] == "loss"
    assert np.isfinite(row["final_loss"])
