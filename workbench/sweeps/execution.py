"""Parallel execution of many runs with `dask.distributed`, in worker processes of this machine or on a cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workbench.errors import OptionError, SweepError
from workbench.io.progress import Progress, n_cores
from workbench.option_checks import PositiveInt, checked
from workbench.sweeps.one_run import make_run
from workbench.sweeps.run_settings import RunSettings
from workbench.sweeps.sweep_store import SweepStore, open_sweep

if TYPE_CHECKING:
    import xarray as xr
    from distributed import Client, LocalCluster

#: How often the worker of a run may end before the run fails; an existing cluster keeps its own setting.
_MAX_LOST_WORKERS = 10
_SECONDS_TO_CONNECT = 10


@checked
def run(
    runs: Sequence[RunSettings],
    path: str | os.PathLike[str],
    *,
    scheduler: str | Client | None = None,
    n_workers: PositiveInt | None = None,
    overwrite: bool = False,
    progress: bool | Callable[[str], None] = True,
) -> xr.Dataset:
    """Execute planned runs in parallel and record them in one store.

    Each run is written as soon as it is finished. After an interruption the same call continues with the missing runs;
    if none is missing, it only opens the store. A run whose worker process ends is repeated on another worker. In a
    script, call this function under ``if __name__ == "__main__":``, because it starts processes.

    Args:
        runs: The planned runs; see `grid`. The rows of the sweep have the same order.
        path: Path of the store, by convention ending in ``.zarr``.
        scheduler: Address of a running dask scheduler, such as ``"tcp://10.0.0.1:8786"``, or a client. None starts
            processes on this machine, which end with the call.
        n_workers: Number of processes on this machine; None starts one for each core.
        overwrite: Replace an existing store at ``path``.
        progress: Show the progress and the address of the dashboard; or a function that receives each message and may
            stop the sweep by raising an exception.

    Returns:
        The sweep, as returned by `open_sweep`.

    Raises:
        OptionError: If there is no run, a run is given twice, or both a cluster and processes are requested.
        StoreError: If the path holds something else, or a sweep of other runs.
        SweepError: If the scheduler cannot be reached, or if runs fail; all other runs are executed and kept.

    Example:
        >>> import workbench as wb
        >>> size, task = {"d_model": 16, "n_layers": 2}, {"name": "associative_recall"}
        >>> runs = wb.sweeps.grid({"tiny": size}, learning_rate=[1e-3, 1e-2], n_steps=20, task=task)
        >>> sweep = wb.sweeps.run(runs, "sweep.zarr", n_workers=2)  # doctest: +SKIP
        >>> len(runs)
        2

    See Also:
        `workbench.sweeps.grid`: Creates the planned runs.
        `workbench.open_sweep`: Opens the store, also while it is being written.
    """
    runs = list(runs)
    _check(runs, scheduler, n_workers)
    store = SweepStore(path, runs, overwrite=overwrite)
    missing = store.missing()
    if missing:
        with Progress(progress, "finished", total=len(missing), unit="run") as bar:
            bar.describe("starting")
            with _cluster(scheduler, min(n_workers or n_cores(), len(missing))) as client:
                bar.describe(f"dashboard at {client.dashboard_link}")
                failed = _execute(client, runs, missing, store, after_run=bar.update)
        if failed:
            index, error = next(iter(failed.items()))
            raise SweepError(
                f"{len(failed)} of {len(runs)} runs failed, the first being run {index} ({runs[index].architecture}: "
                f"{type(error).__name__}: {error}); the others are kept; fix the cause and call wb.sweeps.run() again."
            ) from error
    return open_sweep(path)


def _execute(
    client: Client,
    runs: Sequence[RunSettings],
    missing: Sequence[int],
    store: SweepStore,
    *,
    after_run: Callable[[], None],
) -> dict[int, BaseException]:
    """Execute the missing runs and return the errors of those that failed, by index."""
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
    finally:  # A cluster of the caller would otherwise continue the runs of a stopped sweep.
        client.cancel(list(futures))
    return dict(sorted(failed.items()))


@contextmanager
def _cluster(scheduler: str | Client | None, n_workers: int) -> Iterator[Client]:
    """Yield a client of the given cluster, or of new processes that end with the ``with`` block."""
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
                f"No dask scheduler answers at {scheduler}; start one with `dask scheduler`, or omit scheduler=."
            ) from error
        with client:
            yield client
        return
    settings = {"distributed.scheduler.allowed-failures": _MAX_LOST_WORKERS, "distributed.worker.daemon": False}
    with (
        dask.config.set(settings),
        # Any free port, because another sweep or dashboard may use the default one.
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
    """End the workers without waiting for their runs."""
    await asyncio.gather(*(worker.close(timeout=0.2) for worker in cluster.workers.values()))


def _check(runs: list[RunSettings], scheduler: Any, n_workers: int | None) -> None:
    """Raise OptionError if there is no run, a run is given twice, or both a cluster and processes are requested."""
    if not runs:
        raise OptionError("The sweep has no runs; create some with wb.sweeps.grid(...).")
    for i, run in enumerate(runs):
        if not isinstance(run, RunSettings):
            raise OptionError.of(f"runs[{i}]", run, "RunSettings", remedy="see wb.sweeps.grid")
    if n_workers is not None and scheduler is not None:
        raise OptionError(
            "n_workers= cannot be combined with scheduler=, because a cluster has its own workers; omit one of them."
        )
    seen: dict[str, int] = {}
    for i, run in enumerate(runs):
        if run.identity in seen:
            raise OptionError(
                f"Runs {seen[run.identity]} and {i} of the sweep are the same; give each run its own seed."
            )
        seen[run.identity] = i
