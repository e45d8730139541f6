# PYTHON_ARGCOMPLETE_OK
"""Command line: check, watch and diagnose trainings, assess designs, measure and compare checkpoints.

The exit status of ``workbench assess`` can gate a pipeline: 0 proceed, 1 at risk, 2 refuse, 4 cannot say. All commands
return 3 for invalid input, with one sentence that describes the error, and 5 for an internal error of the workbench.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from workbench.errors import CheckpointError, OptionError, StoreError, WorkbenchError
from workbench.io.atomic import check_free
from workbench.io.files import FileKind
from workbench.schema.statuses import ExitStatus

if TYPE_CHECKING:
    import xarray as xr

#: File descriptor of standard error, where a script prints if standard output is for JSON.
_STDERR = 2
#: Updates of the demonstration, and the one from which its attention is broken.
_DEMO_STEPS, _DEMO_FAULT = 160, 100
_MEASURES = ("near_unit_mass", "spectral_radius", "eigenvector_condition", "nonlinearity_ratio")
_COMPLETION = 'Completion in bash and zsh: eval "$(register-python-argcomplete workbench)".'
_TREE_SUFFIXES = (".nc", ".zarr")
_ROOT = Path(__file__).resolve().parent.parent
_TEXT = FileKind("a text file in UTF-8", "pass one sequence per line", name="--text")
_DESIGN = FileKind("a design", "write options of wb.zoo, or pass a config.json", OptionError, "MODEL", 1 << 24)

#: Exit status, facts for machines, and what a person reads.
Outcome = tuple[int, Mapping[str, Any], str]
_Run = Callable[[argparse.Namespace], Outcome]
#: Names and options of an argument.
_Argument = tuple[tuple[str, ...], dict[str, Any]]
#: Commands by their functions, whose docstrings describe them: an example, and the arguments.
_COMMANDS: dict[_Run, tuple[str, tuple[_Argument, ...]]] = {}


def _argument(*names: str, **options: Any) -> _Argument:
    return names, options


def _flag(name: str, about: str) -> _Argument:
    return (name,), {"action": "store_true", "help": about}


def _several(name: str, metavar: str, about: str, **options: Any) -> _Argument:
    return (name,), {"action": "append", "default": [], "metavar": metavar, "help": f"{about}; repeatable", **options}


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


_FOR_ALL = _flag("--json", "print the results as JSON"), _flag("--quiet", "no progress on standard error")
_OVERWRITE = _flag("--overwrite", "replace existing files")
_TREE = _argument("--tree", type=Path, metavar="DATA", help="data to write: all measurements, .nc or .zarr")
_FILES = _several("--out", "REPORT", "report to write: .html, .md or .ipynb", type=Path), _TREE, _OVERWRITE
_SCRIPT = _argument("command", nargs="*", metavar="-- COMMAND", help="python SCRIPT ... or torchrun ...")
_CHOICE = (
    _argument("--text", type=Path, help="a text file, one sequence per line (default: reference passages)"),
    _argument("--n-snapshots", type=int, default=2048, metavar="N", help="token states (default 2048)"),
    _argument("--seed", type=int, default=0, help="seed of the choice of tokens (default 0)"),
)
_DESIGNED = (
    _argument(
        "model",
        metavar="MODEL",
        help="a known name (gpt2, llama-2-7b, ...), a checkpoint folder, a config.json, or options of wb.zoo as .toml "
        "or .json",
    ),
    _argument("--plan", type=Path, metavar="PLAN.toml", help="training, hardware and target (default: AdamW at 1e-3)"),
    _flag("--own-weights", "the parameters of the checkpoint instead of new ones"),
    _argument("--seed", type=int, default=0, help="seed of parameters and data (default 0)"),
)


def _command(example: str, *arguments: _Argument) -> Callable[[_Run], _Run]:
    """Return a decorator that adds a command, named after its function."""

    def add(run: _Run) -> _Run:
        _COMMANDS[run] = example, arguments
        return run

    return add


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` of None are those of this process."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    given = parser.parse_args(arguments)
    try:
        status, facts, text = given.run(given)
        if getattr(given, "json", False):
            import json

            from workbench.reports.facts import plain

            text = json.dumps(plain(facts), indent=1, ensure_ascii=False, allow_nan=False)
        if text:
            print(text, flush=True)
        return status
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


@_command(
    "workbench check -- python train.py",
    _argument("--updates", type=_count, default=20, metavar="N", help="updates before the tests (default 20)"),
    _several("--accept", "ID", "contract that is broken on purpose"),
    _flag("--go-on", "continue the training after the tests"),
    _several("--out", "REPORT", "page or results to write: .html or .json", type=Path),
    _OVERWRITE,
    _SCRIPT,
)
def _check(given: argparse.Namespace) -> Outcome:
    """Test whether a training is wired as its author believes.

    A training script runs for some updates, without a change to it, and its contracts are tested on copies. Exit
    status: 0 all hold, 1 some are broken, 2 some could not be tested, 3 invalid input, 5 internal error.
    """
    from workbench.contracts.results import KEYS
    from workbench.contracts.script import check_script, exit_status

    for path in given.out:
        if path.suffix not in (".html", ".json"):
            raise StoreError(f"'{path.name}' has the suffix '{path.suffix}', expected one of .html, .json.")
        check_free(path, overwrite=given.overwrite, keys=KEYS if path.suffix == ".json" else None)
    report = check_script(
        _command_of(given),
        updates=given.updates,
        accept=given.accept,
        goes_on=given.go_on,
        progress=not given.quiet,
        output=_STDERR if given.json else None,
    )
    for path in given.out:
        report.write(path, html=path.suffix == ".html", overwrite=given.overwrite)
        _report_file(given, path)
    return exit_status(report), report.as_json(), str(report)


@_command(
    "workbench profile ./my-checkpoint",
    _argument("model", metavar="MODEL", help="a checkpoint folder, hub name or .gguf file"),
    *_CHOICE,
    _TREE,
    _OVERWRITE,
)
def _profile(given: argparse.Namespace) -> Outcome:
    """Measure the Koopman spectra of a checkpoint."""
    _check_tree_path(given.tree, overwrite=given.overwrite)
    import workbench as wb

    spectra = _spectra(given.model, given)
    if given.tree is not None:
        _save(spectra, given)
    summary = wb.summarize(spectra)
    lines, facts = [], {}
    for name in _MEASURES:
        largest, mean = (float(summary[name].sel(statistic=which)) for which in ("max", "mean"))
        lines.append(f"{_title(summary[name])}: mean {mean:.3g}, largest {largest:.3g}")
        facts[name] = {"mean": mean, "largest": largest, "by_layer": _by_layer(spectra, name)}
    return 0, {"model": given.model, **facts}, "\n".join(lines)


@_command(
    "workbench compare ./checkpoint-100 ./checkpoint-200",
    _argument("models", nargs="+", metavar="MODEL", help="a checkpoint, or a run as .zarr or .nc"),
    *_CHOICE,
)
def _compare(given: argparse.Namespace) -> Outcome:
    """Compare the Koopman spectra of checkpoints or recorded runs."""
    import workbench as wb

    data = {}
    for path in given.models:
        is_run = path.rstrip("/").endswith(_TREE_SUFFIXES)
        name, i = Path(path).name.removesuffix(".nc").removesuffix(".zarr") or path, 2
        while name in data:
            name, i = f"{Path(path).name} ({i})", i + 1
        data[name] = wb.open_run(path) if is_run else _spectra(path, given)
    compared = wb.compare(data)
    names = [name for name in _MEASURES if name in compared]
    table = compared[names].sel(source="ours").to_dataframe()[names]
    table.columns = [_title(compared[name]) for name in names]
    facts = {"architectures": compared.sel(source="ours", drop=True).to_dataframe().reset_index().to_dict("records")}
    return 0, facts, table.to_string(float_format=lambda value: f"{value:.3g}")


@_command(
    "workbench watch -- python train.py",
    _argument("--store", metavar="STORE", help="path or URL of the record (default: a new one in runs/)"),
    _several("--log", "LOGGER", "a logger, such as wandb"),
    _several("--notify", "URL", "receiver of alarms"),
    _flag("--resume", "continue the run in the store"),
    _flag("--overwrite", "replace the run in the store"),
    _SCRIPT,
)
def _watch(given: argparse.Namespace) -> Outcome:
    """Record a training script and raise alarms, without a change to it.

    The training is bit for bit the same. The exit status is that of the script.
    """
    from datetime import datetime

    from workbench.callbacks.watched_script import watch_script
    from workbench.io.run_index import status_of
    from workbench.io.stages import stages_at

    command = _command_of(given)
    script = next((Path(word).stem for word in command if word.endswith(".py")), "run")
    store = given.store or f"runs/{script}_{datetime.now().astimezone():%Y%m%d_%H%M%S}.zarr"
    if "://" not in store and not given.resume:
        check_free(Path(store), overwrite=given.overwrite)
    options = {name: getattr(given, name) for name in ("log", "notify", "resume", "overwrite")}
    status = watch_script(command, store, **options, output=_STDERR if given.json else None)
    if "://" not in store and not (Path(store).exists() or stages_at(Path(store))):  # standard error says why
        return status, {"exit_status": status}, ""
    facts = dict(status_of(store))
    alarm = facts["first_alarm"]
    found = f"first alarm at step {alarm['step']}: {alarm['message']}" if alarm else "no alarm."
    text = f"{facts['state']}, last row of step {facts['step']}, {found}\nworkbench diagnose {store} looks for causes."
    return status, {**facts, "exit_status": status}, text


@_command(
    "workbench follow ssh://host/path/runs/a.zarr",
    _argument("run_path", metavar="RUN", help="a store or its URL, or a log"),
    _flag("--once", "print the screen once"),
)
def _follow(given: argparse.Namespace) -> Outcome:
    """Show how a run is doing, here or far away, until q is pressed.

    The run may be finished, or still be written. --json prints the facts once.
    """
    from workbench.terminal import facts_of, follow

    return 0, facts_of(given.run_path) if given.json else follow(given.run_path, once=given.once), ""


@_command(
    "workbench runs s3://bucket/runs",
    _argument("folder", nargs="?", default="runs", metavar="FOLDER", help="a folder or its URL (default runs)"),
)
def _runs(given: argparse.Namespace) -> Outcome:
    """List the runs in a folder or bucket with state, first alarm and cause."""
    import workbench as wb

    table = wb.list_runs(given.folder)
    shown = table[["state", "step", "loss", "first_alarm", "alarm", "cause", "last_written"]]
    rows = table.reset_index().astype(object).where(table.reset_index().notna(), None).to_dict("records")
    return 0, {"runs": rows}, shown.to_string(na_rep="") if len(shown) else f"There are no runs in {given.folder}."


@_command(
    "workbench find-rate gpt2 --steps 1000",
    *_DESIGNED,
    _argument("--steps", type=_count, metavar="N", help="updates of the training (default: those of the plan)"),
    _argument("--budget", type=_count, default=1000, metavar="N", help="updates of the pilot (default 1000)"),
)
def _find_rate(given: argparse.Namespace) -> Outcome:
    """Estimate the best learning rate and the band of useful ones by a pilot."""
    from dataclasses import replace

    import workbench as wb
    from workbench.assessment.measured_model import measured_model, planned_task

    plan = wb.hardware.read_plan(given.plan)
    if given.steps is not None:
        plan = replace(plan, training=replace(plan.training, n_steps=given.steps))
    measured = measured_model(_subject(given.model, own_weights=given.own_weights), seed=given.seed)
    task = planned_task(measured.model, plan, seed=given.seed)
    training = plan.training_plan()
    names = ("warmup", "schedule", "optimizer", "optimizer_options", "clip_norm", "precision")
    settings: dict[str, Any] = {name: getattr(training, name) for name in names}
    found = wb.find_rate(
        measured.model, task, n_steps=training.n_steps, budget=given.budget, progress=not given.quiet, **settings
    )
    return 0, {name: value for name, value in vars(found).items() if name != "data"}, str(found)


@_command("workbench assess gpt2 --plan plan.toml --out gpt2.html", *_DESIGNED, *_FILES)
def _assess(given: argparse.Namespace) -> Outcome:
    """Assess a design and a plan before training.

    Exit status: 0 proceed, 1 at risk, 2 refuse, 3 invalid input, 4 cannot say, 5 internal error.
    """
    _check_outputs(given)
    import workbench as wb
    from workbench.assessment.assess import assess

    plan = wb.hardware.read_plan(given.plan) if given.plan is not None else None
    subject = _subject(given.model, own_weights=given.own_weights)
    tree = assess(subject, plan=plan, seed=given.seed, progress=not given.quiet)
    return int(tree.attrs["exit_status"]), *_written(tree, given, f"{tree.attrs['verdict']}: {tree.attrs['summary']}")


@_command(
    "workbench diagnose runs/a.zarr --out a.html",
    _argument("run_path", metavar="RUN", help="a store or its URL, or a log: text, CSV, JSON, TensorBoard events"),
    *_FILES,
)
def _diagnose(given: argparse.Namespace) -> Outcome:
    """Look for the causes of a failed run in its record.

    Name the causes that the record does not exclude, or report that no fault was found. Exit status: 0 done, 3 invalid
    input, 5 internal error.
    """
    _check_outputs(given)
    from workbench.diagnosis.diagnose import diagnose

    tree = diagnose(given.run_path)
    return 0, *_written(tree, given, tree.attrs["summary"])


@_command(
    "workbench report runs/a.zarr --out a.html",
    _argument("data", metavar="DATA", help="what --tree wrote, or a run, or a log"),
    *_FILES,
)
def _report(given: argparse.Namespace) -> Outcome:
    """Write a report of saved data, or of a run, which is diagnosed."""
    _check_outputs(given)
    from workbench.diagnosis.diagnose import diagnose
    from workbench.io.store import open_run_or_log

    tree = open_run_or_log(given.data)
    tree = tree if "kind" in tree.attrs else diagnose(given.data)
    return 0, *_written(tree, given, "")


@_command(
    "workbench demo",
    _argument("--store", default="runs/demo.zarr", metavar="STORE", help="record (default runs/demo.zarr)"),
    _flag("--overwrite", "replace the record"),
)
def _demo(given: argparse.Namespace) -> Outcome:
    """Train a small model whose attention breaks, watch it and diagnose it; half a minute."""
    import torch

    import workbench as wb

    store = Path(given.store)
    check_free(store, overwrite=given.overwrite)
    model = wb.zoo.transformer("pre_ln", d_model=64, n_layers=4, n_heads=4, vocab_size=32, max_length=32)
    task = wb.tasks.associative_recall(length=32, vocab_size=32, n_pairs=4, batch_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fault = wb.faults.low_precision_attention(n_bits=4, start=_DEMO_FAULT)
    options: dict[str, Any] = {"store": store, "overwrite": given.overwrite, "shows": not given.quiet, "budget": None}
    with wb.watch(model, optimizer, **options) as watched, fault.attach(model, optimizer):
        for i in range(_DEMO_STEPS):
            inputs, targets = task.batch(i)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            watched.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    from workbench.reports.facts import facts

    tree = wb.diagnose(store)
    text = (
        f"A transformer of 4 blocks was trained for {_DEMO_STEPS} updates. From update {_DEMO_FAULT} on, its attention "
        f"was computed with 4 bits of the mantissa.\n\n{watched.status.as_text()}\n\nThe diagnosis, which was not "
        f"told: {tree.attrs['summary']}\n\nNext:\n  workbench follow --once {store}\n  workbench report {store} --out "
        f"demo.html\n  workbench watch -- python train.py"
    )
    return 0, facts(tree), text


@_command("workbench mcp runs", _argument("folder", metavar="FOLDER", help="a folder of runs, or its URL"))
def _mcp(given: argparse.Namespace) -> Outcome:
    """Answer agents about runs by the Model Context Protocol, read-only.

    The server speaks on standard input and output.
    """
    from workbench.agents import store_server

    store_server(given.folder).run("stdio")
    return 0, {}, ""


@_command(
    "workbench practice --cases 10 -- my-agent --mcp {url}",
    _argument(
        "--level", default="3", help="1 (clear) to 5 (mild, or two causes), or wiring: trainings with a wrong line"
    ),
    _argument("--cases", type=_count, default=10, metavar="N", help="number of cases (default 10)"),
    _SCRIPT,
)
def _practice(given: argparse.Namespace) -> Outcome:
    """Score an agent on practice cases: runs or trainings with a hidden cause.

    The command is run once for each case; {url} stands for the address of an MCP server with the tools of the case,
    which is also in WORKBENCH_CASE_URL.
    """
    from workbench.agents import practice

    return 0, *practice(_command_of(given), given.level, range(given.cases), progress=not given.quiet)


@_command(
    "workbench lab notebooks/00_start.ipynb",
    _argument("notebook", nargs="?", default="notebooks/00_start.ipynb", metavar="NOTEBOOK"),
)
def _lab(given: argparse.Namespace) -> Outcome:
    """Open the notebooks in JupyterLab."""
    script = _ROOT / "tools" / "lab.py"
    if not script.exists():
        raise StoreError("The notebooks are not installed with the package; run 'make lab' in the repository.")
    if not (_ROOT / given.notebook).exists():
        raise StoreError(f"There is no notebook {given.notebook} in {_ROOT}; see the list in README.md.")
    command = [sys.executable, str(script), given.notebook]
    sys.stdout.flush()
    os.execv(command[0], command)


def _command_of(given: argparse.Namespace) -> list[str]:
    """Return the command after ``--``."""
    if not given.command:
        raise OptionError(f"There is no command; pass it after --, as in {given.example}.")
    return given.command


def _spectra(model: str, given: argparse.Namespace) -> Any:
    """Return the spectra of a checkpoint on the given text or on reference passages."""
    import workbench as wb
    from workbench.tasks import reference_passages

    subject = wb.open_checkpoint(model)
    inputs: Sequence[str] = reference_passages(64)
    if given.text is not None:
        inputs = [line for line in _TEXT.text(given.text).splitlines() if line.strip()]
    return wb.profile(subject, inputs, n_snapshots=given.n_snapshots, seed=given.seed, progress=not given.quiet)


def _title(variable: Any) -> str:
    return str(variable.attrs.get("long_name", variable.name))


def _by_layer(spectra: Any, name: str) -> list[float] | None:
    """Return a measure by layer; None if it has further dimensions."""
    return spectra[name].values.tolist() if spectra[name].ndim == 1 else None


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


def _written(tree: xr.DataTree, given: argparse.Namespace, text: str) -> tuple[Mapping[str, Any], str]:
    """Write the files that were asked for, and return facts and text."""
    from workbench.reports.facts import facts
    from workbench.reports.make_report import report

    # The data are written first, because they took the longest to compute.
    if given.tree is not None:
        _save(tree, given)
    for path in given.out:
        report(tree, path, overwrite=given.overwrite)
        _report_file(given, path)
    return facts(tree), text


def _save(data: Any, given: argparse.Namespace) -> None:
    import workbench as wb

    write = wb.export_netcdf if given.tree.suffix == ".nc" else wb.save
    write(data, given.tree, overwrite=given.overwrite)
    _report_file(given, given.tree)


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
        raise StoreError(f"{place} would be written twice, as .ipynb and .md have a second file; choose another name.")


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
    parser = _Parser(prog="workbench", description=__doc__.split("\n\n")[0], epilog=_COMPLETION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for run, (example, arguments) in _COMMANDS.items():
        about, name = str(run.__doc__), run.__name__.strip("_").replace("_", "-")
        short = about.partition("\n")[0].rstrip(".")
        command = commands.add_parser(
            name, help=short[0].lower() + short[1:], description=about, epilog=f"Example: {example}"
        )
        command.set_defaults(run=run, example=example)
        for names, options in (*(() if run in (_lab, _mcp) else _FOR_ALL), *arguments):
            command.add_argument(*names, **options)
    return parser


if __name__ == "__main__":
    sys.exit(main())
