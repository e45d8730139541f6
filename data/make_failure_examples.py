"""Record the four complete runs of notebook 09 in data/failures/: three failed runs, and one without a fault.

python data/make_failure_examples.py
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xarray as xr

import workbench as wb
from workbench.course.failure_runs import N_STEPS, BuiltRun, Plant, plant_in_training
from workbench.diagnosis import find_failure, read_record
from workbench.koopman.spectra import RankWarning

OUT = Path(__file__).parent / "failures"
CADENCE = {"attention": 20, "router": 10, "optimizer": 5, "activations": 5}


@dataclass(frozen=True)
class Example:
    """A run: its initialization, peak learning rate, seed and fault."""

    initialization: str
    rate: float
    seed: int
    plant: Plant | None


EXAMPLES = {
    "architecture": Example("xavier", 0.004, 31, Plant("architecture", "large init", 4.5, 0, 1)),
    "healthy": Example("normal", 0.002, 34, None),
    "hyperparameter": Example("xavier", 0.004, 32, Plant("schedule", "jump", 15, 110)),
    "precision": Example("normal", 0.002, 33, Plant("precision", "attention bits", 8, 30)),
}


def build(example: Example) -> BuiltRun:
    """Return model, task, settings and faults of an example, all newly created."""
    model = wb.zoo.transformer(
        norm="none", d_model=20, n_layers=4, n_heads=4, vocab_size=10, max_length=5,
        initialization=example.initialization, seed=example.seed,
    )  # fmt: skip
    task = wb.tasks.associative_recall(length=5, vocab_size=10, n_pairs=2, batch_size=32, seed=example.seed)
    plan = {
        "learning_rate": example.rate, "warmup": 20, "clip_norm": 1.0, "n_steps": N_STEPS, "seed": example.seed,
        "optimizer_options": {"betas": (0.9, 0.95), "fused": True},
    }  # fmt: skip
    made = BuiltRun(model, task, plan)
    if example.plant is not None:
        plant_in_training(made, example.plant)
    return made


def record(name: str, work: Path) -> str:
    """Record a complete run with the last checkpoint before its failure, and remove the fault from the record."""
    made = build(EXAMPLES[name])
    places = OUT / f"{name}.checkpoints"
    shutil.rmtree(places, ignore_errors=True)
    wb.save_checkpoint(made.model, places / "step-00000000")
    store = work / f"{name}.zarr"
    *_, last = wb.train(
        made.model, made.task, store=store, faults=made.faults,
        recorder=wb.Recorder(every=CADENCE, budget=None, n_probe_tokens=64),
        spectra_every=100, checkpoint_every=10, profile_options={"n_snapshots": 256, "n_workers": 1}, **made.plan,
    )  # fmt: skip
    run = wb.open_run(store).load()
    failure = find_failure(read_record(run))
    found = {int(place.name[5:]): place for place in store.with_suffix(".checkpoints").glob("step-*")}
    before = max((step for step in found if step <= failure.step), default=0)
    if before and EXAMPLES[name].plant is not None:  # one checkpoint is enough
        shutil.rmtree(places)
        shutil.copytree(found[before], places / found[before].name)
    wb.export_netcdf(without_answer(run), OUT / f"{name}.nc", overwrite=True)
    return f"{name}: {last.cause or 'not diverged'} at {last.step}, failure from {failure.step}, checkpoint {before}"


def without_answer(run: xr.DataTree) -> xr.DataTree:
    """Return the run without the records of the injected fault."""
    events = run["events"].to_dataset()
    run["events"] = xr.DataTree(events.isel(event=events["kind"].values != "fault"))
    configuration: dict[str, Any] = json.loads(run.attrs["configuration"])
    configuration.pop("faults", None)
    run.attrs["configuration"] = json.dumps(configuration)
    return run


def main() -> None:
    """Record all examples."""
    OUT.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # the rank is recorded
        for name in EXAMPLES:
            print(record(name, Path(work)), flush=True)


if __name__ == "__main__":
    main()
