"""RiskExplorer without a browser: measurements in the background, sliders, and unknown risks."""

import io
import re
import threading

import numpy as np
import pytest
import torch
from PIL import Image

import workbench as wb
import workbench.widgets.risk.controls
from tests.about import about, says
from workbench.errors import OptionError, StoreError
from workbench.sweeps import measure_case, replan
from workbench.widgets import RiskExplorer
from workbench.widgets.figure import Figure
from workbench.widgets.risk.controls import title

pytestmark = pytest.mark.render

SMALL = wb.zoo.ArchitectureConfig(d_model=48, n_layers=2, n_heads=2)


@pytest.fixture
def make():
    """Widgets over a small transformer, measured, and closed after the test."""
    made = []

    def risk_explorer(model=SMALL, task=None, *, waits=True, **options):
        explorer = RiskExplorer(model, task, **options)
        made.append(explorer)
        explorer.setup.length.value = 8
        if waits:
            explorer.wait(60)
        return explorer

    yield risk_explorer
    for explorer in made:
        explorer.close()


@pytest.fixture
def n_measured(monkeypatch):
    """Number of measurements."""
    counted = []

    def count(*args, **options):
        counted.append(options)
        return measure_case(*args, **options)

    monkeypatch.setattr(workbench.widgets.risk.controls, "measure_case", count)
    return counted


def is_pale(explorer):
    return "workbench-risk-stale" in explorer._shown._dom_classes


def by_hand(explorer):
    """The expected measurement with the initial settings."""
    task = wb.tasks.associative_recall(length=8, vocab_size=64, n_pairs=3, batch_size=16, seed=0)
    config = wb.zoo.ArchitectureConfig(**{**SMALL.as_dict(), "vocab_size": 64, "max_length": 8})
    return measure_case(wb.zoo.build(config), task, takes_gradients=False, n_snapshots=512, **explorer.plan.settings())


def test_a_small_model_is_measured_automatically_and_its_risk_shown(make):
    explorer = make()
    assert explorer.error == ""
    expected = by_hand(explorer)
    for name in ("near_unit_mass", "initial_loss", "n_weights", "n_tokens", "learning_rate", "warmup", "seed"):
        np.testing.assert_array_equal(explorer.case[name], expected[name], err_msg=name)
    assert explorer.case["architecture"].values.tolist() == ["Pre-LN"]
    assert explorer.risk == wb.risk.predict(expected)
    assert "risk of not learning well" in explorer._cards.value
    assert f">{float(expected['near_unit_mass'].mean()):.2f}<" in explorer._cards.value
    assert 'class="workbench-answer healthy"' in explorer._words.value
    assert explorer.summary.replace(" %", "&nbsp;%") in explorer._words.value
    assert explorer.summary.startswith("Likely to learn well at a learning rate of 0.003 (risk: ")
    assert explorer._curve.now.data["rate"] == [0.003]
    assert len(explorer._curve.curve.data["failure"]) == 81


def test_sliders_move_the_figures_and_measure_nothing(make, n_measured):
    explorer = make()
    del n_measured[:]
    measured, edge = explorer.case, explorer.risk.useful_edge.value
    seen = []
    for factor in (0.3, 1.0, 3.0, 30.0):
        explorer.plan.learning_rate.value = edge * factor
        expected = wb.risk.predict(replan(measured, learning_rate=explorer.plan.learning_rate.value))
        assert explorer.risk.too_large == expected.too_large
        seen.append(explorer.risk.too_large.value)
    assert seen == sorted(seen)
    assert seen[1] == pytest.approx(0.5, abs=0.15)
    explorer.plan.warmup.value = 100
    explorer.plan.schedule.value = "cosine"
    explorer.plan.clip_norm.value = 0.0
    explorer.plan.n_steps.value = 400
    explorer.plan.optimizer.value = "SGD, momentum 0.9"
    settings = explorer.case.isel(run=0)
    found = {name: settings[name].item() for name in ("warmup", "schedule", "n_steps", "optimizer")}
    assert found == {"warmup": 100, "schedule": "cosine", "n_steps": 400, "optimizer": "SGD"}
    assert np.isnan(explorer.case["clip_norm"].values).all()
    assert explorer.risk.useful_edge.value > 3 * edge  # SGD needs larger rates
    assert explorer.error == ""
    assert n_measured == []


def test_outside_of_what_was_measured_a_banner_and_no_figure(make):
    explorer = make()
    explorer.plan.n_steps.value = 4000
    assert explorer.summary == "The risk is unknown."
    for words in (
        "The risk is unknown.",
        "over 4,000 updates",
        "Run a pilot to find out.",
        "workbench-answer not-measured",
    ):
        assert words in explorer._words.value
    assert re.findall('class="figure">(.*?)<', explorer._cards.value)[:3] == ["–"] * 3
    assert "nan" not in explorer._cards.value
    assert explorer._curve.curve.data["failure"] == []
    assert not explorer._curve.band.visible
    explorer.plan.n_steps.value = 400
    assert "unknown" not in explorer._words.value
    assert len(explorer._curve.curve.data["failure"]) == 81


