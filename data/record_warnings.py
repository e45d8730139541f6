"""Record the runs of the study of alarms, one file per run; resumable, and runs of early_warning.nc are not repeated.

    python data/record_warnings.py --set fit            # healthy runs with their faults, then late failures
    python data/record_warnings.py --set examples       # short runs with faults, which the attribution is fitted to
    python data/record_warnings.py --set locked --plans 3 10 --device cuda    # more healthy runs, on a GPU

Every run has a recorder with its default cadence, and alarms, which request additional checks of arithmetic and
gradients. A run with a fault equals its healthy control up to the first step of the fault, and continues in a copy of
the control's process. It ends soon after its loss is visibly worse: its mean over 50 steps exceeds that of the control
by three standard deviations of the control's means over 50 steps, for 200 steps. A late failure is visible if the mean
over 250 steps exceeds the smallest previous one by three such deviations of the first 1,000 steps, until the end.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
import multiprocessing
import os
import pickle
import select
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from judged_run import JudgedRun
from threadpoolctl import threadpool_limits
from warning_cases import KINDS, Case, LateCase, Later, build, build_late, controls, examples, late_cases, searches

import workbench as wb
from workbench.io.atomic import replacing
from workbench.koopman.spectra import RankWarning

TABLE = Path(__file__).parent / "early_warning.nc"
WINDOW, N_DEVIATIONS, LASTING = 50, 3.0, 200
#: Number of steps of the trend with which the control's means are compared.
TREND = 250
#: Number of steps after the onset, for faults that the logged settings reveal and for others.
HORIZON = {True: 100, False: 1000}
HORIZON_OF_EXAMPLES = 100


def means(loss: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return the mean over the last ``window`` steps, shape (step,); NaN for the first steps."""
    sums = np.cumsum(np.insert(np.asarray(loss, dtype=float), 0, 0.0))
    found = np.full(len(loss), np.nan)
    found[window - 1 :] = (sums[window:] - sums[:-window]) / window
    return found


def deviation(loss: np.ndarray) -> float:
    """Return the standard deviation of a healthy run's means over `WINDOW` steps around their trend, in nat.

    The first 200 steps are excluded.
    """
    short, trend = means(loss), means(loss, TREND)
    shift = (TREND - WINDOW) // 2  # both centered on the same step
    left = short[TREND:-shift] - trend[TREND + shift :]
    return float(np.std(left[np.isfinite(left)]))


def late_harm(losses: list[float]) -> int | None:
    """Return the first step from which a run remains visibly worse than before until its end; None if there is none."""
    long = means(np.array(losses), TREND)
    best = np.fmin.accumulate(np.where(np.isnan(long), np.inf, long))
    is_worse = long > best + N_DEVIATIONS * deviation(np.array(losses[:1000]))
    last_good = int(np.flatnonzero(~is_worse)[-1])
    return last_good + 1 if len(losses) - 1 - last_good >= LASTING else None


class Harm:
    """Check step by step whether a run is visibly worse than its control.

    Args:
        control: Losses of the control.
        losses: Losses of the run so far.

    Attributes:
        since: First step of the current sequence of visibly worse means; None if there is none.
    """

    def __init__(self, control: np.ndarray, losses: list[float]) -> None:
        self._limit = means(control) + N_DEVIATIONS * deviation(control)
        self._losses = list(losses)
        self.since: int | None = None

    def update(self, step: int, loss: float) -> bool:
        """Process a loss, and return whether the harm has lasted."""
        self._losses.append(loss)
        is_worse = step < len(self._limit) and float(np.mean(self._losses[-WINDOW:])) > self._limit[step]
        self.since = (step if self.since is None else self.since) if is_worse else None
        return self.since is not None and step - self.since >= LASTING


