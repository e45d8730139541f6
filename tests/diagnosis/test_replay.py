"""The change of each experiment by itself."""

import numpy as np
import pytest
import torch

import workbench as wb
from tests.diagnosis.records import descent, monitors, record
from workbench.diagnosis.experiment_runs import _have_failed, _is_lower
from workbench.diagnosis.experiments import (
    ReplaySchedule,
    ShiftedTask,
    UpdateLimit,
    propose,
    shifted,
    stabilize_routers,
)
from workbench.diagnosis.failed_run import find_failure
from workbench.diagnosis.ranking import Rules
from workbench.schema.statuses import FailureKind

TASK = wb.tasks.associative_recall(length=5, vocab_size=10, n_pairs=2, batch_size=4, seed=1)


def test_a_quarter_of_the_rate_names_the_rate():
    rate = np.minimum(np.arange(1, 201) / 20, 1) * 8e-3
    one = record({"monitors": monitors(descent(), rate=rate)})
    (proposed,) = propose(one, find_failure(one), {"learning_rate": 1.0}, {}, rules=Rules.uniform(), checkpoints={})
    assert proposed.title == "a quarter of the learning rate (0.002 at its peak)"


def test_the_stream_begins_at_the_step_of_the_replay():
    inputs, targets = next(ShiftedTask(TASK, 7, {}).stream(2))
    assert torch.equal(inputs, TASK.batch(9)[0])
    assert torch.equal(targets, TASK.batch(9)[1])


def test_batches_are_skipped_and_later_ones_take_their_place():
    stream = ShiftedTask(TASK, 5, {"setting": "data", "first": 7, "last": 9}).stream()
    seen = [next(stream)[0] for _ in range(4)]
    assert all(torch.equal(one, TASK.batch(n)[0]) for one, n in zip(seen, (5, 6, 10, 11), strict=True))


def test_several_batches_are_combined():
    inputs, targets = next(ShiftedTask(TASK, 3, {"setting": "batch", "factor": 4}).stream())
    assert inputs.shape[0] == targets.shape[0] == 16
    assert torch.equal(inputs[4:8], TASK.batch(4)[0])


def test_the_schedule_of_a_replay():
    rates = np.concatenate([np.full(10, 1e-3), np.full(10, 1e-2)])
    assert ReplaySchedule(rates, 5, 1e-2, {})(6) == pytest.approx(1.0)
    assert ReplaySchedule(rates, 5, 1e-2, {"setting": "learning_rate", "factor": 0.25})(6) == pytest.approx(0.25)
    held = ReplaySchedule(rates, 5, 1e-2, {"setting": "schedule", "hold": 1e-3, "at": 10})
    assert [held(4), held(5), held(14)] == pytest.approx([0.1, 0.1, 0.1])
    warmed = ReplaySchedule(np.full(60, 1e-2), 0, 1e-2, {"setting": "schedule", "warmup": 20})
    assert [warmed(0), warmed(9), warmed(40)] == pytest.approx([0.05, 0.5, 1.0])


def test_faults_act_at_their_recorded_steps():
    moved = shifted(wb.faults.corrupted_data(start=30, stop=50), 40)
    assert (moved.start, moved.stop) == (0, 10)
    over = shifted(wb.faults.corrupted_data(start=30, stop=50), 60)
    assert over.start is None
    assert shifted(wb.faults.small_batch(n_rows=2, start=30), 10).start == 20


def test_the_update_of_a_block_is_limited_relative_to_the_stream():
    module = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.eye_(module.weight)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    for factor, limit in ((11.0, 1.0), (1.2, 1.0), (4.0, 0.5)):
        out = UpdateLimit(limit)(module, (x,), factor * x)
        expected = x * (1 + min(factor - 1, limit))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_router_weights_become_small_and_balanced():
    model = wb.zoo.moe(
        d_model=16, n_layers=2, n_heads=2, n_experts=4, vocab_size=10, max_length=5, balance_coefficient=50.0, seed=1
    )
    with torch.no_grad():
        model.blocks[1].mlp.router.weight.mul_(1000)
    other = model.blocks[0].attention.query.weight.clone() if hasattr(model.blocks[0].attention, "query") else None
    stabilize_routers(model, ShiftedTask(TASK, 0, {}), {"balance": 0.01, "router_rms": 0.05})
    assert float(model.blocks[1].mlp.router.weight.square().mean().sqrt()) == pytest.approx(0.05, rel=1e-3)
    assert model.config.balance_coefficient == 0.01
    if other is not None:
        assert torch.equal(other, model.blocks[0].attention.query.weight)


def test_a_run_without_a_finite_loss_fails_again_if_the_replay_has_none():
    one = record({"monitors": monitors(np.full(8, np.nan))})
    diverged, finite = np.full(5, np.nan), np.linspace(2, 1, 5)
    assert _have_failed(FailureKind.DIVERGED, one, 0, diverged, finite) == (True, False)
    assert _have_failed(FailureKind.DIVERGED, one, 0, finite, finite) == (False, False)


def test_lower_means_lower_by_more_than_the_noise():
    control = 2 + 0.1 * np.random.default_rng(0).standard_normal(50)
    assert not _is_lower(control - 0.01, control)
    assert _is_lower(control - 0.5, control)
    assert not _is_lower(np.full(50, np.nan), control)


def test_experiments_are_proposed_by_information_and_never_for_the_cause_nothing():
    loss = descent()
    loss[100:] += 3
    one = record({"monitors": monitors(loss)})
    probability = {"learning_rate": 0.5, "nothing": 0.2, "data": 0.2, "precision": 0.09, "optimizer_eps": 0.005}
    rules = Rules.uniform()
    options = {"rules": rules, "checkpoints": {40: None, 90: None, 180: None}}
    found = propose(one, find_failure(one), probability, {}, **options)
    assert [experiment.cause for experiment in found] == ["learning_rate", "data", "precision"]
    assert all(experiment.from_step == 90 for experiment in found)
    assert all(0 < experiment.cost < 2 for experiment in found)
    assert [one.information for one in found] == [rules.information(probability, one.cause) for one in found]


def test_a_replay_of_a_stalled_run_reaches_the_step_at_which_the_change_acts():
    rate = np.where(np.arange(200) >= 117, 0.1, 0.01)
    one = record({"monitors": monitors(descent(last=2.5), rate=rate)})
    failure = find_failure(one)
    assert failure.is_stalled
    probability = {"schedule": 0.5, "batch": 0.5}
    found = {e.cause: e for e in propose(one, failure, probability, {}, rules=Rules.uniform(), checkpoints={})}
    assert found["schedule"].change["at"] == 117
    assert found["schedule"].n_steps == 177
    assert found["batch"].n_steps == 60