@pytest.mark.slow
def test_a_pilot_narrows_the_risk_until_the_plan_changes(make):
    explorer = make(task="synthetic language")
    explorer.plan.n_steps.value = 240
    before = explorer.risk
    explorer.budget.value = 300
    explorer.run_pilot()
    explorer.wait(120)
    assert explorer.error == ""
    assert explorer.pilot.n_updates <= 300
    assert explorer.pilot.reason == ""
    assert explorer.risk.useful_edge == explorer.pilot.useful_edge
    assert explorer.risk != before
    assert "from the pilot" in explorer._cards.value
    assert "Pilot: " in explorer._found.value
    assert isinstance(explorer._losses.canvas, Figure)
    assert "According to the pilot, learning rates from" in explorer._words.value
    assert len(explorer.figure(kind="pilot")) == 1
    explorer.plan.learning_rate.value = 0.1
    assert explorer.pilot is not None
    assert explorer.risk.failure.value == pytest.approx(
        min(1.0, explorer.risk.too_small.value + explorer.risk.too_large.value)
    )
    explorer.plan.clip_norm.value = 0.0
    assert explorer.pilot is None
    assert not isinstance(explorer._losses.canvas, Figure)
    assert explorer._found.value == ""
    explorer.plan.clip_norm.value = 1.0
    assert explorer.pilot is not None  # the plan is the one of the pilot again


def test_a_pilot_can_be_stopped(make, monkeypatch):
    explorer = make()
    begun, may_end = threading.Event(), threading.Event()

    def slow(choice, settings, budget, tell):
        begun.set()
        tell("10 of 1,000 trial updates")
        may_end.wait(30)
        tell("20 of 1,000 trial updates")

    monkeypatch.setattr(workbench.widgets.risk_explorer, "run_pilot", slow)
    explorer.run_pilot()
    assert begun.wait(30)
    assert explorer._stop.layout.display is None
    assert explorer._progress.fraction == 0.01
    assert explorer._start.disabled  # a click would be lost
    explorer.stop()
    assert not explorer._start.disabled
    assert "Stopped at training copies: 10 of 1,000 trial updates" in explorer._status.value
    assert "<progress" not in explorer._status.value
    may_end.set()
    explorer.wait(30)
    assert explorer.pilot is None
    assert not is_pale(explorer)
    assert explorer._stop.layout.display == "none"
    assert explorer.error == ""


def test_what_a_pilot_cannot_do_is_said_and_the_risk_stays(make, monkeypatch):
    explorer = make()

    def fails(choice, settings, budget, tell):
        raise OptionError("The data have a single batch.")

    monkeypatch.setattr(workbench.widgets.risk_explorer, "run_pilot", fails)
    before = explorer.risk
    explorer.run_pilot()
    explorer.wait(30)
    assert explorer.error == "The data have a single batch."
    assert explorer.risk == before
    assert not is_pale(explorer)


def test_controls_of_the_model_start_a_new_measurement(make, n_measured):
    explorer = make()
    first = explorer.case
    explorer.setup.norm.value = "none"
    explorer.wait(60)
    assert explorer.case["architecture"].values.tolist() == ["No-Norm"]
    assert float(explorer.case["near_unit_mass"].mean()) != float(first["near_unit_mass"].mean())
    assert len(n_measured) >= 2
    assert explorer.error == ""


def test_while_measuring_the_figures_are_pale_and_an_old_measurement_is_dropped(make, monkeypatch):
    explorer = make()
    may_end = threading.Event()
    real = workbench.widgets.risk_explorer.measure

    def slow(choice, settings, model, check):
        may_end.wait(30)
        check()
        return real(choice, settings, model, check)

    monkeypatch.setattr(workbench.widgets.risk_explorer, "measure", slow)
    explorer.setup.d_model.value = 64
    assert is_pale(explorer)
    assert "Measuring" in explorer._status.value
    assert "This is the result of the previous model." in explorer._words.value
    explorer.setup.d_model.value = 96
    may_end.set()
    explorer.wait(60)
    assert int(explorer.case["d_model"][0]) == 96
    assert not is_pale(explorer)
    assert explorer._status.value == ""


