"""Single tensors that receive no gradient or never change, by name, and models in which all is well."""

import pytest
import torch
from torch import nn

import workbench as wb

pytestmark = pytest.mark.medium
N_STEPS = 90


@pytest.fixture(autouse=True)
def frequent(monkeypatch):
    monkeypatch.setattr("workbench.callbacks.recorder.settings._EVERY", 10)


def model_with_pooler():
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    model.add_module("pooler", nn.Linear(16, 16))  # never called
    return model


def matrix(number):
    return [name for name, p in model_with_pooler().named_parameters() if p.ndim == 2 and "pooler" not in name][number]


def watched(change=None, *, start=0, held=None):
    """Train a model, with a change of its gradients from a step on, and return the alarms and their events."""
    model, alarms = model_with_pooler(), wb.Alarms()
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != held], lr=1e-3)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    with wb.Recorder(every={"activations": 50}, alarms=alarms).attach(model, optimizer):
        for step in range(N_STEPS):
            inputs, targets = task.batch(step)
            nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            if change is not None and step >= start:
                change(dict(model.named_parameters()))
            optimizer.step()
            optimizer.zero_grad()
            if held is not None:
                model.get_parameter(held).grad = None
    return names, [alarm for alarm in alarms.raised if "tensor" in alarm.signal]


def test_a_model_that_learns_raises_no_alarm_although_a_module_is_never_called():
    names, raised = watched()
    assert "pooler.weight" in names
    assert raised == []


@pytest.mark.parametrize("start", [0, 25])
def test_a_tensor_without_gradient_is_named(start):
    name = matrix(2)

    def change(parameters):
        parameters[name].grad = None if start else torch.zeros_like(parameters[name])

    _, (alarm,) = watched(change, start=start)
    assert alarm.signal == "tensors_without_gradient"
    assert alarm.step < start + 60
    assert f"changed from none to {name} at step" in alarm.message


def test_a_tensor_that_the_optimizer_does_not_hold_is_named():
    name = matrix(1)
    _, (alarm,) = watched(held=name)
    assert alarm.signal == "unchanged_tensors"
    assert "optimizer holds them" in alarm.message
    assert name in alarm.message


def test_the_end_of_a_fault_raises_no_alarm():
    name = matrix(0)
    seen = []

    def change(parameters):
        seen.append(0)
        if len(seen) < 65:
            parameters[name].grad.zero_()

    _, raised = watched(change)
    assert len(raised) == 1
