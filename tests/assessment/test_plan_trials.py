"""Trials of a plan on copies: they diverge if training diverges, and do not change the model."""

import copy

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.assessment.plan_trials import possible_changes, try_changes, try_plan

SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 16, "max_length": 8}


@pytest.fixture(scope="module")
def task():
    return wb.tasks.random_tokens(length=8, vocab_size=16, batch_size=4, seed=0)


@pytest.fixture
def model():
    return wb.zoo.transformer(**SIZE, norm="pre_ln", seed=0)


def plan(rate, **options):
    return wb.TrainingPlan(n_steps=10_000, learning_rate=rate, **options)


def test_at_a_far_too_large_rate_every_trial_diverges(model, task):
    found = try_plan(model, task, plan(1e3), n_updates=12)
    assert found["has_diverged"].values.all()
    assert float(found["share_broken"]) == 1
    for trial, step in enumerate(found["divergence_step"].values.astype(int)):
        assert np.isnan(found["loss"].values[trial, step + 1 :]).all()
        assert str(found["cause"].values[trial])


def test_at_a_small_rate_no_trial_diverges_and_the_model_is_unchanged(model, task):
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = try_plan(model, task, plan(1e-3), n_updates=12)
    assert not found["has_diverged"].values.any()
    assert float(found["share_broken"]) == 0
    assert np.isfinite(found["loss"].values).all()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_trial_trains_on_separate_batches(model, task):
    found = try_plan(model, task, plan(1e-2), n_updates=6, n_trials=2)

    class Later:
        def stream(self, start=0):
            return task.stream(
                12 + start
            )  # the batches of the second trial follow those of the run and of the first trial

        probe, describe = task.probe, task.describe

    records = list(wb.train(copy.deepcopy(model), Later(), n_steps=6, learning_rate=1e-2))
    assert found["loss"].values[1].tolist() == [record.loss for record in records]


@pytest.mark.parametrize(("best", "tried"), [(0.02, 0.02), (0.3, 0.067), (np.nan, 0.025)])
def test_a_lower_rate_is_the_best_one_of_the_pilot_or_a_quarter_of_the_planned_one(best, tried):
    lower = possible_changes(plan(0.1), best)[-1]
    assert (lower.setting, lower.plan.learning_rate) == ("learning_rate", tried)


def test_the_effect_of_a_change_is_measured(model, task):
    changes = [c for c in possible_changes(plan(1e3), best_rate=1e-3) if c.setting in ("clip_norm", "learning_rate")]
    messages = []
    found = try_changes(model, task, changes, n_updates=8, report=messages.append)
    assert messages == ["clip_norm none → 1", "learning_rate 1000 → 0.001"]
    assert found["setting"].values.tolist() == ["clip_norm", "learning_rate"]
    assert found["n_broken"].values.tolist() == [2, 0]  # no clipping saves a rate of 1,000 under Adam
    assert np.isnan(found["last_loss"].values[0])
    assert np.isfinite(found["last_loss"].values[1])
