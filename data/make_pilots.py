"""Record what `wb.find_rate` finds for the designs of the study of learning rates, by budget.

    python data/make_pilots.py                       # everything, into data/rate_pilots.nc; resumable
    python data/make_pilots.py --folder try --sets fit

One pilot for each design and budget, with a seed of its own (the study has others), its settings and no knowledge of
the study. The estimates are extrapolated later, from the last round, so that the regression can be fitted to it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from rate_designs import FAMILIES, designs
from tqdm import tqdm

import workbench as wb
from workbench.io.atomic import replacing
from workbench.io.provenance import versions

BUDGETS, SEED = (300, 600, 1000), 7
_NUMBERS = ("last_updates", "best_rate", "useful_edge", "n_updates", "seconds")


def pilot(number: int, budget: int) -> dict[str, Any]:
    """The last round of one pilot with an edge; NaN: there is none."""
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
    known = [one for one in found.rounds if math.isfinite(one.useful_edge)]
    row = {"design": number, "budget": budget, "n_updates": found.n_updates, "seconds": found.seconds}
    if not known or found.reason.startswith("No rate learned"):
        return row | {"last_updates": math.nan, "best_rate": math.nan, "useful_edge": math.nan}
    last = known[-1]
    return row | {"last_updates": last.n_updates, "best_rate": last.best_rate, "useful_edge": last.useful_edge}


def make(file: Path, sets: list[str], n_workers: int) -> Iterator[dict[str, Any]]:
    """All pilots of some sets; each is a line of the file as soon as it ends."""
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["design"], row["budget"]) for row in done}
    wanted = [(i, budget) for i, design in enumerate(designs()) if design.set in sets for budget in BUDGETS]
    yield from (row for row in done if (row["design"], row["budget"]) in wanted)
    with ProcessPoolExecutor(n_workers) as pool, file.open("a") as lines:
        pending = [pool.submit(pilot, *one) for one in wanted if one not in known]
        for one in tqdm(as_completed(pending), total=len(pending), unit="pilot"):
            lines.write(json.dumps(one.result()) + "\n")
            lines.flush()
            yield one.result()


def collect(rows: list[dict[str, Any]], file: Path) -> None:
    """One file of all pilots, and how it was made."""
    named = designs()
    table = {name: np.full((len(named), len(BUDGETS)), np.nan) for name in _NUMBERS}
    for row in rows:
        for name, values in table.items():
            values[row["design"], BUDGETS.index(row["budget"])] = row[name]
    coords = {
        "budget": list(BUDGETS),
        "cell": ("design", [one.run(0, 1).cell for one in named]),
        "architecture": ("design", [one.architecture.name for one in named]),
        "family": ("design", [one.architecture.family for one in named]),
        "set": ("design", [one.set for one in named]),
    }
    about = {"call": "python data/make_pilots.py", "seed": SEED, "versions": versions()}
    about["core_minutes"] = round(float(np.nansum(table["seconds"])) / 60, 1)
    with replacing(file) as partial:
        xr.Dataset({name: (("design", "budget"), values) for name, values in table.items()}, coords, about).to_netcdf(
            partial, engine="netcdf4"
        )


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
