"""RiskExplorer without a browser: measured beside the page, moved by sliders, and honest about what it never saw."""

import re
import threading

import numpy as np
import pytest
import torch
from bokeh.models import FixedTicker

import workbench as wb
import workbench.widgets.risk.measurement
import workbench.widgets.risk_explorer
from tests.risk.made_sweep import made_sweep
from tests.widgets.planted_risk import planted_model, planted_probability
from workbench.errors import OptionError, SchemaError
from workbench.formatting import percent
from workbench.models.losses import token_loss
from workbench.risk.neighbours import Neighbours
from workbench.sweeps import measure_case, replan
from workbench.widgets import RiskExplorer
from workbench.widgets.risk.forecast import rates_around
from workbench.widgets.risk.model_choice import title
from workbench.widgets.risk.risk_verdict import verdict_of

pytestmark = pytest.mark.render

SMALL = wb.zoo.ArchitectureConfig(d_model=16, n_layers=2)


@pytest.fixture(scope="module")
def sweep():
    return made_sweep(n_configurations=16, n_rates=4, seed=1)[0].assign_coords(n_steps=("run", _steps(16 * 2 * 4 * 2)))


def _steps(n):
    """Not all the same, or every other number of steps would be unfamiliar."""
    return np.resize([20, 120, 2000], n)


@pytest.fixture(scope="module")
def risk(sweep):
    return planted_model(sweep)


@pytest.fixture
def make(risk, sweep):
    """Widgets over a small transformer, measured, and closed after the test."""
    made = []

    def risk_explorer(model=SMALL, task=None, *, waits=True, **options):
        explorer = RiskExplorer(model, task, **{"risk": risk, "sweep": sweep} | options)
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
    """How often something was measured."""
    counted = []

    def count(*args, **options):
        counted.append(options)
        return measure_case(*args, **options)

    monkeypatch.setattr(workbench.widgets.risk.measurement, "measure_case", count)
    return counted


def probability(explorer):
    return float(explorer.prediction["probability"].values[0])


def is_pale(explorer):
    return "workbench-risk-stale" in explorer._shown._dom_classes


def by_hand(**training):
    """What the widget should have measured with its first settings."""
    task = wb.tasks.associative_recall(length=8, vocab_size=64, n_pairs=3, batch_size=16, seed=0)
    config = wb.zoo.ArchitectureConfig(**{**SMALL.as_dict(), "vocab_size": 64, "max_length": 8})
    settings = {"learning_rate": 0.01, "warmup": 20, "n_steps": 120, "schedule": "constant", "optimizer": "AdamW"}
    return measure_case(wb.zoo.build(config), task, takes_gradients=False, **settings | training)


def test_a_small_model_is_measured_unasked_and_the_figures_are_the_risk_models(make, risk):
    explorer = make()
    assert explorer.error == ""
    expected = by_hand()
    for name in ("near_unit_mass", "initial_loss", "n_weights", "n_tokens", "learning_rate", "warmup", "seed"):
        np.testing.assert_array_equal(explorer.case[name], expected[name], err_msg=name)
    assert explorer.case["architecture"].values.tolist() == ["Pre-LN"]
    assert probability(explorer) == pytest.approx(planted_probability(expected), abs=1e-5)
    assert explorer.prediction.identical(risk.predict(explorer.case))
    assert percent(probability(explorer)) in explorer._cards.value.replace("&lt;", "<").replace("&gt;", ">")
    mass = float(expected["near_unit_mass"].mean())
    assert f">{mass:.2f}<" in explorer._cards.value
    assert explorer._banner.layout.display == "none"


