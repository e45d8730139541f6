"""Record the runs of the study behind the alarms; resumable, one file a run.

    python data/record_warnings.py --set fit            # healthy runs, then faults by bisection of their dose
    python data/record_warnings.py --set locked --only healthy

Every run has a recorder with its default cadence and no alarms. A faulted run shares model, data and plan with its
healthy control, which is recorded first, and ends soon after its loss is visibly worse: its mean over 50 steps is above
that of the control by three standard deviations of the control's means over 50 steps, for 200 steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from warning_cases import KINDS, Case, LateCase, build, build_late, controls, late_cases, searches

import workbench as wb
from workbench.io.atomic import replacing
from workbench.koopman.spectra import RankWarning

WINDOW, N_DEVIATIONS, LASTING = 50, 3.0, 200
#: The control's means are compared with its own trend over so many steps.
TREND = 250


def means(loss: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean over the last steps, shape (step,); NaN before there are so many."""
    sums = np.cumsum(np.insert(np.asarray(loss, dtype=float), 0, 0.0))
    found = np.full(len(loss), np.nan)
    found[window - 1 :] = (sums[window:] - sums[:-window]) / window
    return found


def deviation(loss: np.ndarray) -> float:
    """Standard deviation of a healthy run's means over `WINDOW` steps around their trend, from step 200 on, in nats."""
    short, trend = means(loss), means(loss, TREND)
    shift = (TREND - WINDOW) // 2  # both centred on the same step
    left = short[TREND:-shift] - trend[TREND + shift :]
    return float(np.std(left[np.isfinite(left)]))


class Harm:
    """Whether a run is visibly worse than its control, step by step.

    Args:
        control: Losses of the control.

    Attributes:
        since: First step of the present stretch of visibly worse means; None: there is none.
    """

    def __init__(self, control: np.ndarray) -> None:
        self._limit = means(control) + N_DEVIATIONS * deviation(control)
        self._losses: list[float] = []
        self.since: int | None = None

    def update(self, step: int, loss: float) -> bool:
        """Process a loss; whether the harm has lasted."""
        self._losses.append(loss)
        is_worse = step < len(self._limit) and float(np.mean(self._losses[-WINDOW:])) > self._limit[step]
        self.since = (step if self.since is None else self.since) if is_worse else None
        return self.since is not None and step - self.since >= LASTING


def record(case: Case | LateCase, work: Path) -> dict[str, Any]:
    """Train one case into a netCDF file, and a JSON beside it; what it says if it is there."""
    place = work / f"{case.name}.nc"
    if place.with_suffix(".json").exists():
        return json.loads(place.with_suffix(".json").read_text())
    begun = time.monotonic()
    model, task, plan = build(case) if isinstance(case, Case) else build_late(case)
    start = case.start if isinstance(case, Case) else None
    harm = None
    if start is not None:
        control = wb.open_run(work / f"{case.control.name}.nc")["monitors"]["loss"].values
        harm = Harm(control)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        store = Path(folder) / "run.zarr"
        run = wb.train(model, task, store=store, recorder=wb.Recorder(n_probe_tokens=128), **plan)
        has_lasted, last = False, None
        for last in run:
            has_lasted = harm is not None and harm.update(last.step, last.loss) and harm.since >= start
            if has_lasted:
                run.close()
                break
        recorded = wb.open_run(store).load()
    wb.export_netcdf(recorded, place, overwrite=True)
    assert last is not None
    result = asdict(case) | {
        "start": start,
        "n_steps": last.step + 1,
        "diverged": last.cause if last.diverged else "",
        "visible": None if harm is None else harm.since,
        "is_harmful": bool(last.diverged or has_lasted or (harm is not None and harm.since is not None)),
        "seconds": time.monotonic() - begun,
    }
    with replacing(place.with_suffix(".json")) as partial:
        partial.write_text(json.dumps(result))
    return result


def search(case: Case, work: Path) -> list[dict[str, Any]]:
    """The grossest dose, then the subtlest harmful one by bisection of the doses; every run is kept."""
    doses = KINDS[case.kind].doses
    done = [record(replace(case, dose=doses[0]), work)]
    harmful, harmless = 0, len(doses)
    if not done[0]["is_harmful"]:
        return done
    while harmless - harmful > 1:
        middle = (harmful + harmless) // 2
        done.append(record(replace(case, dose=doses[middle]), work))
        if done[-1]["is_harmful"]:
            harmful = middle
        else:
            harmless = middle
    return done


def told(function: Callable[[Any, Path], Any], case: Any, work: Path) -> list[str]:
    """What came of a job, in words."""
    done = function(case, work)
    lines = []
    for result in done if isinstance(done, list) else [done]:
        what = f"{result.get('kind') or 'healthy'} {result.get('dose', '')}" if "setup" in result else "late"
        how = result["diverged"] or ("harm" if result["is_harmful"] else "no harm")
        where = f"from {result['start']}, visible {result['visible']}, " if result["start"] is not None else ""
        name = result.get("setup", case.name)
        lines.append(f"{name} {what}: {where}{how} after {result['n_steps']} ({result['seconds']:.0f} s)")
    return lines


def side_by_side(function: Any, cases: list[Any], work: Path, processes: int) -> Iterator[str]:
    """Jobs in processes of one thread each, results as they come."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(told, function, case, work) for case in cases]):
            yield from done.result()


def main() -> None:
    """Read the command line and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/warnings"))
    parser.add_argument("--set", choices=("fit", "choose", "locked"), required=True)
    parser.add_argument("--only", choices=("healthy", "faults", "late"))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    work = args.work / args.set
    work.mkdir(parents=True, exist_ok=True)
    stages: list[tuple[str, Any, list[Any]]] = [
        ("healthy", record, controls(args.set)),
        ("faults", search, searches(args.set)),
        ("late", record, late_cases(args.set) if args.set != "choose" else []),
    ]
    for stage, function, cases in stages:
        if args.only in (None, stage) and cases:
            for line in side_by_side(function, cases, work, args.processes):
                print(line, flush=True)


if __name__ == "__main__":
    main()
