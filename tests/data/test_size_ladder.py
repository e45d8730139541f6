"""Tests of the search for the explosion edge: known edges, the ends of the range, and runs next to a measured edge."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from size_ladder import LadderTrainer, Rung, find_edge, rungs_of

import workbench as wb
from workbench.scaling.designs import design


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
    always, never = find_edge(lambda _: True, 1.0), find_edge(lambda _: False, 1.0)
    assert (always.low, always.middle) == (0.0, 0.0)
    assert (never.high, never.middle) == (math.inf, math.inf)
    assert always.high < 4e-9
    assert never.low > 2000


@pytest.fixture(scope="module")
def trainer():
    of = design({"norm": "none", "d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "max_length": 16})
    task = wb.tasks.associative_recall(length=16, vocab_size=64, n_pairs=3, batch_size=8)
    return LadderTrainer(of, lambda seed: task, {"fused": True})


@pytest.mark.medium
def test_a_run_just_below_the_edge_converges_and_one_just_above_diverges(trainer):
    rung = Rung(16, 2)
    edge = trainer.explosion_edge(rung, 3, n_steps=20)
    assert 0 < edge.low < edge.high < math.inf
    for rate, diverges in ((edge.low, False), (edge.high, True)):
        model = trainer.model(rung, 3)
        last = list(
            wb.train(model, trainer.task(3), n_steps=20, learning_rate=rate, seed=3, optimizer_options={"fused": True})
        )[-1]
        assert last.diverged == diverges


@pytest.mark.medium
def test_a_parametrization_applies_to_every_model_and_optimizer(trainer):
    mup = wb.baselines.MuP(base_width=8, base_heads=1)
    options = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_length": 16}
    trainer = LadderTrainer(design(options), trainer.task, {"weight_decay": 0.0}, mup)
    model = trainer.model(Rung(32, 2), 1)
    standard = design(options).build(seed=1)
    scaled = model.blocks[0].mlp.state_dict()
    assert all(
        torch.allclose(2 * scaled[name], value)
        for name, value in standard.blocks[0].mlp.state_dict().items()
        if "weight" in name
    )
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    next(trainer.runs(model, 1, 0.01, 1))
    change = {name: (value - before[name]).abs().max().item() for name, value in model.named_parameters()}
    hidden = [size for name, size in change.items() if "mlp" in name and "weight" in name and "norm" not in name]
    assert max(hidden) == pytest.approx(0.01 / 4, rel=1e-3)  # a quarter of the rate at four times the width
    assert max(change.values()) == pytest.approx(0.01, rel=1e-3)


def test_rungs_are_the_widths_at_the_smallest_depth_and_the_depths_at_the_largest_width():
    assert rungs_of((16, 8), (3, 2)) == [Rung(8, 2), Rung(16, 2), Rung(16, 3)]
