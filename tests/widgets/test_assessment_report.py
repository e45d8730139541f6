"""AssessmentReport without a browser: each kind of tree, measurements in the background, and files."""

import io
import itertools
import re
import threading

import pytest
import xarray as xr
from PIL import Image

import workbench as wb
import workbench.assessment.assess
import workbench.diagnosis
import workbench.widgets.assessment_report
import workbench.widgets.report.views
from tests.about import about, says
from tests.reports import made_trees
from workbench.errors import OptionError, SchemaError, StoreError
from workbench.reports.document import Numbers
from workbench.widgets.assessment_report import AssessmentReport
from workbench.widgets.worker import MeasuringProgress

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def assessment():
    return made_trees.assessment()


@pytest.fixture(scope="module")
def comparison():
    return made_trees.comparison()


@pytest.fixture
def make():
    """Widgets, closed after the test."""
    made = []

    def report(*args, **options):
        made.append(AssessmentReport(*args, **options))
        return made[-1]

    yield report
    for one in made:
        one.close()


@pytest.fixture
def answers(monkeypatch):
    """Messages of `ReportPage`."""
    sent = []
    monkeypatch.setattr(
        workbench.widgets.report.views.ReportPage,
        "send",
        lambda self, content, buffers=(): sent.append((content, list(buffers))),
    )
    return sent


def rows(table):
    return [row["id"] for row in table.rows]


def texts(table, name):
    return [cell["text"].replace("\xa0", " ") for row in table.rows if row["id"] == name for cell in row["cells"]]


# The page


def test_the_page_gets_its_text_at_once_and_each_picture_when_it_asks(make, assessment, answers, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        workbench.widgets.report.views,
        "image",
        lambda picture, tree: (drawn.append(picture.title), ("image/png", b"png"))[1],
    )
    report = make(assessment)
    report.text._receive(None, {"question": "text", "id": "1"}, [])
    content, _ = answers[-1]
    titles = [picture.title for picture in report.text.document.pictures]
    assert drawn == []
    assert len(titles) >= 4
    assert [frame["title"] for frame in content["frames"]] == titles
    for frame in content["frames"]:
        assert content["text"].count(f'<p class="lead">{frame["line"]}</p>') == 1
    assert "data:image" not in content["text"].replace('href="data:,"', "")
    report.text._receive(None, {"question": "picture", "number": 2, "id": "2"}, [])
    assert answers[-1] == ({"answer": "2", "mime": "image/png"}, [b"png"])
    assert drawn == [titles[2]]


def test_a_picture_that_cannot_be_drawn_says_so_in_its_place(make, assessment, answers, monkeypatch):
    def refuse(picture, tree):
        raise SchemaError("The part lacks its depth.")

    monkeypatch.setattr(workbench.widgets.report.views, "image", refuse)
    report = make(assessment)
    report.text._receive(None, {"question": "picture", "number": 0, "id": "7"}, [])
    assert answers[-1][0] == {"answer": "7", "failure": "The part lacks its depth."}
    assert report.error == ""


def test_the_style_of_the_file_has_what_the_page_replaces(make, assessment):
    style = re.search("<style>(.*?)</style>", make(assessment).text._text, re.DOTALL)[1]
    for words in (":root", ":target", "@media (prefers-color-scheme: dark)", "@media (max-width", "body {", "rem"):
        assert words in style


# Criteria


def test_criteria_are_filtered_by_failure_mode_and_state_worst_first(make, assessment):
    report = make(assessment)
    view = report.criteria
    states = dict(zip(assessment["criteria"]["criterion"].values, assessment["criteria"]["state"].values, strict=True))
    shown = rows(view.table)
    assert set(shown) == set(states)
    order = [("failing", "at risk", "healthy", "not measured").index(states[name]) for name in shown]
    assert order == sorted(order)
    view.states.value = ["at risk", "failing"]
    assert set(rows(view.table)) == {name for name, state in states.items() if state in ("at risk", "failing")}
    view.mode.value = "precision_headroom"
    assert rows(view.table) == ["hazard_weights"]
    assert texts(view.table, "hazard_weights")[1:] == ["failing", "0.31", "at most 0.1"]
    view.states.value = ["healthy"]
    assert rows(view.table) == []
    assert view.table.value == ""
    assert report.error == ""


