"""Alarms recognize the warm-up from the record, in every kind of loop."""

import pytest
import torch

import workbench as wb
from tests.callbacks.certain_alarms import certain_alarms
from tests.callbacks.test_kss_integrations import fit, lightning, trainer  # noqa: F401
from tests.callbacks.test_recorder_alarms import EVERY, parts  # noqa: F401
from workbench.callbacks.alarms import observations
from workbench.callbacks.alarms.run_evidence import RunEvidence

WARM_UP = 12
PLAN = {"n_steps": 30, "learning_rate": 1e-3, "warmup": WARM_UP}


@pytest.fixture(autouse=True)
def _evaluated_soon(monkeypatch):
    """Evaluate steps from the first one on, and ten steps after the warm-up."""
    monkeypatch.setattr("workbench.callbacks.alarms.run_evidence._FIRST_EVALUATED", 0)
    monkeypatch.setattr("workbench.callbacks.alarms.run_evidence._N_RATES", 10)


def first_evaluated(store):
    """Return the first evaluated step after one that is not."""
    evidence = RunEvidence()
    judged = [
        (reading.step, reading.is_evaluated)
        for observation in observations(wb.open_run(store))
        for reading in evidence.update(observation)
        if reading.watched.name == "grad_norm"
    ]
    last = max(step for step, is_evaluated in judged if not is_evaluated)
    return min(step for step, is_evaluated in judged if is_evaluated and step > last)


@pytest.mark.medium
@pytest.mark.parametrize("is_resumed", [False, True])
def test_in_train(parts, tmp_path, is_resumed):  # noqa: F811
    settings = {**PLAN, "store": tmp_path / "run.zarr", "checkpoint_every": 7}
    options = {"recorder": wb.Recorder(every=EVERY), "alarms": certain_alarms()}
    run = wb.train(parts["model"], parts["task"], **options, **settings)
    for record in run:
        if is_resumed and record.step == 8:
            break
    run.close()
    if is_resumed:
        options = {"recorder": wb.Recorder(every=EVERY), "alarms": certain_alarms()}
        list(wb.train(parts["model"], parts["task"], resume=True, **options, **settings))
    assert first_evaluated(tmp_path / "run.zarr") == WARM_UP + 8  # full one step earlier


def from_zero(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / WARM_UP))


@pytest.mark.medium
def test_in_a_custom_loop(parts, tmp_path):  # noqa: F811
    """With a scheduler that begins at zero, the full rate is reached at step WARM_UP, one step later."""
    model, optimizer, batches = parts["model"], parts["optimizer"], parts["task"].stream(0)
    scheduler, store = from_zero(optimizer), tmp_path / "run.zarr"
    recorder = wb.Recorder(store, every=EVERY, alarms=certain_alarms())
    with recorder.attach(model, optimizer):
        for _ in range(30):
            inputs, targets = next(batches)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            recorder.log(loss=loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert recorder.alarms.raised == []
    assert first_evaluated(store) == WARM_UP + 9
