"""The README: its numbers are recomputed from the files in data/ by code of its own, and its code runs."""

import ast
import builtins
import csv
import re
import shutil

import numpy as np
import pytest
import torch
import xarray as xr

from tests.docs.page_numbers import ROOT, check_page

DATA = ROOT / "data"
README = (ROOT / "README.md").read_text(encoding="utf-8")

CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
#: Task -> its statements in the README.
TASKS = {
    "compare two checkpoints": (
        "texts = wb.tasks.reference_passages(25)",
        'spectra = {name: wb.profile(wb.samples.load(name), texts) for name in ("pre_ln", "no_norm")}',
        "wb.compare(spectra)",
    ),
    "train two architectures with the switch": ("wb.LiveTraining()",),
    "watch a loop of one's own": ("with wb.watch(model, optimizer) as watched:", "..."),
    "find a rate": (
        'plan = {"n_steps": 2000, "warmup": 50, "schedule": "cosine"}',
        "print(wb.find_rate(model, task, **plan))",
    ),
    "assess a design": ('tree = wb.assess("gpt2", plan="notebooks/plan.toml")', 'wb.report(tree, "report.html")'),
}
#: What a user has already: the imported library, and a model, its task and its own loop.
GIVEN = {"wb", "workbench", "model", "task", "optimizer", "loss"}

pytestmark = pytest.mark.recorded


def frame(name):
    """A recorded file as one table, without arrays within a row."""
    with xr.open_dataset(DATA / name) as data:
        own = [each for each in data.variables if set(data[each].dims) <= {"run"} | {"design"}]
        return data[own].load().to_dataframe()


def percent(n, of):
    return f"{n} of {of} ({100 * n / of:.0f} %)"


def spectra():
    norms = xr.load_dataset(DATA / "initialization" / "norms.nc")["near_unit_mass"].mean("seed")
    ends = xr.load_dataset(DATA / "divergence.nc")["has_diverged"]
    ours, published = ({name: float(of.sel(architecture=name)) for name in ("No-Norm", "Pre-LN")}
                       for of in (norms.sel(source="ours"), norms.sel(source="published")))  # fmt: skip
    n = {name: int(ends.sel(architecture=name).sum()) for name in ours}
    of = int(ends.sel(architecture="No-Norm").size)
    return (
        f"without normalization {n['No-Norm']} of {of} runs diverged and M is {ours['No-Norm']:.2f} "
        f"(published: {published['No-Norm']:.2f}); with Pre-LN {n['Pre-LN']} of {of} and {ours['Pre-LN']:.2f} "
        f"({published['Pre-LN']:.2f})"
    )


def prediction():
    """AUROC as the fraction of pairs of a diverged and another run that M orders, ties counted as half."""
    with xr.open_dataset(DATA / "divergence_sweep.nc") as data:
        runs = data.isel(run=(data["study"] == "held out").values)[["near_unit_mass", "has_diverged"]].load()
    score = runs["near_unit_mass"].mean("layer").values
    diverged = runs["has_diverged"].values.astype(bool)
    known = np.isfinite(score)
    yes, no = score[known & diverged], score[known & ~diverged]
    auroc = ((yes[:, None] > no).mean() + 0.5 * (yes[:, None] == no).mean()).item()
    return f"over {len(diverged)} runs of different designs M has an AUROC of {auroc:.2f}"


def shaping():
    runs = frame("shaping.nc").query("study == 'controls'").groupby("control")["has_diverged"]
    n, of = runs.sum(), int(runs.size().iloc[0])
    assert (runs.size() == of).all()
    return (
        f"diverged: {n['KSS .15, published']} of {of} runs with the published penalty, "
        f"{n['KSS, best']} with the recommended trust region",
        f"{n['none']} of {of} without control, {n['clip 1.0']} with clipping",
    )


def warnings():
    runs = frame("early_warning.nc").query("set == 'locked'")
    healthy = runs[runs["kind"] == ""]
    harmed = runs[runs["is_harmful"] & ~runs["settings_show_it"] & ~runs["kind"].isin(["", "late"])]
    soon = {name: int((harmed[name] - harmed["start"]).between(0, 50).sum())
            for name in ("first_step", "loss_step", "grad_norm_step")}  # fmt: skip
    of = len(harmed)
    return (
        f"alarm within 50 steps in {percent(soon['first_step'], of)} harmful faults, "
        f"{int(healthy['n_alarms'].sum())} false alarms in {int(healthy['n_steps'].sum()):,} healthy steps",
        f"loss alone {percent(soon['loss_step'], of)}, gradient norm alone {percent(soon['grad_norm_step'], of)}",
    )


