"""Checks of an unmodified training script: it runs for some updates, its contracts are tested, and it ends."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.contracts.results import CheckReport, Result, Status
from workbench.errors import OptionError

#: Exit statuses of a check.
PASSED, FAILED, NOT_TESTED = 0, 1, 2
_STATUSES = {Status.FAILED: FAILED, Status.NOT_TESTED: NOT_TESTED}
#: Most stages of a training that are observed. After the experiments, another one is waited for during this multiple of
#: the observed updates, and at most as many seconds.
_MOST_STAGES, _MORE_UPDATES, _MOST_SECONDS = 3, 2, 10.0
#: Options of Python and torchrun that have a value of their own.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def check_script(
    command: Sequence[str],
    *,
    updates: int = 20,
    accept: Sequence[str] = (),
    goes_on: bool = False,
    progress: bool = True,
    output: Any = None,
) -> CheckReport:
    """Run the command of a training under observation, and return the results by contract.

    Args:
        command: Command line, such as ``["python", "train.py", "--its", "args"]`` or ``["torchrun", ...]``.
        updates: Number of updates before the experiments.
        accept: Ids of contracts that are broken on purpose.
        goes_on: Whether the training continues after the experiments instead of ending.
        progress: Whether to show the progress of the experiments on standard error.
        output: Stream for what the script prints; None for standard output.

    Returns:
        Results, those of all ranks together.

    Raises:
        OptionError: If the command is none of Python or torchrun, or the script fails before its first update.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = ["-m", "workbench.contracts.script", "--updates", str(updates), "--folder", folder]
        own += [f"--accept={each}" for each in accept] + ["--go-on"] * goes_on + ["--quiet"] * (not progress) + ["--"]
        status = subprocess.run(within(list(command), own), check=False, stdout=output).returncode
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    if not ranks:
        words = f"ended with status {status}" if status else "ended"
        raise OptionError(
            f"The script {words} before its first update in the main thread of its own process; pass a command that "
            "trains a model with torch, torchrun if there are several processes."
        )
    return merged([_in_stages(stages) for stages in ranks])


def within(command: list[str], own: list[str]) -> list[str]:
    """Return the command with our module between the launcher with its options and the script."""
    name = Path(command[0]).name if command else ""
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        known = get_args_parser()
        given = known.parse_args(command[1:])
        n_script = len(given.training_script_args) + 1
        options = command[1:-n_script]
        script = command[-n_script:]
        if given.module:
            options = [each for each in options if each not in ("-m", "--module")]
            script = ["-m", *script]
        return [sys.executable, "-m", "torch.distributed.run", *options, *own, *script]
    if not name.startswith("python"):
        raise OptionError.of("command", " ".join(command), "python SCRIPT or torchrun SCRIPT, after --")
    i = 1
    while i < len(command) and command[i].startswith("-") and command[i] not in ("-m", "-c"):
        i += 2 if command[i] in _WITH_VALUE else 1
    if i >= len(command) or command[i] == "-c":
        raise OptionError.of("command", " ".join(command), "a script or -m with a module, after the options of Python")
    program = sys.executable if name in ("python", "python3") else command[0]
    return [program, *command[1:i], *own, *command[i:]]


def merged(ranks: Sequence[CheckReport]) -> CheckReport:
    """Return one report of several ranks, in which a failure on any of them counts."""
    order = [Status.FAILED, Status.ACCEPTED, Status.NOT_TESTED, Status.PASSED, Status.NOT_APPLICABLE]
    found: list[Result] = []
    for first in ranks[0].checks:
        each = [report[first.id] for report in ranks if any(c.id == first.id for c in report.checks)]
        worst = min(each, key=lambda one: order.index(one.status))
        on = [str(i) for i, one in enumerate(each) if one.status is worst.status]
        if worst.status is Status.FAILED and 0 < len(on) < len(ranks):
            worst = replace(worst, where=f"{worst.where} (rank {', '.join(on)})")
        found.append(worst)
    return CheckReport(found, ranks[0].n_updates, max(report.seconds for report in ranks), ranks[0].losses)


def _in_stages(stages: Sequence[dict[str, Any]]) -> CheckReport:
    """Return one report of the stages of a training, each contract with the stage that says most about it."""
    order = [Status.FAILED, Status.ACCEPTED, Status.PASSED, Status.NOT_TESTED, Status.NOT_APPLICABLE]

    def place(result: Result) -> float:  # a question about a place comes before what holds in another stage
        return 1.5 if result.status is Status.NOT_TESTED and result.where else order.index(result.status)

    reports = [CheckReport.of_json(each) for each in stages]
    found = list(reports[0].checks)
    for stage, report in zip(stages[1:], reports[1:], strict=True):
        for i, old in enumerate(found):
            new = report[old.id]
            if place(new) < place(old):
                found[i] = replace(new, where=new.where and f"{new.where} (after update {stage['n_earlier']})")
    losses = [loss for report in reports for loss in report.losses]
    n_updates, seconds = (sum(getattr(each, name) for each in reports) for name in ("n_updates", "seconds"))
    return CheckReport(found, n_updates, seconds, losses)


def exit_status(report: CheckReport) -> int:
    """Return the exit status of a report: 0 all passed, 1 something failed, 2 something could not be tested."""
    return _STATUSES.get(Status(report.verdict), PASSED)


def run_main(script: list[str]) -> None:
    """Run ``SCRIPT ARGUMENTS`` or ``-m MODULE ARGUMENTS`` as the main program of this process."""
    sys.argv = script[1:] if script[0] == "-m" else script
    if script[0] == "-m":
        sys.path[0] = os.getcwd()
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script[0]).resolve().parent)
        runpy.run_path(script[0], run_name="__main__")


def main() -> None:
    """Run a script under observation in this process, and write its results into a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--accept", action="append", default=[])
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    cut = sys.argv.index("--")
    given, script = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]

    from workbench.contracts import check as check
    from workbench.contracts.lab import all_results, show_progress
    from workbench.contracts.observer import Finished, Observer

    ends_by_itself, reports = False, list[dict[str, Any]]()

    def ready(seen: Observer) -> None:
        start = time.perf_counter()
        with show_progress(not given.quiet and not int(os.environ.get("RANK", 0))) as bar:
            results = all_results(seen, tuple(given.accept), bar)
        losses = [each.loss for each in seen.passes]
        report = CheckReport(results, seen.n_done, time.perf_counter() - start, losses)
        reports.append({**report.as_json(), "n_earlier": seen.n_earlier})
        name = f"{int(os.environ.get('RANK', 0)):05}.json"
        (given.folder / name).write_text(json.dumps(reports), encoding="utf-8")
        if len(reports) < _MOST_STAGES and "RANK" not in os.environ:
            until, most = time.perf_counter() + _MOST_SECONDS, _MORE_UPDATES * given.updates

            def wait() -> None:
                if not given.go_on and (time.perf_counter() > until or seen.n_unseen > most):
                    raise Finished

            seen.waiting = wait
        elif not (given.go_on or ends_by_itself):
            raise Finished

    with Observer(given.updates, ready) as seen:
        seen.sees_all = True
        try:
            run_main(script)
        except Finished:
            return
        finally:
            ends_by_itself = True
            if seen.passes:
                seen.has_ended = not seen.is_over
                seen.finish()


if __name__ == "__main__":
    main()
