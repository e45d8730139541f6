"""Workbench without a browser: sources, ticks, views, progress, and the lines of Python, which are executed."""

import json
import os
import re
import shutil
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.about import about, says
from tests.plots.conftest import spectra_of
from tests.widgets.recorded_runs import run_of
from workbench.errors import CheckpointError, OptionError, StoreError
from workbench.widgets import Workbench
from workbench.widgets.workbench_parts.calls import LibraryCall, Missing, Named, Results
from workbench.widgets.workbench_parts.sources import Kind, quick_kind, search, shipped, source_of
from workbench.widgets.workbench_parts.views import VIEWS, inputs_of

pytestmark = pytest.mark.render
SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with two runs, spectra, a checkpoint, a log, a sweep and a plan."""
    place = tmp_path_factory.mktemp("files")
    wb.save(run_of([0, 10, 20], width=8), place / "runs/calm.zarr")
    wb.save(run_of([0, 10], n_steps=14, diverges=True, width=8, seed=1), place / "runs/wild.zarr")
    wb.save(spectra_of(0.9, width=8), place / "spectra.zarr")
    wb.save_checkpoint(wb.zoo.transformer(**SIZE), place / "tiny")
    (place / "log.csv").write_text("step,loss\n" + "".join(f"{i},{3 / (i + 1)}\n" for i in range(30)))
    (place / "plan.toml").write_text("[training]\nn_steps = 20\n")
    (place / "other.toml").write_text("[tool]\nn_steps = 20\n")
    (place / "notes.txt").write_text("nothing")
    runs = wb.sweeps.grid({"tiny": SIZE}, learning_rate=[1e-3], n_steps=2, task={"name": "random_tokens"})
    wb.sweeps.SweepStore(place / "sweep.zarr", runs)
    return place


@pytest.fixture
def folder(files, tmp_path, monkeypatch):
    """The current folder: a copy of these files."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def make():
    """Workbenches that are closed after the test."""
    made = []

    def workbench(*args, ticked=(), shown=("spectra",), **options):
        bench = Workbench(*args, **options)
        made.append(bench)
        bench.shown = shown
        bench.ticked = ticked
        bench.wait(120)
        return bench

    yield workbench
    for bench in made:
        bench.close()


def executed(bench):
    """The variables after the lines of a workbench have run, without those that display something."""
    code = bench.code
    assert code.splitlines()[-1].startswith(("display(", *(view.variable for view in VIEWS.values()), "rates"))
    variables = {}
    exec(code.rpartition("\n")[0], variables)
    return SimpleNamespace(**{name: value for name, value in variables.items() if not name.startswith("__")})


def remark_of(bench, view):
    return bench._room.frames[view].remark


# ---- sources


def test_shipped_sources_have_different_names_and_open_what_they_say():
    sources = {source.name: source for source in shipped()}
    assert len(sources) == len(shipped())
    assert {"pre_ln", "smollm2", "Pre-LN", "Pre-LN, diverged", "gpt2", "rate study, test set"} <= set(sources)
    results = Results()
    results.compute(sources["No-Norm design"].value, lambda words: None)
    assert results.known(sources["No-Norm design"].value).norm == "none"
    results.compute(sources["failed: precision"].value, lambda words: None)
    assert "monitors" in results.known(sources["failed: precision"].value).children


@pytest.mark.medium
@pytest.mark.recorded
@pytest.mark.parametrize("kind", ["healthy", "diverged"])
def test_the_recorded_runs_are_listed_without_opening_them(kind):
    group = "Recorded runs" if kind == "healthy" else "Diverged runs"
    listed = [source.name.removesuffix(", diverged") for source in shipped() if source.group == group]
    assert listed == list(wb.samples.recorded_runs(kind))


@pytest.mark.medium
def test_a_folder_is_searched(folder):
    found = search(folder)
    assert found.is_complete
    assert {source.name: source.kind for source in found.sources} == {
        "log.csv": Kind.LOG,
        "plan.toml": Kind.PLAN,
        "spectra": Kind.RUN,
        "sweep": Kind.SWEEP,
        "tiny": Kind.CHECKPOINT,
        "runs/calm": Kind.RUN,
        "runs/wild": Kind.RUN,
    }
    assert all(source.mark == "" for source in found.sources)


