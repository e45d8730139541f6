"""Measure the list of 1,000 runs, here, over ssh and in a bucket, and a timeline of 1,024 heads over 100,000 steps.

Call: python -m benchmarks.many_runs; writes benchmarks/many_runs.md. Needs sshd, moto's server, s3fs and paramiko. The
runs are made up with seed 0.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from benchmarks.report import write_report
from tests.io.services import bucket, ssh_server
from workbench.io.far_places import FarPlace
from workbench.io.provenance import versions
from workbench.io.run_index import ALL, INDEX, entry_path, far_entries, stamp_of
from workbench.io.run_output import RunOutput
from workbench.schema.events import Event
from workbench.training.recording import new_run

N_RUNS, N_DUMB, N_RUNNING = 1000, 30, 10
N_STEPS, N_LAYERS, N_HEADS = 100_000, 32, 32


def main() -> None:
    """Run the benchmark, print the table and save it."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [*of_lists(folder), *of_timeline(folder)]
    about = (
        f"{N_RUNS:,} runs of 200 steps in one folder, of which {N_RUNNING} say that they are running, each with an "
        f"alarm and a cause ({N_DUMB} written, the others copied); the index is warm, as runs leave it. Beside it the "
        f"simple way: `open_run` of each store and its events, measured on {N_DUMB} stores and multiplied. ssh and S3 "
        "(moto) are servers on the same machine, so the time of a link is not in it. Then one run with "
        f"{N_STEPS:,} steps of a quantity of {N_LAYERS} x {N_HEADS} layers and heads. {os.cpu_count()} cores "
        f"({platform.machine()}), load average {os.getloadavg()[0]:.1f}; the whole took "
        f"{time.perf_counter() - begun:.0f} s. Written by `python -m benchmarks.many_runs` with seed 0 and "
        f"{versions()}."
    )
    write_report("many_runs", "Many runs, and a large one", about, ("what", "time", "beside it"), rows)


def of_lists(folder: Path) -> list[str]:
    """Return the rows of the lists."""
    home = folder / "runs"
    home.mkdir()
    for i in range(N_DUMB):
        make_run(home / f"run_{i:04d}.zarr", i)
    for i in range(N_DUMB, N_RUNS):
        path, source = home / f"run_{i:04d}.zarr", home / f"run_{i % (N_DUMB - N_RUNNING) + N_RUNNING:04d}.zarr"
        shutil.copytree(source, path)
        entry = json.loads(entry_path(source).read_text()) | {"stamp": stamp_of(path)}
        entry_path(path).write_text(json.dumps(entry))
    rows = [row_of("list here", str(home), at_most=2.0)]
    for path in home.glob(f"{INDEX}/*"):
        path.rename(path.with_suffix(".kept"))
    begun = time.perf_counter()
    wb.list_runs(home)
    rows.append(f"| list here, the index is lost and is made again | **{time.perf_counter() - begun:.2f} s** | |")
    patch = pytest.MonkeyPatch()
    with ssh_server(folder, patch):
        url = f"ssh://far{home}"
        write_all(FarPlace(url))
        rows.append(row_of("list over ssh", url, at_most=2.0))
    patch.undo()
    with bucket(patch):
        place = FarPlace("s3://runs/all")
        files = [*home.glob("run_00[0-2]?.zarr/**/*"), *home.glob("*/zarr.json"), *home.glob(f"{INDEX}/*.json")]
        with ThreadPoolExecutor(8) as pool:
            keys = {str(file.relative_to(home)): file for file in files if file.is_file() and file.name != ALL}
            list(pool.map(lambda key: place.write(keys[key].read_bytes(), key), keys))
        time.sleep(3)
        write_all(place)
        rows.append(row_of("list in a bucket", place.url, at_most=2.0))
    patch.undo()
    return rows


