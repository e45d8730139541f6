"""Fit the alarms to the runs of record_warnings.py, and judge them.

    python data/judge_warnings.py fit        # calibration and attribution, from the runs of "fit"
    python data/judge_warnings.py choose     # a larger threshold where a family of "choose" needs one
    python data/judge_warnings.py judge      # what the alarms say about every run; the table is early_warning.nc

Every run is replayed from its record. Runs were recorded with alarms, so that a record has what an alarm made the
recorder check at the next update; a check that the alarms judged here would not have asked for is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from record_warnings import loaded
from warning_cases import KINDS, SETUPS

import workbench as wb
from workbench.callbacks import alarms as room
from workbench.callbacks.alarms import Attributor, Calibration, calibrate
from workbench.callbacks.alarms.run_evidence import RunEvidence
from workbench.callbacks.recorder.options import CADENCE, is_due
from workbench.io.atomic import replacing
from workbench.io.provenance import versions

WORK = Path("artifacts/warnings")
SHIPPED = Path(room.__file__).parent / "shipped"
OUT = Path(__file__).parent / "early_warning.nc"
SETS = ("fit", "choose", "locked")
#: Steps after the onset whose scores the attribution is fitted to; and steps in which the cause should be named.
LEARNED, NAMED = 150, 50
#: Parts that an alarm makes the recorder check.
CHECKED = ("precision", "reduction")
#: False alarms per 100,000 steps that a signal may raise if some 25 share the rate of one.
SHARE_OF_RATE = 0.04
NOBODY = Attributor(("nobody", "knows"), (), np.zeros((2, 0)), np.zeros(2))


def results(sets: tuple[str, ...]) -> list[dict[str, Any]]:
    """What record_warnings.py says about each finished run, with its place and set."""
    return [
        {"set": name, "place": place.with_suffix(".obs")} | json.loads(place.read_text())
        for name in sets
        for place in sorted((WORK / name).glob("*.json"))
    ]


def is_healthy(result: dict[str, Any]) -> bool:
    """Whether it has no fault, and is none of the late failures."""
    return result.get("kind") == ""


def family_of(result: dict[str, Any]) -> str:
    """What a run is held out with."""
    return SETUPS[result["setup"]].family if "setup" in result else str(result["norm"])


def run_of(result: dict[str, Any]) -> xr.DataTree:
    """The signals of a run that alarms compare with their own past."""
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


def fit(processes: int) -> None:
    """The calibration and the attribution of "fit"."""
    runs = results(("fit",))
    healthy = [run_of(run) for run in runs if is_healthy(run)]
    about = f"{len(healthy)} healthy runs of small models, data/judge_warnings.py"
    SHIPPED.mkdir(exist_ok=True)
    calibration = calibrate(healthy, base=Calibration({}, 0), about=about)
    calibration.save(SHIPPED / "calibration.json", overwrite=True)
    faulted = [run for run in runs if run.get("kind")]
    examples = [example for found, _ in in_processes(scores_after_onset, faulted, processes) for example in found]
    Attributor.fit(examples).save(SHIPPED / "attribution.json", overwrite=True)
    print(f"fitted to {calibration.n_steps:,} healthy steps and {len(examples)} measurements of {len(faulted)} faults")


def scores_after_onset(result: dict[str, Any]) -> list[tuple[dict[str, float], str]]:
    """What an attributor would get at each new alarm after the onset, with the cause."""
    alarms = wb.Alarms(attributor=NOBODY, calibration=Calibration.open(SHIPPED / "calibration.json"))
    found = []
    for observation in loaded(result["place"]):
        if observation.part in (*CHECKED, "settings"):
            continue
        fresh = alarms.observe(observation)
        if fresh and result["start"] <= observation.step < result["start"] + LEARNED:
            found.append((alarms.features(), KINDS[result["kind"]].cause))
        if observation.step >= result["start"] + LEARNED:
            break
    return found


def choose() -> None:
    """Each signal's tail is that of the family, of "choose" or all of "fit", that needs the largest threshold.

    Else the rate of false alarms would hold on average over families, and not in each. The weights of the attribution
    change with the thresholds, so that it says the same as before.
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
    attributor = Attributor.shipped()
    ratio = [
        tails[name].evidence_at(SHARE_OF_RATE) / base.tails[name].evidence_at(SHARE_OF_RATE)
        if name in base.tails
        else 1
        for name in attributor.features
    ]
    about = f"{base.about}; the worst family of these and of {', '.join(sorted(families))}"
    Calibration(tails, n_steps, about).save(SHIPPED / "calibration.json", overwrite=True)
    replace(attributor, weight=attributor.weight * ratio).save(SHIPPED / "attribution.json", overwrite=True)
    print(f"{sum(tails[n] is not base.tails.get(n) for n in tails)} of {len(tails)} thresholds are larger now")