class Recorded:
    """A run in training, with all observations of its recorder.

    Args:
        case: The run to train.
        device: Device of the training.
    """

    def __init__(self, case: Case | LateCase, device: str = "cpu") -> None:
        self.case, self.begun = case, time.monotonic()
        self.model, task, plan = build(case) if isinstance(case, Case) else build_late(case)
        self.later = Later()
        self.losses: list[float] = []
        self.observations: list[Any] = []
        recorder = wb.Recorder(n_probe_tokens=128, budget=None)
        recorder.observe(self.observations.append)
        self.alarms = wb.Alarms()
        self.judged = JudgedRun(self.alarms)
        self.run = wb.train(
            self.model.to(device), task, recorder=recorder, alarms=self.alarms, callbacks=[self.later], **plan
        )
        self.last: Any = None

    def __iter__(self) -> Iterator[Any]:
        for record in self.run:
            self.last = record
            self.losses.append(record.loss)
            self.judged.end_update(record.step)
            yield record

    def save(self, place: Path, visible: int | None = None, **more: Any) -> dict[str, Any]:
        """Write the observations, the row of the alarms (.row) and the result of the run (.json), which is returned."""
        kept = [(o.step, o.part, dict(o.values), dict(o.coords)) for o in self.observations]
        with replacing(place) as partial, gzip.open(partial, "wb", compresslevel=1) as file:
            pickle.dump(kept, file, protocol=5)
        result = asdict(self.case) | {
            "name": place.stem,
            "set": place.parent.name,
            "start": None,
            "n_steps": self.last.step + 1,
            "diverged": self.last.cause if self.last.diverged else "",
            "visible": visible,
            "is_harmful": bool(self.last.diverged or visible is not None),
            "seconds": time.monotonic() - self.begun,
            **more,
        }
        for suffix, content in ((".row", self.judged.row(result)), (".json", result)):
            with replacing(place.with_suffix(suffix)) as partial:
                partial.write_text(json.dumps(content))
        return result


def loaded(place: Path) -> list[wb.alarms.Observation]:
    """Return the observations of a run."""
    with gzip.open(place, "rb") as file:
        return [wb.alarms.Observation(*kept) for kept in pickle.load(file)]


def place_of(case: Case | LateCase, work: Path) -> Path:
    """Return the file of a run's observations."""
    return work / f"{case.name}.obs"


def known(case: Case | LateCase, work: Path) -> dict[str, Any] | None:
    """Return the result of a run from its file or from the table; None if it is not recorded."""
    place = place_of(case, work).with_suffix(".json")
    return json.loads(place.read_text()) if place.exists() else rows_of_table().get(case.name)


@functools.cache
def rows_of_table() -> dict[str, dict[str, Any]]:
    """Return whether runs of the table were harmed, by the name of the run."""
    if not TABLE.exists():
        return {}
    with xr.open_dataset(TABLE) as table:
        names, harmed = table["name"].values.tolist(), table["is_harmful"].values.tolist()
    return {name: {"is_harmful": is_harmful} for name, is_harmful in zip(names, harmed, strict=True)}


def record(case: Case | LateCase, work: Path, device: str = "cpu") -> None:
    """Train and record a run without faults."""
    if known(case, work) is None:
        run = Recorded(case, device)
        for _ in run:
            pass
        visible = late_harm(run.losses) if isinstance(case, LateCase) else None
        tell(run.save(place_of(case, work), visible, device=device))


def record_with_faults(control: Case, faults: list[Case], work: Path) -> None:
    """Train a control and, in copies of its process, the same run with each fault, bisecting the dose."""
    if known(control, work) is not None and all(is_searched(case, work) for case in faults):
        return
    run, waiting = Recorded(control), []
    for record in run:
        waiting += [Waiting(case, run, work) for case in faults if case.start == record.step + 1]
    if not place_of(control, work).exists():
        tell(run.save(place_of(control, work), device="cpu"))
    for each in waiting:
        each.go()


class Waiting:
    """A copy of this process that waits for the losses of the control before it searches the doses of a fault.

    Args:
        case: The fault.
        run: The control, at the first step of the fault.
        work: Folder of the files.
    """

    def __init__(self, case: Case, run: Recorded, work: Path) -> None:
        ours, self._theirs = os.pipe()
        original = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            while not select.select([ours], [], [], 10)[0]:
                if os.getppid() != original:
                    os._exit(1)
            in_a_copy(lambda: search(case, run, work))
        os.close(ours)

    def go(self) -> None:
        """Start the search, and wait until it is finished."""
        os.write(self._theirs, b"go")
        os.close(self._theirs)
        wait_for(self._process)


def in_a_copy(action: Callable[[], Any]) -> None:
    """Run a function in a forked process, and end the process."""
    try:
        action()
    except BaseException:  # noqa: BLE001  it must not go on as a second original
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait_for(process: int) -> None:
    """Wait for a forked process."""
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise RuntimeError("A copy of the process failed; its error is above.")


