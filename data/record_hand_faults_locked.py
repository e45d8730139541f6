"""Alarms on faults written by hand in the test set of the study of alarms, by kind; writes hand_faults_locked.csv.

    python data/record_hand_faults_locked.py            # resumable by healthy run
    python data/record_hand_faults_locked.py --table    # writes the table of what is recorded

Setups, plans, seeds and first steps are those of warning_cases.py, which were drawn before the first run. A healthy
run ends after 1,500 steps. At the first step of each fault it is copied as a process, and the copy is watched for 100
steps. The alarms are the default ones at the time of the recording; its rows are not mixed with those of
early_warning.nc, which were judged by earlier rules.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from record_warnings import Recorded, begin, in_a_copy, place_of, tell, wait_for
from warning_cases import BY_HAND, LOCKED, SETUPS, Case, causal_modules

from workbench.callbacks.alarms.watched import FALL, RISE

TABLE = Path(__file__).parent / "hand_faults_locked.csv"
#: Plans of each setup.
PLANS = (1,)
#: Steps of a healthy run, and steps for which a fault is watched.
N_HEALTHY, N_WATCHED = 1500, 100
_COLUMNS = (
    "setup", "family", "plan", "kind", "start", "n_steps", "divergence", "first_step", "first_signal", "first_cause",
    "cause", "expected_cause", "loss_step", "floor_step", "grad_norm_step", "signals", "n_alarms", "alarms_before",
    "n_loss_alarms", "n_grad_norm_alarms",
)  # fmt: skip


def record(control: Case, work: Path) -> None:
    """Train a healthy run, with a copy of the process for each fault, and write their files."""
    if place_of(control, work).exists():
        return
    run = Recorded(control)
    faults = [replace(control, kind=kind, dose=made.doses[0]) for kind, made in BY_HAND.items()]
    for each in run:
        for case in (fault for fault in faults if fault.start == each.step + 1 and applies(fault, run)):
            if (process := os.fork()) == 0:
                in_a_copy(lambda case=case: watch(case, run, work))
            wait_for(process)
        if each.step + 1 >= N_HEALTHY:
            break
    save(run, control, work)


def applies(case: Case, run: Recorded) -> bool:
    """Return whether a fault can act in a run."""
    return case.kind != "lost mask" or bool(causal_modules(run.model))


def watch(case: Case, run: Recorded, work: Path) -> None:
    """Continue a run with a fault from its first step on."""
    start = case.start or 0
    run.case, run.begun = case, time.monotonic()
    run.later.become(case)
    run.judged.begin_fault(start)
    for each in run:
        if each.step + 1 >= start + N_WATCHED:
            break
    save(run, case, work)


def save(run: Recorded, case: Case, work: Path) -> None:
    """Write the files of a run, with the first step of the floor of the loss and all signals from the onset on."""
    raised = [alarm for alarm in run.alarms.raised if alarm.step >= (case.start or 0)]
    floor = [alarm.step for alarm in raised if alarm.signal in (RISE.name, FALL.name)]
    signals = " ".join(sorted({alarm.signal.replace(" ", "_") for alarm in raised}))
    tell(run.save(place_of(case, work), start=case.start, floor_step=next(iter(floor), None), signals=signals))


def row(place: Path) -> dict[str, Any]:
    """Return the row of the table from the files of a run; an empty cell is a step without an alarm."""
    both = json.loads(place.read_text()) | json.loads(place.with_suffix(".row").read_text())
    values = {name: both[name] for name in _COLUMNS}
    values = {name: "" if value is None or value != value else value for name, value in values.items()}
    return {name: int(value) if isinstance(value, float) else value for name, value in values.items()}


def main() -> None:
    """Read the command line, and record the runs or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/hand_faults_locked"))
    parser.add_argument("--setups", nargs="+", choices=tuple(SETUPS), default=list(LOCKED))
    parser.add_argument("--plans", type=int, nargs="+", default=PLANS)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        rows = [row(place) for place in args.work.glob("*.json")]
        complete = {(each["setup"], each["plan"]) for each in rows if not each["kind"]}
        rows = [each for each in rows if (each["setup"], each["plan"]) in complete]
        rows.sort(key=lambda each: (each["setup"], each["plan"], each["kind"]))
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    begin(1)
    for plan in args.plans:
        for name in args.setups:
            record(Case(name, plan), args.work)


if __name__ == "__main__":
    main()
