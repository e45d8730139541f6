"""Execute many runs on `dask.distributed`: worker processes of this machine, or any cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workbench.errors import OptionError, SweepError
from workbench.io.progress import Progress, n_cores
from workbench.sweeps.one_run import make_run
from workbench.sweeps.run_settings import RunSettings
from workbench.sweeps.sweep_store import SweepStore, open_sweep

if TYPE_CHECKING:
    import xarray as xr
    from distributed import Client, LocalCluster

#: How often a run may lose its worker before it fails; an existing cluster keeps its own setting.
_MOST_LOST_WORKERS = 10
_SECONDS_TO_CONNECT = 10


def run(
    runs: Sequence[RunSettings],
    path: str | os.PathLike[str],
    *,
    scheduler: str | Client | None = None,
    n_workers: int | None = None,
    overwrite: bool = False,
    progress: bool | Callable[[str], None] = True,
) -> xr.Dataset:
    """Execute the runs of a design in parallel and record them in one store.

    Each finished run is written at once. After an interruption the same call continues with the missing runs; if none
    is missing it only reads the store. A run whose worker process ends is repeated on another one. In a script, call it
    under ``if __name__ == "__main__":``, as every program that starts processes.

    Args:
        runs: The design; see `grid`. Its order is the order of the rows.
        path: Path of the store, by convention ending in ``.zarr``.
        scheduler: Address of a running dask scheduler, such as ``"tcp://10.0.0.1:8786"``, or a client; None: processes
            of this machine, for the time of the call.
        n_workers: Processes of this machine; None: one for each core.
        overwrite: Start again, replacing an existing store at ``path``.
        progress: Show how far it is, and the address of the dashboard; or a function that gets each text, whose
            exceptions end it.

    Returns:
        The sweep, as `open_sweep` returns it.

    Raises:
        OptionError: If there is no run, one is given twice, or both a cluster and processes are requested.
        StoreError: If the path holds something else, or a sweep of another design.
        SweepError: If the scheduler cannot be reached, or runs raise errors; all others are executed and kept.

    Example:
        >>> import workbench as wb
        >>> size, task = {"d_model": 16, "n_layers": 2}, {"name": "associative_recall"}
        >>> runs = wb.sweeps.grid({"tiny": size}, learning_rate=[1e-3, 1e-2], n_steps=20, task=task)
        >>> sweep = wb.sweeps.run(runs, "sweep.zarr", n_workers=2)  # doctest: +SKIP
        >>> len(runs)
        2
    """
    runs = list(runs)
    _check(runs, scheduler, n_workers)
    store = SweepStore(path, runs, overwrite=overwrite)
    missing = store.missing()
    if missing:
        with Progress(progress, "finished", total=len(missing), unit="run") as bar:
            bar.say("starting")
            with _cluster(scheduler, min(n_workers or n_cores(), len(missing))) as client:
                bar.say(f"dashboard at {client.dashboard_link}")
                failed = _make(client, runs, missing, store, after_run=bar.update)
        if failed:
            index, error = next(iter(failed.items()))
            raise SweepError(
                f"{len(failed)} of {len(runs)} runs failed, the first being run {index} ({runs[index].architecture}: "
                f"{type(error).__name__}: {error}); the others are kept: fix the cause and call wb.sweeps.run() again."
            ) from error
    return open_sweep(path)


def _make(
    client: Client,
    runs: Sequence[RunSettings],
    missing: Sequence[int],
    store: SweepStore,
    *,
    after_run: Callable[[], None],
) -> dict[int, BaseException]:
    """Execute the missing runs; returns the errors of those that failed."""
    from distributed import as_completed

    futures = {
        client.submit(make_run, runs[i].as_dict(), key=f"run-{i}-{runs[i].identity}", pure=False): i for i in missing
    }
    failed: dict[int, BaseException] = {}
    try:
        for future in as_completed(futures, loop=client.loop):
            index = futures.pop(future)
            if (error := future.exception()) is not None:
                failed[index] = error
            else:
                store.write(index, future.result())
            future.release()
            after_run()
    finally:  # of a sweep that is stopped, no run begins any more on a cluster of the caller's
        client.cancel(list(futures))
    return dict(sorted(failed.items()))


@contextmanager
def _cluster(scheduler: str | Client | None, n_workers: int) -> Iterator[Client]:
    """Yield a client of the given cluster, or of processes that end with the block."""
    import dask
    from distributed import Client, LocalCluster

    if isinstance(scheduler, Client):
        yield scheduler
        return
    if scheduler is not None:
        try:
            client = Client(scheduler, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise SweepError(
                f"No dask scheduler answers at {scheduler}; start one with `dask scheduler`, or leave out scheduler=."
            ) from error
        with client:
            yield client
        return
    settings = {"distributed.scheduler.allowed-failures": _MOST_LOST_WORKERS, "distributed.worker.daemon": False}
    with (
        dask.config.set(settings),
        # Any free port, as another sweep or dashboard may use the default one.
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs="ERROR"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        try:
            yield client
        except BaseException:
            cluster.sync(_end_workers, cluster)
            raise


async def _end_workers(cluster: LocalCluster) -> None:
    """End the workers at once: runs that are stopped are not waited for."""
    await asyncio.gather(*(worker.close(timeout=0.2) for worker in cluster.workers.values()))


def _check(runs: list[RunSettings], scheduler: Any, n_workers: int | None) -> None:
    """Refuse impossible arguments.

    Raises:
        OptionError: If there is no run, a run is given twice, or both a cluster and processes are requested.
    """
    if not runs:
        raise OptionError("The sweep has no run; make some with wb.sweeps.grid(...).")
    for run in runs:
        if not isinstance(run, RunSettings):
            raise OptionError(
                f"A run of the sweep is a {type(run).__name__}, expected RunSettings; see wb.sweeps.grid."
            )
    if n_workers is not None and n_workers < 1:
        raise OptionError(f"n_workers is {n_workers}, expected at least 1.")
    if n_workers is not None and scheduler is not None:
        raise OptionError("A cluster has workers of its own; leave out n_workers= or scheduler=.")
    seen: dict[str, int] = {}
    for i, run in enumerate(runs):
        if run.identity in seen:
            raise OptionError(f"Runs {seen[run.identity]} and {i} of the sweep are the same; give each its own seed.")
        seen[run.identity] = i
