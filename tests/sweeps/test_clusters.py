"""Work on clusters by their address: a killed worker and a slow one change no bit of a result."""

import os
import signal
import threading

import pytest
import xarray as xr

import workbench as wb
from tests.sweeps.cluster_work import SCRIPT, SCRIPTS, checked, measured
from tests.sweeps.small_sweeps import run_sequentially, small_grid, without_seconds
from tests.sweeps.test_execution import wait_for_a_row

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]


@pytest.fixture(scope="module")
def addresses():
    """The addresses of two clusters on this machine, of two processes each."""
    import dask
    from distributed import LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0", "silence_logs": "CRITICAL"}
    with (
        dask.config.set({"distributed.worker.daemon": False}),
        LocalCluster(**options) as one,
        LocalCluster(**options) as other,
    ):
        yield one.scheduler_address, other.scheduler_address


@pytest.fixture(scope="module")
def sequential(tmp_path_factory):
    """The sweep whose runs are made one after another."""
    return run_sequentially(small_grid(), tmp_path_factory.mktemp("sequential") / "a.zarr")


def workers_of(address):
    """Return the ids of the processes of a cluster."""
    from distributed import Client

    with Client(address, set_as_default=False) as client:
        return list(client.run(os.getpid).values())


@pytest.mark.parametrize("what", ["killed", "slow"])
def test_a_sweep_with_a_killed_or_a_slow_worker(what, addresses, sequential, tmp_path):
    address = addresses[what == "slow"]
    first, *_ = workers_of(address)
    path, result = tmp_path / "a.zarr", {}
    thread = threading.Thread(
        target=lambda: result.update(sweep=wb.sweeps.run(small_grid(), path, scheduler=address, progress=False))
    )
    thread.start()
    wait_for_a_row(path)
    n_before = wb.open_sweep(path).sizes["run"]
    os.kill(first, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
    thread.join(timeout=10 if what == "slow" else 180)
    if what == "slow":
        os.kill(first, signal.SIGCONT)
        thread.join(timeout=180)
    assert not thread.is_alive()
    assert n_before < 8
    xr.testing.assert_identical(without_seconds(result["sweep"]), without_seconds(sequential))


def test_a_sweep_that_begins_on_one_cluster_ends_on_another(addresses, sequential, tmp_path):
    path, messages = tmp_path / "a.zarr", []

    def stop(message):
        messages.append(message)
        if path.exists() and wb.open_sweep(path).sizes["run"] >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wb.sweeps.run(small_grid(), path, scheduler=addresses[0], progress=stop)
    assert 2 <= wb.open_sweep(path).sizes["run"] < 8
    sweep = wb.sweeps.run(small_grid(), path, scheduler=addresses[1], progress=False)
    xr.testing.assert_identical(without_seconds(sweep), without_seconds(sequential))


def test_designs_and_scripts_on_a_cluster_with_a_killed_worker(addresses, tmp_path):
    from distributed import Client

    scripts = []
    for name, clear in SCRIPTS.items():
        scripts.append(str(tmp_path / f"{name}.py"))
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(clear=clear))
    norms = ["pre_ln", "none", "post_ln"]
    with Client(addresses[0], set_as_default=False) as client:
        reports, spectra = client.map(checked, scripts), client.map(measured, norms)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        reports, spectra = client.gather([reports, spectra])
    assert reports == [checked(script) for script in scripts]
    assert [report["gradients_cleared"][0] for report in reports] == ["passed", "failed"]
    for norm, found in zip(norms, spectra, strict=True):
        xr.testing.assert_identical(found, measured(norm))
