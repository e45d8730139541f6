"""Record what `wb.find_rate` finds for the designs of the study of learning rates, by budget.

    python data/make_pilots.py                       # everything, into data/rate_pilots.nc; resumable
    python data/make_pilots.py --folder try --sets fit

One pilot for each design and budget, with a seed of its own (the study has others), its settings and no knowledge of
the study. The rates are extrapolated later, from the last round, so that the regression can be fitted to it. The pilots
of the largest budget are followed by a run at the best rate, after which the curvature of the loss is measured.
Delete the folder after a change of the search.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from rate_designs import FAMILIES, Design, designs
from tqdm import tqdm

import workbench as wb
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.models.losses import token_loss
from workbench.monitors.curvature import preconditioned_sharpness, sharpness

BUDGETS, SEED = (300, 600, 1000), 7
#: Budget whose pilots are followed by a run that measures curvature, and the updates of that run.
OF_CURVATURE, N_BEFORE_CURVATURE = 1000, 100
ROUNDS = ("coarse", "fine")
_OF_ROUND, _OF_PILOT = ("updates", "best_rate", "useful_edge"), ("n_updates", "seconds", "is_learned", "curvature")


def pilot(number: int, budget: int) -> dict[str, Any]:
    """What the last coarse and the last fine round of one pilot found, and the curvature after it."""
    torch.set_num_threads(1)
    design = designs()[number]
    run = design.run(0, SEED, n_snapshots=0)
    plan = run.plan()
    found = wb.find_rate(
        run.make_model(),
        run.make_task(),
        n_steps=plan.n_steps,
        budget=budget,
        warmup=plan.warmup,
        schedule=plan.schedule,
        optimizer=plan.optimizer,
        optimizer_options=plan.optimizer_options,
        clip_norm=plan.clip_norm,
        progress=False,
    )
    row: dict[str, Any] = {
        "cell": design.run(0, 1).cell,
        "budget": budget,
        "n_updates": found.n_updates,
        "seconds": found.seconds,
        "is_learned": found.has_learned,
        "curvature": math.nan,
    }
    for one in found.rounds:
        row[ROUNDS[not one.is_coarse]] = [one.n_updates, one.best_rate, one.useful_edge]
    if budget == OF_CURVATURE and found.rounds and math.isfinite(found.rounds[-1].best_rate):
        row["curvature"] = curvature(design, found.rounds[-1].best_rate)
    return row


def curvature(design: Design, rate: float) -> float:
    """Sharpness after some updates at a rate, as the optimizer scales it where it keeps second moments."""
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


def make(file: Path, sets: list[str], n_workers: int) -> Iterator[dict[str, Any]]:
    """All pilots of some sets; each is a line of the file as soon as it ends."""
    text = file.read_text() if file.exists() else ""
    done = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    with replacing(file) as partial:  # without a line that was cut off
        partial.write_text("".join(json.dumps(row) + "\n" for row in done))
    known = {(row["cell"], row["budget"]): row for row in done}
    numbers = {one.run(0, 1).cell: i for i, one in enumerate(designs()) if one.set in sets}
    wanted = [(cell, budget) for budget in reversed(BUDGETS) for cell in numbers]
    yield from (known[one] for one in wanted if one in known)
    with ProcessPoolExecutor(n_workers) as pool, file.open("a") as lines:
        pending = [pool.submit(pilot, numbers[cell], budget) for cell, budget in wanted if (cell, budget) not in known]
        try:
            for one in tqdm(as_completed(pending), total=len(pending), unit="pilot"):
                lines.write(json.dumps(one.result()) + "\n")
                lines.flush()
                yield one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def collect(rows: list[dict[str, Any]], file: Path) -> None:
    """One file of all pilots, and how it was made."""
    named = designs()
    cells = [one.run(0, 1).cell for one in named]
    found = {name: np.full((len(named), len(BUDGETS), len(ROUNDS)), np.nan) for name in _OF_ROUND}
    whole = {name: np.full((len(named), len(BUDGETS)), np.nan) for name in _OF_PILOT}
    for row in rows:
        at = cells.index(row["cell"]), BUDGETS.index(row["budget"])
        for name, values in whole.items():
            values[at] = row[name]
        for i, which in enumerate(ROUNDS):
            for name, value in zip(_OF_ROUND, row.get(which, [math.nan] * 3), strict=True):
                found[name][*at, i] = value
    coords = {
        "budget": list(BUDGETS),
        "round": list(ROUNDS),
        "cell": ("design", cells),
        "architecture": ("design", [one.architecture.name for one in named]),
        "family": ("design", [one.architecture.family for one in named]),
        "set": ("design", [one.set for one in named]),
    }
    about = {"call": "python data/make_pilots.py", "seed": SEED, "versions": versions()}
    about["core_minutes"] = round(float(np.nansum(whole["seconds"])) / 60, 1)
    data = {name: (("design", "budget", "round"), values) for name, values in found.items()}
    data |= {name: (("design", "budget"), values) for name, values in whole.items()}
    with replacing(file) as partial:
        xr.Dataset(data, coords, about).to_netcdf(partial, engine="netcdf4")


def main() -> None:
    """Read the command line and make the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--folder", type=Path, default=here / "rates", help="where the pilots are kept meanwhile")
    parser.add_argument("--out", type=Path, default=here / "rate_pilots.nc")
    parser.add_argument("--sets", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    rows = list(make(args.folder / "pilots.jsonl", args.sets, args.workers))
    print(f"{len(rows)} pilots: {(time.monotonic() - start) / 60:.0f} minutes.")
    if set(args.sets) == set(FAMILIES):
        collect(rows, args.out)


if __name__ == "__main__":
    main()
