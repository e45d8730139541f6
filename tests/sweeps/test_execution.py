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
from tests.about import about, says
from tests.sweeps.small_sweeps import TASK, run_sequentially, small_grid, without_seconds
from workbench.errors import OptionError, SweepError


@pytest.fixture(scope="module")
def cluster():
    import dask
    from distributed import LocalCluster

    with (
        dask.config.set({"distributed.worker.daemon": False}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs="CRITICAL"
        ) as created,
    ):
        yield created


@pytest.fixture(scope="module")
def sequential(tmp_path_factory):
    """The result of the sweep when its runs are executed sequentially."""
    return run_sequentially(small_grid(), tmp_path_factory.mktemp("sequential") / "a.zarr")


def wait_for_a_row(path, process=None, seconds=300):
    """Wait until a row is finished; read only the marks, and seldom, because the scheduler may share this process."""
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
def test_a_killed_worker_changes_no_result(cluster, sequential, tmp_path):
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
    xr.testing.assert_identical(without_seconds(result["sweep"]), without_seconds(sequential))


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_sweep_whose_process_is_killed_continues(cluster, sequential, tmp_path):
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
    xr.testing.assert_identical(without_seconds(sweep), without_seconds(sequential))


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_sweep_that_is_stopped_ends_at_once_and_continues_later(cluster, sequential, tmp_path):
    path, place = tmp_path / "a.zarr", Path(__file__).with_name("interrupted_sweep.py")
    process = subprocess.Popen([sys.executable, str(place), str(path)], stderr=subprocess.PIPE)
    wait_for_a_row(path, process)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=10)
    assert b"KeyboardInterrupt" in output
    assert 0 < wb.open_sweep(path).sizes["run"] < 8
    sweep = wb.sweeps.run(small_grid(), path, scheduler=cluster.scheduler_address, progress=False)
    xr.testing.assert_identical(without_seconds(sweep), without_seconds(sequential))


@pytest.mark.subprocess
@pytest.mark.slow
def test_runs_that_fail_do_not_stop_the_others(cluster, tmp_path):
    runs = small_grid(seed=[0])
    models = {
        "one block": {"make": "torch.nn:Identity"},
        "custom": {"make": f"{small_grid.__module__}:my_model", "width": 8},
    }
    custom = wb.sweeps.grid(models, learning_rate=[1e-3], n_steps=3, task=TASK, n_snapshots=64)
    path = tmp_path / "a.zarr"
    with pytest.raises(SweepError, check=about("runs", (2,))):
        wb.sweeps.run([*runs[:2], *custom], path, scheduler=cluster.scheduler_address, progress=False)
    assert wb.open_sweep(path)["architecture"].values.tolist() == ["Pre-LN", "Pre-LN", "custom"]


@pytest.mark.medium
def test_a_scheduler_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.sweeps.execution._SECONDS_TO_CONNECT", 1)
    with pytest.raises(SweepError, check=says("start one with `dask scheduler`, or omit scheduler=.")):
        wb.sweeps.run(small_grid(seed=[0]), tmp_path / "a.zarr", scheduler="tcp://127.0.0.1:9")
    with pytest.raises(SweepError, check=says("start one with `dask scheduler`, or omit scheduler=.")):
        wb.sweeps.run(small_grid(seed=[0]), tmp_path / "b.zarr", scheduler="nonsense://x")


@pytest.mark.parametrize(
    ("runs", "options", "name", "value"),
    [
        ([], {}, "runs", ()),
        ([1], {}, "runs", 1),
        (small_grid(seed=[0]) * 2, {}, "runs", (0, 4)),
        (small_grid(seed=[0]), {"n_workers": 2, "scheduler": "tcp://a:1"}, "n_workers", 2),
    ],
)
def test_invalid_calls_change_no_file(runs, options, name, value, tmp_path):
    with pytest.raises(OptionError, check=about(name, value)):
        wb.sweeps.run(runs, tmp_path / "a.zarr", **options)
    assert not (tmp_path / "a.zarr").exists()