def test_a_chosen_criterion_shows_what_it_rests_on_and_nothing_is_drawn_unseen(make, assessment):
    report = make(assessment)
    evidence = report.criteria.evidence
    assert evidence.key is None
    report.view = "criteria"
    report.criteria.table.choose("spectral_radius")
    value = float(assessment["spectra"]["spectral_radius"][1])
    assert f"{value:.3g}" in evidence.words.value
    assert "block 1" in evidence.words.value
    assert "37 healthy runs" in evidence.words.value
    assert evidence.key == ("spectra", "spectral_radius")
    report.criteria.table.choose("routing")
    assert "The model has no router." in evidence.words.value
    assert evidence.key == ("criteria", "routing_oscillation")
    report.criteria.table.choose("rate_over_edge")
    assert evidence.key[0] == "pilot"
    picture = evidence._place.canvas
    report.criteria.states.value = ["failing", "at risk"]  # the same row stays chosen, and its figure stays
    assert evidence._place.canvas is picture
    assert report.error == ""


def test_what_the_risk_model_does_not_know_is_shown_without_a_number_or_a_confidence(make):
    report = make(made_trees.without_rates(is_stand_in=True))
    assert report.text.document.verdict == "cannot say"
    report.view = "criteria"
    assert rows(report.criteria.table)[-1] in ("rate_over_edge", "routing")
    report.criteria.table.choose("rate_over_edge")
    assert "not measured" in report.criteria.evidence.words.value
    assert "confidence" not in report.criteria.evidence.words.value
    report.criteria.table.choose("hazard_weights")
    assert "of a proxy model of width 64 with 4 blocks" in report.criteria.evidence.words.value
    assert report.error == ""


def test_a_criterion_leads_to_its_row_in_the_report(make, assessment):
    report = make(assessment)
    report.view = "criteria"
    report.criteria.table.choose("entropy")
    report.criteria.evidence.button.click()
    assert report.view == "report"
    assert report.text.marked == Numbers(assessment).criterion("entropy").anchor
    assert f'id="{report.text.marked}"' in report.text._text


# Measuring


@pytest.fixture
def assess(monkeypatch, assessment):
    """Replacement of the measurement with three parts, the second of which waits for an event."""
    calls, at_second, goes_on = [], threading.Event(), threading.Event()

    def fake(subject, task=None, *, plan=None, seed=0, progress=False):
        calls.append({"subject": subject, "task": task, "plan": plan, "seed": seed, "parts": []})
        if subject == "broken":
            raise OptionError("There is no design 'broken'; choose gpt2.")
        for part in ("spectra", "risk", "hardware"):
            progress(part)
            calls[-1]["parts"].append(part)
            if part == "risk":
                at_second.set()
                assert goes_on.wait(20)
        return assessment

    fake.calls, fake.at_second, fake.goes_on = calls, at_second, goes_on
    monkeypatch.setattr(workbench.assessment.assess, "assess", fake)
    yield fake
    goes_on.set()


def test_a_subject_is_measured_beside_the_page_part_by_part(make, assess, assessment):
    report = make(subject="gpt2", plan={"training": {}}, seed=3)
    assert assess.at_second.wait(20)
    assert report.is_measuring
    assert report.tree is None
    assert "✓ spectra" in report._status.value
    assert "risk …" in report._status.value
    assert report.summary == "Measuring …"
    with pytest.raises(StoreError, check=says("Nothing has been measured yet; wait for the measurement, or")):
        report.save("x.html")
    assert [ending for ending, button in report.export_bar.buttons.items() if not button.disabled] == [".png"]
    assess.goes_on.set()
    report.wait(60)
    assert report.tree is assessment
    assert (assess.calls[0]["plan"], assess.calls[0]["seed"]) == ({"training": {}}, 3)
    assert report.view == "report"
    assert report._line.layout.display == "none"


def test_stop_ends_it_and_measure_begins_again(make, assess, assessment):
    report = make(subject="gpt2")
    assert assess.at_second.wait(20)
    report._stop.click()
    assert not report.is_measuring
    assert "Stopped at risk" in report._status.value
    assert report._button.layout.display is None
    assess.goes_on.set()
    report._button.click()
    report.wait(60)
    assert report.tree is assessment
    assert [call["parts"] for call in assess.calls] == [["spectra", "risk"], ["spectra", "risk", "hardware"]]


def test_steps_of_a_part_are_one_part():
    heard = []
    progress = MeasuringProgress("assessment", heard.append)
    for words in ("risk", "devices", "devices: rounding", "devices: order"):
        progress.tell(words)
    assert progress.current == "devices: order"
    assert [part for part, _ in progress.done] == ["risk"]
    assert heard[-1].count("✓") == 1
    assert "devices: order …" in progress.html()
    assert "left" not in progress.html()  # unknown
    progress.tell("verdict")
    assert progress.current == "verdict"
    assert [part for part, _ in progress.done] == ["risk", "devices"]


def test_counts_say_how_much_is_done_and_how_long_the_rest_takes():
    progress = MeasuringProgress("assessment", lambda _: None, {"spectra": 1, "skipped": 1, "pilot": 2})
    progress.tell("spectra")
    assert progress.fraction == 0
    progress.tell("pilot")
    assert progress.fraction == 0.5
    progress.tell("pilot: 500 of 1,000 updates")
    assert progress.fraction == 0.75
    assert 'value="0.750"' in progress.html()
    assert "about 1 s left" in progress.html()
    progress.tell("a part more")
    assert progress.fraction is None


