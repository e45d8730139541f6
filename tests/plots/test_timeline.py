"""The timeline without rendering: marks, lead time, healthy band, and runs that lack most data."""

import io
from itertools import combinations

import numpy as np
import pytest
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from tests.about import about, says
from tests.monitored_runs import HEAD, LAYER, events_dataset, monitored_run, watched_run
from tests.plots.conftest import run_of
from workbench.errors import OptionError, SchemaError
from workbench.plots import save
from workbench.plots.figure_files import bokeh_plot, picture_of
from workbench.plots.timeline_events import (
    ESTABLISHED,
    FaultSpan,
    TimelineEvent,
    account_of,
    events_of,
    fault_spans,
    lead_time,
    onsets_of,
    signal_of,
)
from workbench.plots.timeline_figure import sentence_alone, timeline
from workbench.plots.timeline_panels import EvidencePanel, PanelAxis, RunEvents, lead_in_words

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def pair():
    return {
        "control": monitored_run(300, seed=1, spectra=False),
        "faulted": monitored_run(300, fault_at=80, diverges=True, seed=2, spectra=False),
    }


def elements(panel, kind):
    return [item for item in panel if type(item).__name__ == kind]


def alarms_in(panel):
    return [item for item in elements(panel, "Points") if "message" in item.dimensions(label=True)]


def test_events_are_read_with_and_without_layer_and_head(pair):
    events = events_of(pair["faulted"])
    alarm = next(event for event in events if event.kind == "alarm")
    assert (alarm.step, alarm.source, alarm.layer, alarm.head) == (120, "effective_rank D2", LAYER, HEAD)
    assert alarm.place == "layer 1, head 2"
    assert [event.source for event in onsets_of(events)] == ["effective_rank D2", "grad_norm", "loss"]
    old = pair["faulted"].copy()
    old["events"] = xr.DataTree(old["events"].to_dataset().drop_vars(["layer", "head"]))
    assert [event.place for event in events_of(old)] == [""] * len(events)
    assert events_of(xr.DataTree()) == []


def test_a_fault_is_active_until_its_next_event():
    def switched(*rows):
        return fault_spans([TimelineEvent(step, "fault", name, message=message) for step, name, message in rows])

    assert switched((5, "a", "a on: the loss is off."), (9, "a", "a off."), (12, "a", "a on: x.")) == [
        FaultSpan("a", 5, 9),
        FaultSpan("a", 12, None),
    ]
    assert switched((3, "b", "b on."), (4, "a", "a on."), (6, "b", "b off.")) == [
        FaultSpan("b", 3, 6),
        FaultSpan("a", 4, None),
    ]
    assert switched((3, "b", "b off.")) == []


def test_the_lead_time_is_from_the_mechanism_to_the_established_signal():
    def alarm(step, source):
        return TimelineEvent(step, "alarm", source)

    rank, norm, loss, end = (
        alarm(10, "effective_rank D2"),
        alarm(40, "grad_norm"),
        alarm(60, "loss"),
        TimelineEvent(90, "divergence", "loss"),
    )
    assert lead_time([rank, norm, loss, end]).n_steps == 30
    assert lead_time([rank, end]).then is end
    assert lead_time([norm, end]) is None
    assert lead_time([rank, loss]).then is loss
    assert lead_time([norm, alarm(55, "max_violation")]).n_steps == -15
    # An alarm before the fault is a false alarm.
    fault = TimelineEvent(30, "fault", "a", message="a on.")
    assert lead_time([rank, fault, alarm(35, "update_ratio"), norm]).n_steps == 5
    assert lead_time([rank, fault, norm]) is None
    lead = lead_time([rank, norm])
    assert [lead.meets(*steps) for steps in ((0, 10), (0, 11), (20, 30), (39, 50), (40, 50))] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert lead_in_words(lead) == "effective_rank D2, 30 steps before grad_norm"
    assert lead_in_words(lead_time([norm, alarm(41, "kurtosis")])) == "kurtosis, 1 step after grad_norm"
    assert (
        lead_in_words(lead_time([rank, TimelineEvent(10, "divergence", "loss")]))
        == "effective_rank D2 at the same step as divergence"
    )


def test_the_lead_time_agrees_with_that_of_the_alarms(pair):
    from workbench.callbacks import alarms

    run = pair["faulted"]
    theirs = alarms.lead_time(alarms.recorded_alarms(run), divergence=299, since=80)
    assert lead_time(events_of(run)).n_steps == theirs.steps == 70
    assert {watched.variable for watched in alarms.WATCHED if watched.is_outcome} == set(ESTABLISHED)


