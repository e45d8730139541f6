"""Tests of the search for the explosion edge: known edges, the ends of the range, and runs next to a measured edge."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.scaling.designs import design
from workbench.scaling.explosion_edges import explosion_edge, find_edge, pilot_edge
from workbench.scaling.size_ladder import LadderTrainer, Rung


@given(st.floats(-15, 8), st.floats(-15, 8), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_a_known_edge_is_enclosed(exponent, start, n_halvings):
    truth, tried = math.exp(exponent), []

    def diverges(rate):
        tried.append(rate)
        return rate > truth

    edge = find_edge(diverges, math.exp(start), n_halvings=n_halvings)
    assert edge.low <= truth < edge.high
    assert edge.high / edge.low == pytest.approx(2 ** (0.5**n_halvings))
    assert edge.low < edge.middle < edge.high
    assert edge.n_runs == len(tried) == len(set(tried))  # no rate is tried twice


def test_a_good_start_saves_runs():
    assert find_edge(lambda rate: rate > 0.011, 0.011).n_runs < find_edge(lambda rate: rate > 0.011, 10.0).n_runs


def test_outside_of_the_range_the_edge_is_open():
    always, never = find_edge(lambda _: True, 1.0, lowest=1e-3), find_edge(lambda _: False, 1.0, highest=1e3)
    assert (always.low, always.middle) == (0.0, 0.0)
    assert (never.high, never.middle) == (math.inf, math.inf)
    assert always.high < 4e-3
    assert never.low > 250


@pytest.fixture(scope="module")
def trainer():
    of = design({"norm": "none", "d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "max_length": 16})
    task = wb.tasks.associative_recall(length=16, vocab_size=64, n_pairs=3, batch_size=8)
    return LadderTrainer(of, task, {"optimizer_options": {"fused": True}})


@pytest.mark.medium
def test_a_run_just_below_the_edge_converges_and_one_just_above_diverges(trainer):
    rung = Rung(16, 2)
    edge = explosion_edge(trainer, rung, 3, n_steps=20)
    assert 0 < edge.low < edge.high < math.inf
    for rate, diverges in ((edge.low, False), (edge.high, True)):
        model = trainer.model(rung, 3)
        last = list(
            wb.train(model, trainer.task, n_steps=20, learning_rate=rate, seed=3, optimizer_options={"fused": True})
        )[-1]
        assert last.diverged == diverges


@pytest.mark.medium
def test_warm_up_moves_only_the_edge_of_trained_runs(trainer):
    rung = Rung(16, 2)
    warm = LadderTrainer(trainer.design, trainer.task, {**trainer.training, "warmup": 20})
    pilot = pilot_edge(trainer, rung, 1, n_halvings=1)
    assert pilot_edge(warm, rung, 1, n_halvings=1) == pilot
    options = {"n_steps": 10, "start": pilot.middle, "n_halvings": 0}
    assert explosion_edge(warm, rung, 1, **options).middle > explosion_edge(trainer, rung, 1, **options).middle
