import errno
import json

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.about import says
from workbench.errors import StoreError
from workbench.io.run_writer import RunWriter


def rows(first, last):
    """Return monitors of steps first .. last - 1, whose values are functions of the step."""
    step = np.arange(first, last)
    return xr.Dataset({"loss": ("step", np.sin(step)), "grad_norm": ("step", 1.0 * step)}, {"step": step})


def layers(step):
    """Return rows with a further dimension, a complex variable, and text that does not grow."""
    value = np.full((1, 3), step + 1j)
    return xr.Dataset(
        {"value": (("step", "layer"), value)}, {"step": [step], "layer_name": ("layer", ["a", "b", "deep"])}
    )


def happening(step, message):
    columns = {"step": [step], "kind": ["test"], "source": [""], "score": [np.nan], "message": [message]}
    return xr.Dataset({name: ("event", column) for name, column in columns.items()})


@pytest.fixture
def writer(tmp_path):
    return RunWriter(tmp_path / "run.zarr", {"subject": "example"})


@pytest.mark.medium
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_blocks_of_any_size_read_back_as_one(tmp_path_factory, sizes):
    path = tmp_path_factory.mktemp("blocks") / "run.zarr"
    writer, first = RunWriter(path, {}), 0
    for size in sizes:
        writer.append("monitors", rows(first, first + size))
        first += size
    writer.commit()
    assert wb.open_run(path)["monitors"].to_dataset().identical(rows(0, first))


def test_readers_see_only_commits(writer):
    assert not wb.open_run(writer.path).children
    writer.append("monitors", rows(0, 5))
    assert not wb.open_run(writer.path).children
    writer.commit(state="running")
    writer.append("monitors", rows(5, 9))
    writer.append("spectral", layers(8))
    seen = wb.open_run(writer.path)
    assert list(seen.children) == ["monitors"]
    assert seen["monitors"].sizes["step"] == 5
    writer.commit()
    assert seen["monitors"].to_dataset().load().identical(rows(0, 5))
    assert wb.open_run(writer.path)["monitors"].sizes["step"] == 9
    assert wb.open_run(writer.path).attrs["state"] == "running"


def test_parts_of_several_dimensions_and_text_grow(writer):
    for step in (0, 7, 14):
        writer.append("spectral", layers(step))
        writer.append("events", happening(step, "é" * step))
    writer.commit()
    run = wb.open_run(writer.path)
    assert run["spectral"]["value"].dims == ("step", "layer")
    assert run["spectral"]["value"].values[:, 2].tolist() == [0 + 1j, 7 + 1j, 14 + 1j]
    assert run["spectral"]["layer_name"].values.tolist() == ["a", "b", "deep"]
    assert run["events"]["message"].values.tolist() == ["", "é" * 7, "é" * 14]


def test_an_interrupted_append_leaves_the_last_commit(writer, monkeypatch):
    import zarr

    writer.append("monitors", rows(0, 5))
    writer.commit()
    calls = []

    def resize_one_array_only(array, shape, resize=zarr.Array.resize):
        if calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        calls.append(shape)
        resize(array, shape)

    monkeypatch.setattr(zarr.Array, "resize", resize_one_array_only)
    with pytest.raises(StoreError, check=says("cannot be written (No space left on device); rows committed")):
        writer.append("monitors", rows(5, 8))
    monkeypatch.undo()
    assert wb.open_run(writer.path)["monitors"].to_dataset().identical(rows(0, 5))
    writer.release()
    reopened = RunWriter.reopen(writer.path, before_step=5)
    reopened.append("monitors", rows(5, 12))
    reopened.commit()
    assert wb.open_run(writer.path)["monitors"].to_dataset().identical(rows(0, 12))


def test_reopening_drops_later_rows_and_uncommitted_parts(writer):
    writer.append("monitors", rows(0, 20))
    for step in (0, 10):
        writer.append("spectral", layers(step))
    writer.append("events", happening(15, "late"))
    writer.commit()
    writer.append("never", rows(0, 3))
    with pytest.raises(StoreError, check=says("is being written by an unclosed recorder of this process;")):
        RunWriter.reopen(writer.path, before_step=10)
    writer.release()
    reopened = RunWriter.reopen(writer.path, before_step=10)
    run = wb.open_run(writer.path)
    assert {part: node["step"].size for part, node in run.children.items()} == {
        "monitors": 10,
        "spectral": 1,
        "events": 0,
    }
    assert not (writer.path / "never").exists()
    reopened.append("monitors", rows(10, 13))
    reopened.append("events", happening(12, "early"))
    reopened.commit()
    run = wb.open_run(writer.path)
    assert run["monitors"].to_dataset().identical(rows(0, 13))
    assert run["events"]["message"].values.tolist() == ["early"]
    assert run.attrs["subject"] == "example"


def test_xarray_reads_the_store(writer):
    writer.append("monitors", rows(0, 5))
    writer.commit()
    writer.append("monitors", rows(5, 9))  # not committed
    with xr.open_datatree(writer.path, engine="zarr") as run:
        assert run["monitors"].to_dataset().identical(rows(0, 5))


def test_an_existing_path_is_replaced_only_on_request(writer):
    with pytest.raises(StoreError, check=says("exists already; pass overwrite=True to replace it, or")):
        RunWriter(writer.path, {})
    with pytest.raises(
        StoreError, check=says("is being written by an unclosed recorder of this process;")
    ):  # it is being written
        RunWriter(writer.path, {}, overwrite=True)
    writer.release()
    RunWriter(writer.path, {"subject": "other"}, overwrite=True)
    assert json.loads((writer.path / "zarr.json").read_text())["attributes"]["subject"] == "other"
