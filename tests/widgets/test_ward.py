"""Ward without a browser: measurements, the answer, the replay, the score, and no answer in the page before the end."""

import json
import threading

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from ipywidgets import widgets

import workbench as wb
from tests.about import about, says
from workbench import course
from workbench.course import cures
from workbench.diagnosis import CAUSES
from workbench.errors import OptionError, StoreError
from workbench.widgets import Ward
from workbench.widgets.ward_parts import table_html

pytestmark = [pytest.mark.render, pytest.mark.medium]


@pytest.fixture(autouse=True)
def _quick_replays(monkeypatch):
    """Replays that train nothing and do not help: what the widget shows of them does not depend on their losses."""

    def replay(truth, run, cause, on_step=lambda: None):
        for _ in range(200):
            on_step()
        return cures.Outcome("another setting", "", np.linspace(4, 3, 200), 99.0, 0.0, 0.0)

    monkeypatch.setattr(cures, "replay", replay)


@pytest.fixture
def make():
    """Widgets that are closed after the test."""
    made = []

    def ward(*args, **options):
        made.append(Ward(*args, **options))
        return made[-1]

    yield ward
    for each in made:
        each.close()


def finish(ward, causes, cure=None):
    ward.finish(causes, cure)
    ward.wait(60)


def states(others):
    """The state that the page has of all open widgets except others, which tests before this one left open."""
    open_widgets = [widget for name, widget in widgets.widget._instances.items() if name not in others]
    return json.dumps([widget.get_state() for widget in open_widgets], default=repr, ensure_ascii=False)


def cells_of(ward):
    return {row["id"]: [cell["text"] for cell in row["cells"]] for row in ward.measurements.rows}


def test_a_case_is_played_with_the_controls_alone(make):
    ward = make(3, level=1)
    patient, costs = ward.patient, ward.patient.measurements["cost"]
    assert patient.complaint in ward._complaint.value
    assert cells_of(ward)["spectra"] == ["spectra", str(costs["spectra"]), ""]
    ward.measurements.value = "loss"
    assert costs.index[0] == "loss"
    assert patient.measurements["description"]["loss"] in ward._about.value
    ward._measure.click()
    assert patient.record["monitors"]["loss"].sizes["step"] > 100
    assert ward.record.timeline.signals == ["loss"]
    ward.measurements.value = "activations"
    assert ward.record.name == "loss"  # the other one is not taken yet
    ward._measure.click()
    assert ward.record.timeline.signals == ["state_norm", "activation_max", "kurtosis"]
    ward.measurements.value = "loss"  # it is shown again, and not charged
    assert ward.record.timeline.signals == ["loss"]
    left = patient.budget - costs["loss"] - costs["activations"]
    assert f"<b>{left}</b> of {patient.budget} left" in ward._budget.value
    assert cells_of(ward)["loss"][-1] == "measured"

    ward.answer.cure = "schedule"
    assert str(patient.cure_cost) in ward._try.description
    ward._try.click()
    ward.wait(60)
    assert f"<b>{left - patient.cure_cost}</b>" in ward._budget.value
    assert "With another setting, the replay ended at a held-out loss of 99" in ward._replay_words.value
    assert ward._replay.figure is not None
    ward.answer.causes = ["schedule"]
    ward._finish.click()
    ward.wait(60)
    assert ward.error == ""
    score = patient.score
    answer = " and ".join(CAUSES[name].title for name in score.causes).replace("'", "&#x27;")
    assert f"{score.points:.0f} of 100 points. True answer: {answer}." in ward._verdict.value
    parts, board, evidence = (table.value for table in ward.score.tables)
    assert score.parts["reason"]["causes"].replace("'", "&#x27;") in parts
    assert score.evidence["sentence"][0] in evidence
    assert ward.answer.is_locked
    expected = course.board().loc[1]
    assert f">{expected['points'].round()['wb.diagnose']:.0f}<" in board
    assert board.index(">you<") < board.index("wb.diagnose")


def test_the_lines_of_python_do_the_same(make):
    ward = make(5, level=2)
    for name in ("loss", "settings"):
        ward.measure(name)
    ward.measure("loss")  # charged and written once
    ward.try_cure("data")
    ward.wait(60)
    finish(ward, ["schedule", "data"], "data")
    names = {}
    exec(ward.python.value, names)
    again = names["patient"]
    assert (again.seed, again.level, again.spent) == (5, 2, ward.patient.spent)
    pd.testing.assert_frame_equal(again.score.parts, ward.patient.score.parts)
    xr.testing.assert_identical(again.record, ward.patient.record)


@pytest.mark.parametrize(("seed", "level"), [(3, 1), (0, 5)])
def test_nothing_of_the_answer_is_in_the_page_before_the_end(make, seed, level):
    others = set(widgets.widget._instances)
    ward = make(seed, level=level)
    for name in ("settings", "loss", "activations"):
        ward.measure(name)
    if level == 1:
        ward.try_cure("schedule")
        ward.wait(60)
    before = "\n".join([states(others), ward.page(), ward.summary, ward.python.value])
    finish(ward, ["data"])
    score, after = ward.patient.score, states(others)
    told = [*score.parts["reason"][["causes", "cure"]], *score.evidence["sentence"]]
    escaped = [sentence.replace("'", "&#x27;") for sentence in told]
    assert [sentence for sentence in escaped if sentence not in after] == []
    assert [sentence for sentence in told + escaped if sentence in before] == []