def test_sliders_move_the_figures_and_measure_nothing(make, n_measured, risk):
    explorer = make()
    del n_measured[:]
    measured, edge = explorer.case, float(risk.largest_stable_rate(explorer.case)["edge"].values[0])
    seen = []
    for factor, verdict in ((0.3, "proceed"), (0.9, "at risk"), (1.1, "at risk"), (3.0, "likely to diverge")):
        explorer.plan.learning_rate.value = edge * factor
        expected = risk.predict(replan(measured, learning_rate=edge * factor))
        assert explorer.prediction["probability"].identical(expected["probability"])
        assert verdict in explorer._cards.value
        seen.append(probability(explorer))
    assert seen == sorted(seen)
    assert seen[0] < 0.05
    assert seen[-1] > 0.95
    explorer.plan.warmup.value = 100
    assert probability(explorer) < seen[-1]
    explorer.plan.schedule.value = "cosine"
    explorer.plan.clip_norm.value = 1.0
    explorer.plan.n_steps.value = 200
    explorer.plan.optimizer.value = "SGD"
    settings = explorer.case.isel(run=0)
    found = {name: settings[name].item() for name in ("warmup", "schedule", "clip_norm", "n_steps", "optimizer")}
    assert found == {"warmup": 100, "schedule": "cosine", "clip_norm": 1.0, "n_steps": 200, "optimizer": "SGD"}
    assert probability(explorer) == pytest.approx(planted_probability(explorer.case), abs=1e-5)
    explorer.plan.clip_norm.value = 0.0
    assert np.isnan(explorer.case["clip_norm"].values).all()
    assert explorer.error == ""
    assert n_measured == []


def test_a_plan_moved_back_is_the_measured_case_again(make):
    explorer = make()
    first = explorer.case
    for control, value in (("learning_rate", 0.1), ("optimizer", "SGD"), ("warmup", 0), ("clip_norm", 0.5)):
        before = getattr(explorer.plan, control).value
        getattr(explorer.plan, control).value = value
        assert not explorer.case.identical(first)
        getattr(explorer.plan, control).value = before
    assert explorer.case.identical(first)


@pytest.mark.slow
def test_another_optimizer_is_measured_anew_where_the_trial_update_counts(make, sweep, n_measured):
    finite = sweep.assign({name: ("run", _rates(sweep)) for name in ("overshoot_rate", "breaking_rate")})
    explorer = make(risk=planted_model(finite, more=("overshoot_rate",)), sweep=finite)
    del n_measured[:]
    before = float(explorer.case["overshoot_rate"].values[0])
    assert np.isfinite(before)
    explorer.plan.learning_rate.value = 0.02
    assert n_measured == []
    explorer.plan.optimizer.value = "SGD"
    explorer.wait(60)
    assert [options["optimizer"] for options in n_measured] == ["SGD"]
    after = float(explorer.case["overshoot_rate"].values[0])
    assert np.isfinite(after)
    assert after != before
    assert np.isnan(explorer.case["rehearsed_rate"]).all()  # nobody asked
    explorer.plan.clip_norm.value = 0.1
    explorer.wait(60)
    assert [options["clip_norm"] for options in n_measured] == [None, 0.1]
    assert explorer.error == ""


def test_a_plan_that_came_back_before_it_was_measured_is_measured_as_it_is(make, sweep, monkeypatch):
    finite = sweep.assign({name: ("run", _rates(sweep)) for name in ("overshoot_rate", "breaking_rate")})
    explorer = make(risk=planted_model(finite, more=("overshoot_rate",)), sweep=finite)
    gate = Gate(monkeypatch)
    before = explorer.case
    explorer.plan.optimizer.value = "SGD"
    assert gate.begun.acquire(timeout=60)
    explorer.plan.learning_rate.value = 0.02  # nothing can be drawn of SGD yet
    assert explorer.case["optimizer"].values.tolist() == ["AdamW"]
    explorer.plan.learning_rate.value = float(before["learning_rate"][0])
    explorer.plan.optimizer.value = "AdamW"
    gate.open.set()
    explorer.wait(60)
    assert explorer.error == ""
    assert explorer.case.identical(before)
    assert not is_pale(explorer)


def _rates(sweep):
    return np.geomspace(1e-5, 1e4, sweep.sizes["run"])


