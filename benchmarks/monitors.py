"""What recorder, probes and alarms cost a training step, part by part, and whether writing ever makes a step wait.

Call: python -m benchmarks.monitors [--rows 32]; writes benchmarks/monitors.md. Steps with and without `workbench.watch`
take turns in one process. The time is that of the processor (`time.process_time`), taken within the recorder's own
functions: the difference of two whole steps would drown in their noise where other programs run too.
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
from workbench.callbacks.watching.watch import Watch
from workbench.io.background_writer import BackgroundWriter, Part
from workbench.io.provenance import versions
from workbench.io.run_output import RunOutput
from workbench.io.run_writer import RunWriter
from workbench.probes.gradient_projections import GradientProjections

WIDTH, DEPTH, LENGTH = 512, 8, 256
#: Share of a step that all parts together may take.
WANTED = 0.02
#: Row of the table -> names under which its time is taken; at every update, and by the cadence of a part.
AT_EVERY_UPDATE = {
    "contents of the batch": ("batch",),
    "norm of the gradient": ("monitors",),
    "size of the update, on a sample": ("sample",),
    "settings": ("settings",),
    "alarms and evidence of the numbers of the update": ("alarms monitors",),
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
#: Function, and the name under which its time is taken.
TIMED: tuple[tuple[type, str, str | Callable[..., str]], ...] = (
    (AttachedRecorder, "_guarded", lambda recorder, part, action: part),
    (AttachedRecorder, "_before_step", "hooks"),
    (AttachedRecorder, "_after_step", "hooks"),
    (BatchWatch, "_enter", "batch"),
    (BatchWatch, "_leave", "batch"),
    (GradientProjections, "_see", "reduction"),
    (Alarms, "observe", lambda alarms, observation: f"alarms {observation.part}"),
    (Alarms, "evidence_row", "alarms monitors"),
    (RunOutput, "add", "store"),
    (Watch, "_hear", "status"),
)


class LanguageModel(torch.nn.Module):
    """Returns its loss, as models of Hugging Face do, so that the effect of an update can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wb.zoo.transformer("pre_ln", d_model=WIDTH, n_layers=DEPTH, n_heads=8, max_length=LENGTH, seed=0)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss and the logits."""
        logits = self.inner(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OwnTimes:
    """Processor time of functions, without that of other timed functions which they call.

    Attributes:
        seconds: By name, since it was cleared.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def timed(self, function: Callable[..., Any], name: str | Callable[..., str]) -> Callable[..., Any]:
        """The function, timed."""

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
    """The functions of `TIMED` are timed; their times by name."""
    times, before = OwnTimes(), [vars(owner)[function] for owner, function, _ in TIMED]
    for (owner, function, name), original in zip(TIMED, before, strict=True):
        setattr(owner, function, times.timed(original, name))
    try:
        yield times.seconds
    finally:
        for (owner, function, _), original in zip(TIMED, before, strict=True):
            setattr(owner, function, original)


