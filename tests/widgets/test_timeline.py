"""The timeline without a browser: states for the page, requests of the user, and runs that grow or are removed."""

import gc
import shutil
import threading
import time
import weakref

import numpy as np
import pytest
import xarray as xr
from bokeh.plotting import figure as bokeh_figure

import workbench as wb
from tests.about import about, says
from tests.monitored_runs import HEAD, LAYER, GrowingRun, monitored_run, watched_run
from tests.waiting import wait_for
from workbench.errors import OptionError, SchemaError, StoreError
from workbench.io.run_writer import RunWriter
from workbench.plots.figure_files import bokeh_plot
from workbench.studies import signals
from workbench.widgets import Timeline
from workbench.widgets.timeline_parts.followed_run import FollowedRun

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def faulted():
    return monitored_run(200, fault_at=60, diverges=True, seed=2)


@pytest.fixture(scope="module")
def pair(faulted):
    return {"twin": monitored_run(200, seed=1, spectra=False), "faulted": faulted}


@pytest.fixture
def make():
    """Timelines with a page that keeps its messages, closed after the test."""
    made = []

    def timeline(*args, **options):
        options = {"poll_every": 3600} | options
        made.append(Timeline(*args, **options))
        return made[-1]

    yield timeline
    for widget in made:
        widget.close()


class Page:
    """The page of a canvas: it keeps its messages, and has painted them when its content is read."""

    def __init__(self, canvas):
        self.canvas, self._sent, self._n_painted = canvas, [], 0
        canvas.send = lambda content, buffers=None: self._sent.append((content, buffers))
        self.say(painted=0)

    def say(self, **content):
        self.canvas._receive(self.canvas, content, [])

    def ask(self, **wish):
        self.say(ask=wish, token=f"page.{len(self.states)}")
        return self.content

    @property
    def states(self):
        while self._n_painted < len(self._sent):
            self._n_painted += 1
            content, _ = self._sent[self._n_painted - 1]
            if "number" in content:
                self.say(painted=content["number"])
        return [state for state in self._sent if "number" in state[0]]

    @property
    def content(self):
        return self.states[-1][0]

    def array(self, place):
        return np.frombuffer(self.states[-1][1][place], np.float32)

    def line(self, signal, run):
        panel = next(panel for panel in self.content["panels"] if panel["name"] == signal)
        line = next(line for line in panel["lines"] if line["run"] == run)
        return self.array(line["step"]), self.array(line["value"])


def test_a_page_gets_every_line_every_mark_and_what_happened(make, pair):
    page = Page(make(pair).canvas)
    content = page.content
    assert content["chosen"][:3] == ["loss", "grad_norm", "effective_rank D2"]
    assert [run["name"] for run in content["runs"]] == ["twin", "faulted"]
    assert content["runs"][1]["words"] == "diverged at step 199"
    assert content["runs"][1]["lead"] == [100, 130, "effective_rank D2, 30 steps before grad_norm"]
    assert content["runs"][1]["faults"] == [{"name": "low precision attention", "start": 60, "stop": None}]
    step, value = page.line("loss", "faulted")
    np.testing.assert_array_equal(step, np.arange(200))
    np.testing.assert_allclose(value, pair["faulted"]["monitors"]["loss"], rtol=1e-6)
    rank = pair["faulted"]["attention"]["effective_rank"].sel(term="D2").min(["layer", "head"])
    np.testing.assert_allclose(page.line("effective_rank D2", "faulted")[1], rank, rtol=1e-6)
    marks = next(panel for panel in content["panels"] if panel["name"] == "effective_rank D2")["marks"]
    assert [(mark["kind"], mark["step"], mark["place"]) for mark in marks] == [
        ("alarm", 100, "layer 1, head 2"),
        ("cross", 199, ""),
    ]
    assert marks[0]["value"] == pytest.approx(float(rank.sel(step=100)))
    assert [alarm["source"] for alarm in content["alarms"]] == ["effective_rank D2", "grad_norm", "loss"]
    assert {"name": "effective_rank D2", "part": "attention", "title": "effective rank D2"} in content["signals"]