def test_a_module_waits_for_the_button(make, n_measured):
    model = wb.zoo.transformer(d_model=48, n_layers=2, n_heads=2, vocab_size=32, max_length=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explorer = make(model, waits=False)
    assert explorer.case is None
    assert explorer.summary == "Press Measure to estimate the risk of this model."
    assert n_measured == []
    with pytest.raises(OptionError, check=says("Nothing has been measured yet; wait for the measurement, or")):
        explorer.figure()
    with pytest.raises(OptionError, check=says("The model has not been measured yet; wait for the")):
        explorer.run_pilot()
    explorer._button.click()
    explorer.wait(60)
    assert explorer.error == ""
    assert int(explorer.case["n_weights"][0]) == sum(weight.numel() for weight in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_measured_is_said_under_the_widget(make):
    explorer = make()
    explorer.setup.source.value = "checkpoint"
    explorer.setup.path.value = "/nowhere/at/all"
    explorer._button.click()
    explorer.wait(60)
    assert "/nowhere/at/all" in explorer.error
    assert is_pale(explorer)
    explorer.setup.source.value = "zoo"
    explorer.wait(60)
    assert explorer.error == ""
    assert not is_pale(explorer)


@pytest.mark.parametrize(
    ("model", "task", "error"),
    [
        (3, None, says("The model is a int, expected a configuration, a")),
        (None, "chess", about("task", "chess")),
        (wb.zoo.ArchitectureConfig(family="vit"), "random tokens", about("task", "random tokens", ("digits",))),
    ],
)
def test_invalid_arguments_are_rejected(model, task, error):
    with pytest.raises(OptionError, check=error):
        RiskExplorer(model, task)


def test_figures_for_print_and_names_that_do_not_exist(make):
    explorer = make()
    assert len(explorer.figure("matplotlib")) == 1
    with pytest.raises(OptionError, check=about("kind", "drivers", ("curve", "pilot"))):
        explorer.figure(kind="drivers")
    with pytest.raises(OptionError, check=says("There is no pilot of this plan; call")):
        explorer.figure(kind="pilot")


def test_the_answer_says_what_is_wrong_and_what_to_do(make):
    explorer = make()
    edge, slow = explorer.risk.useful_edge.value, explorer.risk.slow_edge.value
    explorer.plan.learning_rate.value = 8 * edge
    assert explorer.summary.startswith("Unlikely to learn well")
    assert "The learning rate is probably too large: lower it to about" in explorer._words.value
    assert "A pilot makes this estimate more certain." in explorer._words.value
    explorer.plan.learning_rate.value = slow
    assert "May not learn well" in explorer._words.value
    assert "The learning rate is probably too small: raise it to about" in explorer._words.value
    assert 'class="workbench-answer at-risk"' in explorer._words.value


@pytest.mark.medium
def test_the_picture_follows_the_plan_and_says_what_is_unknown(make):
    explorer = make()
    pictures = [explorer.picture()]
    explorer.plan.learning_rate.value = 0.3
    pictures.append(explorer.picture())
    explorer.plan.n_steps.value = 4000
    pictures.append(explorer.picture())
    assert len(set(pictures)) == 3
    sizes = [Image.open(io.BytesIO(png)).size for png in pictures]
    assert {width for width, _ in sizes} == {1000}
    assert sizes[0][1] > 400 > sizes[2][1]  # an unknown risk has no curve
    assert max(map(len, pictures)) < 120_000


def test_a_picture_before_the_first_result_is_one_line(make):
    model = wb.zoo.transformer(d_model=48, n_layers=2, n_heads=2, vocab_size=32, max_length=8)
    explorer = make(model, waits=False)
    assert Image.open(io.BytesIO(explorer.picture())).size[1] < 80
    with pytest.raises(StoreError, check=says("Nothing has been measured yet; wait for the measurement, or")):
        explorer.save("risk.html")


@pytest.mark.medium
def test_files_of_every_kind(make, tmp_path):
    explorer = make()
    paths = {ending: explorer.save(tmp_path / "new" / f"risk{ending}") for ending in explorer.kinds}
    assert paths[".png"].read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in paths[".svg"].read_bytes()
    page = paths[".html"].read_text()
    for words in (
        explorer.summary.replace(" %", "&nbsp;%"),
        "risk of not learning well",
        "Pre-LN on associative recall, 480 updates",
        "embed_item",
    ):
        assert words in page
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.https?:", page)
    run = wb.open_run(paths[".nc"])
    assert run["risk"]["failure"].sizes == {"learning_rate": 81}
    np.testing.assert_array_equal(run["case"]["near_unit_mass"], explorer.case["near_unit_mass"])
    explorer.plan.n_steps.value = 4000
    assert explorer.export_bar.buttons[".svg"].disabled
    with pytest.raises(StoreError, check=says("There is no curve, because the risk is unknown. The risk")):
        explorer.save(tmp_path / "far.svg")
    assert "The risk is unknown." in explorer.save(tmp_path / "far.html").read_text()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "Pre-LN"),
        ({"norm": "none", "initialization": "rezero"}, "No-Norm, rezero"),
        ({"family": "mamba", "norm": "rms_norm"}, "Mamba"),
        ({"family": "moe", "norm": "sub_ln"}, "mixture of experts, SubLN"),
    ],
)
def test_titles_of_architectures(options, name):
    assert title(wb.zoo.ArchitectureConfig(**options)) == name


def test_everything_is_closed(make):
    explorer = make()
    canvas = explorer._canvas
    explorer.close()
    assert canvas.document.roots == []
    assert explorer.comm is None
