import os
import pickle
import shutil

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.about import about
from workbench.errors import StoreError
from workbench.io.run_writer import RunWriter
from workbench.schema.runs import ALL_CHUNKS


def rows(value):
    count = np.full(4, int(value))
    return xr.Dataset({"loss": ("step", np.full(4, value)), "count": ("step", count)}, {"step": range(4)})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.zarr"
    writer = RunWriter(path, {})
    writer.append("monitors", rows(0.0))  # Zarr does not write zeros, the fill value
    writer.append("attention", rows(np.pi))
    writer.commit()
    return path


def values(run):
    return [run[part][name].values.tolist() for part in ("monitors", "attention") for name in ("loss", "count")]


def test_chunks_that_an_older_version_never_wrote_are_read_as_the_fill_value(path):
    (path / "monitors" / "count" / "c" / "0").unlink()
    (path / "zarr.json").write_text((path / "zarr.json").read_text().replace(f'"{ALL_CHUNKS}": 1', '"older": 1'))
    assert values(wb.open_run(path)) == [[0.0] * 4, [0] * 4, [np.pi] * 4, [3] * 4]


@pytest.mark.parametrize("name", ["loss", "count"])
def test_a_lost_chunk_is_not_read_as_the_fill_value(path, name):
    run = wb.open_run(path)
    writer = RunWriter.reopen(path, before_step=10)
    writer.append("monitors", rows(0.0).assign_coords(step=range(4, 8)))
    writer.commit()
    (path / "monitors" / name / "c" / "0").unlink()
    for found in (run, wb.open_run(path)):
        with pytest.raises(StoreError, match=f"monitors/{name}/c/0", check=about("path", path)):
            found["monitors"][name].load()
        assert found["attention"]["loss"].values.tolist() == [np.pi] * 4


@pytest.mark.parametrize("damage", ["garbage", "pipe", "folder"])
def test_a_damaged_chunk_is_named(path, damage):
    chunk, run = path / "attention" / "loss" / "c" / "0", wb.open_run(path)
    chunk.unlink()
    {"garbage": lambda: chunk.write_bytes(b"no"), "pipe": lambda: os.mkfifo(chunk), "folder": chunk.mkdir}[damage]()
    for found in (run, wb.open_run(path)):
        with pytest.raises(StoreError, check=about("path", path if damage == "garbage" else chunk)):
            found.load()


@pytest.mark.parametrize("metadata", ["null", "[]", "[1", "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500])
def test_metadata_that_are_none_are_rejected(path, metadata):
    (path / "zarr.json").write_text(metadata)
    with pytest.raises(StoreError, check=about("path", path / "zarr.json")):
        wb.open_run(path)


def test_a_run_that_was_removed_does_not_read_as_zeros(path):
    run, loaded = wb.open_run(path), wb.open_run(path).load()
    shutil.rmtree(path)
    for part in ("monitors", "attention"):
        with pytest.raises(StoreError, check=about("path", path)):
            run[part]["count"].load()
    assert values(loaded)[3] == [3] * 4


def test_a_part_that_was_removed_does_not_read_as_zeros(path):
    run = wb.open_run(path)
    shutil.rmtree(path / "attention")
    with pytest.raises(StoreError, check=about("path", path)):
        run["attention"]["count"].load()
    assert run["monitors"]["count"].values.tolist() == [0] * 4


def test_a_run_that_was_replaced_does_not_read_as_the_other(path):
    run = wb.open_run(path)
    other = RunWriter(path, {}, overwrite=True)
    other.append("attention", rows(7.0))
    other.commit()
    with pytest.raises(StoreError, check=about("path", path)):
        run["attention"]["loss"].load()
    assert wb.open_run(path)["attention"]["loss"].values.tolist() == [7.0] * 4


def test_a_run_that_grows_stays_readable(path):
    run = wb.open_run(path)
    writer = RunWriter.reopen(path, before_step=10)
    writer.append("attention", rows(7.0).assign_coords(step=range(4, 8)))
    writer.commit()
    assert run["attention"]["loss"].values.tolist() == [np.pi] * 4


def test_an_open_run_can_be_sent_to_another_process(path):
    run = pickle.loads(pickle.dumps(wb.open_run(path)))
    assert values(run)[2] == [np.pi] * 4
