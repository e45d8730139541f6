"""Links cut, refused credentials, full disks, jumping clocks, two writers and kills: nothing flushed is lost."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import xarray as xr

import workbench as wb
from tests.io.test_far_stores import far, put, trained
from tests.io.test_run_index import written
from tests.waiting import wait_for
from workbench.io import far_places, run_copy
from workbench.io.run_index import INDEX, status_of
from workbench.io.run_output import RecordingWarning, RunOutput
from workbench.training.recording import new_run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(far_places, "_WAITS", (0.0, 0.1))


def planted(path):
    return RunOutput(new_run(run_copy.store_path(path), {"model": {"name": "Planted"}}, overwrite=False))


def row(output, step):
    output.add("monitors", step, {"loss": 5.0 - step, "learning_rate": 1e-3})
    return output.flush()


@pytest.mark.parametrize("kind", ["s3", "ssh"])
def test_a_cut_link_changes_no_loss_and_is_caught_up(kind, tmp_path, monkeypatch):
    alone, _ = trained(None)
    with far(kind, tmp_path, monkeypatch) as (url, link):
        n_before = []

        def hook(step):
            if step == 20:
                n_before.append(link.n_passed)
                link.cut()
            if step == 40:
                time.sleep(8)  # the copy is tried meanwhile
            if step == 50:
                link.mend()

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            losses, watched = trained(f"{url}/a.zarr", hook=hook)
        assert losses == alone
        assert sum("not copied" in str(one.message) for one in found) <= 1
        here = wb.open_run(watched.path).load()
        assert here["monitors"]["step"].values[-1] >= 50
        assert link.n_passed > n_before[0]
        xr.testing.assert_identical(wb.open_run(f"{url}/a.zarr").load(), here)


def test_a_link_that_stays_cut_costs_a_warning_and_a_limited_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run_copy, "_LAST", 3.0)
    alone, _ = trained(None)
    with far("s3", tmp_path, monkeypatch) as (url, link):
        with pytest.warns(RecordingWarning, match="lacks the last rows") as found:
            losses, watched = trained(f"{url}/a.zarr", hook=lambda step: link.cut() if step == 5 else None)
        assert losses == alone
        assert "planted-secret" not in "".join(str(one.message) for one in found)
        assert wb.open_run(watched.path).attrs["state"] == "finished"
        assert wb.open_run(watched.path)["monitors"]["step"].values[-1] == 59


def test_refused_credentials_change_no_loss(tmp_path, monkeypatch):
    alone, _ = trained(None)
    with far("ssh", tmp_path, monkeypatch) as (url, _):
        (tmp_path / "home" / ".ssh" / "authorized_keys").write_text("")
        monkeypatch.setattr(run_copy, "_LAST", 1.0)
        with pytest.warns(RecordingWarning, match=r"not copied to .*uthentication"):
            losses, watched = trained(f"{url}/a.zarr")
        assert losses == alone
        assert wb.open_run(watched.path)["monitors"]["step"].values[-1] == 59
        with pytest.raises(wb.errors.StoreError, match="uthentication"):
            wb.open_run(f"{url}/a.zarr")


def test_a_host_whose_key_is_unknown_is_refused(tmp_path, monkeypatch):
    with far("ssh", tmp_path, monkeypatch) as (url, _):
        (tmp_path / "home" / ".ssh" / "known_hosts").write_text("")
        with pytest.raises(wb.errors.StoreError, match="known_hosts"):
            wb.open_run(f"{url}/a.zarr")


def test_a_second_writer_is_refused_here_and_far_away(tmp_path, monkeypatch):
    with far("ssh", tmp_path, monkeypatch) as (url, _):
        output = planted(f"{url}/a.zarr")
        assert row(output, 0)
        wait_for(lambda: far_places.FarPlace(f"{url}/{INDEX}/a.zarr.json").read())
        with pytest.raises(wb.errors.StoreError, match="being written|exists already"):
            planted(f"{url}/a.zarr")
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")  # as on another machine, where there is no lock
        with pytest.raises(wb.errors.StoreError, match="is being written by process"):
            planted(f"{url}/a.zarr")
        with pytest.raises(wb.errors.StoreError, match="is being written by process"):
            wb.Recorder(f"{url}/a.zarr", resume=True)._stored_state()
        monkeypatch.chdir(tmp_path)
        assert row(output, 1)
        output.close(state="finished")
        assert wb.open_run(f"{url}/a.zarr")["monitors"]["step"].values.tolist() == [0, 1]


SCRIPT = """
import sys, time
import workbench
from workbench.io import run_copy
from workbench.io.run_output import RunOutput
from workbench.training.recording import new_run
output = RunOutput(new_run(run_copy.store_path(sys.argv[1]), {"model": {"name": "Planted"}}, overwrite=False))
for step in range(100_000):
    output.add("monitors", step, {"loss": 5.0 - step, "learning_rate": 1e-3})
    if output.flush():
        print(step, flush=True)
    time.sleep(0.01)