def test_a_page_gets_the_account_the_evidence_and_the_probes_also_of_a_run_that_grows(make, tmp_path):
    run = GrowingRun(watched_run(400, fault_at=100, seed=2), tmp_path / "bad.zarr").grow(100)
    timeline = make({"calm": watched_run(400, seed=1), "bad": run.path}, signals=["loss"])
    page = Page(timeline.canvas)
    content = page.content
    assert [each["account"] for each in content["runs"]] == ["No alarm up to step 400.", "No alarm up to step 99."]
    assert [panel["name"] for panel in content["panels"]] == ["evidence of calm", "evidence of bad", "loss"]
    run.grow(400)
    assert timeline.poll()
    content = page.content
    bad = content["runs"][1]
    assert bad["has_alarm"]
    assert bad["account"].startswith(
        "First alarm: step 109, 9 steps after the fault: arithmetic of attention, layer 1, "
    )
    assert page.array(bad["checks"]["sound"]).tolist() == list(range(9, 100, 10))
    assert page.array(bad["checks"]["broken"]).tolist() == list(range(109, 400, 10))
    (stretch,) = bad["findings"]
    assert (stretch["kind"], stretch["source"], stretch["step"], stretch["last"]) == ("probe", "arithmetic", 109, 399)
    panel = content["panels"][1]
    assert (panel["run"], panel["limit"], panel["low"], panel["high"]) == ("bad", 1.0, 0.1, 1000.0)
    assert [line["signal"] for line in panel["lines"]] == ["loss", "grad_norm", "effective_rank D2", "log_z"]
    assert [(mark["source"], mark["step"]) for mark in panel["marks"]] == [
        ("loss", 325), ("grad_norm", 250), ("effective_rank D2", 140),
    ]  # fmt: skip
    step, value = (page.array(panel["lines"][2][name]) for name in ("step", "value"))
    np.testing.assert_allclose(value[step >= 140], 3.4, rtol=1e-6)
    hidden = page.ask(seen=["loss"])["panels"]
    assert [panel["is_seen"] for panel in hidden] == [False, False, True]
    only = page.ask(shown=["calm"])
    assert [panel["name"] for panel in only["panels"]] == ["evidence of calm", "loss"]


def test_of_a_long_run_a_page_gets_what_it_can_show_of_the_range_in_view(make):
    value = np.random.default_rng(0).normal(size=100_000)
    value[54_321] = 99
    run = xr.DataTree.from_dict({"monitors": xr.Dataset({"loss": ("step", value)}, {"step": np.arange(100_000)})})
    timeline = make(run, signals=["loss"])
    page = Page(timeline.canvas)
    page.ask(width=500)
    step, seen = page.line("loss", "run")
    assert len(step) < 1800
    assert step[seen.argmax()] == 54_321
    content = page.ask(view=[50_000, 51_000])
    step, seen = page.line("loss", "run")
    assert (content["view"], timeline.view) == ([50_000, 51_000], (50_000, 51_000))
    assert 600 < len(step) < 1800
    assert 49_700 < step[0] < 50_000 < 51_000 < step[-1] < 51_300
    (panel,) = content["panels"]
    inside = value[50_000:51_001].astype(np.float32)
    assert (panel["low"], panel["high"]) == pytest.approx((inside.min(), inside.max()))
    assert page.ask(view=None)["is_whole"]
    assert timeline.view is None


def test_only_panels_on_the_screen_get_their_lines(make, pair):
    timeline = make(pair)
    page = Page(timeline.canvas)
    n_bytes = sum(map(len, page.states[-1][1]))
    content = page.ask(seen=["loss"])
    assert [panel["name"] for panel in content["panels"] if panel["is_seen"]] == ["loss"]
    assert sum(map(len, page.states[-1][1])) < 0.6 * n_bytes
    page.say(painted=0)  # another page
    assert all(panel["is_seen"] for panel in page.content["panels"])