def test_an_alarm_is_assigned_to_its_signal():
    names = ["loss", "effective_rank D2", "effective_rank W"]
    assert signal_of(TimelineEvent(0, "alarm", "effective_rank W"), names) == "effective_rank W"
    assert signal_of(TimelineEvent(0, "alarm", "effective_rank"), names) == "effective_rank D2"
    assert signal_of(TimelineEvent(0, "alarm", "spike_score"), names) is None
    assert signal_of(TimelineEvent(0, "alarm", ""), names) is None


def test_the_first_panel_shows_the_events(pair):
    lane = next(iter(timeline(pair, signals="loss")))
    (box,) = elements(lane, "Rectangles")
    assert (box["step"].tolist(), box["step to"].tolist(), box["fault"].tolist()) == (
        [80],
        [300 - 1],
        ["low precision attention"],
    )
    mechanism, established = alarms_in(lane)
    assert mechanism["step"].tolist() == [120]
    assert mechanism["what"].tolist() == ["alarm effective_rank D2, layer 1, head 2"]
    assert established["step"].tolist() == [190, 245]
    head, words = elements(lane, "Labels")
    assert (head["text"].tolist(), words["text"].tolist()) == (["▶"], ["effective_rank D2, 70 steps before grad_norm"])
    ends = [element for element in elements(lane, "Segments") if len(element) == 2]
    assert ends[0]["step"].tolist() == [120, 120]
    assert ends[0]["step to"].tolist() == [190, 120]
    cross = [item for item in elements(lane, "Points") if item["step"].tolist() == [299]]
    assert len(cross) == 1


def test_alarms_are_on_the_line_of_their_signal(pair):
    figure = timeline(pair, signals=["grad_norm", "effective_rank D2", "routing_entropy"])
    _, norm, rank, entropy = figure
    (alarm,) = alarms_in(rank)
    value = pair["faulted"]["attention"]["effective_rank"].sel(term="D2", step=120).min()
    assert (alarm["step"].tolist(), alarm["value"].tolist()) == ([120], [float(value)])
    assert alarms_in(norm)[0]["step"].tolist() == [190]
    assert alarms_in(entropy) == []
    lines = {curve.label: curve for curve in elements(rank, "Curve") if curve.label}
    np.testing.assert_array_equal(
        lines["control"]["value"], pair["control"]["attention"]["effective_rank"].sel(term="D2").min(["layer", "head"])
    )
    assert [rule["step"].tolist() for rule in elements(entropy, "Segments")] == [[120], [190]]


@pytest.mark.slow
def test_panels_share_the_steps_and_the_cursor_and_nothing_else(pair):
    state = bokeh_plot(timeline(pair, signals=["loss", "grad_norm", "effective_rank D2"])).state
    from bokeh.models import CrosshairTool
    from bokeh.plotting import figure as bokeh_figure

    panels = list(state.select({"type": bokeh_figure}))
    assert len(panels) == 4
    assert len({id(panel.x_range) for panel in panels}) == 1
    assert len({id(panel.y_range) for panel in panels}) == len(panels)
    spans = {id(tool.overlay) for panel in panels for tool in panel.tools if isinstance(tool, CrosshairTool)}
    assert len(spans) == 1
    scales = {panel.title.text: type(panel.y_scale).__name__ for panel in panels}
    assert scales["Gradient norm"] == "LogScale"
    assert scales["Effective rank D2, min over layers and heads"] == "LinearScale"


def test_by_default_it_shows_signals_with_alarms_and_signals_that_distinguish_faults(pair):
    names = [curve.vdims[0].label for panel in list(timeline(pair))[1:] for curve in elements(panel, "Curve")[:1]]
    assert names[:4] == ["loss (nat)", "gradient norm", "effective rank D2, min over layers and heads", names[3]]
    assert any(name.startswith("routing entropy, min over layers") for name in names)