def step_seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Processor time of one training step, in seconds."""
    start = time.process_time()
    model(batch, batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start


def own_seconds(n_rows: int, n_pairs: int) -> tuple[float, dict[str, float]]:
    """Medians of a plain step, and of what each part takes when it is measured, in seconds."""
    models = [LanguageModel() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    generator = torch.Generator().manual_seed(0)
    plain, parts = [], []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, all_timed() as seconds:
        warnings.simplefilter("ignore")  # a window of one step is too short to mean anything; it costs as much
        every = dict.fromkeys(BY_CADENCE, 1)
        with wb.watch(models[1], optimizers[1], store=Path(folder, "a.zarr"), every=every, shows=False):
            for i in range(n_pairs + 1):
                batch = torch.randint(0, 256, (n_rows, LENGTH), generator=generator)
                took = step_seconds(models[0], optimizers[0], batch)
                seconds.clear()
                step_seconds(models[1], optimizers[1], batch)
                if i:  # in the first step the model is read, and buffers are made
                    plain.append(took)
                    parts.append(dict(seconds))
    names = sorted({name for each in parts for name in each})
    return statistics.median(plain), {name: statistics.median(each.get(name, 0.0) for each in parts) for name in names}


def table_rows(step: float, seconds: dict[str, float], writer: float) -> list[str]:
    """A row for each part, and the sum of all.

    Args:
        step: Time of a plain step.
        seconds: Times by name.
        writer: Time of the thread that writes, for each step.
    """
    costs = [(name, 1, sum(seconds.get(key, 0.0) for key in keys)) for name, keys in AT_EVERY_UPDATE.items()]
    costs.append(("the store, in a thread of its own", 1, writer))
    # Attention and activations share a pass over the examples; it is counted as if both needed it each time.
    costs.append(("pass over the recorder's examples", CADENCE["attention"] or 0, seconds.get("probe", 0.0)))
    costs += [(part, CADENCE[part] or 0, sum(seconds.get(k, 0.0) for k in keys)) for part, keys in BY_CADENCE.items()]
    rows = [
        f"| {name} | {'every update' if every == 1 else f'every {every} updates'} | {1e3 * cost:.1f} ms | "
        f"{cost / every / step:.3%} |  |"
        for name, every, cost in costs
    ]
    total = sum(cost / every for _, every, cost in costs)
    wanted = f"at most {WANTED:.0%}"
    return [*rows, f"| **all together** |  | {1e3 * total:.1f} ms a step | **{total / step:.2%}** | {wanted} |"]


def writing(n_steps: int) -> tuple[np.ndarray, float]:
    """Milliseconds that each step waits to hand over its rows while blocks are written; the writer's seconds a step."""
    scalars = {f"scalar_{i}": 1.0 for i in range(50)}
    dims = {f"matrix_{i}": ("layer", "head", "term") for i in range(4)}
    matrix = np.zeros((DEPTH, 8, 5))
    waits = []
    with tempfile.TemporaryDirectory() as folder:
        writer = BackgroundWriter(RunWriter(Path(folder) / "a.zarr", {}), rows_per_block=50)
        writer.declare(Part.of_scalars("monitors", scalars))
        writer.declare(Part("attention", dims))
        began = time.process_time() - time.thread_time()
        for step in range(n_steps):
            start = time.perf_counter()
            writer.add("monitors", step, scalars)
            if (step + 1) % 10 == 0:
                writer.add("attention", step, dict.fromkeys(dims, matrix))
            waits.append(1e3 * (time.perf_counter() - start))
            time.sleep(0.005)  # the step itself
        writer.close()
        others = time.process_time() - time.thread_time() - began
    return np.array(waits), others / n_steps


def main() -> None:
    """Measure, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    step, seconds = own_seconds(args.rows, args.pairs)
    waits, writer = writing(args.steps)
    rows = table_rows(step, seconds, writer)
    rows.append(
        f"| a step waits for the store | every update | {np.median(waits):.2f} ms (99 %: "
        f"{np.quantile(waits, 0.99):.2f} ms) |  | under 5 ms |"
    )
    about = (
        f"`wb.watch` on a Pre-LN transformer, d = {WIDTH}, L = {DEPTH}, 8 heads, batches of {args.rows} x {LENGTH} "
        f"tokens, float32, AdamW, {torch.get_num_threads()} thread; a plain step takes {step:.1f} s of the processor. "
        f"Watched and plain steps take turns ({args.pairs} of each); each watched one measures every part, whose time "
        "within the recorder's own functions is then divided by its default cadence. Medians of processor time, not of "
        "the clock, as the machine had other work too. "
        "Checks that an alarm asks for come on top. Writing: 50 scalars a step and four arrays of "
        f"{DEPTH} x 8 x 5 every 10, in blocks of 50. Made by `make bench` on {os.cpu_count()} cores "
        f"({platform.machine()}), {versions()}."
    )
    columns = ("part", "how often", "processor time of one", "share of a step", "wanted")
    write_report("monitors", "Cost of recorder, probes and alarms", about, columns, rows)


if __name__ == "__main__":
    main()