def rates():
    with (DATA / "rate_accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    (row,) = [
        row for row in rows
        if (row["set"], row["kind"], row["budget"], row["horizon"]) == ("locked", "model", "1000", "480")
    ]  # fmt: skip
    of = int(row["designs"])

    def both(before=""):
        return " and ".join(f"{float(row[before + factor]) * of:.0f}" for factor in ("1.6", "2.5"))

    return (
        f"within a factor of 1.6 and 2.5 for {both()} of {of} designs (target: 80 % and 95 %)",
        f"median edge of the optimizer {both('by optimizer, ')}, one rate for all {both('one rate, ')}",
    )


def assessment():
    designs = frame("assessed_designs.nc").query("set == 'locked'")
    flagged = designs["verdict"].isin(["at risk", "refuse"])
    by_settings = designs["settings_state"] != "healthy"
    fails, trains = designs["fails"], ~designs["fails"] & (designs["kind"] != "planted")
    return (
        f"flagged: {int((flagged & fails).sum())} of {int(fails.sum())} designs that fail, "
        f"{int((flagged & trains).sum())} of {int(trains.sum())} that train",
        f"settings alone {int((by_settings & fails).sum())} and {int((by_settings & trains).sum())}",
    )


def diagnosis():
    runs = xr.load_dataset(DATA / "failures.nc")
    runs = runs.isel(run=(runs["set"] == "locked").values)
    causes = runs["ranked_cause"].values.tolist()
    failed = runs.isel(run=~runs["is_cause"].values[:, causes.index("nothing")])
    truth, of = failed["is_cause"].values, failed.sizes["run"]

    def first(probability):
        return f"{100 * truth[np.arange(of), probability.argmax(1)].mean():.0f} %"

    monitors = failed.sel(view="mechanism")
    inside = monitors["is_in_set"].values
    return (
        f"first cause right in {first(monitors['probability'].values)} of {of} failed runs; a set of "
        f"{inside.sum(1).mean():.1f} causes holds the true ones in {100 * (inside | ~truth).all(1).mean():.0f} %",
        f"settings alone {first(failed['probability_by_settings'].values)}, "
        f"always the most frequent cause {100 * truth.mean(0).max():.0f} %",
    )


def test_every_number_of_the_readme_is_that_of_the_data():
    claims = [spectra(), prediction(), *shaping(), *warnings(), *rates(), *assessment(), *diagnosis()]
    notebooks = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")]
    check_page("README.md", claims, settings=[f"[{name}" for name in notebooks if f"[{name}]" in README])


def test_the_readme_is_short():
    assert len(README.encode()) <= 10_000


def test_the_readme_links_to_files_that_exist():
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_at_most_three_lines_and_needs_no_others(task):
    assert [line for line in TASKS[task] if line not in README] == []
    assert len(TASKS[task]) <= 3
    code = "".join(f"{line}\n    " if line.endswith(":") else f"{line}\n" for line in TASKS[task])
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    read, written = ({name.id for name in names if isinstance(name.ctx, kind)} for kind in (ast.Load, ast.Store))
    assert read - written - set(dir(builtins)) <= GIVEN


@pytest.mark.slow
def test_the_code_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "plan.toml", tmp_path / "notebooks")
    names = {"__name__": "readme"}
    compare, train, assess = CODE
    exec(compile(compare, "README.md", "exec"), names)
    training, watching = train.split("\nwith ")
    exec(compile(training, "README.md", "exec"), names)
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    exec(compile(f"with {watching}", "README.md", "exec"), names)
    shutil.copytree(tmp_path / "runs" / "none.zarr", tmp_path / "runs" / "failed.zarr")
    exec(compile(assess, "README.md", "exec"), names)
    assert (tmp_path / "report.html").exists()
    assert "the best learning rate is" in capsys.readouterr().out
    assert names["tree"].attrs["summary"].startswith("The loss began to rise")