def test_a_click_on_an_alarm_shows_layers_heads_and_modes_of_each_run(make, pair, faulted):
    timeline = make(pair)
    page = Page(timeline.canvas)
    chosen = page.ask(select={"step": 100, "signal": "effective_rank D2", "run": "faulted"})["selection"]
    assert (chosen["layer"], chosen["head"], chosen["dims"]) == (LAYER, HEAD, ["layer", "head"])
    assert chosen["event"]["message"] == "One head turns only in one direction."
    twin, own = chosen["details"]
    heat = page.array(own["heat"]).reshape(3, 4)
    np.testing.assert_allclose(heat, faulted["attention"]["effective_rank"].sel(term="D2", step=100), rtol=1e-6)
    assert np.unravel_index(heat.argmin(), heat.shape) == (LAYER, HEAD)
    assert chosen["is_low_bad"]
    assert (twin["modes"], own["modes_step"]) == (None, 100)
    eigenvalue = faulted["spectra"]["eigenvalue"].sel(step=100).values.ravel()
    points = page.array(own["modes"][0]).reshape(-1, 2)
    np.testing.assert_allclose(points[:, 0] + 1j * points[:, 1], eigenvalue, rtol=1e-5)
    assert timeline.selection.event.source == "effective_rank D2"
    assert page.ask(select=None)["selection"] is None


def test_a_click_on_the_mark_of_a_probe_shows_what_it_found(make):
    timeline = make({"failed": wb.samples.failed_run("precision")})
    page = Page(timeline.canvas)
    (found,) = page.content["runs"][0]["findings"]
    page.ask(select={"step": found["step"], "signal": found["source"], "run": "failed"})
    chosen = page.content["selection"]
    assert (chosen["event"]["kind"], chosen["event"]["source"]) == ("probe", "arithmetic")
    assert "the attention kernel is wrong" in chosen["event"]["message"]
    entry = timeline.runs["failed"].entries[chosen["signal"]]
    assert (entry.part, chosen["details"][0]["heat"] is None) == ("precision", False)


def test_no_alarm_is_told_from_no_alarms_attached(make):
    alone, calm = monitored_run(50, seed=1), watched_run(400, seed=1)
    for runs, words in (
        ({"alone": alone}, "Recorded without alarms"),
        ({"calm": calm}, "Alarms attached, none raised"),
        ({"alone": alone, "calm": calm}, "Alarms attached, none raised: calm; recorded without alarms: alone"),
    ):
        content = Page(make(runs, signals=["loss"]).canvas).content
        assert (content["alarms"], content["no_alarms"]) == ([], words)


def test_a_signal_without_layers_shows_those_of_the_last_alarm(make, pair):
    timeline = make(pair)
    timeline.select(130, signal="grad_norm", run="faulted")
    assert (timeline.selection.signal, timeline.selection.event.source) == ("effective_rank D2", "grad_norm")
    timeline.select(20, signal="loss")
    assert timeline.selection.signal == "effective_rank D2"  # the first displayed signal with layers
    timeline.select(77, signal="update_ratio")
    detail = timeline.selection.details[0]
    assert (timeline.selection.dims, detail.rows, detail.columns) == (
        ("module", ""),
        ["block 0", "block 1", "block 2", "outside"],
        [""],
    )
    assert detail.step == 80
    timeline.select(50, signal="expert_load")
    assert timeline.selection.dims == ("layer", "expert")
    bare = make({"a": xr.DataTree.from_dict({"monitors": pair["twin"]["monitors"].to_dataset()})})
    bare.select(3)
    assert (bare.selection.signal, bare.selection.details[0].heat, bare.selection.details[0].modes) == ("", None, None)
    assert bare.error == ""


def test_signals_runs_and_reduction_are_chosen_by_hand_and_by_code(make, pair):
    timeline = make(pair)
    page = Page(timeline.canvas)
    content = page.ask(signals=["routing_entropy", "no such signal"], reduce="max", shown=["faulted"])
    assert (timeline.signals, timeline.reduce, timeline.shown) == (["routing_entropy"], "max", ["faulted"])
    assert content["panels"][0]["title"] == "routing entropy, max over layers (nat)"
    assert [line["run"] for line in content["panels"][0]["lines"]] == ["faulted"]
    timeline.signals = ["loss", "accuracy"]
    timeline.reduce = "worst"
    timeline.shown = ["twin", "faulted"]
    assert [panel["name"] for panel in page.content["panels"]] == ["loss", "accuracy"]
    timeline.view = (10, 20)
    assert page.content["view"] == [10, 20]
    assert page.ask(signals=[])["panels"] == []
    assert page.ask(shown=[])["runs"][0]["is_shown"] is False