def test_what_is_unlike_everything_recorded_is_withheld(make):
    explorer = make()
    explorer.plan.optimizer.value = "RMSprop"
    assert np.isnan(probability(explorer))
    assert explorer._banner.layout.display is None
    assert "No figure is given" in explorer._banner_words.value
    assert "rmsprop" in explorer._banner_words.value.lower()
    assert "adamw or sgd" in explorer._banner_words.value.lower()
    assert "cannot say" in explorer._cards.value
    assert np.isnan(explorer._curve.curve.data["probability"]).all()
    assert explorer._curve._silence.visible
    assert "Withheld" in explorer._bars.value
    assert len(explorer._curve.runs["diverged"].data["rate"]) > 0
    assert not hasattr(explorer, "extrapolate")
    with pytest.raises(OptionError, match="nothing is known of what drives its risk"):
        explorer.figure("drivers")
    explorer.plan.optimizer.value = "AdamW"
    assert explorer._banner.layout.display == "none"
    assert np.isfinite(probability(explorer))


@pytest.mark.slow
def test_a_model_of_a_size_that_nobody_recorded_is_refused(n_measured):
    """The default is inside of what was recorded; 128 wide or 8 deep is not, whatever its features say."""
    explorer = RiskExplorer(risk="forward")
    explorer.wait(60)
    assert explorer.error == ""
    assert np.isfinite(probability(explorer))
    assert explorer._banner.layout.display == "none"
    for control, value, words in (
        ("d_model", 128, "width (d_model), which is 128 where they had 24 to 96"),
        ("n_layers", 8, "number of layers (n_layers), which is 8 where they had 2 to 6"),
    ):
        before = getattr(explorer.setup, control).value
        getattr(explorer.setup, control).value = value
        explorer.wait(60)
        assert np.isnan(probability(explorer))
        assert "No figure is given" in explorer._banner_words.value
        assert words in explorer._banner_words.value
        assert "cannot say" in explorer._cards.value
        assert explorer._curve._silence.visible
        assert "Withheld" in explorer._bars.value
        getattr(explorer.setup, control).value = before
        explorer.wait(60)
    assert np.isfinite(probability(explorer))
    explorer.close()


def test_the_curve_is_the_risk_at_every_rate_with_the_planned_one_on_it(make, risk):
    explorer = make()
    panel = explorer._curve
    for rate in (1e-2, 0.03, 0.5):
        explorer.plan.learning_rate.value = rate
        data = panel.curve.data
        cases = explorer.case.isel(run=np.zeros(len(data["rate"]), int)).assign_coords(
            learning_rate=("run", data["rate"])
        )
        expected = risk.predict(cases)
        for name in ("probability", "low", "high"):
            np.testing.assert_array_equal(data[name], expected[name])
        assert panel.now.data == {"rate": [rate], "probability": [probability(explorer)]}
        assert panel._line.location == rate
        assert panel.x_range.start < rate < panel.x_range.end
    stable = risk.largest_stable_rate(explorer.case)
    assert panel.edge.data["rate"] == [float(stable["largest_stable_rate"][0])]
    on_the_edge = risk.predict(replan(explorer.case, learning_rate=panel.edge.data["rate"][0]))
    assert float(on_the_edge["probability"][0]) == pytest.approx(0.2)
    (axis,) = panel.figure.xaxis
    assert isinstance(axis.ticker, FixedTicker)
    assert axis.ticker.ticks[0] == panel.x_range.start


def test_the_curve_spans_whole_decades_around_rate_and_edge(make, risk):
    explorer = make()
    stable = risk.largest_stable_rate(explorer.case)
    edge, recorded = float(stable["largest_stable_rate"][0]), np.array([1e-9, 0.3, 1.0, 20.0])
    for rate in (1e-5, 1e-2, 1e3):
        rates = rates_around(rate, stable, recorded)
        ends = np.log10(rates[[0, -1]])
        np.testing.assert_allclose(ends, np.round(ends), atol=1e-9)
        assert rates[0] < min(rate, edge) / 3
        assert rates[-1] > max(rate, edge) * 3
    unknown = stable.assign({name: stable[name] * np.nan for name in ("largest_stable_rate", "low", "high")})
    assert rates_around(0.02, unknown, recorded)[[0, -1]] == pytest.approx([1e-3, 10.0])


