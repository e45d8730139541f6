"""Losses of healthy runs, and the alarms that the floor of the loss raises on them; writes loss_floor.csv.

    python data/record_loss_floor.py --sets fit choose      # trains the first plan of each setup; resumable
    python data/record_loss_floor.py --table                # evaluates the losses recorded so far

The runs are those of warning_cases.py without a recorder, since the floor reads only loss and learning rate. The
thresholds were set on "fit" and "choose"; "locked" was recorded afterwards, with the thresholds unchanged.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from warning_cases import SETUPS, Case, build

import workbench as wb
from workbench.callbacks.alarms.run_evidence import RunEvidence
from workbench.callbacks.alarms.watched import FALL, RISE
from workbench.io.atomic import replacing

TABLE = Path(__file__).parent / "loss_floor.csv"


def record(case: Case, work: Path) -> None:
    """Train a healthy run, and save its losses and rates."""
    place = work / f"{case.set}_{case.name}.npz"
    if place.exists():
        return
    model, task, plan = build(case)
    rows = [(each.loss, each.learning_rate) for each in wb.train(model, task, **plan)]
    loss, rate = np.array(rows).T
    with replacing(place) as partial, partial.open("wb") as file:
        np.savez(file, loss=loss, rate=rate)
    print(place.stem, len(loss), flush=True)


def judge(case: Case, work: Path) -> dict[str, Any]:
    """Return a row of the table: the alarms of the floor, and the largest evidence in multiples of its threshold."""
    with np.load(work / f"{case.set}_{case.name}.npz") as file:
        monitors = {name: ("step", file[key]) for name, key in (("loss", "loss"), ("learning_rate", "rate"))}
    run = xr.DataTree.from_dict({"/monitors": xr.Dataset(monitors, {"step": np.arange(len(monitors["loss"][1]))})})
    raised = [alarm.signal for alarm in wb.alarms.replay(run, wb.Alarms())]
    evidence, largest = RunEvidence(), {RISE.name: 0.0, FALL.name: 0.0}
    for observation in wb.alarms.observations(run):
        for reading in evidence.update(observation):
            name = reading.watched.name
            if (
                name in largest
                and reading.is_evaluated
                and reading.evidence > largest[name] * reading.watched.threshold
            ):
                largest[name] = reading.evidence / reading.watched.threshold
    return {
        "set": case.set, "setup": case.setup, "plan": case.plan, "n_steps": run["monitors"].sizes["step"],
        "n_rises": raised.count(RISE.name), "n_falls": raised.count(FALL.name),
        "largest_rise": round(largest[RISE.name], 2), "largest_fall": round(largest[FALL.name], 2),
    }  # fmt: skip


def main() -> None:
    """Read the command line, and record or evaluate the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/loss_floor"))
    parser.add_argument("--sets", nargs="+", choices=("fit", "choose", "locked"), default=[])
    parser.add_argument("--setups", nargs="+", choices=tuple(SETUPS), default=list(SETUPS))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    cases = [Case(name, 0) for name in args.setups]
    for case in cases:
        if case.set in args.sets:
            record(case, args.work)
    if args.table:
        rows = [judge(case, args.work) for case in cases if (args.work / f"{case.set}_{case.name}.npz").exists()]
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
