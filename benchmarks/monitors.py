"""Measure the cost of recorder, probes and alarms per training step by part, and how long a step waits for the store.

Call: python -m benchmarks.monitors [--rows 32]; writes benchmarks/monitors.md. Steps with and without `workbench.watch`
alternate in one process. Costs are those that the watch itself counts, as processor time: the difference of two
complete steps would be smaller than their noise while other programs run.
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
from unittest import mock

import numpy as np
import torch

import workbench as wb
from benchmarks.report import write_report
from workbench.callbacks.recorder.options import CADENCE
from workbench.callbacks.recorder.probes import SPECTRA_OF_HEADS
from workbench.io import run_output
from workbench.io.provenance import versions
from workbench.io.run_output import RunOutput
from workbench.io.run_writer import RunWriter

WIDTH, DEPTH, LENGTH = 512, 8, 256
#: Target: largest fraction of a step that all parts together take.
TARGET = 0.02
#: Rows of what is done at every update, by the name of its cost; the others have the cadence of their part.
AT_EVERY_UPDATE = {
    "row": "row of the update, hooks",
    "batch": "contents of the batch, norm of the gradient, size of the update",
    "settings": "settings",
    "alarms": "alarms and evidence from the metrics of the update",
}
#: Rows of a cadence; activations share a pass over the probe with attention, and are counted there.
BY_CADENCE = ("attention", "optimizer", "precision", "reduction", "update")


class LanguageModel(torch.nn.Module):
    """Model that returns its loss, as those of Hugging Face, so that the effect of an update can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wb.zoo.transformer("pre_ln", d_model=WIDTH, n_layers=DEPTH, n_heads=8, max_length=LENGTH, seed=0)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits."""
        logits = self.inner(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


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
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(run_output, "stopwatch", time.process_time),
    ):
        warnings.simplefilter("ignore")  # windows of one step are too short for results, but cost the same
        every, path = dict.fromkeys((*BY_CADENCE, "activations"), 1), Path(folder, "a.zarr")
        with wb.watch(models[1], optimizers[1], store=path, every=every, budget=None, shows=False) as watch:
            without = []
            for _ in range(n_pairs + 1):  # the first measurements, which cost more, do not count
                batch = torch.randint(0, 256, (n_rows, LENGTH), generator=generator)
                without.append(step_seconds(models[0], optimizers[0], batch))
                step_seconds(models[1], optimizers[1], batch)
            cost = watch.cost
    assert cost is not None
    return statistics.median(without[1:]), {name: part.seconds for name, part in cost.parts.items()}


def table_rows(step: float, seconds: dict[str, float], writer: float) -> list[str]:
    """Return a row for each part, and one for their sum.

    Args:
        step: Time of a step without the recorder.
        seconds: Times by name.
        writer: Time of writing per step.
    """
    costs = [(row, 1, seconds.get(name, 0.0)) for name, row in AT_EVERY_UPDATE.items()]
    costs.append(("the store", 1, writer))
    names = {"attention": "attention and activations, with their pass over the probe"}
    costs += [(names.get(part, part), CADENCE[part] or 0, seconds.get(part, 0.0)) for part in BY_CADENCE]
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
        "measures every part, whose cost (`watched.cost`) is then divided by the default cadence of the part. On small "
        "or fast models the budget makes cadences longer (`foreign.md`). The table shows medians of processor time, "
        "because other programs ran on the machine. Checks "
        "that an alarm triggers are not included. The store receives 50 scalars per step and four arrays of "
        f"{DEPTH} x 8 x 5 every 10 steps, in blocks of 200 rows. Generated by `make bench` on {os.cpu_count()} cores "
        f"({platform.machine()}) with {versions()}."
    )
    columns = ("part", "cadence", "processor time of one", "fraction of a step", "target")
    write_report("monitors", "Cost of recorder, probes and alarms", about, columns, rows)


if __name__ == "__main__":
    main()
