"""Fit the alarms to the runs of record_warnings.py, and evaluate them.

    python data/judge_warnings.py fit        # fits the calibration to the healthy runs of "fit"
    python data/judge_warnings.py attribute  # fits the attribution to the runs of "examples"
    python data/judge_warnings.py choose     # raises thresholds where a family of "choose" needs it
    python data/judge_warnings.py judge      # evaluates the alarms of every run; writes early_warning.nc

Every run is replayed from its record. Runs were recorded with alarms, so a record contains the checks that an alarm
requested for the next update; a check that the alarms evaluated here would not have requested is omitted.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from fitting import fit_attributor, save_attributor
from judged_run import JudgedRun, family_of, is_healthy
from record_warnings import loaded
from warning_cases import KINDS

import workbench as wb
from workbench.callbacks import alarms as room
from workbench.callbacks.alarms import Calibration, calibrate
from workbench.callbacks.recorder.options import CADENCE
from workbench.io.atomic import replacing
from workbench.io.provenance import versions

WORK = Path("artifacts/warnings")
SHIPPED = Path(room.__file__).parent / "shipped"
OUT = Path(__file__).parent / "early_warning.nc"
SETS = ("fit", "choose", "locked")
#: Penalty of the attribution: the better one of 1 and 10 on held-out families of "examples" (72 % and 77 % correct).
PENALTY = 10.0
#: Parts that the recorder checks after an alarm.
CHECKED = ("precision", "reduction")
#: False alarms per 100,000 steps that a signal may raise if about 25 signals share a rate of one.
SHARE_OF_RATE = 0.04


def results(sets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the results of record_warnings.py for each finished run, with its file and set."""
    return [
        {"set": name, "place": place.with_suffix(".obs")} | json.loads(place.read_text())
        for name in sets
        for place in sorted((WORK / name).glob("*.json"))
    ]


def run_of(result: dict[str, Any]) -> xr.DataTree:
    """Return the signals of a run that alarms compare with their own past."""
    parts: dict[str, list[Any]] = {}
    for observation in loaded(result["place"]):
        if observation.part != "settings":
            parts.setdefault(observation.part, []).append(observation)
    tree = {}
    for name, found in parts.items():
        names = set.intersection(*(set(each.values) for each in found))
        variables = {}
        for variable in names:
            values = np.array([np.asarray(each.values[variable], dtype=float) for each in found])
            dims = ["step", *(f"{variable}_{i}" for i in range(values.ndim - 1))]
            variables[variable] = (dims, values)
        coords = {key: ((f"{key}_",), np.asarray(values)) for key, values in found[0].coords.items()}
        tree[f"/{name}"] = xr.Dataset(variables, {"step": [each.step for each in found]} | coords)
    return xr.DataTree.from_dict(tree)


# Fitting


def fit() -> None:
    """Fit the calibration to the set "fit"."""
    healthy = [run_of(run) for run in results(("fit",)) if is_healthy(run)]
    about = f"{len(healthy)} healthy runs of small models, data/judge_warnings.py"
    SHIPPED.mkdir(exist_ok=True)
    calibration = calibrate(healthy, base=Calibration({}, 0), about=about)
    calibration.save(SHIPPED / "calibration.json", overwrite=True)
    print(f"fitted to {calibration.n_steps:,} healthy steps")


def attribute(processes: int) -> None:
    """Fit the attribution to the set "examples"."""
    by_setup: dict[str, list[dict[str, Any]]] = {}
    for run in results(("examples",)):
        by_setup.setdefault(run["setup"], []).append(run)
    found = in_processes(scores_at_first_alarms, list(by_setup.values()), processes)
    examples = [example for of_setup, _ in found for example in of_setup]
    save_attributor(fit_attributor(examples, penalty=PENALTY), SHIPPED / "attribution.json")
    print(f"fitted to the first alarms of {len(examples)} faults; probes or settings show the others first")


def scores_at_first_alarms(runs: list[dict[str, Any]]) -> list[tuple[dict[str, float], str]]:
    """Return the scores at the first alarm after the onset, with the cause, for the faults of one control.

    A fault is omitted if a probe or the settings reveal it first, or if there is no alarm.
    """
    [control] = [run for run in runs if not run["kind"]]
    waiting = sorted((run for run in runs if run["kind"]), key=lambda run: run["start"])
    alarms, found = wb.Alarms(), []
    for observation in loaded(control["place"]):
        while waiting and observation.step >= waiting[0]["start"]:
            run = waiting.pop(0)
            if (scores := scores_at_first_alarm(copy.deepcopy(alarms), run)) is not None:
                found.append((scores, KINDS[run["kind"]].cause))
        alarms.observe(observation)
    return found


