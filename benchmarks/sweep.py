"""Measure the throughput of sweeps with one and two workers, and the time to open a finished sweep.

Call: python -m benchmarks.sweep [--rounds 4]; writes benchmarks/sweep.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import zarr

import workbench as wb
from benchmarks.report import write_report
from workbench.io.provenance import versions

N_RUNS = 8
TASK = {"name": "associative_recall", "length": 16, "vocab_size": 64, "n_pairs": 3, "batch_size": 16}
#: Settings of the recorded sweep; no run diverges, so that all take equally long.
DESIGN = {
    "task": TASK, "n_steps": 120, "d_model": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 64, "max_length": 16,
    "learning_rate": [1e-3], "optimizer_options": [{"fused": True}],
}  # fmt: skip
#: Number of runs of the finished sweep that a new process opens.
N_FINISHED = 2000
FINISHED = """
import time, sys
begin = time.perf_counter()
import xarray, zarr, workbench as wb
wb.sweeps
start = time.perf_counter()
runs = wb.sweeps.grid({"Pre-LN": {"norm": "pre_ln"}}, learning_rate=[1e-3], n_steps=1, seed=range(%d), task=%r)
sweep = wb.sweeps.run(runs, sys.argv[1], progress=False)
assert sweep.sizes["run"] == %d
print(start - begin, time.perf_counter() - start)
"""


def throughput(n_rounds: int, folder: Path) -> dict[int, list[float]]:
    """Return runs per second with one and two workers in each round; the running clusters alternate."""
    from distributed import Client, LocalCluster

    found: dict[int, list[float]] = {1: [], 2: []}
    options = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0", "silence_logs": "ERROR"}
    with LocalCluster(n_workers=1, **options) as one, LocalCluster(n_workers=2, **options) as two:
        for number in range(n_rounds + 1):
            for n_workers, cluster in ((1, one), (2, two)):
                seeds = range(number * N_RUNS, (number + 1) * N_RUNS)
                runs = wb.sweeps.grid({"Pre-LN": {"norm": "pre_ln"}}, seed=seeds, **DESIGN)
                with Client(cluster, set_as_default=False) as client:
                    start = time.perf_counter()
                    wb.sweeps.run(runs, folder / f"{n_workers}-{number}.zarr", scheduler=client, progress=False)
                    if number:  # the first round is a warm-up with the imports of the workers
                        found[n_workers].append(N_RUNS / (time.perf_counter() - start))
    return found


def independent(n_processes: int, seconds: float = 6.0) -> float:
    """Return the training steps per second of independent processes together: the upper limit of this machine."""
    with get_context("spawn").Pool(n_processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pool.map(_steps, [2.0] * n_processes)  # imports
        return sum(pool.map(_steps, [seconds] * n_processes, chunksize=1))


def _steps(seconds: float) -> float:
    """Train for some seconds and return the steps per second."""
    run = wb.sweeps.grid({"Pre-LN": {"norm": "pre_ln"}}, **{**DESIGN, "n_steps": 100_000})[0]
    records = wb.train(run.make_model(), run.make_task(), **run.training)
    next(records)
    start, n_steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(records)
        n_steps += 1
    records.close()
    return n_steps / (time.perf_counter() - start)


def finished(folder: Path) -> tuple[float, float]:
    """Return the seconds that a new process needs for its imports, and to request a finished sweep."""
    task = {"name": "random_tokens"}
    runs = wb.sweeps.grid(
        {"Pre-LN": {"norm": "pre_ln"}}, learning_rate=[1e-3], n_steps=1, seed=range(N_FINISHED), task=task
    )
    small = wb.sweeps.grid(
        {"Pre-LN": {"norm": "pre_ln"}}, learning_rate=[1e-3], n_steps=1, task={**task, "length": 8}, n_snapshots=256
    )
    row = wb.sweeps.make_run(small[0].as_dict())  # the content does not matter, so one row is copied to all
    path = folder / "finished.zarr"
    wb.sweeps.SweepStore(path, runs).write(0, row)
    group = zarr.open_group(path, mode="r+")
    for _, array in group.arrays():
        array[1:] = np.broadcast_to(array[:1], (N_FINISHED - 1, *array.shape[1:]))
    code = FINISHED % (N_FINISHED, task, N_FINISHED)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    imports, call = map(float, done.stdout.split())
    return imports, call


def main() -> None:
    """Run the benchmark, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    n_rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        rates = throughput(n_rounds, Path(folder))
        steps = {n: independent(n) for n in (1, 2)}
        imports, call = finished(Path(folder))
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    rows = [
        f"| sweep, runs per minute | {60 * statistics.median(rates[1]):.1f} | {60 * statistics.median(rates[2]):.1f} "
        f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |",
        f"| independent training loops, steps per second | {steps[1]:.1f} | {steps[2]:.1f} "
        f"| {steps[2] / steps[1]:.2f} |",
    ]
    write_report(
        "sweep",
        "Sweeps",
        f"{n_rounds} rounds of {N_RUNS} runs of 120 steps (Pre-LN, d = 64, L = 4) with one and two worker processes; "
        f"the two running clusters alternate. {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads by default; {versions()}.",
        ("", "1 worker", "2 workers", "ratio"),
        rows,
        f"Opening a finished sweep of {N_FINISHED} runs in a new process takes {call:.1f} s, including its design, "
        f"after {imports:.1f} s of imports.",
    )


if __name__ == "__main__":
    main()