def test_the_drivers_are_those_of_the_case_and_add_up(make, risk):
    explorer = make()
    explorer.plan.learning_rate.value = 0.3
    drivers = risk.drivers(explorer.case)
    page = explorer._bars.value
    names = re.findall(r'scope="row"[^>]*>([^<]*)<', page)
    values = [float(value) for value in re.findall(r">([+-][0-9.]+)</td>", page)]
    assert names[0] == "learning rate"
    assert values[0] == pytest.approx(float(drivers.sel(feature="learning_rate")[0]), abs=0.006)
    assert sum(values) == pytest.approx(float(drivers.sum()), abs=0.006 * len(values))
    assert [abs(value) for value in values[:-1]] == sorted((abs(value) for value in values[:-1]), reverse=True)
    widths = [float(width) for width in re.findall(r"background:[^;]+;width:([0-9.]+)%", page)]
    assert widths == pytest.approx([100 * abs(value / values[0]) for value in values], abs=0.5)


def test_the_nearest_runs_are_on_the_curve_and_in_the_table(make, risk, sweep):
    explorer = make()
    expected = Neighbours(risk, sweep).cells(explorer.case, 5)
    assert explorer.nearest.identical(expected)
    panel = explorer._curve
    inside = expected["learning_rate"].values
    inside = expected.isel(run=(inside > panel.x_range.start) & (inside < panel.x_range.end))
    for ended, has_diverged in (("survived", False), ("diverged", True)):
        rates = np.sort(inside["learning_rate"].values[inside["has_diverged"].values == has_diverged])
        np.testing.assert_array_equal(np.sort(panel.runs[ended].data["rate"]), rates)
    table = explorer._table.value
    assert table.count("<tr>") == 1 + 5
    for cell in np.unique(expected["cell"]):
        rates = expected["learning_rate"].values[expected["cell"].values == cell]
        assert f">{rates[np.abs(np.log(rates / 0.01)).argmin()]:.2g}<" in table
    explorer.plan.learning_rate.value = 1.0
    assert explorer._table.value != table


def test_runs_and_names_of_others_cannot_break_the_page(make, sweep):
    strange = sweep.assign_coords(architecture=("run", np.full(sweep.sizes["run"], "<b>&")))
    explorer = make(sweep=strange)
    assert "&lt;b&gt;&amp;" in explorer._table.value
    assert "<b>&" not in explorer._table.value
    measured = explorer._measured
    case = measured.case.assign_coords(architecture=("run", ["<i>model"]))
    explorer._measured, explorer._asked = measured._replace(case=case), {}
    explorer._draw()
    assert "&lt;i&gt;model" in explorer._head.value
    assert "<i>model" not in explorer._head.value


def test_longer_runs_than_any_recorded_are_said_to_be(make):
    explorer = make()
    assert "recorded runs had" not in explorer._cards.value
    explorer.plan.n_steps.max = 5000
    explorer.plan.n_steps.value = 3000
    assert "recorded runs had 20 to 2000 steps: nothing is known of later ones" in explorer._cards.value


def test_a_model_that_counts_as_diverged_already_needs_no_plan(make):
    explorer = make()
    measured = explorer._measured
    broken = measured.case.assign(initial_loss=("run", np.array([1e4], np.float32)))
    explorer._measured, explorer._asked = measured._replace(case=broken), {}
    explorer.plan.learning_rate.value = 1e-4
    assert probability(explorer) == 1
    assert "likely to diverge" in explorer._cards.value
    assert "nothing else matters" in explorer._bars.value
    assert explorer.error == ""


def test_the_figure_is_written_in_place(make):
    explorer = make()
    sent = []
    explorer._canvas.send = lambda content, buffers=None: sent.append(content)
    explorer.plan.learning_rate.value = 0.02
    (content,) = sent
    assert "rate" in content["patch"]
    assert "Figure" not in content["patch"]