def test_the_healthy_band_is_that_of_runs_or_of_the_first_steps(pair):
    healthy = {str(i): monitored_run(300, seed=10 + i, spectra=False) for i in range(3)}
    _, panel = timeline(pair, signals="effective_rank D2", healthy=healthy, band=(0.1, 0.9))
    (band,) = elements(panel, "Area")
    values = np.concatenate(
        [run["attention"]["effective_rank"].sel(term="D2").min(["layer", "head"]).values for run in healthy.values()]
    )
    assert (band["low"] < band["high"]).all()
    assert abs(np.median(band["low"]) - np.quantile(values, 0.1)) < 0.1
    assert band["step"][0] == 0
    _, panel = timeline(pair, signals="loss", healthy=50, band=(0.0, 1.0))
    bands = elements(panel, "Area")
    first = pair["faulted"]["monitors"]["loss"].values[:50]
    np.testing.assert_allclose([bands[1]["low"][0], bands[1]["high"][0]], [first.min(), first.max()])
    assert elements(list(timeline(pair))[1], "Area") == []


def test_long_lines_keep_their_spikes():
    step = np.arange(60_000)
    loss = np.ones(len(step))
    loss[31_234] = 1.5
    run = xr.DataTree.from_dict({"monitors": xr.Dataset({"loss": ("step", loss)}, {"step": step})})
    _, panel = timeline(run)
    (curve,) = elements(panel, "Curve")
    assert len(curve["step"]) < 3000
    assert curve["value"].max() == 1.5
    assert curve["step"][curve["value"].argmax()] == 31_234


def test_explosions_are_in_view_up_to_a_thousand_times_the_usual_values():
    usual = np.linspace(1, 2, 100)
    assert PanelAxis.of("loss", np.append(usual, 500)) == PanelAxis(1.0, 500.0, True)
    axis = PanelAxis.of("grad_norm", np.append(usual, 1e30))
    assert axis.is_logarithmic
    assert axis.high == pytest.approx(1000 * np.quantile(np.append(usual, 1e30), 0.8))
    assert PanelAxis.of("grad_norm", np.append(usual, 1e30), shows_all=True).high == 1e30
    assert not PanelAxis.of("loss", np.append(usual, 0.0)).is_logarithmic
    assert not PanelAxis.of("accuracy", np.array([1e-6, 1.0])).is_logarithmic
    assert PanelAxis.of("loss", np.zeros(0)) == PanelAxis(0.0, 1.0, False)


@pytest.mark.slow
def test_runs_of_earlier_versions_and_runs_that_lack_most_data_are_drawn(pair):
    bare = xr.DataTree.from_dict({"monitors": xr.Dataset({"loss": ("step", [2.0, 1.0])}, {"step": [0, 7]})})
    old = run_of({0: 0.9, 10: 1.2}, n_layers=2, width=8, diverged=12)
    figure = timeline({"old": old, "bare": bare, **pair}, signals=["loss", "effective_rank D2"])
    notes = [
        note.text
        for panel in bokeh_plot(figure).state.children
        for note in panel[0].above
        if getattr(note, "name", "") == "note_above"
    ]
    assert any("old not recorded; bare not recorded" in note for note in notes)
    words = timeline({"old": old, "bare": bare}, signals="spectral_radius")
    assert "× divergence" in bokeh_plot(words).state.children[0][0].above[0].text
    assert len(timeline(bare)) == 2


@pytest.mark.slow
def test_values_that_are_not_finite_are_noted(pair):
    run = pair["faulted"].copy(deep=True)
    run["monitors"]["loss"][250:260] = np.inf
    run["monitors"]["loss"][260:] = np.nan
    data = run["attention"].to_dataset().copy(deep=True)
    data["effective_rank"][:] = np.nan
    run["attention"] = xr.DataTree(data)
    figure = timeline(run, signals=["loss", "effective_rank D2"])
    notes = [panel[0].above[0].text for panel in bokeh_plot(figure).state.children]
    assert notes[1] == "infinite from step 250; undefined after step 259"
    assert notes[2] == "undefined"


def test_first_and_last_step_of_a_run(pair):
    run_events = RunEvents.of("faulted", pair["faulted"], 3)
    assert (run_events.first_step, run_events.last_step, run_events.place) == (0, 299, 3)
    assert run_events.diverged.step == 299
    empty = RunEvents.of("nothing", xr.DataTree(), 0)
    assert (empty.events, empty.last_step) == ([], 0)
    events = xr.DataTree.from_dict({"events": events_dataset([(4, "finished", "", np.nan, "", -1, -1)])})
    assert RunEvents.of("a", events, 0).last_step == 4


def account(*rows, last_step=500, is_watched=True):
    events = [TimelineEvent(step, kind, source, **more) for step, kind, source, more in rows]
    return account_of(events, last_step=last_step, is_watched=is_watched)


