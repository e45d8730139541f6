"""The recorder copies only what is trained, once, and only if there is memory for it."""

from __future__ import annotations

import weakref

import torch

import workbench as wb
from tests.callbacks.test_recorder import adam, dense, events_of, loss_of, task  # noqa: F401
from tests.small_training import same_weights
from workbench.callbacks.recorder import collectors
from workbench.callbacks.recorder.probes import ProbeCollector
from workbench.callbacks.recorder.updates import UpdateCollector
from workbench.models.calling import call_model
from workbench.probes.update import update_effect

EVERY = {"attention": None, "router": None, "optimizer": 1, "activations": None, "reduction": None, "update": 1}


def trained(model, task, store, n_steps=2):  # noqa: F811
    optimizer = adam(model)
    recorder = wb.Recorder(store, every=EVERY | {"precision": 1}, loss_of=loss_on)
    with recorder.attach(model, optimizer):
        for i in range(n_steps):
            optimizer.zero_grad()
            loss_of(model, task.batch(i)).backward()
            optimizer.step()
    return model


def loss_on(model, probe):
    return call_model(model, probe).logsumexp(-1).mean()


def test_frozen_parameters_are_not_copied_and_trained_ones_once(task, tmp_path, monkeypatch):  # noqa: F811
    copied = []
    begin = ProbeCollector.begin_update

    def noted(self, copies):
        begin(self, copies)
        own = {weight.untyped_storage().data_ptr() for weight in copies.values()}
        copied.append({name: weight.untyped_storage().data_ptr() in own for name, weight in self._before.items()})

    monkeypatch.setattr(ProbeCollector, "begin_update", noted)
    model = dense()
    for name, weight in model.named_parameters():
        weight.requires_grad_("blocks.1" in name)
    trained(model, task, tmp_path / "a.zarr")
    assert copied
    for each in copied:
        assert each == {name: True for name, _ in model.named_parameters() if "blocks.1" in name}
    assert wb.open_run(tmp_path / "a.zarr")["update"]["predicted_loss_change"].notnull().all()


def test_gradients_are_released_one_by_one():
    """The prediction of an update needs no second copy of the model, and leaves no gradient."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    before = {name: weight.detach() + 0.01 for name, weight in model.named_parameters()}
    alive, most = [0], [0]

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.shape == (64, 64) and not func.is_view:
                alive[0] += 1
                most[0] = max(most[0], alive[0])
                weakref.finalize(found, lambda: alive.__setitem__(0, alive[0] - 1))
            return found

    with Count():
        effect = update_effect(model, lambda m: m(torch.ones(3, 64)).square().mean(), before)
    assert most[0] < 8
    gradients = torch.autograd.grad(
        torch.func.functional_call(model, {n: w.requires_grad_() for n, w in before.items()}, torch.ones(3, 64))
        .square()
        .mean(),
        list(before.values()),
    )
    steps = [weight.detach() - before[name].detach() for name, weight in model.named_parameters()]
    expected = sum(float((g.double() * d.double()).sum()) for g, d in zip(gradients, steps, strict=True))
    assert abs(effect.predicted - expected) < 1e-6 * abs(expected)
    assert all(weight.grad is None for weight in model.parameters())


def test_without_free_memory_nothing_is_copied_and_the_training_goes_on(task, tmp_path, monkeypatch):  # noqa: F811
    expected = trained(dense(), task, tmp_path / "control.zarr")
    monkeypatch.setattr(collectors, "_SMALL", 0)
    monkeypatch.setattr(collectors, "free_memory", lambda device: 100)
    monkeypatch.setattr(UpdateCollector, "begin", None)
    found = trained(dense(), task, tmp_path / "a.zarr")
    assert same_weights(expected, found)
    missing = {event["source"]: event["message"] for event in events_of(tmp_path / "a.zarr")}
    for part in ("optimizer", "update", "precision"):
        assert "of memory, but 0.00 GB are free" in missing[part]