def test_the_answer_to_a_request_has_its_token_once_it_is_completed(make, pair):
    page = Page(make(pair).canvas)
    n = len(page.states)
    page.ask(view=[0, 50], width=300, reduce="min")
    assert len(page.states) == n + 1
    assert page.content["token"] == f"page.{n}"


def test_invalid_requests_are_rejected_and_shown(make, pair, tmp_path):
    timeline = make(pair)
    page = Page(timeline.canvas)
    reductions = ("worst", "min", "max", "mean")
    for act, kind, error in (
        (lambda: setattr(timeline, "signals", ["los"]), SchemaError, about("signals", "los")),
        (lambda: setattr(timeline, "reduce", "median"), OptionError, about("reduce", "median", reductions)),
        (lambda: setattr(timeline, "view", (3, 3)), OptionError, about("view", (3, 3))),
        (lambda: setattr(timeline, "shown", ["x"]), SchemaError, says("choose from twin, faulted.")),
        (
            lambda: timeline.select(1, signal="x"),
            SchemaError,
            says("effective_rank dWq, effective_rank dWk, effective_rank W,"),
        ),
        (lambda: timeline.select(1, run="x"), SchemaError, says("choose from twin, faulted.")),
        (lambda: make({}), SchemaError, says("The runs are an empty dict, expected a run, the path of a")),
        (lambda: make(tmp_path / "no.zarr"), StoreError, about("path", tmp_path / "no.zarr")),
        (lambda: make(pair, signals=["x"]), SchemaError, about("signals", "x")),
        (lambda: make(pair, poll_every=0), OptionError, about("poll_every", 0)),
        (lambda: make(pair, band=(1, 0)), OptionError, about("band", (1, 0))),
        (lambda: make(pair, healthy=0), OptionError, about("healthy", 0)),
    ):
        with pytest.raises(kind, check=error):
            act()
    page.ask(reduce="median")
    assert timeline.error == "reduce must be one of 'worst', 'min', 'max', 'mean', got 'median'."
    page.ask(reduce="mean")
    assert timeline.error == ""


def test_a_healthy_band_comes_from_runs_or_from_the_start(make, pair):
    healthy = {str(i): monitored_run(200, seed=10 + i, spectra=False) for i in range(2)}
    page = Page(make(pair, healthy=healthy, signals=["grad_norm"]).canvas)
    (band,) = page.content["panels"][0]["bands"]
    assert band["run"] is None
    lower, upper = page.array(band["lower"]), page.array(band["upper"])
    assert (lower < upper).all()
    assert page.content["band"] == "5 to 95 % of 2 healthy runs"
    own = Page(make(pair, healthy=60, band=(0, 1), signals=["grad_norm"]).canvas)
    assert [band["run"] for band in own.content["panels"][0]["bands"]] == ["twin", "faulted"]
    start = pair["faulted"]["monitors"]["grad_norm"].values[:60]
    assert own.array(own.content["panels"][0]["bands"][1]["upper"])[0] == pytest.approx(start.max())


def test_it_can_be_had_as_a_figure(make, pair):
    timeline = make(pair, healthy=50, signals=["loss", "effective_rank D2"])
    timeline.shown = ["faulted"]
    _, loss, _ = timeline.figure()
    assert [curve.label for curve in loss if type(curve).__name__ == "Curve" and curve.label] == ["faulted"]
    timeline.view = (50, 100)
    timeline.select(70)
    _, loss, rank = timeline.figure()
    values = timeline.runs["faulted"].line("loss", None).value[50:101]
    (panel,) = bokeh_plot(loss).state.select({"type": bokeh_figure})
    assert (panel.x_range.start, panel.x_range.end) == (50, 100)
    low, high = panel.y_range.start, panel.y_range.end
    assert values.min() - 0.1 < low < values.min() < values.max() < high < values.max() + 0.1
    assert [70] in [rule["step"].tolist() for rule in rank if type(rule).__name__ == "Segments"]


