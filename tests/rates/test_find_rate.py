import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about
from tests.rates.known_runs import KnownRuns
from workbench.errors import OptionError
from workbench.rates.find_rate import Estimate, extrapolated, furthest, longest_measured
from workbench.rates.rate_search import RateSearch, Round
from workbench.training.training_plan import TrainingPlan

SIZE = {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 32, "max_length": 8}


def task(**options):
    return wb.tasks.synthetic_lm(**{"length": 8, "vocab_size": 32, "batch_size": 8, **options})


def known_loop(calls):
    """Return a loop with known losses, which appends rate and seed of each call to ``calls``."""

    def loop(rate, seed):
        runs = KnownRuns()
        calls.append((rate, seed))
        for step in range(1, 10_000):
            yield runs.loss_at(rate, seed, step)

    return loop


@pytest.mark.medium
def test_rates_are_found_and_the_model_is_not_changed():
    model = wb.zoo.transformer(**SIZE)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    found = wb.find_rate(model, task(), n_steps=150, budget=240, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert found.n_updates <= 240
    assert not found.reason
    assert found.best_rate.low < found.best_rate.value < found.best_rate.high
    assert found.best_rate.value < found.useful_edge.value
    assert str(found).startswith("Over 150 updates the best learning rate is about ")
    again = wb.find_rate(model, task(), n_steps=150, budget=240, progress=False)
    assert (again.best_rate, again.useful_edge) == (found.best_rate, found.useful_edge)


def test_a_custom_loop_replaces_model_and_task():
    calls = []
    found = wb.find_rate(loop=known_loop(calls), n_steps=120, progress=False)
    last = found.rounds[-1]
    assert last.useful_edge == pytest.approx(6e-3, rel=0.2)
    assert {seed for _, seed in calls} == {0, 1}
    assert max(calls.count(one) for one in calls) <= 2  # once in each of the two rounds
    assert math.isnan(found.trivial_loss)


def test_estimates_follow_from_the_last_round():
    last = list(RateSearch(KnownRuns(), 1000, 10_000, 2).rounds(3e-3))[-1]
    slow, best, edge = extrapolated(last, TrainingPlan(n_steps=1000)).values()
    assert slow.value <= best.value <= edge.value
    assert best.low < best.value < best.high
    assert edge.low < edge.value < edge.high
    doubled = Round(False, last.n_updates, 2 * last.rate, last.loss, 2 * last.best_rate, 2 * last.useful_edge)
    assert extrapolated(doubled, TrainingPlan(n_steps=1000))["useful_edge"].value == pytest.approx(2 * edge.value)
    assert furthest(last) > last.n_updates


def test_estimates_are_distributions():
    found = Estimate(4e-3, 2e-3, 6e-3)
    probabilities = [found.probability_below(rate) for rate in (1e-9, 2e-3, 4e-3, 6e-3, 1.0)]
    assert probabilities == pytest.approx([0.0, 0.1, 0.5, 0.9, 1.0], abs=1e-6)
    assert found.at_most(1e-3) == Estimate(1e-3, 1e-3, 6e-3)
    assert str(found) == "0.004 (0.002-0.006)"
    assert Estimate(1.0, 1.0, 1.0).probability_below(2.0) == 1.0


def test_rates_are_not_extrapolated_beyond_the_measured_lengths():
    found = wb.find_rate(loop=known_loop([]), n_steps=10_000_000, progress=False)
    assert math.isnan(found.useful_edge.value)
    assert "not to 10,000,000" in found.reason
    assert "Repeat the pilot with a budget of" in str(found)


def test_a_loss_that_is_never_finite_is_reported():
    found = wb.find_rate(loop=lambda rate, seed: iter([math.nan]), n_steps=100, budget=200, progress=False)
    assert found.reason.startswith("No rate yielded a finite loss")
    assert found.data.sizes["rate"] == 0


def test_an_interrupted_pilot_uses_the_finished_rounds():
    def loop(rate, seed):
        runs = KnownRuns()
        for step in range(1, 100):
            if step > 50:
                raise KeyboardInterrupt
            yield runs.loss_at(rate, seed, step)

    found = wb.find_rate(loop=loop, n_steps=300, progress=False)
    assert len(found.rounds) == 1
    assert found.useful_edge.value > 0
    assert "Interrupted pilot: " in str(found)
    complete = wb.find_rate(loop=known_loop([]), n_steps=300, progress=False)
    width = [one.useful_edge.high / one.useful_edge.low for one in (found, complete)]
    assert width[0] > width[1]  # a first round is less accurate

    def at_once(rate, seed):
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        wb.find_rate(loop=at_once, n_steps=300, progress=False)


def test_rates_for_another_width():
    found = wb.find_rate(loop=known_loop([]), n_steps=600, progress=False)
    wide = found.for_width(4.0)
    assert "The rates are for a model 4 times as wide as the pilot's, by Adam's rule." in str(wide)
    assert wide.useful_edge.value == pytest.approx(found.useful_edge.value / 4)
    assert wide.useful_edge.high == pytest.approx(1.5 * found.useful_edge.high / 4)
    assert found.for_width(16.0).useful_edge.high == pytest.approx(1.5**2 * found.useful_edge.high / 16)
    assert found.for_width(4.0, parametrization="mup").best_rate.value == found.best_rate.value
    assert found.for_width(1.0).best_rate == found.best_rate
    factors = [of.data.attrs["rate_factor"] for of in (found, wide, found.for_width(4.0, parametrization="mup"))]
    assert factors == [1, 1 / 4, 1]
    assert found.for_width(np.int64(4)).useful_edge == wide.useful_edge
    for wrong in (0, -1.0, math.nan, "4", True):
        with pytest.raises(OptionError, check=about("ratio")):
            found.for_width(wrong)
    with pytest.raises(OptionError, check=about("parametrization", "ntk", ("standard", "mup"))):
        found.for_width(2.0, parametrization="ntk")
    for optimizer in ("SGD", "MuonWithAdamW"):
        with pytest.raises(OptionError, check=about("optimizer", optimizer)):
            replace(found, optimizer=optimizer).for_width(2.0)


def test_a_loss_that_no_rate_changes_has_no_edge():
    found = wb.find_rate(loop=lambda rate, seed: itertools.repeat(2.0), n_steps=100, budget=2000, progress=False)
    assert found.reason.startswith("The loss is the same at every rate")


def test_progress_is_reported_and_can_end_the_pilot():
    messages = []
    found = wb.find_rate(loop=known_loop([]), n_steps=300, budget=400, progress=messages.append)
    assert messages == [f"{n} of 400 trial updates" for n in range(1, found.n_updates + 1)]

    def stop(text):
        if text.startswith("50 of"):
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        wb.find_rate(loop=known_loop([]), n_steps=300, progress=stop)


def test_trainings_longer_than_those_of_the_study_have_a_caveat():
    n_steps = longest_measured() + 1
    found = wb.find_rate(loop=known_loop([]), n_steps=n_steps, budget=5 * n_steps, progress=False)
    assert found.best_rate.value > 0
    assert f"measured up to {n_steps - 1:,} updates; beyond that, it is extrapolated." in str(found)


def test_a_training_much_longer_than_the_pilot_has_a_caveat():
    long, short = (wb.find_rate(loop=known_loop([]), n_steps=n, budget=1000, progress=False) for n in (1200, 600))
    assert "The training is 6 times as long as the pilot runs, and such" in str(long)
    assert "pass budget=1,500 for longer pilot runs" in long.caveat
    assert not short.caveat


def test_data_contain_every_loss_and_the_estimates():
    found = wb.find_rate(loop=known_loop([]), n_steps=600, progress=False)
    data = found.data
    last = found.rounds[-1]
    at = data["loss"].sel(n_updates=last.n_updates, rate=last.rate).values
    np.testing.assert_array_equal(at, last.loss)
    assert float(data["useful_edge_low"]) == found.useful_edge.low
    assert data.attrs == {"n_steps": 600, "reason": "", "rate_factor": 1.0}


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({}, "loop", ()),
        ({"loop": known_loop([]), "task": 1}, "loop", ("task", "loop")),
        ({"loop": known_loop([]), "schedule": "step"}, "schedule", "step"),
        ({"model": torch.nn.Linear(1, 1)}, "task", ("model",)),
        ({"loop": known_loop([]), "warmup": 5, "clip_norm": 1.0}, "warmup", 5),
        ({"loop": lambda rate, seed: [2.0] * 20}, "loop", 20),
    ],
)
def test_invalid_settings_are_rejected(options, name, value):
    with pytest.raises(OptionError, check=about(name, value)):
        wb.find_rate(**{"n_steps": 100, "progress": False, **options})


def test_an_existing_optimizer_is_rejected():
    model = wb.zoo.transformer(**SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, check=about("optimizer", "SGD")):
        wb.find_rate(model, task(), n_steps=100, optimizer=optimizer, progress=False)
