"""Fit the alarms to the runs of record_warnings.py, and judge them.

    python data/judge_warnings.py fit                  # calibration and attribution, from the runs of "fit"
    python data/judge_warnings.py judge                # what the alarms say about every run, into early_warning.nc

Every run is replayed from its record, so the judgement is the same as live but for one thing: live, an alarm makes the
recorder check arithmetic and gradients at the next update, a record only has them at their cadence.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from warning_cases import KINDS, SETUPS

import workbench as wb
from workbench.callbacks import alarms as room
from workbench.callbacks.alarms import Attributor, Calibration, calibrate, observations
from workbench.callbacks.alarms.run_evidence import RunEvidence
from workbench.io.provenance import versions

WORK = Path("artifacts/warnings")
SHIPPED = Path(room.__file__).parent / "shipped"
OUT = Path(__file__).parent / "early_warning.nc"
SETS = ("fit", "choose", "locked")
#: Steps after the onset whose scores the attribution is fitted to; and steps in which the cause should be named.
LEARNED, NAMED = 150, 50
NOBODY = Attributor(("nobody", "knows"), (), np.zeros((2, 0)), np.zeros(2))


def results(sets: tuple[str, ...]) -> list[dict[str, Any]]:
    """What record_warnings.py says about each finished run, with its place and set."""
    return [
        {"set": name, "place": place.with_suffix(".nc")} | json.loads(place.read_text())
        for name in sets
        for place in sorted((WORK / name).glob("*.json"))
    ]


def is_healthy(result: dict[str, Any]) -> bool:
    """Whether it has no fault, and is none of the late failures."""
    return result.get("kind") == ""


# Fitting


def fit(processes: int) -> None:
    """The shipped calibration and attribution."""
    runs = results(("fit",))
    healthy = [wb.open_run(run["place"]) for run in runs if is_healthy(run)]
    about = f"{len(healthy)} healthy runs of small models, data/judge_warnings.py"
    SHIPPED.mkdir(exist_ok=True)
    calibration = calibrate(healthy, base=Calibration({}, 0), about=about)
    calibration.save(SHIPPED / "calibration.json", overwrite=True)
    faulted = [run for run in runs if run.get("kind")]
    examples = [example for found in in_processes(scores_after_onset, faulted, processes) for example in found]
    Attributor.fit(examples).save(SHIPPED / "attribution.json", overwrite=True)
    print(f"fitted to {calibration.n_steps:,} healthy steps and {len(examples)} measurements of {len(faulted)} faults")


def scores_after_onset(result: dict[str, Any]) -> list[tuple[dict[str, float], str]]:
    """What an attributor would get at each new alarm after the onset, with the cause."""
    alarms = wb.Alarms(attributor=NOBODY, calibration=Calibration.open(SHIPPED / "calibration.json"))
    found = []
    for observation in observations(wb.open_run(result["place"])):
        if observation.part in ("precision", "reduction", "settings"):
            continue
        fresh = alarms.observe(observation)
        if fresh and result["start"] <= observation.step < result["start"] + LEARNED:
            found.append((alarms.features(), KINDS[result["kind"]].cause))
        if observation.step >= result["start"] + LEARNED:
            break
    return found


# Judging


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """What the alarms say about one run, when, and what they name as the cause."""
    start = result["start"] or 0
    alarms, alone = wb.Alarms(), Alone()
    named = {"first_cause": "", "cause": ""}
    for observation in observations(wb.open_run(result["place"])):
        fresh = [alarm for alarm in alarms.observe(observation) if alarm.step >= start]
        alone.observe(observation)
        if fresh and not named["first_cause"]:
            named["first_cause"] = alarms.attribute().cause
        if named["first_cause"] and observation.step <= start + NAMED:
            named["cause"] = alarms.attribute().cause
    before = [alarm for alarm in alarms.raised if alarm.step < start]
    after = [alarm for alarm in alarms.raised if alarm.step >= start]
    mechanisms = [alarm for alarm in after if not alarm.is_outcome]
    first, mechanism = next(iter(after), None), next(iter(mechanisms), None)
    kind = result.get("kind", "")
    return {
        "set": result["set"],
        "setup": result.get("setup", "late"),
        "family": SETUPS[result["setup"]].family if "setup" in result else str(result["norm"]),
        "plan": result.get("plan", result.get("seed", -1)),
        "kind": kind if "setup" in result else "late",
        "dose": float(result.get("dose", result.get("rate", math.nan))),
        "remedy": str(result.get("remedy", "")),
        "expected_cause": KINDS[kind].cause if kind else "",
        "settings_show_it": bool(kind) and KINDS[kind].is_visible,
        "start": math.nan if result["start"] is None else result["start"],
        "n_steps": result["n_steps"],
        "is_harmful": bool(result["is_harmful"]),
        "visible_step": math.nan if result["visible"] is None else result["visible"],
        "divergence": result["diverged"],
        "first_step": math.nan if first is None else first.step,
        "first_signal": "" if first is None else first.signal,
        "mechanism_step": math.nan if mechanism is None else mechanism.step,
        "mechanism_signal": "" if mechanism is None else mechanism.signal,
        "loss_step": alone.first("loss", start),
        "grad_norm_step": alone.first("grad_norm", start),
        "n_alarms": len(after),
        "n_alarms_before": len(before),
        "false_signals": ", ".join(f"{a.signal} {a.step}" for a in (alarms.raised if is_healthy(result) else before)),
        **named,
    }


class Alone:
    """The alarms of the loss and of the gradient norm, each alone with the whole rate of false alarms."""

    def __init__(self) -> None:
        self._evidence = RunEvidence()
        self._steps: dict[str, list[int]] = {"loss": [], "grad_norm": []}
        calibration = Calibration.shipped()
        self._threshold = {name: calibration.threshold(name, 1.0, n_signals=1) for name in self._steps}

    def observe(self, observation: Any) -> None:
        """Process an observation."""
        if observation.part != "monitors":
            return
        for reading in self._evidence.update(observation):
            name = reading.watched.name
            if name in self._steps and (
                reading.is_broken or (reading.is_judged and reading.evidence >= self._threshold[name])
            ):
                self._steps[name].append(reading.step)

    def first(self, name: str, start: int) -> float:
        """First step of an alarm from ``start`` on; NaN: there is none."""
        return float(next((step for step in self._steps[name] if step >= start), math.nan))


def judge_all(processes: int, sets: tuple[str, ...], out: Path) -> None:
    """The table of all runs."""
    rows = list(in_processes(judge, results(sets), processes))
    columns = {name: ("run", [row[name] for row in rows]) for name in rows[0]}
    attrs = {"calibration": Calibration.shipped().about, "script": "data/judge_warnings.py", "versions": versions()}
    table = xr.Dataset(columns, attrs=attrs)
    table.to_netcdf(out)
    print(f"{len(rows)} runs in {out}")


def in_processes(function: Any, items: list[Any], processes: int) -> Iterator[Any]:
    """Results in the order of the items."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for i, found in enumerate(pool.map(function, items, chunksize=4)):
            if i % 50 == 49:
                print(f"{i + 1} of {len(items)}", flush=True)
            yield found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("fit", "judge"))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    stages = {"fit": fit, "judge": partial(judge_all, sets=tuple(args.sets), out=args.out)}
    stages[args.stage](args.processes)


if __name__ == "__main__":
    main()