def test_another_architecture_brings_another_case_and_controls_agree(make):
    explorer = make()
    before = probability(explorer)
    explorer.setup.norm.value = "none"
    explorer.wait(60)
    assert explorer.case["architecture"].values.tolist() == ["No-Norm"]
    assert probability(explorer) > before
    assert [value for _, value in explorer.setup.initialization.options] == ["normal", "xavier", "fixup", "rezero"]
    explorer.setup.initialization.value = "rezero"
    explorer.wait(60)
    assert explorer.case["initialization"].values.tolist() == ["rezero"]
    explorer.setup.family.value = "mamba"
    explorer.wait(60)
    assert explorer.setup.norm.value == "rms_norm"
    assert explorer.case["family"].values.tolist() == ["mamba"]
    explorer.setup.family.value = "vit"
    explorer.wait(60)
    assert explorer.setup.task.value == "digits"
    assert explorer.case["task"].values.tolist() == ["digits"]
    explorer.setup.family.value = "transformer"
    explorer.wait(60)
    assert explorer.setup.task.value == "associative recall"
    assert explorer.error == ""


def test_the_seed_is_that_of_weights_data_and_case(make):
    explorer = make()
    loss = explorer.case["initial_loss"].values
    explorer.setup.seed.value = 5
    explorer.wait(60)
    assert explorer.case["seed"].values.tolist() == [5]
    assert explorer.case["initial_loss"].values != loss
    explorer.setup.seed.value = 0
    explorer.wait(60)
    assert explorer.case["initial_loss"].values == loss


def test_an_impossible_architecture_is_said_and_the_old_figures_are_pale(make):
    explorer = make()
    explorer.setup.d_model.value = 18
    explorer.wait(60)
    assert explorer.error == "n_heads (4) does not divide d_model (18); choose a divisor of the width."
    assert is_pale(explorer)
    assert explorer.case["d_model"].values.tolist() == [16]
    explorer.plan.learning_rate.value = 0.02
    assert is_pale(explorer)
    explorer.setup.d_model.value = 32
    explorer.wait(60)
    assert explorer.error == ""
    assert not is_pale(explorer)
    assert explorer.case["d_model"].values.tolist() == [32]


class Gate:
    """Holds measurements until it is opened."""

    def __init__(self, monkeypatch):
        self.begun, self.open = threading.Semaphore(0), threading.Event()
        self.asked = []

        def hold(choice, *args):
            self.asked.append(choice.seed)
            self.begun.release()
            assert self.open.wait(60)
            return measure(choice, *args)

        measure = workbench.widgets.risk_explorer.measure
        monkeypatch.setattr(workbench.widgets.risk_explorer, "measure", hold)


def test_the_page_lives_while_it_measures_and_only_the_newest_counts(make, monkeypatch):
    explorer, n_threads = make(), torch.get_num_threads()
    gate = Gate(monkeypatch)
    explorer.setup.seed.value = 1
    assert gate.begun.acquire(timeout=60)
    assert explorer.is_measuring
    assert "<progress" in explorer._status.value
    assert is_pale(explorer)
    explorer.plan.learning_rate.value = 0.03  # the sliders still move the old case
    assert explorer.case["learning_rate"].values.tolist() == [0.03]
    for seed in (2, 3, 4):
        explorer.setup.seed.value = seed
    gate.open.set()
    explorer.wait(60)
    assert gate.asked == [1, 4]
    assert explorer.case["seed"].values.tolist() == [4]
    assert explorer.case["learning_rate"].values.tolist() == [0.03]
    assert not explorer.is_measuring
    assert explorer._status.value == ""
    assert torch.get_num_threads() == n_threads


def test_after_an_impossible_choice_the_measurement_before_it_is_not_shown(make, monkeypatch):
    explorer = make()
    gate = Gate(monkeypatch)
    explorer.setup.seed.value = 1
    assert gate.begun.acquire(timeout=60)
    explorer.setup.d_model.value = 18
    gate.open.set()
    explorer._worker._pool.submit(lambda: None).result(60)  # behind what was dropped
    assert "does not divide" in explorer.error
    assert explorer.case["seed"].values.tolist() == [0]


def test_what_fails_in_the_thread_is_said_under_the_widget(make, monkeypatch):
    explorer = make()

    def fail(*args, **options):
        raise wb.WorkbenchError("The stream holds NaN.")

    monkeypatch.setattr(workbench.widgets.risk.measurement, "measure_case", fail)
    explorer.setup.seed.value = 1
    explorer.wait(60)
    assert explorer.error == "The stream holds NaN."
    assert is_pale(explorer)
    monkeypatch.undo()
    explorer._button.click()
    explorer.wait(60)
    assert explorer.error == ""
    assert explorer.case["seed"].values.tolist() == [1]