def test_what_cannot_be_measured_is_a_sentence_under_the_widget(make, assess):
    report = make(subject="broken")
    report.wait(20)
    assert report.error == "There is no design 'broken'; choose gpt2."
    assert report._stop.layout.display == "none"
    assert report._button.layout.display is None


# Experiments of a diagnosis


@pytest.fixture
def run_experiment(monkeypatch):
    """Replacement of the replays: runs some steps, or continues until it is stopped, and fills in the row."""
    said = []

    def fake(tree, experiment=0, *, model, task, progress, n_steps=3):
        for step in itertools.count(1) if n_steps is None else range(1, n_steps + 1):
            said.append(f"{step} of 1,000 steps")
            progress(said[-1])
        done = tree.copy()
        table = tree["experiments"].to_dataset()
        columns = {
            "outcome": ["it survived", ""],
            "supports": [True, False],
            "value": [1.5, float("nan")],
            "twin_value": [9.0, float("nan")],
        }
        done["experiments"] = xr.DataTree(
            table.assign({name: ("experiment", values) for name, values in columns.items()})
        )
        return done

    fake.said = said
    monkeypatch.setattr("workbench.diagnosis.experiment_runs.run_experiment", fake)
    return fake


TASK = wb.tasks.random_tokens(vocab_size=8, length=4, batch_size=2)


def test_an_experiment_runs_and_its_outcome_is_in_the_tree_the_table_and_the_page(make, run_experiment):
    tree = made_trees.diagnosis(with_outcome=False)
    report = make(tree, model="the model", task=TASK)
    report.view = "experiments"
    assert texts(report.experiments.table, "0")[-1] == ""
    assert "it survived" not in report.text._text
    report.experiments.button.click()
    report.wait(60)
    assert report.error == ""
    assert report.tree["experiments"]["outcome"].values.tolist() == ["it survived", ""]
    assert "outcome" not in tree["experiments"]
    assert texts(report.experiments.table, "0")[-1] == "for the cause"
    assert "Outcome: it survived. This is evidence for the cause." in report.experiments.words.value
    assert "it survived" in report.text._text
    assert report.view == "experiments"
    assert not report.experiments.button.disabled


def test_an_experiment_ends_at_the_next_step_when_it_is_stopped(make, run_experiment):
    report = make(made_trees.diagnosis(), model="the model", task=TASK, replay={"n_steps": None})
    report.run_experiment(0)
    future = report._future
    while len(run_experiment.said) < 3:
        assert not future.done()
    report.stop()
    future.result(20)  # the thread is idle
    assert "Stopped at two replays: " in report._status.value
    assert report.error == ""


def test_without_model_and_task_experiments_are_shown_but_not_run(make):
    report = make(made_trees.diagnosis())
    assert report.experiments.button.disabled
    assert "model=..., task=..." in report.experiments.words.value
    with pytest.raises(OptionError, check=says("An experiment needs the model and the task of the run; pass")):
        report.run_experiment(0)


# Designs side by side


def test_two_designs_stand_side_by_side(make, comparison):
    report = make(comparison)
    view = report.side_by_side
    assert (view.first.value, view.second.value) == ("wide", "deep")
    assert view.table.columns == ["criterion", "state of wide", "wide", "state of deep", "deep", "healthy band"]
    assert texts(view.table, "rate_over_edge")[1:] == ["at risk", "0.649", "healthy", "0.17", "at most 0.5"]
    view.only_different.value = True
    assert rows(view.table) == ["rate_over_edge"]
    report.view = "side by side"
    assert ["wide" in one.words.value for one in view.evidence] == [True, False]
    assert ["0.649" in one.words.value for one in view.evidence] == [True, False]
    view.evidence[1].button.click()
    assert report.view == "report"
    assert f'id="{report.text.marked}"' in report.text._text
    assert "deep" in report.text.marked
    view.first.value = "deep"
    assert rows(view.table) == []
    assert report.error == ""


# Files


def test_the_tree_is_written_where_the_field_says(make, assessment, tmp_path):
    report = make(assessment)
    bar = report.export_bar
    assert bar.path.value == "reports/No-Norm_3_blocks"
    bar.path.value = str(tmp_path / "new" / "mine")
    bar.buttons[".nc"].click()
    written = tmp_path / "new" / "mine.nc"
    assert str(written) in bar.note.value
    again = wb.open_run(written)
    assert again.attrs["verdict"] == "at risk"
    xr.testing.assert_equal(again["criteria"].to_dataset(), assessment["criteria"].to_dataset())