FAULT = (300, "fault", "low_precision_attention", {"message": "low_precision_attention on."})
PROBE = (319, "alarm", "arithmetic", {"layer": 1, "head": 0})
RANK = (340, "alarm", "effective_rank D2", {"layer": 1, "head": 2})
CAUSE = (319, "attribution", "low_precision_attention", {"score": 1.0})


def test_the_account_states_the_first_alarm_after_the_fault_and_its_cause():
    assert account(FAULT, PROBE, CAUSE, RANK) == (
        "First alarm: step 319, 19 steps after the fault: arithmetic of attention, layer 1, head 0 (probe). "
        "Likely cause: low precision attention."
    )
    logits = (319, "alarm", "logits", {"layer": 0, "head": 3})
    assert "largest attention logit, layer 0, head 3 (limit)" in account(FAULT, logits)
    early = (210, "alarm", "kurtosis", {"layer": 2})
    assert account(early, FAULT, PROBE, CAUSE).endswith("low precision attention. 1 alarm before the fault.")
    assert account(early) == "First alarm: step 210: kurtosis, layer 2 (evidence). Likely cause: unknown."
    # The cause is recorded only when it changes.
    known = (210, "attribution", "large_rate", {"score": 0.62})
    assert (
        "step 340, 40 steps after the fault: effective_rank D2, layer 1, head 2 (evidence). Likely cause: large rate"
        in (account(early, known, FAULT, RANK))
    )
    later = (360, "attribution", "stale_reduction", {"score": 0.9})
    assert account(FAULT, PROBE, CAUSE, later).endswith("low precision attention. From step 360 on: stale reduction.")
    change = [(30, "setting", "learning_rate", {}), (30, "alarm", "learning_rate", {})]
    assert account(*change).startswith("First alarm: step 30: learning_rate (setting).")


def test_the_account_states_that_there_was_no_alarm_only_if_the_run_was_monitored():
    assert account() == "No alarm up to step 500."
    assert account(is_watched=False) == ""
    assert account(FAULT) == "No alarm up to step 500, 200 steps after the fault."
    early = (210, "alarm", "kurtosis", {})
    assert account(early, FAULT) == (
        "No alarm since the fault up to step 500, 200 steps after the fault. 1 alarm before the fault."
    )


def test_the_evidence_shows_the_first_alarms_and_the_signals_nearest_to_one():
    panel = EvidencePanel.of(watched_run(400, fault_at=100, seed=2, spectra=False))
    assert [line.signal for line in panel.lines] == ["loss", "grad_norm", "effective_rank D2", "log_z"]
    loss, _, rank, _ = panel.lines
    assert panel.view == (0.1, 1000.0)
    assert panel.note == "2 weaker signals not shown; loss above 1000"
    assert (loss.value[-1], loss.step[0]) == (1000.0, 59)
    assert rank.value[rank.step >= 140].tolist() == [3.4] * 26
    calm = EvidencePanel.of(watched_run(400, seed=2, spectra=False))
    assert (calm.view, calm.lines[0].value.max()) == ((0.1, 2.0), 0.2)
    data = watched_run(400, seed=2, spectra=False)["evidence"].to_dataset()
    unknown = xr.DataTree.from_dict({"evidence": data * np.nan})
    assert (EvidencePanel.of(unknown).lines, "no evaluated step yet" in EvidencePanel.of(unknown).note) == ([], True)
    assert EvidencePanel.of(xr.DataTree()) is None


def test_evidence_and_probes_are_in_the_figure():
    runs = {name: watched_run(400, fault_at=at, seed=2, spectra=False) for name, at in (("calm", None), ("bad", 100))}
    lane, calm, bad, _ = timeline(runs, signals="loss")
    lines = {curve.label: curve for curve in elements(bad, "Curve") if curve.label}
    assert set(lines) == {"loss", "grad_norm", "effective_rank D2", "log_z"}
    assert [curve["value"].tolist() for curve in elements(bad, "Curve") if not curve.label][-1] == [1.0, 1.0]
    assert elements(calm, "Rectangles") == []
    assert elements(bad, "Rectangles")[0]["step"].tolist() == [100]
    (found,) = [marks for marks in alarms_in(lane) if "probe arithmetic" in marks["what"].tolist()]
    assert found["step"].tolist() == list(range(109, 400, 10))
    assert "5,000 times what rounding explains" in found["message"][0]
    (sound,) = [item["step"].tolist() for item in elements(lane, "Points") if 9 in item["step"]]
    assert sound == [*range(9, 400, 10), *range(9, 100, 10)]
    notes = bokeh_plot(timeline(runs, signals="loss")).state.children[0][0].above[0].text.split("\n")
    assert notes[:2] == [
        "calm: No alarm up to step 400.",
        "bad: First alarm: step 109, 9 steps after the fault: arithmetic of attention, layer 1, head 0 (probe).",
    ]
    assert "■ probe failed" in notes[-1]


