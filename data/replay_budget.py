"""Replay recorded runs as if a budget had thinned their observations; one row per run and schedule, in data/budget.nc.

    python data/replay_budget.py record   # trains the runs in artifacts/budget/; resumable, about half an hour
    python data/replay_budget.py cost     # measures what each part costs with each model
    python data/replay_budget.py replay   # replays every run by every schedule; resumable
    python data/replay_budget.py table    # writes the table of the replays so far, and prints it

The plan, fixed before the first run:

- Setups of the test set of the alarms, in an order that alternates text, images and experts, each with plan 3, which no
  study has trained. A healthy run has 3,000 updates.
- Twelve kinds of faults with their second largest dose; setup number i has six of them, from number 6 i on, in turn
  (a kind that cannot act in a setup is left out). A fault begins 1,300 updates later than in the study of alarms,
  between 1,700 and 2,200, so that parts that are rarely measured have a past, and is watched for 600 updates.
- Setups are recorded in order until the time is over; those that are not complete do not count.

All parts are recorded at the cadence of `options.CADENCE`. A replay passes on what `Budget` would have measured: the
parts that it calls due, the contents of the batch and the settings at their steps, and the loss when alarms are due or
a part is. Its intervals follow from the costs of the parts and of a step with the same model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from judge_warnings import CHECKED
from record_warnings import Recorded, begin, in_a_copy, loaded, place_of, tell, wait_for
from scipy.stats import chi2
from warning_cases import KINDS, SETUPS, Case, applies

import workbench as wb
from workbench.callbacks.observation import Observation
from workbench.callbacks.recorder.budget import OF_UPDATE, Budget
from workbench.callbacks.recorder.options import CADENCE
from workbench.course.failure_runs import model_and_task
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.models.losses import prediction_of, token_loss

WORK, OUT = Path("artifacts/budget"), Path(__file__).parent / "budget_replays.nc"
COSTS = WORK / "costs.json"
#: Setups in the order of their recording.
NAMES = (
    "opt bytes", "rms vit", "olmoe lm", "nemotron lm", "granite bytes", "kan recall", "minimax lm", "lfm2 lm",
    "deepseek lm", "glm4 bytes", "diffllama bytes", "recurrent gemma bytes",
)  # fmt: skip
FAULTS = (
    "attention", "labels", "bucket", "weights", "stale", "rate", "tokens", "reduction", "moments", "loader",
    "bucket of a rank", "attention output",
)  # fmt: skip
PLAN, PER_SETUP, LATER, MIDDLE, HORIZON = 3, 6, 1300, 1500, 600
#: Budgets, and number of updates for which costs are measured.
SHARES, N_TIMED = (0.2, 0.05, 0.02), 120
#: Metrics of an update that are known without its batch, and settings among them.
OF_ROW = (
    "loss", "auxiliary_loss", "accuracy", "learning_rate", "batch_size", "n_tokens", "loss_scale", "is_skipped",
)  # fmt: skip
LOGGED_SETTINGS = ("batch_size", "auxiliary_loss")


@dataclass(frozen=True)
class LateFault(Case):
    """A fault that begins after more updates than in the study of alarms."""

    @property
    def start(self) -> int | None:
        """First step of the fault."""
        start = super().start
        return None if start is None else start + LATER


def faults_of(name: str) -> list[LateFault]:
    """Return the faults of a setup."""
    first = PER_SETUP * NAMES.index(name)
    kinds = [FAULTS[(first + i) % len(FAULTS)] for i in range(PER_SETUP)]
    return [LateFault(name, PLAN, kind, KINDS[kind].doses[1]) for kind in kinds if applies(SETUPS[name], kind)]


# Recording


def record(name: str) -> None:
    """Train a healthy run and, in copies of its process, its faults, unless they are recorded."""
    control = Case(name, PLAN)
    waiting = [case for case in faults_of(name) if not place_of(case, WORK).exists()]
    if not waiting and place_of(control, WORK).exists():
        return
    run = Recorded(control)
    for update in run:
        for case in [case for case in waiting if case.start == update.step + 1]:
            if (process := os.fork()) == 0:
                in_a_copy(lambda case=case: branch(case, run))
            wait_for(process)
    tell(run.save(place_of(control, WORK)))


def branch(case: LateFault, run: Recorded) -> None:
    """Continue a run with a fault from its first step on."""
    start = case.start or 0
    run.case, run.begun = case, time.monotonic()
    run.later.become(case)
    run.judged.begin_fault(start)
    for last in run:
        if last.step >= start + HORIZON:
            break
    tell(run.save(place_of(case, WORK), start=start))


# Costs


def measured_cost(name: str) -> dict[str, float]:
    """Return the seconds of each part with the model of a setup, of a step, and the number of blocks."""
    model, task = model_and_task(SETUPS[name], PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        wb.watch(model, optimizer, store=Path(folder, "run.zarr"), budget=None, shows=False) as watched,
    ):
        for i in range(N_TIMED):
            inputs, targets = task.batch(i)
            token_loss(prediction_of(model(inputs)), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        cost = watched.cost
    found = {part: each.seconds for part, each in cost.parts.items() if math.isfinite(each.seconds)}
    [whole, *_] = [each for each in loaded(place_of(Case(name, PLAN), WORK)) if each.part == "precision"]
    return found | {"step": cost.step_seconds, "n_blocks": len(whole.coords["layer"])}


def budget_of(cost: Mapping[str, float], share: float | None, slower: int = 1) -> Budget:
    """Return a budget with the intervals that follow from the costs, or with cadences that are so many times slower."""
    known = {part: seconds for part, seconds in cost.items() if part != "n_blocks"}
    of_part = {part: seconds for part, seconds in known.items() if part != "step"}
    budget = Budget(CADENCE, fixed=(), share=share or 1.0, device=torch.device("cpu"), costs=of_part)
    if share is None:
        budget.interval = {part: slower * every for part, every in budget.interval.items()}
        return budget
    budget.plan(known)
    if budget.in_turn:  # one block at a time from now on
        budget.plan(known | {"precision": known["precision"] / cost["n_blocks"]})
    return budget


# Replay


@dataclass(frozen=True)
class Schedule:
    """How the observations of a run are thinned.

    Attributes:
        share: Share of the training time that observation may take; None for the cadences of `options.CADENCE`.
        slower: Factor of these cadences.
        changes: Factor of all intervals from the middle of the run on.
        is_irregular: Whether each interval is drawn from 1, 1.5 and 2 times its length.
    """

    share: float | None = None
    slower: int = 1
    changes: float = 1.0
    is_irregular: bool = False

    @property
    def name(self) -> str:
        """Words for the table."""
        words = f"cadence x {self.slower}" if self.share is None else f"{self.share:.0%}"
        words += {1.0: ""}.get(self.changes, f", then x {self.changes:g}")
        return words + (", irregular" if self.is_irregular else "")


#: Schedules of all runs, and those of healthy runs alone.
SCHEDULES = (Schedule(), Schedule(slower=4), Schedule(slower=16), *(Schedule(share) for share in SHARES))
OF_HEALTHY = (
    Schedule(is_irregular=True), Schedule(slower=4, is_irregular=True),
    Schedule(changes=4), Schedule(slower=4, changes=0.25), Schedule(slower=4, changes=4),
    Schedule(slower=16, changes=0.25), Schedule(slower=4, changes=4, is_irregular=True),
    Schedule(slower=16, changes=0.25, is_irregular=True),
)  # fmt: skip


class Thinned:
    """Choice of the observations of a run that a budget would have made.

    Args:
        budget: Budget whose intervals count.
        parts: Parts that the run has.
        schedule: Changes of the intervals.
    """

    def __init__(self, budget: Budget, parts: set[str], schedule: Schedule) -> None:
        self._budget, self._schedule, self._base = budget, schedule, dict(budget.interval)
        self._parts = parts | {*OF_UPDATE}
        self._draw = np.random.default_rng(PLAN)
        self._settings: list[Observation] = []
        self._turn, self._was_finite = 0, True
        #: Set when the alarms ask for a check of arithmetic and gradients at the next update.
        self.is_asked = False

    def of_step(self, step: int, found: list[Observation]) -> Iterator[Observation]:
        """Yield those of one step."""
        by = self._draw.choice([1.0, 1.5, 2.0], len(self._base)) if self._schedule.is_irregular else 1.0
        by = np.broadcast_to(by * (self._schedule.changes if step >= MIDDLE else 1.0), len(self._base))
        self._budget.interval = {
            part: max(1, round(every * factor)) for (part, every), factor in zip(self._base.items(), by, strict=True)
        }
        due = self._budget.due(step, step, self._parts.__contains__) & self._parts
        forced, self.is_asked = set(CHECKED) if self.is_asked else set(), False
        for each in found:
            if each.part == "settings":
                is_logged = str(each.coords["setting"]) in LOGGED_SETTINGS
                self._settings += [] if is_logged else [each]
                if is_logged:
                    yield each
            elif each.part == "monitors":
                if (row := self._row(each, due, forced)) is not None:
                    yield row
            elif each.part in due | forced:
                yield self._one_block(each) if each.part in self._budget.in_turn - forced else each
        if "settings" in due:
            yield from (replace(each, step=step) for each in self._settings)
            self._settings.clear()

    def _row(self, row: Observation, due: set[str], forced: set[str]) -> Observation | None:
        """Return what is examined of an update; None if nothing is."""
        is_finite = math.isfinite(row.values["loss"])
        is_checked = bool((due | forced) - {"settings"}) or (self._was_finite and not is_finite)
        self._was_finite = is_finite
        if not is_checked:
            return None
        if "batch" in due:
            return replace(row, values=dict(row.values) | {"examined": np.array(2.0)})
        values = {name: row.values[name] for name in OF_ROW if name in row.values}
        return replace(row, values=values | {"examined": np.array(1.0)})

    def _one_block(self, whole: Observation) -> Observation:
        """Return the next block of a part whose blocks are measured in turn; the others are NaN."""
        turn, self._turn = self._turn, self._turn + 1
        n = len(whole.coords["layer"])
        values = {name: np.array(value, dtype=float) for name, value in whole.values.items()}
        for value in values.values():
            if value.ndim and len(value) == n:
                value[np.arange(n) != turn % n] = math.nan
        return replace(whole, values=values)


def by_step(place: Path) -> dict[int, list[Observation]]:
    """Return the observations of a run by step."""
    found: dict[int, list[Observation]] = {}
    for each in loaded(place):
        found.setdefault(each.step, []).append(each)
    return found


class Replay:
    """Replay of a healthy run and, in copies of the process, of its faults.

    Args:
        results: Results of the healthy run and of the faults.
        cost: Costs of the parts with the model.
        schedule: How the observations are thinned.
    """

    def __init__(self, results: list[dict[str, Any]], cost: Mapping[str, float], schedule: Schedule) -> None:
        self._schedule, self._alarms, self._n_examined = schedule, wb.Alarms(), 0
        self._control, *faults = results
        self._faults = [] if schedule in OF_HEALTHY else faults
        self._steps = by_step(WORK / f"{self._control['name']}.obs")
        parts = {each.part for found in self._steps.values() for each in found}
        self._thinned = Thinned(budget_of(cost, schedule.share, schedule.slower), parts, schedule)

    def go(self) -> None:
        """Replay all runs, and write their rows."""
        for step, found in sorted(self._steps.items()):
            for fault in [fault for fault in self._faults if fault["start"] == step]:
                if (process := os.fork()) == 0:
                    in_a_copy(lambda fault=fault: self._branch(fault))
                wait_for(process)
            self._observe(step, found)
        self._save(self._control)

    def _branch(self, fault: dict[str, Any]) -> None:
        for step, found in sorted(by_step(WORK / f"{fault['name']}.obs").items()):
            if step >= fault["start"]:
                self._observe(step, found)
        self._save(fault)

    def _observe(self, step: int, found: list[Observation]) -> None:
        for each in self._thinned.of_step(step, found):
            self._n_examined += each.part == "monitors"
            if self._alarms.observe(each) or self._alarms.is_in_doubt:
                self._thinned.is_asked = True

    def _save(self, result: dict[str, Any]) -> None:
        start = math.inf if result["start"] is None else result["start"]
        before = [alarm for alarm in self._alarms.raised if alarm.step < start]
        first = next((alarm for alarm in self._alarms.raised if alarm.step >= start), None)
        row = {
            "name": result["name"],
            "setup": result["setup"],
            "family": SETUPS[result["setup"]].family,
            "kind": result["kind"],
            "schedule": self._schedule.name,
            "start": start,
            "n_steps": result["n_steps"],
            "n_examined": self._n_examined,
            "first_step": math.nan if first is None else first.step,
            "first_signal": "" if first is None else first.signal,
            "n_alarms_before": len(before),
            "alarms_before": ", ".join(f"{alarm.signal} {alarm.step}" for alarm in before),
            "seconds": result["seconds"],
        }
        with replacing(row_of(result, self._schedule)) as partial:
            partial.write_text(json.dumps(row))


def row_of(result: dict[str, Any], schedule: Schedule) -> Path:
    """Return the file of a row."""
    return WORK / f"{result['name']} {schedule.name}.row".replace("%", " percent")


def recorded() -> dict[str, list[dict[str, Any]]]:
    """Return the results of the complete setups, by setup."""
    found = {}
    for name in NAMES:
        places = [place_of(case, WORK).with_suffix(".json") for case in (Case(name, PLAN), *faults_of(name))]
        if all(place.exists() for place in places):
            found[name] = [json.loads(place.read_text()) for place in places]
    return found


def measure_costs() -> None:
    """Measure the costs with the model of every recorded setup that has none, and write them."""
    costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
    costs |= {name: measured_cost(name) for name in recorded() if name not in costs}
    with replacing(COSTS) as partial:
        partial.write_text(json.dumps(costs, indent=1))
    for name, cost in costs.items():
        for share in SHARES:
            print(name, f"{share:.0%}", budget_of(cost, share).interval)


def replay() -> None:
    """Write the rows of each schedule that has none."""
    begun, costs = time.monotonic(), json.loads(COSTS.read_text())
    for name, results in recorded().items():
        for schedule in (*SCHEDULES, *OF_HEALTHY):
            if not row_of(results[0], schedule).exists():
                Replay(results, costs[name], schedule).go()
                print(f"{name}, {schedule.name}: {time.monotonic() - begun:.0f} s", flush=True)


def write_table() -> None:
    """Write the table of the rows that exist, and print it."""
    costs = json.loads(COSTS.read_text())
    places = [
        row_of(result, schedule)
        for schedule in (*SCHEDULES, *OF_HEALTHY)
        for results in recorded().values()
        for result in results
        if row_of(results[0], schedule).exists()  # the last one to be written
    ]
    rows = [json.loads(place.read_text()) for place in places if place.exists()]
    intervals = {
        name: {
            schedule.name: budget_of(costs[name], schedule.share, schedule.slower).interval for schedule in SCHEDULES
        }
        for name in recorded()
    }
    attrs = {
        "call": "python data/replay_budget.py record, cost, replay and table",
        "seeds": json.dumps({name: Case(name, PLAN).seed for name in recorded()}),
        "costs": json.dumps(costs),
        "intervals": json.dumps(intervals),
        "versions": versions(),
        "minutes": round(sum({row["name"]: row["seconds"] for row in rows}.values()) / 60),
    }
    columns = {name: ("row", [row[name] for row in rows]) for name in rows[0] if name != "seconds"}
    with replacing(OUT) as partial:
        xr.Dataset(columns, attrs=attrs).to_netcdf(partial, engine="netcdf4")
    report(xr.load_dataset(OUT))


def report(data: xr.Dataset) -> None:
    """Print false alarms and delays."""
    rows = data.to_dataframe()
    healthy, faults = rows[rows["kind"] == ""], rows[rows["kind"] != ""]
    for name, of_schedule in rows.groupby("schedule", sort=False):
        n, steps = int(of_schedule["n_alarms_before"].sum()), 0
        own = healthy[healthy["schedule"] == name]
        n, steps = int(own["n_alarms_before"].sum()), int(own["n_steps"].sum())
        low, high = chi2.ppf(0.025, 2 * n) / 2 if n else 0.0, chi2.ppf(0.975, 2 * n + 2) / 2
        scale = 100_000 / steps
        words = f"{n} false alarms in {steps} steps: {n * scale:.1f} ({low * scale:.1f} to {high * scale:.1f})"
        print(f"{name}: {words}, {own['n_examined'].sum() / steps:.2%} of the updates examined")
        print(*(text for text in own["alarms_before"] if text), sep="; ")
    for kind, of_kind in faults.groupby("kind", sort=False):
        print(kind)
        for name, found in of_kind.groupby("schedule", sort=False):
            delay = (found["first_step"] - found["start"]).dropna()
            signals = ", ".join(sorted({signal for signal in found["first_signal"] if signal}))
            middle, worst = (delay.median(), delay.max()) if len(delay) else (math.nan, math.nan)
            print(f"  {name:14} {len(delay)} of {len(found)}, delay {middle:.0f}, at most {worst:.0f}; {signals}")


def main() -> None:
    """Run the requested step of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("record", "cost", "replay", "table"))
    args = parser.parse_args()
    begin(1)
    WORK.mkdir(parents=True, exist_ok=True)
    if args.stage == "record":
        for name in NAMES:
            record(name)
    else:
        {"cost": measure_costs, "replay": replay, "table": write_table}[args.stage]()


if __name__ == "__main__":
    main()
