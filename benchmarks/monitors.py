"""What the monitors of a `workbench.Recorder` cost a training step, and whether writing them ever makes it wait.

Call: python -m benchmarks.monitors [--rows 32]; writes benchmarks/monitors.md. Steps with and without a recorder take
turns in one process, on the same model.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import workbench as wb
from benchmarks.report import write_report
from workbench.io.background_writer import BackgroundWriter, Part
from workbench.io.provenance import versions
from workbench.io.run_writer import RunWriter

WIDTH, DEPTH, LENGTH, DELTA = 512, 8, 256, 10
MECHANISM = ("attention", "router", "optimizer", "activations")


def timed_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> tuple[float, float]:
    """Seconds of one training step, and of its update, around which a recorder looks."""
    start = time.perf_counter()
    logits = model(batch)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
    before = time.perf_counter()
    optimizer.step()
    update = time.perf_counter() - before
    optimizer.zero_grad()
    return time.perf_counter() - start, update


def look_seconds(parts: tuple[str, ...], n_rows: int, n_pairs: int) -> tuple[float, float]:
    """Medians of a plain step and of what an update around which these parts look takes longer, in seconds."""
    model = wb.zoo.transformer("pre_ln", d_model=WIDTH, n_layers=DEPTH, n_heads=8, max_length=LENGTH, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(0, 256, (n_rows, LENGTH), generator=torch.Generator().manual_seed(0))
    every = {part: 1 if part in parts else None for part in (*MECHANISM, "curvature", "spectra")}
    plain, watched = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a window of one step is too short to mean anything; it costs as much
        recorder = wb.Recorder(every=every)
        with recorder.attach(model, optimizer):
            timed_step(model, optimizer, batch)  # the anatomy is read, buffers are made
        for _ in range(n_pairs):
            plain.append(timed_step(model, optimizer, batch))
            with recorder.attach(model, optimizer):
                timed_step(model, optimizer, batch[:1])  # the base point
                watched.append(timed_step(model, optimizer, batch))
    looks = (b - a for (_, a), (_, b) in zip(plain, watched, strict=True))
    return statistics.median(step for step, _ in plain), statistics.median(looks)


def blocked_milliseconds(n_steps: int) -> np.ndarray:
    """How long each step waits to hand over its rows while blocks of them are written all the time."""
    scalars = {f"scalar_{i}": 1.0 for i in range(50)}
    dims = {f"matrix_{i}": ("layer", "head", "term") for i in range(4)}
    matrix = np.zeros((DEPTH, 8, 5))
    waits = []
    with tempfile.TemporaryDirectory() as folder:
        writer = BackgroundWriter(RunWriter(Path(folder) / "a.zarr", {}), rows_per_block=50)
        writer.declare(Part.of_scalars("monitors", scalars))
        writer.declare(Part("attention", dims))
        for step in range(n_steps):
            start = time.perf_counter()
            writer.add("monitors", step, scalars)
            if (step + 1) % DELTA == 0:
                writer.add("attention", step, dict.fromkeys(dims, matrix))
            waits.append(1e3 * (time.perf_counter() - start))
            time.sleep(0.005)  # the step itself
        writer.close()
    return np.array(waits)


def main() -> None:
    """Measure, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    rows = []
    for parts in (MECHANISM, ("attention",)):
        step, look = look_seconds(parts, args.rows, args.pairs)
        name = "all mechanism monitors" if parts == MECHANISM else "updates of queries and keys, logits, entropy"
        cost = look / (DELTA * step)
        wanted = "under +2 %" if parts == MECHANISM else ""
        took = f"{look:.2f} s a look, {step:.1f} s a step"
        rows.append(f"| {name}, every {DELTA} steps | {wanted} | **{cost:+.2%}** | {took} |")
    waits = blocked_milliseconds(args.steps)
    rows.append(
        f"| a step waits for the store | under 5 ms | **{np.median(waits):.2f} ms** (median) | "
        f"{np.quantile(waits, 0.99):.2f} ms at 99 % |"
    )
    about = (
        f"Pre-LN, d = {WIDTH}, L = {DEPTH}, 8 heads, batches of {args.rows} x {LENGTH} tokens, float32, AdamW. A look "
        f"is timed around the update, against the plain update before it, and spread over the {DELTA} steps between "
        f"two looks. Waiting: 50 scalars a step and four arrays of {DEPTH} x 8 x 5 every {DELTA}, while blocks are "
        f"being written. Made by `make bench` on {os.cpu_count()} cores ({platform.machine()}), {versions()}."
    )
    write_report("monitors", "Cost of the monitors", about, ("what", "wanted", "measured", "time"), rows)


if __name__ == "__main__":
    main()