def test_a_closed_widget_drops_what_is_being_measured(make, monkeypatch):
    explorer = make()
    gate = Gate(monkeypatch)
    case, thread = explorer.case, next(t for t in threading.enumerate() if t.name.startswith("MeasuringWidget"))
    explorer.setup.seed.value = 1
    assert gate.begun.acquire(timeout=60)
    explorer.close()
    gate.open.set()
    thread.join(60)
    assert not thread.is_alive()
    assert explorer.case is case
    explorer.plan.learning_rate.value = 0.5
    assert explorer.case is case
    assert explorer._canvas.comm is None
    explorer.close()


@pytest.mark.slow
def test_a_measurement_ends_where_it_is_stopped_or_another_one_is_asked_for(make, monkeypatch):
    explorer = make(risk="pilot")
    n_looks, begun, go = [0], threading.Event(), threading.Event()

    def look(*args):
        n_looks[0] += 1
        if n_looks[0] == 5:
            begun.set()
            assert go.wait(60)
        return token_loss(*args)

    monkeypatch.setattr(workbench.widgets.risk.measurement, "token_loss", look)
    case = explorer.case
    explorer.setup.seed.value = 1
    assert begun.wait(60)
    assert explorer._stop.layout.display is None
    explorer._stop.click()
    assert "stopped" in explorer._status.value
    assert not explorer.is_measuring
    go.set()
    explorer._worker._pool.submit(lambda: None).result(60)
    assert n_looks == [5]
    assert explorer.error == ""
    assert explorer.case is case
    assert is_pale(explorer)
    assert explorer._stop.layout.display == "none"
    explorer.stop()
    explorer._button.click()
    explorer.wait(60)
    assert n_looks[0] > 20
    assert explorer.case["seed"].values.tolist() == [1]
    assert explorer._stop.layout.display == "none"


def test_a_module_is_measured_when_asked_and_left_as_it_was(make, n_measured):
    config = wb.zoo.ArchitectureConfig(d_model=16, n_layers=3, vocab_size=40, max_length=6, norm="none")
    model = wb.zoo.build(config).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explorer = make(model)
    assert n_measured == []
    assert explorer.case is None
    assert explorer.prediction is None
    assert explorer.nearest is None
    assert "press Measure" in explorer._status.value
    with pytest.raises(OptionError, match="Nothing has been measured yet"):
        explorer.figure()
    explorer._button.click()
    explorer.wait(60)
    assert explorer.error == ""
    case = explorer.case.isel(run=0)
    assert (case["n_layers"].item(), case["architecture"].item()) == (3, "Transformer")
    assert (case["task"].item(), case["n_tokens"].item()) == ("random_tokens", 6 * 16)  # no longer than it can read
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    explorer.setup.task.value = "bytes of English"
    explorer._button.click()
    explorer.wait(60)
    assert "knows 40 tokens, but bytes need 256" in explorer.error


def test_a_checkpoint_is_opened_by_its_path_and_a_wrong_one_is_said(make, tmp_path):
    model = wb.zoo.transformer(norm="none", d_model=16, n_layers=2, n_heads=2, vocab_size=300, max_length=12)
    folder = wb.save_checkpoint(model, tmp_path / "saved")
    explorer = make(folder, "bytes of English")
    assert explorer.case is None
    explorer.measure()
    explorer.wait(60)
    assert explorer.error == ""
    assert explorer.case["architecture"].values.tolist() == ["saved"]
    assert explorer.case["task"].values.tolist() == ["text_bytes"]
    explorer.setup.path.value = str(tmp_path / "nowhere.pt")
    explorer._button.click()
    explorer.wait(60)
    assert "There is no file or folder" in explorer.error
    explorer.setup.path.value = "  "
    explorer._button.click()
    assert explorer.error == "There is no path; write that of a checkpoint, a folder or a file."
    given = make(wb.open_checkpoint(folder), task=wb.tasks.random_tokens(length=5, vocab_size=7, batch_size=3))
    given.measure()
    given.wait(60)
    assert given.case["n_tokens"].values.tolist() == [15]


