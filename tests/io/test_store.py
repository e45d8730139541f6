import errno
import os
import threading
import time

import numpy as np
import pytest
import xarray as xr
import zarr.storage

import workbench as wb
from tests.about import about, says
from tests.koopman.snapshots import snapshots
from workbench.errors import OptionError, SchemaError, StoreError
from workbench.io.atomic import replacing
from workbench.schema.runs import SCHEMA_VERSION


@pytest.fixture
def spectra():
    return wb.koopman.whitened_dmd(*snapshots(6, 80))


@pytest.fixture
def run(spectra):
    monitors = xr.Dataset({"loss": ("step", [2.0, 1.0])}, {"step": [0, 10]}, {"unit": "nat"})
    tree = xr.DataTree.from_dict({"/spectra": spectra, "/monitors": monitors})
    tree.attrs.update(config='{"norm": "none"}', seed=3)
    return tree


@pytest.mark.parametrize(("write", "suffix"), [(wb.save, "zarr"), (wb.export_netcdf, "nc")])
def test_a_run_that_is_read_back_is_equal(tmp_path, run, spectra, write, suffix):
    path = write(run, tmp_path / f"a.{suffix}")
    found = wb.open_run(path).load()
    assert found["spectra"].to_dataset().identical(spectra)
    assert found["monitors"].to_dataset().identical(run["monitors"].to_dataset())
    assert found["spectra"].eigenvalue.dtype == np.complex128
    assert found["spectra"].is_reliable.dtype == bool
    assert found.attrs["config"] == '{"norm": "none"}'
    assert found.attrs["schema_version"] == SCHEMA_VERSION
    assert wb.schema.runs.validate_spectra(found["spectra"].to_dataset())
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_missing_modes_are_read_back_as_nan(tmp_path):
    with pytest.warns(wb.koopman.RankWarning):
        parts = [wb.koopman.whitened_dmd(*snapshots(6, n)) for n in (80, 4)]
    both = xr.concat(parts, "layer", join="outer", fill_value={"is_reliable": False}, combine_attrs="override")
    for write, name in ((wb.save, "a.zarr"), (wb.export_netcdf, "a.nc")):
        found = wb.open_run(write(both, tmp_path / name))["spectra"].to_dataset()
        assert np.isnan(found.eigenvalue.values[1, 3:]).all()
        assert found.equals(both)


@pytest.mark.medium
def test_store_to_netcdf_and_back_again(tmp_path, run):
    opened = wb.open_run(wb.save(run, tmp_path / "a.zarr"))
    there = wb.open_run(wb.export_netcdf(opened, tmp_path / "a.nc"))
    assert wb.open_run(wb.save(there, tmp_path / "b.zarr")).identical(opened)


@pytest.mark.parametrize(("write", "suffix"), [(wb.save, "zarr"), (wb.export_netcdf, "nc")])
def test_files_are_overwritten_only_on_request(tmp_path, run, spectra, write, suffix):
    path = write(spectra, tmp_path / f"a.{suffix}")
    with pytest.raises(StoreError, check=about("path", path)):
        write(run, path)
    assert "monitors" not in wb.open_run(path).children
    write(run, path, overwrite=True)
    assert "monitors" in wb.open_run(path).children
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_files_that_threads_write_after_an_error_are_removed_too(tmp_path):
    def write_late(path):
        time.sleep(0.02)
        path.mkdir(parents=True)
        (path / "late").write_text("")

    def fail(path):
        with replacing(path) as partial:
            threading.Thread(target=write_late, args=(partial,)).start()
            raise OSError

    with pytest.raises(StoreError, check=says("cannot be written (); check its folder.")):
        fail(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_store_and_no_other_files(tmp_path, run, spectra, monkeypatch):
    path = wb.save(spectra, tmp_path / "a.zarr")
    write = zarr.storage.LocalStore.set
    n_written = 0

    async def set_until_full(self, key, value):
        nonlocal n_written
        n_written += 1
        if n_written > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await write(self, key, value)

    monkeypatch.setattr(zarr.storage.LocalStore, "set", set_until_full)
    for target, overwrite in ((path, True), (tmp_path / "b.zarr", False)):
        n_written = 0
        with pytest.raises(StoreError, check=about("path", target, "on a disk with enough space")):
            wb.save(run, target, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]
    assert wb.open_run(path)["spectra"].to_dataset().identical(spectra)


def test_data_of_a_newer_schema_are_rejected_before_anything_is_written(tmp_path, spectra):
    spectra.attrs["schema_version"] = SCHEMA_VERSION + 1
    with pytest.raises(SchemaError, check=says("this workbench")):
        wb.save(spectra, tmp_path / "a.zarr")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["/", "/spectra"])
def test_a_store_of_a_newer_schema_is_rejected(tmp_path, run, where):
    path = wb.save(run, tmp_path / "a.zarr")
    zarr.open_group(path)[where].attrs["schema_version"] = SCHEMA_VERSION + 1
    with pytest.raises(SchemaError, check=says("this workbench")):
        wb.open_run(path)


def test_paths_without_a_run_are_rejected(tmp_path, run):
    (tmp_path / "a.nc").write_bytes(b"\x89HDF\r\n\x1a\n broken")
    (tmp_path / "empty").mkdir()
    xr.Dataset({"a": 1}).to_zarr(tmp_path / "other.zarr", consolidated=False)
    for name, expected in (
        ("none.zarr", "an undamaged run"),
        ("a.nc", "an undamaged run"),
        ("other.zarr", "an undamaged run"),
    ):
        with pytest.raises(StoreError, check=about("path", tmp_path / name, expected)):
            wb.open_run(tmp_path / name)


def test_attributes_that_cannot_be_stored_are_rejected(tmp_path, spectra):
    spectra.attrs["config"] = {"nested": 1}
    with pytest.raises(SchemaError, check=says("which netCDF cannot store; use numbers, text or JSON")):
        wb.save(spectra, tmp_path / "a.zarr")
    with pytest.raises(OptionError, check=about("run", (1, 2))):
        wb.save([1, 2], tmp_path / "a.zarr")
    assert not list(tmp_path.iterdir())
