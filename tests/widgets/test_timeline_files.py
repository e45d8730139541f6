"""Files of the timeline and its static picture contain what the widget shows."""

import base64
import io
import json
import re
import zlib
from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from PIL import Image

import workbench as wb
from tests.about import says
from tests.monitored_runs import HEAD, LAYER, GrowingRun, monitored_run, watched_run
from workbench.errors import StoreError
from workbench.io.run_writer import RunWriter
from workbench.widgets import Timeline

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def runs():
    return {
        "calm": watched_run(400, seed=1),
        "faulted": watched_run(400, fault_at=100, diverges=True, seed=2),
    }


@pytest.fixture
def timeline(runs):
    widget = Timeline(runs, signals=["loss", "effective_rank D2"])
    yield widget
    widget.close()


class Kept:
    """The content of a saved page, unpacked as by its script."""

    def __init__(self, text):
        (record,) = re.findall(r'<script type="text/plain" id="record">(.*?)</script>', text, re.DOTALL)
        whole = zlib.decompress(base64.b64decode(record))
        size = int.from_bytes(whole[:4], "little")
        self.content = json.loads(whole[4 : 4 + size])
        ends = 4 + size + np.cumsum([0, *self.content["sizes"]])
        self._buffers = [whole[a:b] for a, b in pairwise(ends)]

    def array(self, place, kind=np.float32):
        return np.frombuffer(self._buffers[place], kind)

    def line(self, signal, run):
        panel = next(panel for panel in self.content["panels"] if panel["name"] == signal)
        line = next(line for line in panel["lines"] if line["run"] == run)
        return self.array(line["step"]), self.array(line["value"])

    def moments(self, *, is_alarm):
        return [moment for moment in self.content["moments"] if (moment["event"] is not None) is is_alarm]


def test_a_page_holds_every_line_and_the_details_of_alarms_and_steps(timeline, runs, tmp_path):
    path = timeline.save(tmp_path / "new" / "page.html")
    kept = Kept(path.read_text())
    for name in timeline.names:  # including signals that are not displayed
        for run in runs:
            line = timeline.runs[run].line(name, None)
            step, value = kept.line(name, run)
            np.testing.assert_array_equal(step, line.step)
            np.testing.assert_allclose(value, line.value, rtol=1e-6)
    assert [panel["name"] for panel in kept.content["panels"]][:2] == ["evidence of calm", "evidence of faulted"]
    assert kept.content["chosen"] == ["loss", "effective_rank D2"]
    alarms = kept.moments(is_alarm=True)
    assert [moment["event"]["source"] for moment in alarms] == ["arithmetic", "effective_rank D2", "grad_norm", "loss"]
    chosen = next(moment for moment in alarms if moment["event"]["source"] == "effective_rank D2")
    assert (chosen["step"], chosen["layer"], chosen["head"], chosen["signal"]) == (
        140,
        LAYER,
        HEAD,
        "effective_rank D2",
    )
    heat = kept.array(chosen["details"][1]["heat"]).reshape(3, 4)
    np.testing.assert_allclose(heat, runs["faulted"]["attention"]["effective_rank"].sel(term="D2", step=140), rtol=1e-6)
    steps = [moment["step"] for moment in kept.moments(is_alarm=False)]
    assert sorted(set(steps)) == [0, 100, 200, 300]  # steps with spectra
    last = next(moment for moment in kept.moments(is_alarm=False) if moment["step"] == 300)["details"][1]
    points = kept.array(last["modes"][0]).reshape(-1, 2)
    eigenvalue = runs["faulted"]["spectra"]["eigenvalue"].sel(step=300).values.ravel()
    np.testing.assert_allclose(points[:, 0] + 1j * points[:, 1], eigenvalue, rtol=1e-5)
    assert last["mode_layers"] == [0, 1, 2]


def test_a_page_is_one_file_that_needs_no_other_and_shows_what_the_widget_shows(timeline, tmp_path):
    timeline.view = (100, 300)
    timeline.shown = ["faulted"]
    timeline.select(133)
    text = timeline.save(tmp_path / "page.html").read_text()
    assert re.findall(r"https?://|<link|<img|\bsrc=|\bimport\b\s*[({'\"]|url\(", text) == []
    assert len(text) < 400_000
    content = Kept(text).content
    assert (content["view"], content["is_whole"]) == ([100, 300], False)
    assert [run["is_shown"] for run in content["runs"]] == [False, True]
    assert content["select"] == {"step": 133, "signal": "effective_rank D2", "run": None}
    assert 133 in [moment["step"] for moment in content["moments"]]
    assert "<title>Timeline of calm and faulted</title>" in text
    assert "from step 100 to 300, with step 133 selected: loss and effective_rank D2." in text


def test_a_page_of_a_long_run_has_fewer_points_and_every_spike(tmp_path):
    value = np.random.default_rng(0).normal(size=200_000)
    value[54_321] = 99
    parts = {"monitors": xr.Dataset({"loss": ("step", value)}, {"step": np.arange(200_000)})}
    widget = Timeline(xr.DataTree.from_dict(parts))
    text = widget.page()
    widget.close()
    step, kept = Kept(text).line("loss", "run")
    assert 2000 < len(step) < 4000
    assert step[kept.argmax()] == 54_321