"""


def test_a_killed_writer_loses_nothing_that_was_flushed(tmp_path, monkeypatch):
    with far("ssh", tmp_path, monkeypatch) as (url, link):
        writer = subprocess.Popen([sys.executable, "-c", SCRIPT, f"{url}/a.zarr"], stdout=subprocess.PIPE,
                                  env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        wait_for(lambda: far_places.FarPlace(f"{url}/a.zarr").stamp("zarr.json"))
        lines = [writer.stdout.readline() for _ in range(100)]
        n_passed = link.n_passed
        wait_for(lambda: link.n_passed > n_passed + 1000)  # in the middle of the next copy
        writer.send_signal(signal.SIGKILL)
        flushed = int([*lines, *writer.communicate()[0].splitlines()][-1])
        (path,) = Path("runs").glob("a.*.zarr")
        here = wb.open_run(path).load()
        assert here["monitors"]["step"].values[-1] >= flushed
        wait_for(lambda: status_of(f"{url}/a.zarr")["state"] == "ended without being closed")
        there = wb.open_run(f"{url}/a.zarr").load()
        xr.testing.assert_identical(there["monitors"].to_dataset(), here["monitors"].to_dataset())


def test_a_killed_reader_changes_nothing(tmp_path, monkeypatch):
    with far("ssh", tmp_path, monkeypatch) as (url, _):
        output = planted(f"{url}/a.zarr")
        row(output, 0)
        wait_for(lambda: far_places.FarPlace(f"{url}/a.zarr").stamp("zarr.json"))
        code = "import workbench as wb, sys\nwhile True: print(len(wb.open_run(sys.argv[1]).load()), flush=True)"
        reader = subprocess.Popen([sys.executable, "-c", code, f"{url}/a.zarr"], stdout=subprocess.PIPE,
                                  env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        reader.stdout.readline()
        reader.kill()
        reader.communicate()
        assert row(output, 1)
        output.close(state="finished")
        xr.testing.assert_identical(wb.open_run(f"{url}/a.zarr").load(), wb.open_run(output.path).load())


def test_a_jump_of_the_clock_neither_ends_a_run_nor_hides_its_end(tmp_path, monkeypatch):
    alone, _ = trained(None)
    true = time.time
    jumps = {10: 86_400.0, 30: -7 * 86_400.0}
    losses, watched = trained("a.zarr", hook=lambda step: step in jumps and monkeypatch.setattr(
        time, "time", lambda: true() + jumps[step]))  # fmt: skip
    assert losses == alone
    found = wb.list_runs(".")
    assert found.loc["a", "state"] == "finished"
    assert found.loc["a", "step"] == wb.open_run(watched.path)["monitors"]["step"].values[-1] == 59
    with far("memory", tmp_path, monkeypatch) as (url, _):
        path = written(tmp_path / "b.zarr", state="running")
        put(path, f"{url}/b.zarr")
        assert wb.open_run(f"{url}/b.zarr").attrs["state"] == "running"  # whose writer cannot be seen from here
        entry = json.loads((tmp_path / INDEX / "b.zarr.json").read_text())
        entry |= {"step": 3, "copier": {"token": "x", "heard": true() + 90 * 86_400}}  # stale, of a clock in the future
        far_places.FarPlace(f"{url}/{INDEX}/b.zarr.json").write(json.dumps(entry | {"digest": "old"}).encode())
        assert wb.list_runs(url).loc["b", ["state", "step"]].tolist() == ["running", 11]


def test_a_full_disk_changes_no_loss_and_the_index_is_made_again(tmp_path, monkeypatch):
    alone, _ = trained(None)
    write = Path.write_text

    def full(path, text, *args, **options):
        if INDEX in path.parts:
            raise OSError(28, "No space left on device")
        return write(path, text, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        losses, watched = trained("a.zarr")
        assert losses == alone
        assert not (tmp_path / INDEX / "a.zarr.json").exists()
        assert status_of(watched.path)["step"] == 59
    assert status_of(watched.path)["step"] == 59
    assert (tmp_path / INDEX / "a.zarr.json").exists()