def test_nothing_wrong_excludes_causes_and_changes(make):
    ward = make()
    assert [row["cause"] for row in ward.answer.rows] == [*ward.patient.cures, "nothing"]
    assert all(row["meaning"] and row["title"] and row["change"] for row in ward.answer.rows)
    ward.answer.causes = ["data"]
    ward.answer.cure = "data"
    ward.answer.causes = ["data", "nothing"]
    assert (ward.answer.causes, ward.answer.cure) == (["nothing"], "")
    ward.answer.causes = ["schedule", "nothing"]
    assert ward.answer.causes == ["schedule"]
    ward.answer.causes = ["nothing"]
    ward.answer.cure = "schedule"
    assert ward.answer.causes == []
    ward.answer.causes = ["nothing"]
    ward._finish.click()
    ward.wait(60)
    assert 'patient.finish(["nothing"])' in ward.python.value


def test_bad_input_is_explained_and_changes_nothing(make):
    ward = make(level=5)
    ward._finish.click()
    assert "No cause is marked" in ward.error
    ward._try.click()
    assert "No change is chosen" in ward.error
    ward._seed.value = 2
    assert (ward.patient.seed, ward.error) == (2, "")
    ward.open_case(0)
    with pytest.raises(OptionError, check=about("level", 9)):
        ward.open_case(0, level=9)
    with pytest.raises(OptionError, check=about("level", 9)):
        make(level=9)
    with pytest.raises(OptionError, check=says("No cause is marked; mark at least one, or")):
        ward.finish([])
    assert ward.patient.spent == 0
    costs = ward.patient.measurements["cost"].sort_values(ascending=False)
    for name, cost in costs.items():
        if cost <= ward.patient.remaining and name != costs.index[2]:
            ward.measure(name)
    name, spent = costs.index[2], ward.patient.spent  # one that is left, and costs more than what is left
    assert cells_of(ward)[name][-1] == "too expensive"
    ward.measurements.value = name
    ward._measure.click()
    assert f"'{name}' costs {costs[name]}" in ward.error
    ward.answer.cure = "data"
    ward._try.click()
    ward.wait(60)
    assert f"'cure' costs {ward.patient.cure_cost}" in ward.error
    assert (ward.patient.spent, ward.patient.score) == (spent, None)


def test_a_case_that_was_left_is_as_it_was(make):
    ward = make()
    ward.measure("loss")
    ward.answer.causes = ["schedule"]
    ward._next.click()
    assert (ward.patient.seed, ward.answer.causes, ward.record.timeline) == (1, [], None)
    assert cells_of(ward)["loss"][-1] == ""
    finish(ward, ["data"])
    ward._level.value = 3
    assert (ward.patient.seed, ward.patient.level) == (1, 3)
    ward.open_case(0, level=1)
    assert (ward._seed.value, ward._level.value) == (0, 1)
    assert ward.answer.causes == ["schedule"]
    assert ward.patient.spent == 1
    assert ward.record.timeline.signals == ["loss"]
    ward.open_case(1, level=1)
    assert ward.answer.is_locked
    assert ward.patient.score.parts["reason"]["cure"] in ward.score.tables[0].value


def test_a_replay_can_be_stopped_and_nothing_else_happens_meanwhile(make, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def replay(truth, run, cause, on_step):
        begun.set()
        try:
            while True:
                on_step()
        finally:
            ended.set()

    monkeypatch.setattr(cures, "replay", replay)
    ward = make()
    ward.try_cure("data")
    assert begun.wait(30)
    assert "<progress" in ward._status.value
    for act in (lambda: ward.measure("loss"), lambda: finish(ward, ["data"]), lambda: ward.try_cure("data")):
        with pytest.raises(OptionError, check=says("A replay is running; wait until it ends, or press Stop.")):
            act()
    ward._stop.click()
    assert not ward.is_measuring
    assert "Stopped" in ward._status.value
    assert ended.wait(30)
    assert (ward.patient.spent, ward._replay.figure) == (0, None)
    ward.measure("loss")
    assert ward.error == ""


def test_settings_and_parts_that_a_model_lacks(make):
    cases = ((n, course.patient(n, level=1)) for n in range(100))
    seed = next(n for n, case in cases if case.measure("spectra").sizes["step"] > case.measure("router").sizes["step"])
    ward = make(seed)
    ward.measure("settings")
    assert ward.record.timeline is None
    assert "training.learning_rate" in ward.record._table.value
    ward.measure("router")
    assert "has no such part" in ward.record._title.value
    ward.measure("spectra")
    last = ward.patient.record["spectra"]["step"].values[-1]
    assert ward.record.timeline.selection.step == last  # eigenvalues of the last spectra


@pytest.mark.slow
def test_files_and_picture(make, tmp_path):
    ward = make(3)
    assert ward.picture()[1:4] == b"PNG"
    with pytest.raises(StoreError, check=says("Nothing has been measured yet but settings; take another")):
        ward.save(tmp_path / "case.nc")
    ward.measure("settings")
    assert set(ward.refused_kinds) == {".svg", ".nc"}
    assert ward.export_bar.buttons[".nc"].disabled
    assert "training.learning_rate" in ward.page()
    ward.measure("grad_norm")
    finish(ward, ["schedule"])
    for ending in ward.kinds:
        assert ward.save(tmp_path / f"case{ending}").stat().st_size > 1000
    opened = wb.open_run(tmp_path / "case.nc")["patient"]
    np.testing.assert_array_equal(opened["monitors"]["grad_norm"], ward.patient.record["monitors"]["grad_norm"])
    assert f"{ward.patient.score.points:.0f} of 100 points" in (tmp_path / "case.html").read_text(encoding="utf-8")


def test_tables_escape_their_text_and_leave_out_unknown_numbers():
    table = table_html(pd.DataFrame({"a_name": ["<b>"], "weight": [np.nan], "is_right": [True]}))
    assert "&lt;b&gt;" in table
    assert "nan" not in table
    assert ">a name<" in table
    assert ">yes<" in table
