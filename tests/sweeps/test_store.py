import errno
import shutil

import numpy as np
import pytest
import xarray as xr
import zarr

import workbench as wb
from tests.about import about, says
from tests.data_scripts import load_script
from tests.sweeps.small_sweeps import run_sequentially, small_grid
from workbench.errors import StoreError
from workbench.schema.sweeps import CURVES, MEASURES, OUTCOMES, SETTINGS

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
