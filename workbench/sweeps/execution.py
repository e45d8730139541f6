"""Execution of one run, and of many in parallel with `dask.distributed`, on this machine or on a cluster."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import xarray as xr
from threadpoolctl import threadpool_limits
from torch import nn

from workbench.callbacks.train import train
from workbench.errors import OptionError, StoreError, SweepError
from workbench.io.atomic import check_free, replacing
from workbench.io.files import FileKind, as_path
from workbench.io.progress import Progress, n_cores
from workbench.io.provenance import versions
from workbench.models.calling import call_model
from workbench.models.losses import token_loss
from workbench.models.probing import eval_mode
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt
from workbench.schema.sweeps import CURVES, LOSS_WINDOW, MEASURES, OUTCOMES, SETTINGS, SWEEP_VERSION, dtype_of
from workbench.sweeps.case_measures import measure_row
from workbench.sweeps.run_settings import RunSettings
from workbench.tasks.task import SeededTask, frequency_loss
from workbench.training.callback import StepRecord
from workbench.training.recording import first_difference

if TYPE_CHECKING:
    from distributed import Client, LocalCluster


#: Rows in a chunk. A chunk is rewritten with each of its rows; empty chunks take no space.
_ROWS_PER_CHUNK = 256
_MARK = "is_done"
_KIND = "sweep"
_STORE = FileKind("an undamaged sweep", "choose another path, or create one with wb.sweeps.run(runs, path)")


class SweepStore:
    """The store of a sweep that is being executed.

    Args:
        path: Path of the store; an existing sweep of the same runs is continued.
        runs: The planned runs.
        overwrite: Replace an existing store at ``path``.

    Raises:
        StoreError: If the path holds something else, or a sweep of other runs.

    Example:
        >>> import workbench as wb
        >>> task = {"name": "random_tokens", "length": 8, "vocab_size": 16, "batch_size": 4}
        >>> size = {"d_model": 16, "n_layers": 2, "n_heads": 2}
        >>> runs = wb.sweeps.grid({"tiny": size}, learning_rate=[0.001, 0.01], n_steps=2, task=task, n_snapshots=64)
        >>> store = wb.sweeps.SweepStore("sweep.zarr", runs)
        >>> store.missing()
        [0, 1]

    See Also:
        `workbench.sweeps.run`: Executes the runs and fills the store.
        `workbench.open_sweep`: Opens the store.
    """

    def __init__(self, path: str | os.PathLike[str], runs: Sequence[RunSettings], *, overwrite: bool = False) -> None:
        import zarr

        self.path = Path(path)
        if overwrite or not self.path.exists():
            check_free(self.path, overwrite=overwrite)
            with replacing(self.path) as partial:
                _lay_out(partial, runs)
        else:
            _check_design(self.path, runs)
        self._group = zarr.open_group(self.path, mode="r+", use_consolidated=False)
        designed = runs[0].describe()
        names = [name for name in {**SETTINGS, **MEASURES, **OUTCOMES, **CURVES} if name not in designed]
        # An older store has no losses along the runs, and is continued without them.
        self._arrays = {name: cast(zarr.Array, self._group[name]) for name in names if name in self._group}
        self._mark = cast(zarr.Array, self._group[_MARK])

    def missing(self) -> list[int]:
        """Return the indices of the unfinished rows."""
        return np.flatnonzero(~np.asarray(self._mark[:])).tolist()

    def write(self, index: int, row: Mapping[str, Any]) -> None:
        """Write the row of a finished run.

        Args:
            index: Index of the run among the planned runs.
            row: Values of the row, as returned by `make_run`.

        Raises:
            StoreError: If the row cannot be written, for example on a full disk; it is then not marked as finished.
        """
        try:
            for name, array in self._arrays.items():
                with np.errstate(over="ignore"):  # values too large for single precision become infinite
                    value = np.asarray(row[name], dtype=array.dtype)
                if value.ndim and any(n > m for n, m in zip(value.shape, array.shape[1:], strict=True)):
                    array.resize((array.shape[0], *np.maximum(value.shape, array.shape[1:]).tolist()))
                place: tuple[int | slice, ...] = (index, *(slice(n) for n in value.shape))
                array[place] = value
            self._mark[index] = True
        except OSError as error:
            raise StoreError(
                f"The sweep at {self.path} cannot be written ({error.strerror or error}); its finished runs are kept: "
                "free some space and start it again."
            ) from error


def open_sweep(path: str | os.PathLike[str]) -> xr.Dataset:
    """Open the finished runs of a sweep, also while it is being executed.

    Args:
        path: Path of the store.

    Returns:
        Dataset with dimension ``run``, in the order of the planned runs; see `workbench.schema.sweeps`. Its attribute
        ``n_missing`` is the number of unfinished runs.

    Raises:
        StoreError: If there is no sweep at the path, or its version is newer than that of this workbench.

    Example:
        >>> import workbench as wb
        >>> size, task = {"d_model": 16, "n_layers": 2}, {"name": "random_tokens"}
        >>> runs = wb.sweeps.grid({"tiny": size}, learning_rate=[1e-3, 1e-2], n_steps=2, task=task)
        >>> store = wb.sweeps.SweepStore("sweep.zarr", runs)  # wb.sweeps.run() creates it
        >>> wb.open_sweep("sweep.zarr").attrs["n_missing"]
        2

    See Also:
        `workbench.sweeps.run`: Executes a sweep.
        `workbench.rates.rate_outcomes`: Computes the outcomes of a sweep over learning rates.
    """
    attrs = _attrs_of(as_path(path))
    # At this size dask would be slower.
    with _STORE.reading(path), xr.open_zarr(path, consolidated=False, chunks=None) as data:
        is_done = data[_MARK].values
        data = data.drop_vars(_MARK).isel(run=is_done).load()
    data = data.set_coords(list(SETTINGS))
    kept = {name: value for name, value in attrs.items() if name not in ("kind", "design")}
    for name, variable in data.variables.items():
        if variable.dtype.kind not in "fcib":
            data[name] = (variable.dims, np.array(variable.values.tolist(), dtype=str), variable.attrs)
    data = data.drop_encoding()
    data.attrs = kept | {"n_missing": int((~is_done).sum())}
    return data


def _lay_out(path: Path, runs: Sequence[RunSettings]) -> None:
    """Create a store in which no row is finished: arrays have their full length, and the settings are filled in."""
    import zarr

    designed = [run.describe() for run in runs]
    group = zarr.create_group(path)
    extents = dict.fromkeys(("layer", "mode", "window", "evaluation"), 1)
    for name, rule in {**SETTINGS, **MEASURES, **OUTCOMES, **CURVES}.items():
        shape = tuple(len(runs) if dim == "run" else extents[dim] for dim in rule.dims)
        chunks = tuple(min(_ROWS_PER_CHUNK, len(runs)) if dim == "run" else 64 for dim in rule.dims)
        dtype = dtype_of(name, rule.kind)
        array = group.create_array(
            name,
            shape=shape,
            chunks=chunks,
            dtype="string" if dtype is np.str_ else dtype,
            fill_value={"f": np.nan, "c": np.nan, "i": 0, "b": False, "U": ""}[rule.kind],
            attributes=dict(rule.attrs),
            dimension_names=rule.dims,
        )
        if name in designed[0]:
            array[:] = np.array([row[name] for row in designed], dtype=array.dtype)
    group.create_array(
        _MARK, shape=(len(runs),), chunks=(len(runs),), dtype=bool, fill_value=False, dimension_names=("run",)
    )
    group.attrs.update(
        {
            "kind": _KIND,
            "sweep_version": SWEEP_VERSION,
            "design": [json.dumps(run.as_dict(), sort_keys=True) for run in runs],
            "versions": versions(),
        }
    )


def _attrs_of(path: Path) -> dict[str, Any]:
    """Return the attributes of the store of a sweep."""
    with _STORE.reading(path):
        attrs: dict[str, Any] = dict(_STORE.json(path / "zarr.json")["attributes"])
        if attrs["kind"] != _KIND:
            raise ValueError(f"its kind is {attrs['kind']!r}")
    if attrs["sweep_version"] > SWEEP_VERSION:
        raise StoreError(
            f"The sweep at {path} has version {attrs['sweep_version']}, but this workbench reads versions up to "
            f"{SWEEP_VERSION}; update the workbench."
        )
    return attrs


def _check_design(path: Path, runs: Sequence[RunSettings]) -> None:
    """Raise StoreError if the path holds something else, or a sweep of other runs."""
    recorded = _attrs_of(path)["design"]
    planned = [json.dumps(run.as_dict(), sort_keys=True) for run in runs]
    if recorded == planned:
        return
    advice = "pass the same runs, choose another path, or pass overwrite=True"
    if len(recorded) != len(planned):
        raise StoreError(f"The sweep at {path} has {len(recorded)} runs instead of {len(planned)}; {advice}.")
    index = next(i for i, (old, new) in enumerate(zip(recorded, planned, strict=True)) if old != new)
    before, now = json.loads(recorded[index]), json.loads(planned[index])
    name, old, new = first_difference(before, now) or ("settings", before, now)
    raise StoreError(f"The sweep at {path} has other runs: in run {index}, {name} is {old} instead of {new}; {advice}.")


#: Steps from which the predictors of RKSP Table 2 are computed.
_GRAD_NORM_STEP, _SPIKE_STEPS = 100, 500
#: A loss is a spike if it exceeds the mean of the preceding window by this many standard deviations. The paper states
#: no rule; with 3 deviations, noise alone causes about one spike in a thousand steps.
_SPIKE_WINDOW, _SPIKE_DEVIATIONS = 20, 3.0
#: Number of token states of the held-out examples.
N_HELD_OUT = 4096


def make_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a new model, train it, and return its row.

    The computation uses one thread, so the same settings yield the same row on every worker of one machine type.

    Args:
        settings: Settings, as returned by `RunSettings.as_dict`.

    Returns:
        The values of the row by name, as defined in `workbench.schema.sweeps`.

    Example:
        >>> import workbench as wb
        >>> task = {"name": "random_tokens", "length": 8, "vocab_size": 16, "batch_size": 4}
        >>> model = {"d_model": 16, "n_layers": 2, "n_heads": 2}
        >>> runs = wb.sweeps.grid({"tiny": model}, learning_rate=[0.001], n_steps=2, task=task, n_snapshots=64)
        >>> row = wb.sweeps.make_run(runs[0].as_dict())
        >>> row["has_diverged"]
        False

    See Also:
        `workbench.sweeps.run`: Executes many runs in parallel.
    """
    start = time.monotonic()
    run = RunSettings.from_dict(settings)
    plan = run.plan()
    with _one_thread():
        model, task = run.make_model(), run.make_task()
        is_measured = run.n_snapshots > 0
        row = measure_row(
            model, task, plan, n_snapshots=run.n_snapshots, takes_gradients=is_measured, runs_pilot=is_measured
        )
        training: dict[str, Any] = {name: getattr(plan, name) for name in settings["training"]}
        training |= {"optimizer_options": plan.optimizer_options, "seed": run.seed}
        records, evaluations = [], []
        for record in train(model, task, kss=run.make_kss(), **training):
            records.append(record)
            is_due = run.n_evaluations and not (record.step + 1) % (plan.n_steps // run.n_evaluations)
            if is_due and math.isfinite(record.loss):
                evaluations.append((record.step + 1, held_out_loss(model, task)))
        trivial = trivial_loss(task) if run.n_evaluations else math.nan
    row |= run.describe() | outcome(records) | loss_curves(records, evaluations) | {"trivial_loss": trivial}
    return row | {"seconds": time.monotonic() - start}


def outcome(records: list[StepRecord]) -> dict[str, Any]:
    """Return the outcome of a run, with the names of ``schema.sweeps.OUTCOMES``, without the duration."""
    loss = np.array([record.loss for record in records])
    grad_norm = np.array([record.grad_norm for record in records])
    last, diverged = records[-1], next((record for record in records if record.diverged), None)
    n_last = max(1, len(records) // 8)
    grad_norm = np.where(np.isnan(grad_norm), np.inf, grad_norm)
    known = grad_norm[1 : _GRAD_NORM_STEP + 1]
    with np.errstate(invalid="ignore", over="ignore"):
        variance = float(np.var(known)) if len(known) and np.isfinite(known).all() else math.inf
    return {
        "grad_norm_step_100": float(grad_norm[min(_GRAD_NORM_STEP, len(records) - 1)]),
        "grad_norm_variance": variance,
        "n_loss_spikes": count_spikes(loss[: _SPIKE_STEPS + 1]),
        "has_diverged": diverged is not None,
        "cause": "" if diverged is None else diverged.cause,
        "divergence_step": math.nan if diverged is None else float(diverged.step),
        "final_loss": last.loss if math.isfinite(last.loss) else math.nan,
        "accuracy": math.nan
        if diverged is not None
        else float(np.mean([record.accuracy for record in records[-n_last:]])),
    }


def loss_curves(records: list[StepRecord], evaluations: list[tuple[int, float]]) -> dict[str, np.ndarray]:
    """Return the losses along a run by name in ``schema.sweeps.CURVES``; infinite where not finite."""
    losses = np.array([record.loss for record in records])
    n_windows = -(-len(losses) // LOSS_WINDOW)
    windows = [losses[i * LOSS_WINDOW : (i + 1) * LOSS_WINDOW].mean() for i in range(n_windows)]
    steps, held_out = np.array(evaluations, dtype=float).T if evaluations else np.full((2, 1), math.nan)
    training = np.array(windows, dtype=float)
    return {
        "training_loss": np.where(np.isfinite(training), training, np.inf),
        "held_out_loss": np.where(np.isfinite(held_out) | np.isnan(steps), held_out, np.inf),
        "evaluation_step": steps,
    }


@torch.no_grad()
def held_out_loss(model: nn.Module, task: SeededTask) -> float:
    """Return the loss on held-out examples of a task in eval mode, in nats."""
    inputs, targets = task.held_out(N_HELD_OUT)
    with eval_mode(model):
        output = call_model(model, inputs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return float(token_loss(logits, targets))


def trivial_loss(task: SeededTask) -> float:
    """Return the held-out loss of the predictor that knows only the frequencies of the training targets, in nats."""
    _, targets = task.held_out(N_HELD_OUT)
    return frequency_loss(task, targets)


def count_spikes(loss: np.ndarray) -> int:
    """Count steps whose loss exceeds the mean of the previous 20 by three deviations (RKSP leaves spikes undefined)."""
    loss = np.asarray(loss, dtype=float)
    if not len(loss) > _SPIKE_WINDOW:
        return int(np.count_nonzero(~np.isfinite(loss)))
    before = np.lib.stride_tricks.sliding_window_view(loss, _SPIKE_WINDOW)[:-1]
    now = loss[_SPIKE_WINDOW:]
    with np.errstate(invalid="ignore", over="ignore"):
        is_high = now > before.mean(-1) + _SPIKE_DEVIATIONS * before.std(-1)
    return int(np.count_nonzero(is_high | ~np.isfinite(now)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread within the ``with`` block."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(n_threads)


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
    if not runs:
        raise OptionError("The sweep has no runs; create some with wb.sweeps.grid(...).")
    if n_workers is not None and scheduler is not None:
        raise OptionError("n_workers= cannot be combined with scheduler=, whose cluster has its own workers; omit one.")
    seen: dict[str, int] = {}
    for i, run in enumerate(runs):
        if (first := seen.setdefault(run.identity, i)) != i:
            raise OptionError(f"Runs {first} and {i} of the sweep are the same; give each run its own seed.")
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