def search(case: Case, run: Recorded, work: Path) -> None:
    """Run the largest dose, then find the smallest harmful dose by bisection; every run is kept."""
    control = np.array([float(o.values["loss"]) for o in loaded(place_of(case.control, work)) if o.part == "monitors"])
    for dose in doses_of(case, work):
        one = replace(case, dose=dose)
        if (process := os.fork()) == 0:
            in_a_copy(lambda one=one: branch(one, run, control, work))
        wait_for(process)


def doses_of(case: Case, work: Path) -> Iterator[float]:
    """Yield the unrecorded doses of a search one at a time; the next dose depends on the result of the previous one."""
    if case.is_example:
        yield from () if known(case, work) else (case.dose,)
        return
    doses = KINDS[case.kind].doses
    harmful, harmless, middle = -1, len(doses), 0
    while harmless - harmful > 1:
        one = replace(case, dose=doses[middle])
        if known(one, work) is None:
            yield doses[middle]
        found = known(one, work)
        if found is None or KINDS[case.kind].is_visible or (middle == 0 and not found["is_harmful"]):
            return
        if found["is_harmful"]:
            harmful = middle
        else:
            harmless = middle
        middle = (harmful + harmless) // 2


def is_searched(case: Case, work: Path) -> bool:
    """Return whether all doses of a search are recorded."""
    return next(doses_of(case, work), None) is None


def branch(case: Case, run: Recorded, control: np.ndarray, work: Path) -> None:
    """Continue a run with a fault from its first step on."""
    start = case.start or 0
    last_step = start + (HORIZON_OF_EXAMPLES if case.is_example else HORIZON[KINDS[case.kind].is_visible])
    run.case, run.begun = case, time.monotonic()
    run.later.become(case)
    run.judged.begin_fault(start)
    harm, has_lasted = Harm(control, run.losses), False
    for last in run:
        has_lasted = harm.update(last.step, last.loss) and (harm.since or 0) >= start
        if has_lasted or last.step >= last_step:
            break
    tell(run.save(place_of(case, work), harm.since, start=start))


def tell(result: dict[str, Any]) -> None:
    """Print the result of a run."""
    what = f"{result.get('kind') or 'healthy'} {result.get('dose', '')}" if "setup" in result else "late"
    how = result["diverged"] or ("harm" if result["is_harmful"] else "no harm")
    where = f"from {result['start']}, visible {result['visible']}, " if result["start"] is not None else ""
    name = f"{result['setup']} {result['plan']}" if "setup" in result else str(result)
    print(f"{name} {what}: {where}{how} after {result['n_steps']} ({result['seconds']:.0f} s)", flush=True)


def begin(n_threads: int) -> None:
    """Initialize a worker process."""
    torch.set_num_threads(n_threads)
    threadpool_limits(n_threads)
    warnings.simplefilter("ignore", RankWarning)


def main() -> None:
    """Read the command line and record the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/warnings"))
    parser.add_argument("--set", choices=("fit", "choose", "locked", "examples"), required=True)
    parser.add_argument("--only", choices=("healthy", "late"))
    parser.add_argument("--plans", type=int, nargs=2, default=(0, 1000), help="first plan, and the one after the last")
    parser.add_argument("--device", default="cpu", help="device of healthy runs without faults")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    work = args.work / args.set
    work.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[Any, ...]] = []
    faults: dict[Case, list[Case]] = {}
    if args.set == "examples":
        jobs += [(record_with_faults, control, of_it, work) for control, of_it in examples().items()]
        run_all(jobs, args.processes)
        return
    for case in searches(args.set) if args.only is None and args.device == "cpu" else []:
        faults.setdefault(case.control, []).append(case)
    for control in controls(args.set) if args.only != "late" else []:
        if args.plans[0] <= control.plan < args.plans[1]:
            of_it = faults.get(control, [])
            jobs.append((record_with_faults, control, of_it, work) if of_it else (record, control, work, args.device))
    if args.only != "healthy":
        jobs += [(record, case, work) for case in late_cases(args.set)]
    run_all(jobs, args.processes)


def run_all(jobs: list[tuple[Any, ...]], processes: int) -> None:
    """Run jobs (function and arguments), the longest first, then by the number of the plan."""
    jobs.sort(key=lambda job: (-len(job[2]) if isinstance(job[2], list) else 0, getattr(job[1], "plan", math.inf)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=begin, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(*job) for job in jobs]):
            done.result()


if __name__ == "__main__":
    main()
