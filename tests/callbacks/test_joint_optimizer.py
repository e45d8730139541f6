"""Optimizers of every kind: several at once, objects that only step, a new one in the middle, and foreign ones."""

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks.test_recorder import adam, dense, loss_of, of_part, recorder_with, task  # noqa: F401
from tests.callbacks.test_recorder_loops import column
from tests.small_training import same_weights
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer, optimizers_in
from workbench.callbacks.recorder.shards import HeldParts
from workbench.callbacks.recorder.updates import UpdateCollector
from workbench.errors import OptionError
from workbench.models.readable_weights import complete


def parts_of(model):
    """Parameters in two groups, as for Muon and AdamW."""
    return [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]


def two(model):
    matrices, vectors = parts_of(model)
    return [torch.optim.SGD(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=1e-3)]


class Descent:
    """An optimizer that is none of PyTorch's."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 1e-2}]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(1e-2 * p.grad)


def trained(model, task, optimizers, recorder=None, n_steps=4, steps=lambda i, optimizers: optimizers):  # noqa: F811
    attached = None if recorder is None else recorder.attach(model, optimizers)
    for i in range(n_steps):
        loss_of(model, task.batch(i)).backward()
        for each in steps(i, list(optimizers.values()) if isinstance(optimizers, dict) else list(optimizers)):
            each.step()
        model.zero_grad()
    if attached is not None:
        attached.detach()
    return model


@pytest.mark.parametrize("form", [list, tuple, lambda parts: dict(enumerate(parts))])
def test_several_optimizers_make_one_update(task, form):  # noqa: F811
    model, twin = dense(), dense()
    recorder = recorder_with(every={"optimizer": 1})
    trained(model, task, form(two(model)), recorder)
    assert same_weights(model, trained(twin, task, two(twin)))
    assert [(o.step, o.part) for o in recorder.heard] == [(i, p) for i in range(4) for p in ("optimizer", "monitors")]
    assert column(recorder, "learning_rate").tolist() == [1e-2] * 4
    assert np.isfinite(column(recorder, "grad_norm")).all()
    for o in of_part(recorder, "optimizer"):  # of the parameters of both
        assert (o.values["update_ratio"] > 0).all()


def test_an_update_may_be_made_by_some_of_them(task):  # noqa: F811
    model = dense()
    recorder = recorder_with(every=None)
    trained(model, task, two(model), recorder, steps=lambda i, parts: parts[: 1 + i % 2])
    assert column(recorder, "batch_size").tolist() == [8] * 4
    assert column(recorder, "is_skipped").tolist() == [0] * 4


def test_objects_that_step_are_optimizers(task):  # noqa: F811
    model, twin = dense(), dense()
    optimizer = Descent(model.parameters())
    recorder = recorder_with(every={"optimizer": 2})
    trained(model, task, [optimizer], recorder)
    assert same_weights(model, trained(twin, task, [Descent(twin.parameters())]))
    assert len(of_part(recorder, "monitors")) == 4
    assert "step" not in vars(optimizer)


def test_a_new_optimizer_is_followed(task, tmp_path):  # noqa: F811
    model = dense()
    optimizer, recorder = adam(model), recorder_with(tmp_path / "a.zarr", every=None)
    with recorder.attach(model, optimizer):
        for i in range(12):
            if i == 4:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
            loss_of(model, task.batch(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    rates = column(recorder, "learning_rate")
    assert rates[:4].tolist() == [1e-2] * 4
    assert rates[4:].tolist() == [0.125] * 5  # three updates passed until it was found
    events = wb.open_run(tmp_path / "a.zarr")["events"].to_dataset()
    assert "SGD" in str(events["message"].values[events["source"].values == "optimizer"][0])


@pytest.mark.parametrize("given", [None, 3, [], [3], {"a": object()}])
def test_what_is_no_optimizer_is_refused(given):
    with pytest.raises(OptionError) as caught:
        optimizers_in(given)
    assert caught.value.name == "optimizer"


def of_collector(optimizer, model, task, state):  # noqa: F811
    from workbench.callbacks.recorder.joint_optimizer import OptimizedParameters

    joint = JointOptimizer([optimizer])
    collector = UpdateCollector(HeldParts(joint), OptimizedParameters(model, joint), None)
    loss_of(model, task.batch(0)).backward()
    collector.begin()
    optimizer.step()
    for p in model.parameters():
        optimizer.state[p] |= state(p)
    return complete(collector.end())[0]


def test_pairs_of_eps_and_codes_of_eight_bits_are_no_moments(task):  # noqa: F811
    model = dense()
    adafactor = torch.optim.Adafactor(model.parameters())
    for group in adafactor.param_groups:
        group["eps"] = (1e-30, 1e-3)
    found = of_collector(adafactor, model, task, lambda p: {"exp_avg_sq": torch.ones_like(p)})
    assert np.isfinite(found["adam_staleness"]).all()
    assert np.isnan(found["gradient_rms_over_eps"]).all()
    model = dense()
    codes = of_collector(adam(model), model, task, lambda p: {"exp_avg_sq": torch.zeros_like(p, dtype=torch.uint8)})
    assert np.isnan(codes["adam_staleness"]).all()