def scores_at_first_alarm(alarms: wb.Alarms, run: dict[str, Any]) -> dict[str, float] | None:
    """Return the scores at the first alarm of a run with a fault; None if the attribution is not used."""
    for observation in loaded(run["place"]):
        if observation.step >= run["start"] and (fresh := alarms.observe(observation)):
            scores = alarms.features()
            return scores if all(alarm.signal in scores for alarm in fresh) else None
    return None


def choose() -> None:
    """Set each signal's tail to that of the family that needs the largest threshold.

    Compared are the families of "choose" and all of "fit". Otherwise the rate of false alarms would hold on average
    over families, but not in each family.
    """
    base = Calibration.shipped()
    tails, n_steps = dict(base.tails), base.n_steps
    families: dict[str, list[dict[str, Any]]] = {}
    for run in results(("choose",)):
        if is_healthy(run):
            families.setdefault(family_of(run), []).append(run)
    for runs in families.values():
        own = calibrate([run_of(run) for run in runs], base=base)
        n_steps += own.n_steps
        for name, tail in own.tails.items():
            if name not in tails or tail.evidence_at(SHARE_OF_RATE) > tails[name].evidence_at(SHARE_OF_RATE):
                tails[name] = tail
    about = f"{base.about}; the worst family of these and of {', '.join(sorted(families))}"
    Calibration(tails, n_steps, about).save(SHIPPED / "calibration.json", overwrite=True)
    print(f"{sum(tails[n] is not base.tails.get(n) for n in tails)} of {len(tails)} thresholds were raised")


# Evaluation


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the alarms of one run from its record."""
    alarms = wb.Alarms()
    judged, asked_after = JudgedRun(alarms, result["start"]), -1
    for observation in loaded(result["place"]):
        is_extra = observation.part in CHECKED and (observation.step + 1) % (CADENCE[observation.part] or 1) != 0
        if is_extra and asked_after < observation.step - 1:
            continue
        if alarms.observe(observation) or alarms.is_in_doubt:
            asked_after = observation.step
        if observation.part == "monitors":
            judged.end_update(observation.step)
    return judged.row(result)


def judge_all(processes: int, sets: tuple[str, ...]) -> None:
    """Write a row for each run next to it. Existing rows are kept; remove them after a change of the alarms."""
    waiting = [result for result in results(sets) if not result["place"].with_suffix(".row").exists()]
    for row, result in in_processes(judge, waiting, processes):
        place = result["place"].with_suffix(".row")
        with replacing(place) as partial_file:
            partial_file.write_text(json.dumps(row))


def write_table(out: Path) -> None:
    """Write the table of all rows, including those that it already has."""
    rows = {}
    if out.exists():
        before = xr.load_dataset(out).to_dataframe().to_dict("records")
        rows = {row["name"]: row for row in before}
    for place in (place for name in SETS for place in (WORK / name).glob("*.row")):
        row = json.loads(place.read_text())
        rows[row["name"]] = row
    kept = without_failed_controls(list(rows.values()))
    ordered = sorted(kept, key=lambda row: (row["set"], row["name"]))
    columns = {name: ("run", [row[name] for row in ordered]) for name in ordered[0]}
    seconds = sum(row["seconds"] for row in ordered)
    attrs = {
        "calibration": Calibration.shipped().about,
        "scripts": "data/record_warnings.py, data/judge_warnings.py",
        "versions": versions(),
        "minutes": round(seconds / 60),
    }
    xr.Dataset(columns, attrs=attrs).to_netcdf(out)
    print(f"{len(rows)} runs in {out}")


def without_failed_controls(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without faults whose control failed, because these have no healthy run for comparison."""
    failed = {(row["setup"], row["plan"]) for row in rows if row["kind"] == "" and row["is_harmful"]}
    found = []
    for row in rows:
        if (row["setup"], row["plan"]) in failed and row["kind"] not in ("", "late"):
            continue
        is_failed = row["kind"] == "" and row["is_harmful"]
        found.append(row | {"kind": "late"} if is_failed else row)
    return found


def in_processes(function: Any, items: list[Any], processes: int) -> Iterator[tuple[Any, Any]]:
    """Yield results with their items, in the order of the items."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        for i, found in enumerate(pool.map(function, items)):
            if i % 50 == 49:
                print(f"{i + 1} of {len(items)}", flush=True)
            yield found, items[i]


def main() -> None:
    """Run the requested step of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("fit", "choose", "attribute", "judge"))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.stage == "judge":
        judge_all(args.processes, tuple(args.sets))
        write_table(args.out)
    else:
        {"fit": fit, "choose": choose, "attribute": partial(attribute, args.processes)}[args.stage]()


if __name__ == "__main__":
    main()