def test_logs_of_other_tools_are_listed(tmp_path):
    for name, text in {
        "a/train.log": "iter 0: loss 3.5, time 1ms\niter 10: loss 3.25, time 1ms\n",
        "a/notes.txt": "The loss was 3 at step 10.\n",
        "a/config.json": '{"z_loss": 0.1, "n_layer": 2, "step": 3}',
        "b/trainer_state.json": "{}",
        "c/metrics.jsonl": '{"step": 0, "loss": 3.5}\n{"step": 1, "loss": 3.25}\n',
        "c/texts.jsonl": '{"text": "loss"}\n{"text": "step 3"}\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {source.name: source.kind for source in search(tmp_path).sources}
    assert found == dict.fromkeys(["a/train.log", "b", "c/metrics.jsonl"], "log")


def test_hidden_and_deep_folders_are_skipped_and_a_partial_search_says_so(folder, monkeypatch):
    for place in (".hidden", "a/b/c", "a/b/c/d/e"):
        wb.save(spectra_of(0.9, width=8), folder / place / "one.zarr")
    found = search(folder)
    names = [source.name for source in found.sources]
    assert "a/b/c/one" in names
    assert "a/b/c/d/e/one" not in names
    assert ".hidden/one" not in names
    assert not found.is_complete
    monkeypatch.setattr("workbench.widgets.workbench_parts.sources._MOST_FOUND", 2)
    assert len(search(folder).sources) == 2


def set_state(store, state, age=0.0):
    """Write a state into a store, as if it had been written some seconds ago."""
    meta = store / "zarr.json"
    content = json.loads(meta.read_text())
    content["attributes"]["state"] = state
    meta.write_text(json.dumps(content))
    then = time.time() - age
    os.utime(meta, (then, then))


def test_runs_that_are_being_written_are_marked(folder, make):
    set_state(folder / "runs/calm.zarr", "running")
    set_state(folder / "runs/wild.zarr", "running", age=7200)
    bench = make()
    marks = {name: source.mark for name, source in bench._catalogue.sources.items() if source.mark}
    assert marks == {"runs/calm": "live", "runs/wild": "silent for 2 h"}
    items = {item["name"]: item for group in bench._room.sources.groups for item in group["items"]}
    assert items["runs/calm"]["mark"] == "live"
    set_state(folder / "runs/calm.zarr", "finished")
    bench._follow(looks=True)
    assert bench._catalogue.sources["runs/calm"].mark == ""


def test_an_incomplete_search_loses_nothing(folder, make, monkeypatch):
    bench = make(ticked=["runs/wild"])
    before = bench.sources
    monkeypatch.setattr("workbench.widgets.workbench_parts.sources._MOST_FOUND", 2)
    bench._follow(looks=True)
    assert sorted(bench.sources) == sorted(before)
    assert bench.ticked == ["runs/wild"]
    assert "Not the whole folder" in bench._room.note.value
    shutil.rmtree("runs/wild.zarr")
    bench._follow(looks=True)
    assert bench.ticked == []


def test_what_is_opened_by_path_or_name_is_ticked(folder, make):
    bench = make(folder / "runs")
    assert [name for name in bench.sources if "calm" in name] == ["calm"]
    assert bench.add("log.csv") == "log.csv"
    assert bench.add(folder / "runs" / "calm.zarr") == "calm"  # it was in the list
    assert bench.add("pre_ln") == "pre_ln"
    bench._room.path.value = str(folder / "tiny")
    assert bench.ticked == ["log.csv", "calm", "pre_ln", "tiny"]
    assert bench._room.path.value == ""
    assert bench.add("log.csv") == "log.csv"
    assert bench.ticked.count("log.csv") == 1


def test_what_cannot_be_opened_is_named(folder, make):
    bench = make()
    bench._room.path.value = "nowhere.zarr"
    assert "There is no file or folder nowhere.zarr" in bench.error
    bench._room.path.value = "notes.txt"
    assert "neither a run, a log, a sweep" in bench.error
    assert bench.ticked == []
    with pytest.raises(StoreError, check=says("There is no folder")):
        Workbench(folder / "none")
    with pytest.raises(OptionError, check=about("ticked", "nothing")):
        bench.ticked = ["nothing"]


def test_a_name_that_is_no_path_is_one_of_the_hub(folder):
    source = source_of("org/model", folder)
    assert source.kind == Kind.CHECKPOINT
    assert source.value == LibraryCall("wb.open_checkpoint", ("org/model",))
    assert source_of("gpt2", folder).kind == Kind.PUBLISHED


def test_a_dropped_file_is_saved_and_opened(folder, make):
    bench = make()
    content = (folder / "log.csv").read_bytes()

    def drop(name, content):
        middle = len(content) // 2
        for start, end in ((0, middle), (middle, len(content))):
            message = {"file": name, "start": start, "isLast": end == len(content)}
            bench._room.sources._handle_custom_msg(message, [memoryview(content[start:end])])

    drop("../mine.csv", content)
    assert bench.ticked == ["dropped/mine.csv"]
    assert (folder / "dropped" / "mine.csv").read_bytes() == content
    drop("mine.csv", content)
    drop("mine.csv", content[: len(content) // 2])
    assert bench.ticked == ["dropped/mine.csv", "dropped/2 mine.csv"]
    bench._room.sources._handle_custom_msg({"failed": "x is a folder or an empty file; enter its path."}, [])
    assert bench.error.startswith("x is a folder")


@pytest.mark.medium
def test_a_removed_run_leaves_the_list(folder, make):
    bench = make(ticked=["runs/calm"])
    (folder / "runs/calm.zarr").rename(folder / "runs/quiet.zarr")
    bench.rescan()
    assert "runs/calm" not in bench.sources
    assert "runs/quiet" in bench.sources
    assert bench.ticked == []
    assert bench.views == {}


# ---- calls and their code


def test_a_call_is_computed_once_and_its_failure_is_kept():
    results, told = Results(), []
    call = LibraryCall("wb.tasks.reference_passages", (3,), topic="texts")
    with pytest.raises(Missing):
        results.known(call)
    results.compute(Named((("a", call),)), told.append)
    assert results.known(call) is results.known(LibraryCall("wb.tasks.reference_passages", (3,)))
    assert told == ["texts: starting"]
    wrong = LibraryCall("wb.tasks.reference_passages", (0,))
    results.compute(Named((("a", wrong),)), told.append)
    for value in (wrong, Named((("a", wrong),))):
        with pytest.raises(OptionError, check=about("n_passages", 0)):
            results.known(value)
    results.forget_failures()
    assert not results.has(wrong)


def test_a_stopped_call_is_not_kept():
    results = Results()
    model = LibraryCall("wb.zoo.transformer", options=tuple(SIZE.items()))
    call = LibraryCall("wb.profile", (model, LibraryCall("wb.tasks.text_bytes")), topic="model")

    def stop(words):
        if "layers" in words:
            raise KeyError(words)

    with pytest.raises(KeyError):
        results.compute(call, stop)
    assert not results.has(call)
    assert results.has(model)


def test_inputs_fit_the_model():
    assert inputs_of(wb.samples.load("pre_ln")).function == "wb.tasks.reference_passages"
    assert inputs_of(wb.zoo.transformer(**SIZE)).function == "wb.tasks.text_bytes"
    few = inputs_of(wb.zoo.transformer(vocab_size=50, max_length=20, **SIZE))
    assert few == LibraryCall("wb.tasks.random_tokens", options=(("length", 20), ("vocab_size", 50)))
    vit = inputs_of(wb.zoo.vit(image_size=8, n_channels=1, patch_size=2, **SIZE))
    assert dict(vit.options) == {"image_size": 8, "n_channels": 1, "n_classes": 10}
    with pytest.raises(CheckpointError, check=says("The inputs of Linear are unknown; profile it with")):
        inputs_of(__import__("torch").nn.Linear(2, 2))


# ---- views


def test_without_ticks_each_view_says_what_to_tick(folder, make):
    bench = make(shown=list(VIEWS))
    assert bench.views == {}
    assert bench.code == ""
    assert bench.summary == "Workbench, in which nothing is ticked."
    for name, view in VIEWS.items():
        assert view.wanted in remark_of(bench, name)
    assert set(bench.refused_kinds) == {".py", ".html"}
    with pytest.raises(OptionError, check=says("No view shows anything yet; tick a source.")):
        bench.figure()


def test_a_view_without_its_kind_of_source_says_what_to_tick(folder, make):
    bench = make(ticked=["log.csv"], shown=["spectra", "compare", "live", "timeline", "rate and risk"])
    assert list(bench.views) == ["timeline"]
    for name in ("spectra", "compare", "live", "rate and risk"):
        assert VIEWS[name].wanted in remark_of(bench, name)
    assert "wb.read_log" in bench.code
    (run,) = executed(bench).timeline.runs.values()
    xr.testing.assert_equal(
        run.tree["monitors"].to_dataset(), bench.views["timeline"].runs["log.csv"].tree["monitors"].to_dataset()
    )


@pytest.mark.slow
def test_checkpoints_are_compared_in_two_views_and_profiled_once(folder, make, monkeypatch):
    profiled, profile = [], wb.profile
    monkeypatch.setattr(wb, "profile", lambda *args, **options: profiled.append(1) or profile(*args, **options))
    bench = make(ticked=["pre_ln", "no_norm"])
    assert bench.summary == "Workbench with pre_ln and no_norm: spectra."
    assert list(bench.views["spectra"].spectra) == ["pre_ln", "no_norm"]
    explorer = bench.views["spectra"]
    bench.shown = ["spectra", "compare"]
    bench.wait(120)
    assert list(bench.views) == ["spectra", "compare"]
    assert bench.views["spectra"] is explorer
    bench.ticked = ["pre_ln"]
    bench.wait(120)
    bench.ticked = ["pre_ln", "no_norm"]
    bench.wait(120)
    assert bench.views["spectra"] is explorer
    assert len(profiled) == 2
    assert bench.code.endswith("display(explorer, comparison)")
    bench.shown = ["spectra"]
    ran = executed(bench)
    for name, spectra in explorer.spectra.items():
        xr.testing.assert_equal(ran.spectra[name], spectra)
        xr.testing.assert_equal(ran.explorer.spectra[name], spectra)
    assert len(profiled) == 4
    assert max(len(line) for line in bench.code.splitlines()) <= 100


@pytest.mark.slow
def test_runs_spectra_designs_and_files_are_shown_together(folder, make):
    ticked = ["runs/calm", "tiny", "spectra", "log.csv"]
    bench = make(ticked=ticked, shown=["spectra", "compare", "timeline"])
    assert bench.error == ""
    assert list(bench.views["spectra"].spectra) == ["runs/calm", "tiny", "spectra"]
    assert "step" not in bench.views["spectra"].spectra["runs/calm"].dims
    assert list(bench.views["timeline"].runs) == ["runs/calm", "spectra", "log.csv"]
    assert bench.views["timeline"].runs["runs/calm"].path.name == "calm.zarr"  # so that it is followed
    ran = executed(bench)
    for name, spectra in bench.views["spectra"].spectra.items():
        xr.testing.assert_equal(ran.explorer.spectra[name], spectra)
    assert ran.comparison.steps == bench.views["compare"].steps == [0, 10, 20]
    assert list(ran.timeline.runs) == list(bench.views["timeline"].runs)


@pytest.mark.medium
def test_several_views_share_one_save_menu(folder, make):
    bench = make(ticked=["runs/calm"], shown=["spectra", "timeline"])
    assert [view.export_bar.layout.display for view in bench.views.values()] == ["none", "none"]
    assert bench.export_bar.layout.display is None
    bench.shown = ["timeline"]
    bench.wait(60)
    assert bench.views["timeline"].export_bar.layout.display is None


@pytest.mark.medium
def test_changed_controls_are_part_of_the_code(folder, make):
    bench = make(ticked=["runs/calm"], shown=["spectra", "timeline"])
    explorer, timeline = bench.views["spectra"], bench.views["timeline"]
    explorer.near_unit_upper.value = 1.1
    explorer.reliable_only.value = True
    timeline.signals = ["loss"]
    timeline.view = (2, 9)
    assert "explorer.reliable_only.value = True\n" in bench.code
    assert "timeline.view = (2.0, 9.0)\n" in bench.code
    bench._follow(looks=False)
    assert bench._room.code.value == bench.code
    ran = executed(bench)
    assert ran.explorer.thresholds == explorer.thresholds
    assert ran.explorer.masses.value == explorer.masses.value
    assert ran.timeline.summary == timeline.summary


def test_two_architectures_are_passed_to_the_live_view(folder, make):
    bench = make(ticked=["Pre-LN design", "No-Norm design", "tiny"], shown=["live"])
    live = bench.views["live"]
    assert [controls.norm.value for controls in (live.setup.first, live.setup.second)] == ["none", "pre_ln"]
    assert live.setup.second.d_model.value == 16
    assert live.setup.has_second
    live.kss.enabled = True
    live.setup.n_steps.value = 7
    ran = executed(bench)
    assert ran.live.kss.enabled
    assert ran.live.setup.n_steps.value == 7
    assert [one.names for one in (ran.live.setup.first, ran.live.setup.second)] == [
        one.names for one in (live.setup.first, live.setup.second)
    ]
    ran.live.close()


def test_a_view_that_cannot_be_made_says_why(folder, make):
    wb.save_checkpoint(wb.zoo.vit(image_size=8, n_channels=1, patch_size=2, **SIZE), "vision")
    bench = make(ticked=["vision", "tiny"], shown=["live"])
    assert bench.views == {}
    assert "only one reads images" in remark_of(bench, "live")
    assert bench.error == ""


def test_a_damaged_source_is_left_out_and_tried_again(folder, make):
    (folder / "bad.csv").write_text("step,loss\n")
    bench = make(ticked=["bad.csv", "log.csv"], shown=["timeline"])
    assert list(bench.views["timeline"].runs) == ["log.csv"]
    assert "bad.csv has no rows" in remark_of(bench, "timeline")
    (folder / "bad.csv").write_text("step,loss\n0,2\n1,1\n")
    bench.rescan()
    bench.wait(60)
    assert list(bench.views["timeline"].runs) == ["bad.csv", "log.csv"]
    assert remark_of(bench, "timeline") == ""


@pytest.mark.slow
def test_the_rates_of_a_sweep_are_drawn(folder, make):
    bench = make(ticked=["rates with KSS"], shown=["rate and risk"])
    assert bench.error == ""
    ran = executed(bench)
    assert type(ran.rates).__name__ == "Figure"
    assert 'wb.plots.rate_bands(wb.rates.rate_outcomes(wb.samples.open("kss_rates")))' in bench.code
    assert bench.picture()[1:4] == b"PNG"


@pytest.mark.medium
def test_a_failed_run_is_diagnosed_with_its_timeline(folder, make):
    bench = make(ticked=["failed: hyperparameter"], shown=["timeline", "report"])
    tree = bench.views["report"].tree
    assert tree.attrs["kind"] == "diagnosis"
    assert executed(bench).report.tree.attrs["summary"] == tree.attrs["summary"]
    assert "wb.diagnose(" in bench.code


@pytest.mark.slow
def test_a_design_is_assessed_with_the_ticked_plan(folder, make):
    (folder / "plan.toml").write_text("[training]\nn_steps = 10\nbatch_size = 4\n")
    bench = make(ticked=["tiny", "plan.toml"], shown=["report"])
    assert bench.code.splitlines()[-2:] == [
        'report = AssessmentReport(subject=wb.open_checkpoint("tiny"), plan="plan.toml")',
        "report",
    ]
    report = bench.views["report"]
    report.wait(300)
    ran = executed(bench)
    ran.report.wait(300)
    for one in (report, ran.report):
        assert one.error == ""
        assert json.loads(one.tree.attrs["plan"])["training"]["n_steps"] == 10
    assert ran.report.tree.attrs["verdict"] == report.tree.attrs["verdict"]


@pytest.mark.slow
def test_a_pilot_is_part_of_the_code(folder, make):
    bench = make(ticked=["Pre-LN design"], shown=["rate and risk"])
    risk = bench.views["rate and risk"]
    risk.setup.n_layers.value, risk.plan.n_steps.value, risk.budget.value = 2, 80, 200
    risk.wait(120)
    risk.run_pilot()
    risk.wait(300)
    assert risk.error == ""
    ran = executed(bench)
    assert ran.found is ran.risk.pilot
    assert ran.risk.summary == risk.summary
    np.testing.assert_array_equal(ran.found.data["rate"], risk.pilot.data["rate"])


# ---- progress, pictures, files


@pytest.mark.medium
def test_a_profile_can_be_stopped_and_continued(folder, make, monkeypatch):
    began, goes_on, profile = threading.Event(), threading.Event(), wb.profile

    def slow(*args, progress, **options):
        progress("1 of 6 layers")
        began.set()
        assert goes_on.wait(60)
        progress("2 of 6 layers")
        return profile(*args, progress=progress, **options)

    monkeypatch.setattr(wb, "profile", slow)
    monkeypatch.setattr("workbench.widgets.worker._EVERY", -1.0)  # each message is shown
    bench = make()
    bench.ticked = ["pre_ln"]
    assert began.wait(60)
    assert bench.is_measuring
    assert "Being computed" in remark_of(bench, "spectra")
    assert "<progress" in bench._status.value
    assert re.search(r"pre_ln: 1 of 6 layers … · .*, about .* left", bench._status.value)
    assert bench._stop.layout.display is None
    bench._stop.click()
    assert not bench.is_measuring
    assert "Stopped; press Continue" in remark_of(bench, "spectra")
    assert bench._room.go_on.layout.display is None
    goes_on.set()
    bench._room.go_on.click()
    bench.wait(60)
    assert list(bench.views) == ["spectra"]
    assert bench._room.go_on.layout.display == "none"
    assert bench.error == ""


@pytest.mark.medium
def test_a_quick_view_does_not_wait_for_a_slow_one(folder, make, monkeypatch):
    goes_on, diagnose = threading.Event(), wb.diagnose
    monkeypatch.setattr(wb, "diagnose", lambda *args: goes_on.wait(60) and diagnose(*args))
    bench = make()
    bench.shown = ["timeline", "report"]
    bench.ticked = ["failed: precision"]
    end = time.monotonic() + 60
    while not bench.views and time.monotonic() < end:
        time.sleep(0.02)
    assert list(bench.views) == ["timeline"]
    assert bench.is_measuring
    goes_on.set()
    bench.wait(60)
    assert list(bench.views) == ["timeline", "report"]


@pytest.mark.medium
def test_views_are_saved_as_code_page_and_picture(folder, make):
    bench = make(ticked=["runs/calm", "tiny"], shown=["timeline", "live"])
    assert bench.save("out/lines.py").read_text() == f"{bench.code}\n"
    page = bench.save("out/page.html").read_text()
    assert page.count("<iframe ") == 2
    assert "LiveTraining" in page
    assert "press Start and wait" in page  # in place of the figure that does not exist yet
    assert bench.save("out/all.png").read_bytes()[1:4] == b"PNG"
    assert bench.figure("matplotlib") is not None


def test_a_view_that_is_switched_on_becomes_the_first(folder, make):
    bench = make(shown=["spectra", "timeline"])
    bench._room.tags.value = ["spectra", "live", "timeline"]
    assert bench.shown == ["live", "spectra", "timeline"]
    assert [box.children[0].value for box in bench._room._grid.children] == [
        bench._room.frames[name].box.children[0].value for name in bench.shown
    ]
    bench._room.tags.value = ["timeline"]
    bench.shown = "report"
    assert bench.shown == ["report"]


@pytest.mark.medium
def test_the_theme_is_passed_on(folder, make):
    bench = make(ticked=["spectra"], theme="projector")
    assert bench.views["spectra"].theme == "projector"
    assert 'theme="projector"' in bench.code
    assert executed(bench).explorer.theme == "projector"


@pytest.mark.medium
def test_old_widgets_are_closed_and_closing_ends_everything(folder, make, monkeypatch):
    monkeypatch.setattr("workbench.widgets.workbench._MOST_KEPT", 1)
    bench = make(ticked=["runs/calm"], shown=["timeline"])
    first = bench.views["timeline"]
    bench.ticked = ["runs/wild"]
    bench.wait(60)
    assert first.comm is None
    second = bench.views["timeline"]
    assert second.comm is not None
    bench.close()
    bench._thread.join(10)
    assert not bench._thread.is_alive()
    assert second.comm is None


def test_a_cell_that_is_run_again_ends_what_runs(folder, make):
    bench = make(ticked=["runs/calm"], shown=["timeline"])
    timeline = bench.views["timeline"]
    bench._retire("its cell was run again")
    bench._thread.join(10)
    assert not bench._thread.is_alive()
    assert timeline.comm is None


def test_files_that_are_no_sources_have_no_kind(folder):
    assert quick_kind(folder / "notes.txt", is_folder=False) is None
    assert quick_kind(folder / "runs", is_folder=True) is None
    assert quick_kind(folder / "other.toml", is_folder=False) is None
