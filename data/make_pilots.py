"""Record the results of `wb.find_rate` for the designs of the study of learning rates, by budget.

    python data/make_pilots.py                       # everything that data/rate_pilots.jsonl lacks
    python data/make_pilots.py --out try.jsonl --sets fit

There is one pilot for each design and budget, with a seed that the study does not have, the settings of the design and
no data of the study, and one pilot with a custom training loop, which only reports training losses. The rates are
extrapolated later from the last round, so that the regression can be fitted to it. The pilots of the largest budget are
followed by a run at the best rate, after which the curvature of the loss is measured.

The first line of the file describes its origin; every other line is a pilot. Move the file away after a change of the
search.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rate_designs import FAMILIES, Design, designs
from tqdm import tqdm

import workbench as wb
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.models.losses import token_loss
from workbench.monitors.curvature import preconditioned_sharpness, sharpness

BUDGETS, SEED = (300, 600, 1000), 7
#: Budget of the pilots with a custom loop, and of those followed by a curvature measurement; updates of that run.
LARGEST, N_BEFORE_CURVATURE = 1000, 100
#: Maximum warm-up of the loop, whose length is not known in advance.
N_OF_LOOP_WARMUP = 12
#: Kind of pilot and budget, in the order in which they are run.
KINDS = (*(("model", budget) for budget in reversed(BUDGETS)), ("loop", LARGEST))


def pilot(number: int, kind: str, budget: int) -> dict[str, Any]:
    """Run a pilot and return its rounds and the curvature after it."""
    torch.set_num_threads(1)
    design = designs()[number]
    run = design.run(0, SEED, n_snapshots=0)
    plan = run.plan()
    length: dict[str, Any] = {"n_steps": plan.n_steps, "budget": budget, "schedule": plan.schedule, "progress": False}
    if kind == "model":
        settings = {name: getattr(plan, name) for name in ("warmup", "optimizer", "optimizer_options", "clip_norm")}
        found = wb.find_rate(run.make_model(), run.make_task(), **length, **settings)
    else:
        first = 0.1 if plan.optimizer == "SGD" else None
        found = wb.find_rate(loop=lambda rate, seed: losses_of(design, rate, seed), start=first, **length)
    row: dict[str, Any] = {
        "cell": design.run(0, 1).cell,
        "kind": kind,
        "budget": budget,
        "n_updates": found.n_updates,
        "seconds": found.seconds,
        "is_learned": found.has_learned,
        "trivial_loss": found.trivial_loss,
        "rounds": [asdict(one) | {"rate": one.rate.tolist(), "loss": one.loss.tolist()} for one in found.rounds],
        "curvature": math.nan,
    }
    if (kind, budget) == ("model", LARGEST) and found.rounds and math.isfinite(found.rounds[-1].best_rate):
        row["curvature"] = curvature(design, found.rounds[-1].best_rate)
    return row


def losses_of(design: Design, rate: float, seed: int) -> Iterator[float]:
    """Yield the training losses of a custom loop at a constant learning rate after a short warm-up."""
    run = design.run(0, SEED + seed, n_snapshots=0)
    plan = replace(run.plan(), learning_rate=rate, schedule="constant")
    warmup = min(plan.warmup, N_OF_LOOP_WARMUP)
    settings = {name: getattr(plan, name) for name in ("optimizer", "optimizer_options", "clip_norm", "learning_rate")}
    for record in wb.train(
        run.make_model(), run.make_task(), n_steps=plan.n_steps, warmup=warmup, stops_at_divergence=False, **settings
    ):
        yield record.loss
    yield math.nan  # reached if training ended early at a loss or gradient that is not finite


def curvature(design: Design, rate: float) -> float:
    """Return the sharpness after a run at a rate, preconditioned if the optimizer keeps second moments."""
    run = design.run(0, SEED, n_snapshots=0)
    plan, model, task = run.plan(), run.make_model(), run.make_task()
    optimizer = replace(plan, learning_rate=rate).optimizer_for(model)
    settings = {"warmup": min(plan.warmup, N_BEFORE_CURVATURE // 3), "clip_norm": plan.clip_norm, "seed": SEED}
    list(wb.train(model, task, n_steps=N_BEFORE_CURVATURE, optimizer=optimizer, **settings))
    inputs, targets = task.batch(N_BEFORE_CURVATURE)

    def loss_of(module: torch.nn.Module) -> torch.Tensor:
        output = module(inputs)
        return token_loss(output if isinstance(output, torch.Tensor) else output.logits, targets)

    if all("exp_avg_sq" in state for state in optimizer.state.values()):
        return preconditioned_sharpness(model, loss_of, optimizer)
    return sharpness(model, loss_of)


def recorded(file: Path) -> list[dict[str, Any]]:
    """Return the pilots in a file, without an incomplete line."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines[1:] if line.endswith("}\n")]


def make(file: Path, sets: list[str], n_workers: int) -> list[dict[str, Any]]:
    """Record the missing pilots of the given sets, each as soon as it ends, and return all pilots of the file."""
    done = recorded(file)
    about = {"call": "python data/make_pilots.py", "seed": SEED, "versions": versions()}
    with replacing(file) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in [about, *done]))
    known = {(row["cell"], row["kind"], row["budget"]) for row in done}
    numbers = {one.run(0, 1).cell: i for i, one in enumerate(designs()) if one.set in sets}
    wanted = [(cell, *kind) for kind in KINDS for cell in numbers if (cell, *kind) not in known]
    with ProcessPoolExecutor(n_workers) as pool, file.open("a") as lines:
        pending = [pool.submit(pilot, numbers[cell], kind, budget) for cell, kind, budget in wanted]
        try:
            for one in tqdm(as_completed(pending), total=len(pending), unit="pilot"):
                lines.write(json.dumps(one.result()) + "\n")
                lines.flush()
        finally:
            pool.shutdown(cancel_futures=True)
    return recorded(file)


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "rate_pilots.jsonl")
    parser.add_argument("--sets", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    rows = make(args.out, args.sets, args.workers)
    print(f"{len(rows)} pilots; {(time.monotonic() - start) / 60:.0f} minutes.")


if __name__ == "__main__":
    main()