def test_details_of_large_models_are_kept_at_fewer_steps(monkeypatch, timeline):
    monkeypatch.setattr("workbench.widgets.timeline_parts.canvas._MOST_OF_DETAILS", 1)
    assert sorted({moment["step"] for moment in Kept(timeline.page()).moments(is_alarm=False)}) == [0, 100, 200, 300]
    monkeypatch.setattr("workbench.widgets.timeline_parts.canvas._N_STEPS", 2)
    monkeypatch.setattr("workbench.widgets.timeline_parts.canvas._MOST_OF_DETAILS", 1e9)
    assert sorted({moment["step"] for moment in Kept(timeline.page()).moments(is_alarm=False)}) == [0, 300]


def test_no_page_says_what_stands_for_nothing(timeline):
    timeline.select(70, signal="update_ratio")
    text = json.dumps(Kept(timeline.page()).content)
    assert not re.search(r"(layer|head|module) -1|np\.|\bNaN\b|True_|False_", text)
    rows = timeline.selection.details[0]
    assert (rows.rows, rows.row_layers) == (["block 0", "block 1", "block 2", "outside"], [0, 1, 2, None])


@pytest.mark.slow
def test_every_kind_of_file_is_written_by_its_button(timeline, tmp_path):
    bar = timeline.export_bar
    bar.path.value = str(tmp_path / "figure")
    for ending, button in bar.buttons.items():
        button.click()
        assert timeline.error == ""
        assert (tmp_path / f"figure{ending}").stat().st_size > 1000
    assert list(bar.buttons) == [".png", ".svg", ".html", ".nc"]
    assert "netCDF" in bar.buttons[".nc"].description
    again = wb.open_run(tmp_path / "figure.nc")
    np.testing.assert_array_equal(again["faulted/monitors"]["loss"], timeline.runs["faulted"].tree["monitors"]["loss"])
    timeline.shown = []
    assert bar.buttons[".nc"].disabled
    with pytest.raises(StoreError, check=says("No run is shown; show one first.")):
        timeline.save(tmp_path / "none.nc")


def test_the_picture_is_drawn_again_when_what_is_shown_has_changed(timeline, monkeypatch):
    settled = []
    monkeypatch.setattr(timeline, "_settle", lambda: settled.append(1))
    for change in (
        lambda: setattr(timeline, "signals", ["loss"]),
        lambda: setattr(timeline, "shown", ["faulted"]),
        lambda: setattr(timeline, "view", (0, 100)),
        lambda: setattr(timeline, "reduce", "mean"),
        lambda: timeline.select(100),
        lambda: timeline._obey({"signals": ["grad_norm"]}),
    ):
        before = len(settled)
        change()
        assert len(settled) > before
    before = len(settled)
    timeline._obey({"width": 500, "seen": ["loss"]})
    assert len(settled) == before
    assert Image.open(io.BytesIO(timeline.picture())).size[0] > 700


def test_rows_of_a_run_that_goes_on_draw_no_picture(tmp_path, monkeypatch):
    growing = GrowingRun(monitored_run(200, seed=2, spectra=False), tmp_path / "a.zarr").grow(80)
    widget = Timeline(tmp_path / "a.zarr", signals=["loss"], poll_every=3600)
    settled = []
    monkeypatch.setattr(widget, "_settle", lambda: settled.append(1))
    growing.grow(140)
    assert widget.poll()
    assert settled == []
    growing.grow(200, state="finished")
    assert widget.poll()
    assert settled == [1]
    widget.close()


def test_a_run_that_waits_has_a_picture_a_page_and_a_sentence(tmp_path):
    writer = RunWriter(tmp_path / "a.zarr", {"subject": "a", "state": "running", "created": "now"})
    writer.commit()
    widget = Timeline(tmp_path / "a.zarr", poll_every=3600, theme="projector")
    assert Image.open(io.BytesIO(widget.picture())).size[1] < 150
    expected = "no signal has been recorded yet; the figure appears with the first one."
    assert widget.summary == f"Timeline of a (running, nothing recorded yet): {expected}"
    text = widget.save(tmp_path / "a.html").read_text()
    assert Kept(text).content["panels"] == []
    assert '<main class="workbench-projector">' in text
    widget.close()


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_log_of_another_tool_is_followed(tmp_path, is_folder):
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "train.log"
    path.write_text("".join(f"step: {step} loss: {3 - step / 8} lr: 0.5\n" for step in range(6)))
    widget = Timeline({"mine": path.parent if is_folder else path}, poll_every=3600)
    assert widget.signals == ["loss"]
    assert not widget.poll()
    with path.open("a") as file:
        file.writelines(f"step: {step} loss: 2.0 lr: 0.25\n" for step in range(4, 9))
    assert widget.poll()
    line = widget.runs["mine"].line("loss", None)
    assert line.step.tolist() == list(range(9))
    assert line.value.tolist() == [3, 2.875, 2.75, 2.625, 2, 2, 2, 2, 2]
    assert [(event.kind, event.step) for event in widget.runs["mine"].run_events.events] == [("resumed", 4)]
    (tmp_path / "gone.log").write_text(path.read_text())
    path.unlink()
    path.parent.rmdir()
    widget.poll()
    assert widget.states == {"mine": "removed"}
    widget.close()
    by_data = Timeline(wb.read_log(tmp_path / "gone.log"), signals=["loss", "learning_rate"])
    assert by_data.signals == ["loss", "learning_rate"]
    by_data.close()