def test_rows_of_a_store_that_grows_are_added_and_only_they_are_read(make, faulted, tmp_path, monkeypatch):
    growing = GrowingRun(faulted, tmp_path / "a.zarr").grow(80)
    timeline = make({"a": tmp_path / "a.zarr"}, signals=["loss", "effective_rank D2"])
    page = Page(timeline.canvas)
    assert page.line("loss", "a")[0][-1] == 79
    assert timeline.states == {"a": "running"}
    assert timeline.poll() is False
    read, rows = signals.read, []
    monkeypatch.setattr(signals, "read", lambda *args, **kw: rows.append(kw["first_row"]) or read(*args, **kw))
    growing.grow(140)
    assert timeline.poll() is True
    assert sorted(set(rows)) == [8, 80]
    step, value = page.line("loss", "a")
    np.testing.assert_array_equal(step, np.arange(140))
    np.testing.assert_allclose(value, faulted["monitors"]["loss"].values[:140], rtol=1e-6)
    rank = faulted["attention"]["effective_rank"].sel(term="D2").min(["layer", "head"]).values[:14]
    np.testing.assert_allclose(page.line("effective_rank D2", "a")[1], rank, rtol=1e-6)
    assert [alarm["source"] for alarm in page.content["alarms"]] == ["effective_rank D2", "grad_norm"]
    growing.grow(200, state="diverged")
    timeline.poll()
    assert timeline.states == {"a": "diverged"}
    assert page.content["runs"][0]["words"] == "diverged at step 199"
    assert page.line("loss", "a")[0][-1] == 199


def test_what_alarms_is_shown_unless_somebody_has_chosen(make, tmp_path):
    run = monitored_run(120, fault_at=30, spectra=False)
    data = run["events"].to_dataset()
    run["events"] = xr.DataTree(data.assign(source=data["source"].where(data["source"] != "loss", "expert_load")))
    growing = GrowingRun(run, tmp_path / "a.zarr").grow(20)
    free, chosen = make(tmp_path / "a.zarr"), make(tmp_path / "a.zarr", signals=["loss"])
    assert "expert_load" not in free.signals
    before = free.signals
    growing.grow(120)
    free.poll()
    chosen.poll()
    assert free.signals == [*before, "expert_load"]
    assert chosen.signals == ["loss"]


def test_a_run_that_begins_with_nothing_can_be_watched_from_the_start(make, tmp_path):
    RunWriter(tmp_path / "a.zarr", {"subject": "a", "state": "running", "created": "now"}).commit()
    timeline = make(tmp_path / "a.zarr")
    page = Page(timeline.canvas)
    assert (timeline.signals, page.content["panels"]) == ([], [])
    GrowingRun(monitored_run(60, spectra=False), tmp_path / "b.zarr", created="later").grow(40)
    shutil.rmtree(tmp_path / "a.zarr")
    (tmp_path / "b.zarr").rename(tmp_path / "a.zarr")
    timeline.poll()
    assert timeline.signals[:2] == ["loss", "grad_norm"]
    assert page.line("loss", "a")[0][-1] == 39


def test_signals_may_be_named_before_a_run_has_recorded_any(make, tmp_path):
    path = tmp_path / "new.zarr"
    RunWriter(path, {"subject": "a", "state": "running", "created": "now"}).commit()
    timeline = make({"new": path}, signals=["loss", "grad_norm"])
    assert (timeline.error, timeline.signals) == ("", ["loss", "grad_norm"])
    assert timeline.picture().startswith(b"\x89PNG")


def test_a_store_that_is_removed_is_said_and_its_data_stay(make, faulted, tmp_path):
    GrowingRun(faulted, tmp_path / "a.zarr").grow(100)
    timeline = make({"a": tmp_path / "a.zarr"}, signals=["loss"])
    page = Page(timeline.canvas)
    before = page.line("loss", "a")
    shutil.rmtree(tmp_path / "a.zarr")
    assert timeline.poll() is True
    sentence = f"The run 'a' was removed from {tmp_path / 'a.zarr'}; the data read so far stay visible."
    assert timeline.error == sentence
    assert timeline.states == {"a": "removed"}
    assert page.content["runs"][0]["words"] == "removed, up to step 99"
    np.testing.assert_array_equal(page.line("loss", "a"), before)
    # Data that were not read before can no longer be read; a remark states this, and the widget stays usable.
    content = page.ask(signals=["loss", "routing_entropy"], select={"step": 3, "signal": "routing_entropy"})
    assert content["panels"][1]["remarks"] == [["a", "not read before the run was removed"]]
    assert content["selection"]["details"][0]["heat"] is None
    assert timeline.error == sentence
    assert timeline.poll() is False
    # Another run is written to the same path.
    writing = GrowingRun(faulted, tmp_path / "a.zarr", created="later").grow(120)
    assert timeline.poll() is True
    assert (timeline.error, timeline.states) == ("", {"a": "running"})
    assert writing.n_done == 120  # alive, otherwise the run ended
    assert page.line("loss", "a")[0][-1] == 119
    assert page.line("routing_entropy", "a")[0][-1] == 110


