"""Command line: assess a design before training, diagnose a failed run, or measure a checkpoint.

The exit status of ``workbench assess`` can gate a pipeline: 0 proceed, 1 at risk, 2 refuse, 4 cannot say. All commands
return 3 for invalid input, with one sentence that describes the error, and 5 for an internal error of the workbench.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from workbench.errors import CheckpointError, OptionError, StoreError, WorkbenchError
from workbench.io.atomic import check_free
from workbench.io.files import FileKind
from workbench.schema.statuses import ExitStatus, Verdict

if TYPE_CHECKING:
    import xarray as xr

_TREE_SUFFIXES = (".nc", ".zarr")
_ROOT = Path(__file__).resolve().parent.parent
_TEXT = FileKind("a text file in UTF-8", "pass one sequence per line", name="--text")
_DESIGN = FileKind("a design", "write options of wb.zoo, or pass a config.json", OptionError, "MODEL", 1 << 24)
_STATUSES: dict[int, str] = {verdict.exit_status: verdict for verdict in Verdict}
_STATUSES |= {ExitStatus.BAD_INPUT: "invalid input", ExitStatus.BROKEN: "internal error"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` of None are those of this process."""
    given = _parser().parse_args(arguments)
    try:
        return given.run(given)
    except WorkbenchError as error:
        words = str(error).replace("pass overwrite=True", "pass --overwrite")
        print(f"workbench: {words}", file=sys.stderr)
        return ExitStatus.BAD_INPUT
    except BrokenPipeError:  # the reader of the output has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.INTERRUPTED
    except KeyboardInterrupt:
        print("workbench: stopped.", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    except Exception:  # noqa: BLE001  (Python's own exit status is 1, which means "at risk" here)
        traceback.print_exc()
        return ExitStatus.BROKEN


def _assess(given: argparse.Namespace) -> int:
    _check_outputs(given)
    import workbench as wb
    from workbench.assessment.assess import assess

    plan = wb.hardware.read_plan(given.plan) if given.plan is not None else None
    subject = _subject(given.model, own_weights=given.own_weights)
    tree = assess(subject, plan=plan, seed=given.seed, progress=not given.quiet)
    _write(tree, given)
    print(f"{tree.attrs['verdict']}: {tree.attrs['summary']}")
    return int(tree.attrs["exit_status"])


def _diagnose(given: argparse.Namespace) -> int:
    _check_outputs(given)
    from workbench.diagnosis.diagnose import diagnose

    tree = diagnose(given.run_path)
    _write(tree, given)
    print(tree.attrs["summary"])
    return 0


def _profile(given: argparse.Namespace) -> int:
    _check_tree_path(given.tree, overwrite=given.overwrite)
    import workbench as wb

    subject = wb.open_checkpoint(given.model)
    if given.text is not None:
        inputs = [line for line in _TEXT.text(given.text).splitlines() if line.strip()]
    else:
        from workbench.tasks import reference_passages

        inputs = reference_passages(64)
    spectra = wb.profile(subject, inputs, n_snapshots=given.n_snapshots, seed=given.seed, progress=not given.quiet)
    if given.tree is not None:
        _save(spectra, given.tree, overwrite=given.overwrite)
        _report_file(given, given.tree)
    summary = wb.summarize(spectra)
    for name in ("near_unit_mass", "spectral_radius", "eigenvector_condition", "nonlinearity_ratio"):
        largest, mean = (float(summary[name].sel(statistic=which)) for which in ("max", "mean"))
        print(f"{summary[name].attrs.get('long_name', name)}: mean {mean:.3g}, largest {largest:.3g}")
    return 0


def _check(given: argparse.Namespace) -> int:
    if not given.command:
        raise OptionError("There is no command to check; pass it after --, as in workbench check -- python train.py.")
    from workbench.contracts.results import KEYS
    from workbench.contracts.script import check_script, exit_status

    for path, keys in ((given.json, KEYS), (given.out, None)):
        if path is not None:
            check_free(path, overwrite=given.overwrite, keys=keys)

    report = check_script(
        given.command, updates=given.updates, accept=given.accept, goes_on=given.go_on, progress=not given.quiet
    )
    for path, is_page in ((given.json, False), (given.out, True)):
        if path is not None:
            report.write(path, html=is_page, overwrite=given.overwrite)
    print(report, flush=True)
    return exit_status(report)


def _lab(given: argparse.Namespace) -> int:
    script = _ROOT / "tools" / "lab.py"
    if not script.exists():
        raise StoreError("The notebooks are not installed with the package; run 'make lab' in the repository.")
    if not (_ROOT / given.notebook).exists():
        raise StoreError(f"There is no notebook {given.notebook} in {_ROOT}; see the list in README.md.")
    command = [sys.executable, str(script), given.notebook]
    sys.stdout.flush()
    os.execv(command[0], command)


def _subject(model: str, *, own_weights: bool) -> Any:
    """Return the design or checkpoint to assess."""
    import workbench as wb

    path = Path(model).expanduser()
    if own_weights:
        return wb.open_checkpoint(model)
    if path.is_file() and path.suffix == ".toml":
        return wb.design(_DESIGN.toml(path), name=path.stem)
    if path.is_file() and path.suffix == ".json" and path.name != "config.json":
        options = _DESIGN.json(path)
        # A configuration of transformers with another file name has the type of the model.
        is_of_transformers = "model_type" in options
        return wb.design(path if is_of_transformers else options, name=path.stem)
    if path.is_file() and path.suffix not in (".json", ".toml"):
        raise CheckpointError(
            f"{path} does not describe a design; pass a known name, a config.json, a checkpoint folder or options of "
            "wb.zoo as .toml or .json, or add --own-weights to assess a checkpoint with its own parameters."
        )
    return wb.design(str(path) if path.exists() else model)


def _write(tree: xr.DataTree, given: argparse.Namespace) -> None:
    from workbench.reports.make_report import report

    # The data are written first, because they took the longest to compute.
    if given.tree is not None:
        _save(tree, given.tree, overwrite=given.overwrite)
        _report_file(given, given.tree)
    for path in given.out:
        report(tree, path, overwrite=given.overwrite)
        _report_file(given, path)


def _save(data: Any, path: Path, *, overwrite: bool) -> None:
    import workbench as wb

    write = wb.export_netcdf if path.suffix == ".nc" else wb.save
    write(data, path, overwrite=overwrite)


def _report_file(given: argparse.Namespace, path: Path) -> None:
    if not given.quiet:
        print(f"wrote {path}", file=sys.stderr, flush=True)


def _check_outputs(given: argparse.Namespace) -> None:
    """Raise before the work if a file exists, cannot be written, or would be written twice."""
    from workbench.reports.make_report import check_target

    _check_tree_path(given.tree, overwrite=given.overwrite)
    places = [given.tree, *given.out, *(check_target(path, overwrite=given.overwrite) for path in given.out)]
    named = [os.path.abspath(place) for place in places if place is not None]
    if twice := {place for place in named if named.count(place) > 1}:
        place = min(twice)
        raise StoreError(
            f"{place} would be written twice, as a report in .ipynb or .md writes a second file; choose another name."
        )


def _check_tree_path(path: Path | None, *, overwrite: bool) -> None:
    if path is None:
        return
    if path.suffix not in _TREE_SUFFIXES:
        raise StoreError(f"'{path.name}' has the suffix '{path.suffix}', expected one of {', '.join(_TREE_SUFFIXES)}.")
    check_free(path, overwrite=overwrite)


class _Parser(argparse.ArgumentParser):
    """Parser that exits with the status of invalid input; that of argparse, 2, means "refuse" here."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help.", file=sys.stderr)
        sys.exit(ExitStatus.BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="workbench", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    assess = commands.add_parser(
        "assess",
        help="will this design train under this plan?",
        description="Assess a design and a plan before training. Exit status: "
        + ", ".join(f"{status} {meaning}" for status, meaning in sorted(_STATUSES.items()))
        + ".",
    )
    assess.add_argument(
        "model",
        metavar="MODEL",
        help="a known name (gpt2, llama-2-7b, ...), a checkpoint folder, a config.json, or options of wb.zoo as .toml "
        "or .json",
    )
    assess.add_argument(
        "--plan", type=Path, metavar="PLAN.toml", help="training, hardware and target (default: AdamW at 1e-3)"
    )
    assess.add_argument(
        "--own-weights",
        action="store_true",
        help="assess the parameters of the checkpoint instead of newly initialized ones",
    )
    assess.add_argument("--seed", type=int, default=0, help="seed of parameters and data (default 0)")
    _add_outputs(assess)
    assess.set_defaults(run=_assess)

    diagnose = commands.add_parser(
        "diagnose",
        help="why did this run fail?",
        description="Name the causes that the record of a run does not exclude, or report that no fault was found. "
        "Exit status: 0 done, 3 invalid input, 5 internal error.",
    )
    diagnose.add_argument(
        "run_path", type=Path, metavar="RUN", help="a store of wb.train, or a log: text, CSV, JSON, TensorBoard events"
    )
    _add_outputs(diagnose)
    diagnose.set_defaults(run=_diagnose)

    check = commands.add_parser(
        "check",
        help="is this training wired as its author believes?",
        description="Run a training script for some updates, without a change to it, and test its contracts on copies. "
        "Exit status: 0 all hold, 1 some are broken, 2 some could not be tested, 3 invalid input, 5 internal error.",
    )
    check.add_argument("--updates", type=_count, default=20, metavar="N", help="updates before the tests (default 20)")
    check.add_argument(
        "--accept", action="append", default=[], metavar="ID", help="contract that is broken on purpose; repeatable"
    )
    check.add_argument("--go-on", action="store_true", help="continue the training after the tests")
    check.add_argument("--json", type=Path, metavar="PATH", help="results to write for machines")
    check.add_argument("--out", type=Path, metavar="PAGE.html", help="page to write")
    check.add_argument("--overwrite", action="store_true", help="replace existing files")
    check.add_argument("--quiet", action="store_true", help="no progress on standard error")
    check.add_argument("command", nargs="*", metavar="-- COMMAND", help="python SCRIPT ... or torchrun ... SCRIPT ...")
    check.set_defaults(run=_check)

    profile = commands.add_parser(
        "profile", help="Koopman spectra of a checkpoint", description="Measure the Koopman spectra of a checkpoint."
    )
    profile.add_argument("model", metavar="MODEL", help="a checkpoint folder, hub name or .gguf file")
    profile.add_argument("--text", type=Path, help="a text file, one sequence per line (default: reference passages)")
    profile.add_argument("--n-snapshots", type=int, default=2048, metavar="N", help="token states (default 2048)")
    profile.add_argument("--seed", type=int, default=0, help="seed of the choice of tokens (default 0)")
    _add_data_output(profile)
    profile.set_defaults(run=_profile)

    lab = commands.add_parser("lab", help="open the notebooks in JupyterLab", description="Open JupyterLab.")
    lab.add_argument("notebook", nargs="?", default="notebooks/00_start.ipynb", metavar="NOTEBOOK")
    lab.set_defaults(run=_lab)
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        action="append",
        default=[],
        metavar="REPORT",
        help="report to write: .html, .md or .ipynb; may be repeated",
    )
    _add_data_output(parser)


def _add_data_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tree", type=Path, metavar="DATA", help="data to write: all measurements, .nc or .zarr")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


if __name__ == "__main__":
    sys.exit(main())