def make_run(path: Path, i: int) -> None:
    """Write a small run with an alarm and a cause, or one that was never closed."""
    rng = np.random.default_rng([0, i])
    output = RunOutput(new_run(path, {"model": {"name": "Made up"}}, overwrite=False))
    for step, noise in enumerate(rng.normal(size=200)):
        output.add("monitors", step, {"loss": 5 - step / 100 + 0.1 * noise, "grad_norm": 1.0, "learning_rate": 1e-3})
    at = int(rng.integers(50, 150))
    output.event(Event(at, "alarm", "grad_norm", 1.5, "The gradient norm rose."))
    output.event(Event(at, "attribution", "learning_rate", 0.9, "It was raised."))
    output.close(state="running" if i < N_RUNNING else "finished")
    if i < N_RUNNING:  # as the process that copies it says
        entry = json.loads(entry_path(path).read_text()) | {"copier": {"token": "", "heard": time.time() + 3000}}
        entry_path(path).write_text(json.dumps(entry))


def write_all(folder: FarPlace) -> None:
    """Write the file of all entries, as a run that ends does."""
    entries: Any = far_entries(folder)
    folder.write(json.dumps(entries[ALL]).encode(), f"{INDEX}/{ALL}")


def row_of(what: str, folder: str, *, at_most: float) -> str:
    """Return the row of a list, with the simple way beside it."""
    times = [timed(lambda: wb.list_runs(folder)) for _ in range(3)]
    found = wb.list_runs(folder)
    assert len(found) == N_RUNS
    assert (found["cause"] == "learning rate").all()
    simple = timed(lambda: [read(f"{folder}/run_{i:04d}.zarr") for i in range(N_DUMB)]) * N_RUNS / N_DUMB
    row = f"| {what} (asked: {at_most:g} s) | **{statistics.median(times):.2f} s** | {simple:.0f} s |"
    print(row, flush=True)
    return row


def read(path: str) -> None:
    """Read the state and the first alarm of a run in the simple way."""
    run = wb.open_run(path)
    assert "alarm" in run["events"]["kind"].values


def timed(act: Callable[[], Any]) -> float:
    """Return the seconds that a function takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def of_timeline(folder: Path) -> list[str]:
    """Return the rows of a timeline of a large run."""
    path, rng = folder / "large.zarr", np.random.default_rng(0)
    output = RunOutput(new_run(path, {"model": {"name": "Made up"}}, overwrite=False), rows_per_block=2000)
    coords = {"layer": np.arange(N_LAYERS), "head": np.arange(N_HEADS)}
    for step in range(N_STEPS):
        output.add("monitors", step, {"loss": 5 - step / N_STEPS, "grad_norm": 1.0, "learning_rate": 1e-3})
        if not step % 1000:
            some = rng.normal(size=(1000, N_LAYERS, N_HEADS)).astype(np.float16).astype(float)
        output.add("attention", step, {"attention_entropy": some[step % 1000]}, coords)
    output.close(state="finished")
    rows = []

    def row(what: str, act: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        found = act()
        rows.append(f"| large run: {what} | **{time.perf_counter() - begun:.2f} s** | |")
        print(rows[-1], flush=True)
        return found

    run = row("open", lambda: wb.open_run(path))
    signals = ["loss", "attention_entropy"]
    timeline = row("timeline, first paint", lambda: painted(wb.widgets.Timeline(str(path), signals=signals)))
    zooms = [timed(lambda i=i: zoomed(timeline, i)) for i in range(20)]
    rows.append(f"| large run: one zoom or pan in the kernel | **{1e3 * statistics.median(zooms):.0f} ms** | |")
    row("map of layers and heads at a step", lambda: timeline.select(50_000, signal="attention_entropy"))
    timeline.close()
    monitors = xr.DataTree.from_dict({"/monitors": run["monitors"].to_dataset()})
    row("replay of the alarms, loss and gradient norm", lambda: wb.alarms.replay(monitors, wb.Alarms()))
    row("replay of the alarms, all 1,024 heads", lambda: wb.alarms.replay(run, wb.Alarms()))
    return rows


def painted(timeline: Any) -> Any:
    """Return a timeline after it has made what the page draws first."""
    timeline.canvas.state()
    return timeline


def zoomed(timeline: Any, i: int) -> None:
    """Make what the page draws after a zoom."""
    timeline.view = (300.0 * i, N_STEPS - 700.0 * i)
    timeline.canvas.state()


if __name__ == "__main__":
    main()
