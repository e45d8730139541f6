"""What it costs a training run to be recorded, as a ratio measured side by side in one process.

Call: python -m benchmarks.recording [--steps 400]; writes benchmarks/recording.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import workbench as wb
from benchmarks.report import write_report
from workbench.io.provenance import versions

#: Steps between spectra; runs take turns in chunks of so many.
EVERY = 50


def begin(n_steps: int, **recording: object) -> Iterator[object]:
    """A fresh run on the paper's associative recall at d = 128, L = 4."""
    model = wb.zoo.transformer("pre_ln", d_model=128, n_layers=4, n_heads=4, seed=0)
    return wb.train(model, wb.tasks.associative_recall(batch_size=32), n_steps=n_steps, **recording)


def seconds_of_each(runs: dict[str, Iterator[object]], n_steps: int) -> dict[str, float]:
    """Wall time of each run over ``n_steps``; they take turns, so that a busy moment hits all of them."""
    seconds = dict.fromkeys(runs, 0.0)
    for chunk in range(n_steps // EVERY + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(EVERY):
                next(run)
            if chunk:  # the first chunk warms up: imports, the anatomy, the store's beginning
                seconds[name] += time.perf_counter() - start
    return seconds


def main() -> None:
    """Measure, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    n_steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "nothing": {},
            "monitors": {"store": Path(folder) / "monitors.zarr"},
            "monitors and spectra": {"store": Path(folder) / "spectra.zarr", "spectra_every": EVERY},
        }
        total = n_steps + EVERY + 1
        runs = {name: begin(total, **options) for name, options in kinds.items()}
        seconds = seconds_of_each(runs, n_steps)
    plain = seconds["nothing"]
    rows = []
    for name, wanted in (("monitors", "measured"), ("monitors and spectra", "under +10 %")):
        a_step = 1e3 * seconds[name] / n_steps
        rows.append(f"| {name} | {wanted} | **{seconds[name] / plain - 1:+.1%}** | {a_step:.1f} ms a step |")
    about = (
        f"Pre-LN, d = 128, L = 4, associative recall (32 sequences of 64 tokens), {n_steps} steps; spectra of 2,048 "
        f"states every {EVERY} steps. Runs take turns in one process; without recording a step takes "
        f"{1e3 * plain / n_steps:.1f} ms. Made by `make bench` on {os.cpu_count()} cores ({platform.machine()}), "
        f"{versions()}."
    )
    write_report("recording", "Cost of recording", about, ("recorded", "wanted", "measured", "time"), rows)


if __name__ == "__main__":
    main()