def test_a_resumed_run_is_read_anew_where_it_went_back(make, faulted, tmp_path):
    GrowingRun(faulted, tmp_path / "a.zarr").grow(100)
    timeline = make({"a": tmp_path / "a.zarr"}, signals=["loss"])
    page = Page(timeline.canvas)
    writer = RunWriter.reopen(tmp_path / "a.zarr", before_step=50)
    steps = np.arange(50, 150)
    rows = faulted["monitors"].to_dataset().isel(step=slice(50, 150)).copy(deep=True)
    rows["loss"][:] = 7.0
    event = {"step": 50, "kind": "resumed", "source": "", "score": np.nan, "message": "", "layer": -1, "head": -1}
    writer.append("monitors", rows)
    writer.append("events", xr.Dataset({name: ("event", np.array([value])) for name, value in event.items()}))
    writer.commit()
    timeline.poll()
    step, value = page.line("loss", "a")
    assert step.tolist() == list(range(150))
    assert (value[steps] == 7).all()
    np.testing.assert_allclose(value[:50], faulted["monitors"]["loss"].values[:50], rtol=1e-6)


def test_a_store_that_cannot_be_read_for_a_moment_is_forgiven_and_a_broken_one_said(make, faulted, tmp_path):
    growing = GrowingRun(faulted, tmp_path / "a.zarr").grow(60)
    timeline = make({"a": tmp_path / "a.zarr"}, signals=["loss"])
    root = tmp_path / "a.zarr" / "zarr.json"
    good = root.read_text()
    root.write_text("{")
    assert [timeline.poll(), timeline.poll()] == [False, False]
    assert timeline.error == ""
    assert timeline.poll() is True
    assert timeline.error.startswith("The run 'a' can no longer be read:")
    assert timeline.states == {"a": "unreadable"}
    root.write_text(good)
    growing.grow(90)
    timeline.poll()
    assert (timeline.error, timeline.states) == ("", {"a": "running"})


def test_a_silent_run_is_said_to_be_silent(faulted, tmp_path, monkeypatch):
    growing = GrowingRun(faulted, tmp_path / "a.zarr").grow(60)
    run = FollowedRun("a", tmp_path / "a.zarr", 0)
    assert run.state_in_words == "running, up to step 59"
    now = time.time()
    monkeypatch.setattr("workbench.widgets.timeline_parts.followed_run.time.time", lambda: now + 600)
    assert run.state_in_words == "running, silent for 10 min, up to step 59"
    del growing
    assert FollowedRun("a", tmp_path / "a.zarr", 0).state_in_words == "ended without being closed, up to step 59"


@pytest.mark.slow
def test_the_widget_follows_automatically_until_it_is_closed(faulted, tmp_path):
    growing = GrowingRun(faulted, tmp_path / "a.zarr").grow(50)
    timeline = Timeline({"a": tmp_path / "a.zarr"}, signals=["loss"], poll_every=0.05)
    page = Page(timeline.canvas)
    growing.grow(100)
    wait_for(lambda page=page: page.line("loss", "a")[0][-1] == 99)
    assert "Timeline" in [thread.name for thread in threading.enumerate()]
    thread = timeline._thread
    timeline.close()
    assert not thread.is_alive()
    assert (timeline.comm, timeline.canvas.comm) == (None, None)
    timeline.close()
    forgotten = weakref.ref(timeline)
    del timeline, page
    gc.collect()
    assert forgotten() is None


def test_runs_that_cannot_grow_need_no_thread(make, pair):
    assert make(pair)._thread is None
