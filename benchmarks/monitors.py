"""Measure the cost of recorder, probes and alarms per training step by part, and how long a step waits for the store.

Call: python -m benchmarks.monitors [--rows 32]; writes benchmarks/monitors.md. Steps with and without `workbench.watch`
alternate in one process. The measured time is processor time (`time.process_time`) within the functions of the
recorder, because the difference of two complete steps would be smaller than their noise while other programs run.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import workbench as wb
from benchmarks.report import write_report
from workbench.callbacks.alarms import Alarms
from workbench.callbacks.recorder.attached import AttachedRecorder
from workbench.callbacks.recorder.batch_watch import BatchWatch
from workbench.callbacks.recorder.options import CADENCE
from workbench.callbacks.recorder.probes import SPECTRA_OF_HEADS
from workbench.callbacks.watch import Watch
from workbench.io.provenance import versions
from workbench.io.run_output import RunOutput
from workbench.io.run_writer import RunWriter
from workbench.probes.gradient_projections import GradientProjections

WIDTH, DEPTH, LENGTH = 512, 8, 256
#: Target: largest fraction of a step that all parts together take.
TARGET = 0.02
#: Names of the timed functions, by row of the table: rows of every update, and rows with the cadence of a part.
AT_EVERY_UPDATE = {
    "contents of the batch": ("batch",),
    "gradient norm": ("monitors",),
    "size of the update, on a sample": ("sample",),
    "settings": ("settings",),
    "alarms and evidence from the metrics of the update": ("alarms monitors",),
    "rows for the store, status, hooks": ("store", "status", "hooks"),
}
BY_CADENCE = {
    "attention": ("attention", "alarms attention"),
    "optimizer": ("optimizer", "alarms optimizer"),
    "activations": ("activations", "alarms activations"),
    "precision": ("precision", "alarms precision"),
    "reduction": ("reduction", "alarms reduction"),
    "update": ("update", "alarms update"),
}
#: Class and method to time, and the name under which the time is counted.
TIMED: tuple[tuple[type, str, str | Callable[..., str]], ...] = (
    (AttachedRecorder, "_guarded", lambda recorder, part, action, **_: part),
    (AttachedRecorder, "_before_update", "hooks"),
    (AttachedRecorder, "_after_step", "hooks"),
    (BatchWatch, "_enter", "batch"),
    (BatchWatch, "_leave", "batch"),
    (BatchWatch, "_arrive", "batch"),
    (GradientProjections, "_see", "reduction"),
    (Alarms, "observe", lambda alarms, observation: f"alarms {observation.part}"),
    (Alarms, "_evidence_row", "alarms monitors"),
    (RunOutput, "add", "store"),
    (Watch, "_take_observation", "status"),
)


class LanguageModel(torch.nn.Module):
    """Model that returns its loss, as those of Hugging Face, so that the effect of an update can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wb.zoo.transformer("pre_ln", d_model=WIDTH, n_layers=DEPTH, n_heads=8, max_length=LENGTH, seed=0)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits."""
        logits = self.inner(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OwnTimes:
    """Processor time of functions, excluding that of the timed functions that they call.

    Attributes:
        seconds: Time by name, since the dict was cleared.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def timed(self, function: Callable[..., Any], name: str | Callable[..., str]) -> Callable[..., Any]:
        """Return the function with its time counted under a name, or under the name returned by a function."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            own = name if isinstance(name, str) else name(*args, **kwargs)
            start = time.process_time()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.process_time() - start
                self.seconds[own] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return run


@contextmanager
def all_timed() -> Iterator[dict[str, float]]:
    """Context in which the functions of `TIMED` are timed; yields their times by name."""
    times, before = OwnTimes(), [vars(owner)[function] for owner, function, _ in TIMED]
    for (owner, function, name), original in zip(TIMED, before, strict=True):
        setattr(owner, function, times.timed(original, name))
    try:
        yield times.seconds
    finally:
        for (owner, function, _), original in zip(TIMED, before, strict=True):
            setattr(owner, function, original)


def step_seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Run one training step and return its processor time in seconds."""
    start = time.process_time()
    model(batch, batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start


def own_seconds(n_rows: int, n_pairs: int) -> tuple[float, dict[str, float]]:
    """Measure steps with and without the recorder, which measures every part at every step.

    Args:
        n_rows: Sequences per batch.
        n_pairs: Number of steps of each kind.

    Returns:
        Median time of a step without the recorder, and of each part by name, in seconds.
    """
    models = [LanguageModel() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    generator = torch.Generator().manual_seed(0)
    without, parts = [], []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, all_timed() as seconds:
        warnings.simplefilter("ignore")  # windows of one step are too short for results, but cost the same
        every = dict.fromkeys(BY_CADENCE, 1)
        with wb.watch(models[1], optimizers[1], store=Path(folder, "a.zarr"), every=every, shows=False):
            for i in range(n_pairs + 1):
                batch = torch.randint(0, 256, (n_rows, LENGTH), generator=generator)
                took = step_seconds(models[0], optimizers[0], batch)
                seconds.clear()
                step_seconds(models[1], optimizers[1], batch)
                if i:  # in the first step the anatomy is read and buffers are allocated
                    without.append(took)
                    parts.append(dict(seconds))
    names = sorted({name for each in parts for name in each})
    return statistics.median(without), {
        name: statistics.median(each.get(name, 0.0) for each in parts) for name in names
    }


def table_rows(step: float, seconds: dict[str, float], writer: float) -> list[str]:
    """Return a row for each part, and one for their sum.

    Args:
        step: Time of a step without the recorder.
        seconds: Times by name.
        writer: Time of writing per step.
    """
    costs = [(name, 1, sum(seconds.get(key, 0.0) for key in keys)) for name, keys in AT_EVERY_UPDATE.items()]
    costs.append(("the store", 1, writer))
    # Attention and activations share a pass over the probe; it is counted for every measurement of attention.
    costs.append(("pass over the probe of the recorder", CADENCE["attention"] or 0, seconds.get("probe", 0.0)))
    costs += [(part, CADENCE[part] or 0, sum(seconds.get(k, 0.0) for k in keys)) for part, keys in BY_CADENCE.items()]
    rows = [
        f"| {name} | {'every update' if every == 1 else f'every {every} updates'} | {1e3 * cost:.1f} ms | "
        f"{cost / every / step:.3%} |  |"
        for name, every, cost in costs
    ]
    total = sum(cost / every for _, every, cost in costs)
    target = f"at most {TARGET:.0%}"
    return [*rows, f"| **total** |  | {1e3 * total:.1f} ms per step | **{total / step:.2%}** | {target} |"]


def writing(n_steps: int) -> tuple[np.ndarray, float]:
    """Return the milliseconds that each step waits for the store, and the seconds of writing per step."""
    scalars = {f"scalar_{i}": 1.0 for i in range(50)}
    matrix = np.zeros((DEPTH, 8, 5))
    arrays = dict.fromkeys(SPECTRA_OF_HEADS, matrix)
    waits = []
    with tempfile.TemporaryDirectory() as folder:
        output = RunOutput(RunWriter(Path(folder) / "a.zarr", {}))
        for step in range(n_steps):
            start = time.perf_counter()
            if (step + 1) % 10 == 0:
                output.add("attention", step, arrays)
            output.add("monitors", step, scalars)
            waits.append(1e3 * (time.perf_counter() - start))
        output.close()
    return np.array(waits), sum(waits) / n_steps / 1e3


def main() -> None:
    """Run the benchmark, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    step, seconds = own_seconds(args.rows, args.pairs)
    waits, writer = writing(args.steps)
    rows = table_rows(step, seconds, writer)
    rows.append(
        f"| wait of a step for the store | every update | {np.median(waits):.2f} ms (a step that writes a block: "
        f"{np.median(np.sort(waits)[-5:]):.0f} ms) |  |  |"
    )
    about = (
        f"`wb.watch` on a Pre-LN transformer, d = {WIDTH}, L = {DEPTH}, 8 heads, batches of {args.rows} x {LENGTH} "
        f"tokens, float32, AdamW, {torch.get_num_threads()} thread; a step without the recorder takes {step:.1f} s of "
        f"processor time. Steps with and without the recorder alternate ({args.pairs} of each); each recorded step "
        "measures every part, and the time within the functions of the recorder is then divided by the default cadence "
        "of the part. The table shows medians of processor time, because other programs ran on the machine. Checks "
        "that an alarm triggers are not included. The store receives 50 scalars per step and four arrays of "
        f"{DEPTH} x 8 x 5 every 10 steps, in blocks of 200 rows. Generated by `make bench` on {os.cpu_count()} cores "
        f"({platform.machine()}) with {versions()}."
    )
    columns = ("part", "cadence", "processor time of one", "fraction of a step", "target")
    write_report("monitors", "Cost of recorder, probes and alarms", about, columns, rows)


if __name__ == "__main__":
    main()