@pytest.mark.slow
def test_texts_of_the_picture_do_not_overlap(pair):
    from workbench.plots import style

    long = {
        f"run {i} with a name that is much too long for its row": watched_run(400, fault_at=60 + 50 * i, seed=i)
        for i in range(5)
    }
    crowded = timeline(
        pair | long,
        signals=[
            "loss",
            "grad_norm",
            "effective_rank D2",
            "routing_entropy",
            "update_ratio",
            "accuracy",
            "expert_load",
        ],
        healthy=50,
        selected=120,
        backend="matplotlib",
    )
    for figure in (crowded, timeline(pair, signals="loss", view=(100, 200), backend="matplotlib")):
        with style.drawing("matplotlib") as hv:
            sheet = hv.renderer("matplotlib").get_plot(figure).state
            FigureCanvasAgg(sheet).draw()
        texts = [text for text in sheet.findobj(Text) if text.get_text().strip() and _is_shown(text)]
        texts += [number for axes in sheet.axes for number in _numbers(axes)]
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
        assert len(boxes) > 12
        met = [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if _overlap(one, other)]
        assert met == []


def _is_shown(text):
    """Return whether a text is drawn; numbers of the axes are treated separately."""
    axes = text.axes
    if axes is None:
        return False  # of a tick, which matplotlib draws separately
    return axes.get_visible() and (axes.axison or text not in (axes.xaxis.label, axes.yaxis.label))


def _numbers(axes):
    """Return the numbers along the axes that are drawn."""
    if not (axes.get_visible() and axes.axison):
        return []
    found = []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        found += [tick.label1 for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
    return found


def _overlap(one, other):
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return wide > 1 and high > 1


def test_a_sentence_is_drawn_as_a_small_figure():
    for backend in ("bokeh", "matplotlib"):
        figure = sentence_alone("Nothing yet.", backend=backend)
        assert figure["text"].tolist() == ["Nothing yet."]
    assert Image.open(io.BytesIO(picture_of(figure))).size[1] < 120


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bokeh", "matplotlib"])
def test_the_file_has_the_colors_of_the_runs(pair, backend, tmp_path):
    ending = {"bokeh": "html", "matplotlib": "png"}[backend]
    path = save(
        timeline(
            pair | {"watched": watched_run(300, fault_at=80, seed=2, spectra=False)},
            signals=["loss", "effective_rank D2"],
            healthy=60,
            backend=backend,
        ),
        tmp_path / f"figure.{ending}",
        **({"dpi": 60} if ending == "png" else {}),
    )
    if backend == "bokeh":
        assert "70 steps before grad_norm" in path.read_text()
        return
    pixels = np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB")).astype(int)
    for color in ((0x1F, 0x77, 0xD4), (0xD5, 0x5E, 0x00), (0xE0, 0x0B, 0x4B)):
        assert (np.abs(pixels - color).sum(-1) < 30).sum() > 100


def test_invalid_input_is_rejected(pair):
    with pytest.raises(SchemaError, check=about("signals", "los")):
        timeline(pair, signals=["los"])
    with pytest.raises(SchemaError, check=says("effective_rank dWq, effective_rank dWk, effective_rank W,")):
        timeline(pair, signals=[])
    with pytest.raises(SchemaError, check=says("signals is empty.")):
        timeline({"a": xr.DataTree()})
    with pytest.raises(SchemaError, check=about("runs")):
        timeline({})
    with pytest.raises(OptionError, check=about("reduce", "median")):
        timeline(pair, reduce="median")
    with pytest.raises(OptionError, check=about("band", 0.9)):
        timeline(pair, band=0.9)
    with pytest.raises(OptionError, check=about("healthy", 1)):
        timeline(pair, healthy=1)
    with pytest.raises(OptionError, check=about("backend", "plotly")):
        timeline(pair, backend="plotly")
    with pytest.raises(OptionError, check=says("places has no number for")):
        timeline(pair, places={"control": 0})