# Judging


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """What the alarms say about one run, when, and what they name as the cause."""
    start = result["start"] or 0
    alarms, alone = wb.Alarms(), Alone()
    named = {"first_cause": "", "cause": ""}
    asked_after = -1
    for observation in loaded(result["place"]):
        is_extra = observation.part in CHECKED and not is_due(observation.step, CADENCE[observation.part])
        if is_extra and asked_after < observation.step - 1:
            continue
        fresh = alarms.observe(observation)
        if fresh:
            asked_after = observation.step
        alone.observe(observation)
        if any(alarm.step >= start for alarm in fresh) and not named["first_cause"]:
            named["first_cause"] = alarms.attribute().cause
        if named["first_cause"] and observation.step <= start + NAMED:
            named["cause"] = alarms.attribute().cause
    before = [alarm for alarm in alarms.raised if alarm.step < start]
    after = [alarm for alarm in alarms.raised if alarm.step >= start]
    mechanisms = [alarm for alarm in after if not alarm.is_outcome]
    first, mechanism = next(iter(after), None), next(iter(mechanisms), None)
    kind = result.get("kind", "")
    ends = [result["visible"], result["n_steps"] - 1 if result["diverged"] else None]
    return {
        "name": result["place"].stem,
        "set": result["set"],
        "setup": result.get("setup", "decoder at a high rate"),
        "family": family_of(result),
        "plan": result.get("plan", result.get("seed", -1)),
        "device": result.get("device", "cpu"),
        "kind": kind if "setup" in result else "late",
        "dose": float(result.get("dose", result.get("rate", math.nan))),
        "remedy": str(result.get("remedy", "")),
        "expected_cause": "logit_growth" if "setup" not in result else KINDS[kind].cause if kind else "",
        "settings_show_it": bool(kind) and KINDS[kind].is_visible,
        "start": math.nan if result["start"] is None else result["start"],
        "n_steps": result["n_steps"],
        "is_harmful": bool(result["is_harmful"]),
        "harm_step": float(min((end for end in ends if end is not None), default=math.nan)),
        "divergence": result["diverged"],
        "first_step": math.nan if first is None else first.step,
        "first_signal": "" if first is None else first.signal,
        "mechanism_step": math.nan if mechanism is None else mechanism.step,
        "mechanism_signal": "" if mechanism is None else mechanism.signal,
        "loss_step": alone.first("loss", start),
        "grad_norm_step": alone.first("grad_norm", start),
        "n_alarms": len(after),
        "n_alarms_before": len(before),
        "alarms_before": ", ".join(f"{a.signal} {a.step}" for a in (alarms.raised if is_healthy(result) else before)),
        "n_loss_alarms": alone.n_before("loss", None if is_healthy(result) else start),
        "n_grad_norm_alarms": alone.n_before("grad_norm", None if is_healthy(result) else start),
        "seconds": result["seconds"],
        **named,
    }


class Alone:
    """The alarms of the loss and of the gradient norm, each alone with the whole rate of false alarms."""

    def __init__(self) -> None:
        self._evidence = RunEvidence()
        self._steps: dict[str, list[int]] = {"loss": [], "grad_norm": []}
        self._is_standing = dict.fromkeys(self._steps, False)
        calibration = Calibration.shipped()
        self._threshold = {name: calibration.threshold(name, 1.0, n_signals=1) for name in self._steps}

    def observe(self, observation: Any) -> None:
        """Process an observation."""
        if observation.part != "monitors":
            return
        for reading in self._evidence.update(observation):
            name = reading.watched.name
            if name not in self._steps:
                continue
            share = math.inf if reading.is_broken else reading.evidence / self._threshold[name]
            if reading.is_broken or (reading.is_judged and share >= 1):
                if not self._is_standing[name]:
                    self._steps[name].append(reading.step)
                self._is_standing[name] = True
            elif share < 0.5:
                self._is_standing[name] = False

    def first(self, name: str, start: int) -> float:
        """First step of an alarm from ``start`` on; NaN: there is none."""
        return float(next((step for step in self._steps[name] if step >= start), math.nan))

    def n_before(self, name: str, start: int | None) -> int:
        """Alarms before a step, or at all."""
        return sum(start is None or step < start for step in self._steps[name])


def judge_all(processes: int, sets: tuple[str, ...]) -> None:
    """A row for each run, beside it; rows that are there are kept: remove them after a change of the alarms."""
    waiting = [result for result in results(sets) if not result["place"].with_suffix(".row").exists()]
    for row, result in in_processes(judge, waiting, processes):
        place = result["place"].with_suffix(".row")
        with replacing(place) as partial_file:
            partial_file.write_text(json.dumps(row))


def write_table(out: Path) -> None:
    """The table of all rows, those that it had before included."""
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
    """Controls that fail are failures by themselves; their faults are left out, with nothing to compare them with."""
    failed = {(row["setup"], row["plan"]) for row in rows if row["kind"] == "" and row["is_harmful"]}
    found = []
    for row in rows:
        if (row["setup"], row["plan"]) in failed and row["kind"] not in ("", "late"):
            continue
        is_failed = row["kind"] == "" and row["is_harmful"]
        found.append(row | {"kind": "late"} if is_failed else row)
    return found


def in_processes(function: Any, items: list[Any], processes: int) -> Iterator[tuple[Any, Any]]:
    """Results with their items, in the order of the items."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        for i, found in enumerate(pool.map(function, items, chunksize=4)):
            if i % 50 == 49:
                print(f"{i + 1} of {len(items)}", flush=True)
            yield found, items[i]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("fit", "choose", "judge"))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.stage == "judge":
        judge_all(args.processes, tuple(args.sets))
        write_table(args.out)
    else:
        {"fit": partial(fit, args.processes), "choose": choose}[args.stage]()


if __name__ == "__main__":
    main()
