import os
import signal
import stat
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError, StoreError
from workbench.io.atomic import check_free, replacing, write_json


def run(value):
    return {"monitors": xr.Dataset({"loss": ("step", [float(value)])}, {"step": [0]})}


def value_of(path):
    return wb.open_run(path)["monitors"]["loss"].item()


def foreign(tmp_path):
    """Return a file and folders that the workbench did not write."""
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("years of work")
    xr.Dataset({"a": ("x", np.ones(2))}).to_zarr(tmp_path / "other.zarr", zarr_format=3, consolidated=False)
    (wb.save(run(1), tmp_path / "mixed.zarr") / "notes.txt").write_text("mine")
    (wb.save(run(1), tmp_path / "mixed too.zarr") / "notes").mkdir()
    (tmp_path / "mixed too.zarr" / "notes" / "a.txt").write_text("mine")
    (tmp_path / "r_pictures").mkdir()
    (tmp_path / "r_pictures" / "01-losses.svg").write_text("ours")
    (tmp_path / "r_pictures" / "holiday.jpg").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    return [tmp_path, *tmp_path.iterdir()]


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("write", [wb.save, wb.export_netcdf])
def test_only_what_the_workbench_wrote_is_replaced(tmp_path, write):
    places = foreign(tmp_path)
    before = content(tmp_path)
    for place in places:
        with pytest.raises(StoreError, match="not written by the workbench", check=about("path", place)):
            write(run(2), place, overwrite=True)
    assert content(tmp_path) == before


def test_what_the_workbench_wrote_is_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.nc").touch()
    for place in (wb.save(run(1), tmp_path / "a"), wb.export_netcdf(run(1), tmp_path / "b"), tmp_path / "empty"):
        for write in (wb.save, wb.export_netcdf, wb.save):
            assert value_of(write(run(2), place, overwrite=True)) == 2
    assert value_of(wb.export_netcdf(run(2), tmp_path / "empty.nc", overwrite=True)) == 2


@pytest.mark.parametrize("name", ["a.html", "a.md", "a.svg", "a.pdf", "a.png"])
def test_pages_and_pictures_are_recognized(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"of another tool")
    with pytest.raises(StoreError, check=about("path", path)):
        check_free(path, overwrite=True)
    with replacing(path) as partial:
        partial.write_bytes(b"of the workbench, which is long enough")
    check_free(path, overwrite=True)


def test_a_marked_png_is_the_same_picture(tmp_path):
    from PIL import Image

    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    with replacing(tmp_path / "a.png") as partial:
        image.save(partial)
    assert list(Image.open(tmp_path / "a.png").tobytes()) == list(range(256))


def test_a_json_file_is_replaced_only_by_one_with_the_same_keys(tmp_path):
    path = write_json({"a": 1, "b": 2}, tmp_path / "a.json")
    write_json({"b": 3, "a": 4}, path, overwrite=True)
    for other in ({"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(StoreError, check=says("was not written by the workbench alone, so overwrite=True")):
            write_json(other, path, overwrite=True)


@pytest.mark.parametrize("overwrite", ["False", "no", 1, None])
def test_a_switch_is_true_or_false(tmp_path, overwrite):
    path = wb.save(run(1), tmp_path / "a.zarr")
    for place in (path, tmp_path / "new.zarr"):
        with pytest.raises(OptionError, check=about("overwrite", overwrite)):
            wb.save(run(2), place, overwrite=overwrite)
    assert value_of(path) == 1


def test_links_are_followed_and_permissions_kept(tmp_path):
    for write, name in ((wb.save, "a.zarr"), (wb.export_netcdf, "a.nc")):
        path, link = write(run(1), tmp_path / name), tmp_path / f"link to {name}"
        link.symlink_to(path)
        path.chmod(0o700)
        write(run(2), link, overwrite=True)
        assert link.is_symlink()
        assert (value_of(path), stat.S_IMODE(path.stat().st_mode)) == (2, 0o700)


def test_names_as_long_as_the_system_allows_are_written(tmp_path):
    assert value_of(wb.save(run(1), tmp_path / ("n" * 255))) == 1
    for name in ("n" * 256, "file/a"):
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, check=about("path", tmp_path / name)):
            wb.save(run(1), tmp_path / name)


_KILLED = """
import os, signal, sys
import workbench as wb
from tests.io.test_atomic import run
from workbench.io import atomic
exchange, path, when = atomic._exchange, *sys.argv[1:]
def killed(*paths):
    when == "after" and exchange(*paths)
    os.kill(os.getpid(), signal.SIGKILL)
atomic._exchange = killed
wb.save(run(2), path, overwrite=True)
"""


@pytest.mark.subprocess
@pytest.mark.parametrize(("when", "value"), [("before", 1), ("after", 2)])
def test_a_killed_process_leaves_the_old_or_the_new_run(tmp_path, when, value):
    path = wb.save(run(1), tmp_path / "a.zarr")
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(path), when], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert value_of(path) == value


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_where_paths_cannot_be_exchanged(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr("workbench.io.atomic._exchange", lambda *_: False)
    path = wb.save(run(1), tmp_path / "a.zarr")
    assert value_of(wb.save(run(2), path, overwrite=True)) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["a.zarr"]


def test_a_full_disk_leaves_no_open_netcdf_file(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(StoreError, check=says("was not written and its previous content is unchanged; free")):
        wb.export_netcdf(run(1), tmp_path / "a.nc")
    assert not list(tmp_path.iterdir())