def test_a_task_of_ones_own_is_used_as_it_is(make):
    task = wb.tasks.random_tokens(length=9, vocab_size=33, batch_size=5, seed=2)
    explorer = make(task=task)
    assert explorer.error == ""
    assert explorer.case["n_tokens"].values.tolist() == [45]
    assert explorer.case["task"].values.tolist() == ["random_tokens"]


@pytest.mark.parametrize("backend", ["bokeh", "matplotlib"])
def test_the_figures_to_keep_show_what_the_widget_shows(make, backend, tmp_path):
    explorer = make()
    for kind in ("curve", "drivers"):
        ending = "html" if backend == "bokeh" else "png"
        path = wb.plots.save(explorer.figure(kind, backend), tmp_path / f"{kind}.{ending}")
        assert path.stat().st_size > 10_000
    with pytest.raises(OptionError, match="There is no figure 'map', expected 'curve' or 'drivers'"):
        explorer.figure("map")


def test_the_shipped_risk_models_are_chosen_by_how_closely_one_looks(n_measured):
    explorer = RiskExplorer(SMALL, risk="forward")
    explorer.wait(60)
    assert explorer.error == ""
    assert explorer.risk.features == wb.risk.shipped("forward").features
    assert [options["runs_pilot"] for options in n_measured] == [False]
    explorer.look.value = "gradient"
    explorer.wait(60)
    assert explorer.risk.features == wb.risk.shipped("gradient").features
    assert [options["takes_gradients"] for options in n_measured] == [False, True]
    assert explorer.prediction.identical(wb.risk.shipped("gradient").predict(explorer.case))
    explorer.look.value = "forward"  # for which what was measured is enough
    assert len(n_measured) == 2
    assert explorer.prediction.identical(wb.risk.shipped("forward").predict(explorer.case))
    assert explorer.error == ""
    explorer.close()


def test_the_best_one_is_the_first_and_the_list_is_hidden_where_a_model_is_passed(make):
    explorer = RiskExplorer(wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2))
    assert explorer.risk.features == wb.risk.shipped("pilot").features
    assert explorer.look.layout.display is None
    explorer.close()
    assert make(waits=False).look.layout.display == "none"


def test_wrong_arguments_are_refused_at_once(risk, sweep):
    given = {"risk": risk, "sweep": sweep}
    with pytest.raises(OptionError, match="The model is a int, expected a wb.zoo.ArchitectureConfig, a path"):
        RiskExplorer(3, **given)
    with pytest.raises(OptionError, match="There is no task 'chess'; choose from associative recall"):
        RiskExplorer(task="chess", **given)
    with pytest.raises(OptionError, match="The task 'digits' does not fit the model; choose from random tokens"):
        RiskExplorer(torch.nn.Linear(2, 2), "digits", **given)
    with pytest.raises(OptionError, match="risk is 'oracle', expected a risk model or one of forward, gradient, pilot"):
        RiskExplorer(risk="oracle", sweep=sweep)
    with pytest.raises(SchemaError, match="The dataset is no sweep: it lacks has_diverged"):
        RiskExplorer(risk=risk, sweep=sweep.drop_vars("has_diverged"))


def test_verdicts_and_percentages():
    words = [verdict_of(p) for p in (0.0, 0.19, 0.2, 0.8, 0.81, np.nan)]
    assert words == ["proceed", "proceed", "at risk", "at risk", "likely to diverge", "cannot say"]
    assert [percent(p) for p in (0, 0.004, 0.5, 0.996, 1, np.nan)] == ["0 %", "< 1 %", "50 %", "> 99 %", "100 %", "–"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"norm": "none", "initialization": "fixup"}, "No-Norm, fixup"),
        ({"family": "mamba"}, "Mamba"),
        ({"family": "moe", "norm": "rms_norm"}, "mixture of experts, RMSNorm"),
    ],
)
def test_architectures_have_names(options, name):
    assert title(wb.zoo.ArchitectureConfig(**options)) == name