@pytest.mark.slow
def test_the_report_is_written_in_every_kind(make, tmp_path, monkeypatch):
    report = make(made_trees.diagnosis())
    written = report.save(tmp_path / "run.ipynb")  # its figures are drawn when it runs
    assert written == tmp_path / "run.ipynb"
    assert "the learning rate was too high" in written.read_text()
    assert (tmp_path / "run.nc").exists()
    asked = []
    monkeypatch.setattr(
        workbench.widgets.assessment_report, "report", lambda tree, path, overwrite: asked.append((path, overwrite))
    )
    report.save(tmp_path / "run.html")
    report.save(tmp_path / "run.md", overwrite=True)
    assert asked == [(tmp_path / "run.html", False), (tmp_path / "run.md", True)]


# The picture


def size_of(png):
    return Image.open(io.BytesIO(png)).size


@pytest.mark.medium
def test_the_picture_shows_the_chosen_view(make, assessment, tmp_path):
    report = make(assessment)
    of_report = report.picture()
    report.view = "criteria"
    of_criteria = report.picture()
    report.criteria.table.choose("spectral_radius")
    of_another = report.picture()
    assert len({of_report, of_criteria, of_another}) == 3
    assert {size_of(png)[0] for png in (of_report, of_criteria, of_another)} == {1000}
    assert size_of(of_criteria)[1] > size_of(of_report)[1] + 100  # the table, and the figure below
    assert len(of_another) < 200_000
    saved = Image.open(report.save(tmp_path / "seen.png"))
    assert saved.tobytes() == Image.open(io.BytesIO(of_another)).tobytes()
    assert len(report.figure("matplotlib")) == 1
    report.view = "report"
    with pytest.raises(OptionError, check=says("No figure is shown; choose a criterion in the view")):
        report.figure()


@pytest.mark.medium
def test_pictures_of_the_other_kinds_and_before_the_end(make, comparison, assess):
    report = make(comparison)
    report.view = "side by side"
    other = make(made_trees.diagnosis())
    other.view = "experiments"
    waiting = make(subject="gpt2")
    pictures = [one.picture() for one in (report, other, waiting)]
    assert size_of(pictures[2])[1] < 80 < size_of(pictures[1])[1]
    assert {size_of(png)[0] for png in pictures} == {1000}


def test_the_answer_stands_above_every_view(make, assessment, comparison):
    words = make(assessment)._words.value
    for part in (
        "No-Norm, 3 blocks is at risk as planned",
        "Largest useful rate: 0.0021",
        "Recommended action: Lower the peak",
    ):
        assert part in words
    assert 'class="workbench-answer at-risk"' in words
    assert make(assessment).summary.startswith("No-Norm, 3 blocks is at risk as planned: the gradient grows")
    assert "Choose deep: verdict proceed" in make(comparison).summary
    assert "most likely failed because the learning rate was too high" in make(made_trees.diagnosis()).summary


@pytest.mark.parametrize("kind", ["assessment", "diagnosis", "comparison"])
def test_no_sentinel_is_on_the_screen(make, kind):
    report = make(getattr(made_trees, kind)())
    text = re.sub("<[^>]*>", " ", report.text._text[report.text._text.index("<body>") :])
    assert not re.findall(r"np\.\w+|(?:layer|block|step) -1\b|\bnan\b", text)


# Errors


def test_it_takes_either_a_tree_or_a_subject(assessment):
    with pytest.raises(OptionError, check=says("AssessmentReport received neither tree nor subject; pass")):
        AssessmentReport()
    with pytest.raises(OptionError, check=says("AssessmentReport received both tree and subject; pass")):
        AssessmentReport(assessment, subject="gpt2")
    with pytest.raises(OptionError, check=says("A plan requires subject=; a tree already contains the plan")):
        AssessmentReport(assessment, plan={})
    with pytest.raises(SchemaError, check=says("The kind of the tree is None, expected one of assessment,")):
        AssessmentReport(xr.DataTree())


def test_only_a_diagnosis_has_experiments_and_only_a_subject_is_measured(make, assessment):
    report = make(assessment)
    with pytest.raises(OptionError, check=says("Only a diagnosis has experiments; pass a tree from")):
        report.run_experiment(0)
    with pytest.raises(OptionError, check=says("Nothing can be measured, as this report shows a")):
        report.measure()
    with pytest.raises(OptionError, check=about("view", "experiments", ("report", "criteria"))):
        report.view = "experiments"


def test_close_leaves_nothing(assessment):
    report = AssessmentReport(assessment)
    report.view = "criteria"
    parts = [report.text, report.criteria.table, report.side_by_side.table, report.experiments.table, report.export_bar]
    parts.append(report.criteria.evidence._place.canvas)
    report.close()
    assert len(parts) == 6
    assert [part.comm for part in parts] == [None] * 6
