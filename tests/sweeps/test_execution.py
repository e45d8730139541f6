"""Sweeps on real worker processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import xarray as xr
import zarr

import workbench as wb
from tests.sweeps.small_sweeps import TASK, made_alone, small_grid, without_seconds
from workbench.errors import OptionError, SweepError


@pytest.fixture(scope="module")
def cluster():
    import dask
    from distributed import LocalCluster

    with (
        dask.config.set({"distributed.worker.daemon": False}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs="CRITICAL"
        ) as own,
    ):
        yield own


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the sweep gives where nothing runs side by side."""
    return made_alone(small_grid(), tmp_path_factory.mktemp("alone") / "a.zarr")


def wait_for_a_row(path, process=None, seconds=300):
    """Look at the marks alone, seldom: the scheduler may share this process."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        if Path(path).exists() and zarr.open_group(path, mode="r", use_consolidated=False)["is_done"][:].any():
            return
        if process is not None and process.poll() is not None:
            pytest.fail("the sweep ended by itself", pytrace=False)
        time.sleep(0.3)
    pytest.fail("no row was finished", pytrace=False)


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_killed_worker_changes_no_result(cluster, alone, tmp_path):
    from distributed import Client

    path, result = tmp_path / "a.zarr", {}
    with Client(cluster, set_as_default=False) as client:
        pids = client.run(os.getpid)
        thread = threading.Thread(
            target=lambda: result.update(sweep=wb.sweeps.run(small_grid(), path, scheduler=client, progress=False))
        )
        thread.start()
        wait_for_a_row(path)
        n_before = wb.open_sweep(path).sizes["run"]
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        thread.join(timeout=180)
        assert not thread.is_alive()
        assert set(client.run(os.getpid).values()) != set(pids.values())
    assert n_before < 8
    xr.testing.assert_identical(without_seconds(result["sweep"]), without_seconds(alone))


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_sweep_whose_process_is_killed_goes_on(cluster, alone, tmp_path):
    path = tmp_path / "a.zarr"
    place = Path(__file__).with_name("interrupted_sweep.py")
    process = subprocess.Popen([sys.executable, str(place), str(path)], stderr=subprocess.DEVNULL)
    try:
        wait_for_a_row(path, process)
    finally:
        process.kill()
        process.wait()
    n_before = wb.open_sweep(path).sizes["run"]
    assert 0 < n_before < 8
    sweep = wb.sweeps.run(small_grid(), path, scheduler=cluster.scheduler_address, progress=False)
    xr.testing.assert_identical(without_seconds(sweep), without_seconds(alone))


@pytest.mark.slow
def test_a_finished_sweep_starts_no_process(tmp_path, monkeypatch):
    runs = small_grid(seed=[0])
    first = made_alone(runs, tmp_path / "a.zarr")
    monkeypatch.setattr("distributed.LocalCluster.__init__", lambda *_, **__: pytest.fail("a cluster was started"))
    again = wb.sweeps.run(runs, tmp_path / "a.zarr")
    xr.testing.assert_identical(first, again)


@pytest.mark.slow
@pytest.mark.subprocess
def test_progress_and_dashboard_are_told(cluster, tmp_path):
    from distributed import Client

    told = []
    with Client(cluster, set_as_default=False) as client:
        wb.sweeps.run(small_grid(seed=[0])[:1], tmp_path / "a.zarr", scheduler=client, progress=told.append)
        assert client.status == "running"  # it is the caller's
        assert told == ["starting", f"dashboard at {client.dashboard_link}", "1 of 1 run"]


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_sweep_that_is_stopped_ends_at_once_and_goes_on_later(cluster, alone, tmp_path):
    path, place = tmp_path / "a.zarr", Path(__file__).with_name("interrupted_sweep.py")
    process = subprocess.Popen([sys.executable, str(place), str(path)], stderr=subprocess.PIPE)
    wait_for_a_row(path, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert b"KeyboardInterrupt" in said
    assert 0 < wb.open_sweep(path).sizes["run"] < 8
    sweep = wb.sweeps.run(small_grid(), path, scheduler=cluster.scheduler_address, progress=False)
    xr.testing.assert_identical(without_seconds(sweep), without_seconds(alone))


@pytest.mark.subprocess
@pytest.mark.slow
def test_runs_that_fail_do_not_take_the_others_with_them(cluster, tmp_path):
    runs = small_grid(seed=[0])
    models = {
        "one block": {"make": "torch.nn:Identity"},
        "mine": {"make": f"{small_grid.__module__}:my_model", "width": 8},
    }
    own = wb.sweeps.grid(models, learning_rate=[1e-3], n_steps=3, task=TASK, n_snapshots=64)
    path = tmp_path / "a.zarr"
    with pytest.raises(SweepError, match=r"1 of 4 runs failed, the first being run 2 \(one block: .*others are kept"):
        wb.sweeps.run([*runs[:2], *own], path, scheduler=cluster.scheduler_address, progress=False)
    assert wb.open_sweep(path)["architecture"].values.tolist() == ["Pre-LN", "Pre-LN", "mine"]


@pytest.mark.medium
def test_a_scheduler_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.sweeps.execution._SECONDS_TO_CONNECT", 1)
    with pytest.raises(SweepError, match=r"No dask scheduler answers at tcp://127\.0\.0\.1:9; start one"):
        wb.sweeps.run(small_grid(seed=[0]), tmp_path / "a.zarr", scheduler="tcp://127.0.0.1:9")
    with pytest.raises(SweepError, match="No dask scheduler answers at nonsense://x"):
        wb.sweeps.run(small_grid(seed=[0]), tmp_path / "b.zarr", scheduler="nonsense://x")


@pytest.mark.parametrize(
    ("runs", "options", "said"),
    [
        ([], {}, "The sweep has no run"),
        ([1], {}, "is a int, expected RunSettings"),
        (small_grid(seed=[0]) * 2, {}, "Runs 0 and 4 of the sweep are the same"),
        (small_grid(seed=[0]), {"n_workers": 0}, "n_workers is 0, expected at least 1"),
        (small_grid(seed=[0]), {"n_workers": 2, "scheduler": "tcp://a:1"}, "A cluster has workers of its own"),
    ],
)
def test_calls_that_make_no_sense_touch_nothing(runs, options, said, tmp_path):
    with pytest.raises(OptionError, match=said):
        wb.sweeps.run(runs, tmp_path / "a.zarr", **options)
    assert not (tmp_path / "a.zarr").exists()
