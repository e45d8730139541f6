"""Faults in a custom training loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import workbench as wb
from tests.about import about
from tests.callbacks.test_recorder import adam, dense, loss_of, of_part, recorder_with, task  # noqa: F401
from tests.small_training import same_weights
from workbench.errors import OptionError


def trained(model, task, fault=None, recorder=None, *, n_steps=8):  # noqa: F811
    """Train in a standard loop, to which a recorder is attached first, then the fault."""
    optimizer = adam(model)
    attached = [each.attach(model, optimizer) for each in (recorder, fault) if each is not None]
    for i in range(n_steps):
        optimizer.zero_grad()
        loss_of(model, task.batch(i)).backward()
        optimizer.step()
    for each in reversed(attached):
        each.detach()
    hooks = (
        model._forward_pre_hooks, model._forward_hooks, optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )  # fmt: skip
    assert [len(each) for each in hooks] == [0, 0, 0, 0]
    return model


MAKERS = {
    "attention": lambda **when: wb.faults.low_precision_attention(n_bits=6, **when),
    "rate": lambda **when: wb.faults.large_rate(factor=3.0, **when),
    "bucket": lambda **when: wb.faults.dropped_bucket(share=1.0, **when),
    "stale": lambda **when: wb.faults.stale_reduction(delay=2, **when),
    "tokens": lambda **when: wb.faults.corrupted_data(what="tokens", **when),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_fault_acts_only_while_it_is_on(name, task):  # noqa: F811
    control = trained(dense(), task)
    off = trained(dense(), task, MAKERS[name]())
    if name == "attention":  # the attention of the fault is used also while it is off
        for one, other in zip(control.parameters(), off.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    else:
        assert same_weights(control, off)
    faulty = trained(dense(), task, MAKERS[name](start=3))
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(off.parameters(), faulty.parameters(), strict=True))
    assert same_weights(off, trained(dense(), task, MAKERS[name](start=8)))


@pytest.mark.parametrize(
    ("name", "part", "signal"),
    [
        ("attention", "precision", "arithmetic"),
        ("bucket", "reduction", "gradients"),
        ("stale", "reduction", "gradients"),
    ],
)
def test_a_recorder_that_was_attached_before_detects_the_fault(name, part, signal, task):  # noqa: F811
    alarms = wb.Alarms()
    recorder = recorder_with(every={part: 2}, alarms=alarms)
    trained(dense(), task, MAKERS[name](start=4), recorder)
    first = alarms.raised[0]
    assert (first.signal, first.step) == (signal, 5)


def test_a_recorder_records_the_changed_learning_rate(task):  # noqa: F811
    recorder = recorder_with(every=None)
    trained(dense(), task, MAKERS["rate"](start=5), recorder)
    rates = [float(o.values["learning_rate"]) for o in of_part(recorder, "monitors")]
    assert rates[5:] == pytest.approx([3 * rates[0]] * 3)
    assert rates[:5] == pytest.approx([rates[0]] * 5)


def test_labels_among_the_inputs_of_the_model_are_changed():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 40, (4, 12))
    fault = wb.faults.corrupted_data(what="labels", start=0)
    before = float(model(input_ids=ids, labels=ids).loss.detach())
    with fault.attach(model, adam(model)):
        faulty = float(model(input_ids=ids, labels=ids).loss.detach())
    assert faulty != before
    assert float(model(input_ids=ids, labels=ids).loss.detach()) == before


@pytest.mark.parametrize("kind", ["labels", "examples"])
def test_labels_that_the_model_does_not_receive_need_change_batch(kind, task):  # noqa: F811
    makers = {
        "labels": lambda: wb.faults.corrupted_data(start=0),
        "examples": lambda: wb.faults.small_batch(start=0),
    }
    make, model = makers[kind], dense()
    with pytest.raises(OptionError, check=about("labels")), make().attach(model, adam(model)):
        model(task.batch(0)[0])
    assert not model._forward_pre_hooks
    inputs, targets = task.batch(0)
    with make().attach(model, adam(model)) as attached:
        changed, labels = attached.change_batch(inputs, targets)
        model(changed)
    assert len(changed) == len(labels) == (2 if kind == "examples" else len(inputs))
    assert kind == "examples" or not torch.equal(labels, targets)


def test_faults_that_need_the_loop_of_the_workbench_are_rejected(task):  # noqa: F811
    model = dense()
    for fault in (wb.faults.no_auxiliary_loss(start=0), wb.faults.low_precision_reduction(start=0)):
        with pytest.raises(OptionError, check=about("faults", fault.name)):
            fault.attach(model, adam(model))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", ["attention", "rate", "stale"])
def test_a_fault_acts_with_a_closure_and_in_eval_mode(name, task):  # noqa: F811
    def with_closure(fault):
        model = dense().eval()
        optimizer = adam(model)
        with fault.attach(model, optimizer):
            for i in range(6):

                def closure(i=i):
                    optimizer.zero_grad()
                    loss = loss_of(model, task.batch(i))
                    loss.backward()
                    return loss

                optimizer.step(closure)
        return model

    assert same_weights(with_closure(MAKERS[name](start=3)), trained(dense(), task, MAKERS[name](start=3), n_steps=6))


def test_the_learning_rate_is_restored_after_an_error_within_the_update(task):  # noqa: F811
    model = dense()
    optimizer = adam(model)
    rate = optimizer.param_groups[0]["lr"]

    def fail(*_):
        raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(fail)
    attached = MAKERS["rate"](start=0).attach(model, optimizer)
    loss_of(model, task.batch(0)).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    attached.detach(is_broken=True)
    handle.remove()
    assert optimizer.param_groups[0]["lr"] == rate


def test_the_examples_of_a_recorder_are_not_corrupted(task):  # noqa: F811
    """In both orders of attaching the recorder and the fault."""
    found = []
    for is_first in (True, False):
        model, recorder = dense(), recorder_with(every={"precision": 2, "update": 2, "activations": 2})
        optimizer = adam(model)
        parts = [recorder, MAKERS["tokens"](start=0)]
        attached = [each.attach(model, optimizer) for each in (parts if is_first else parts[::-1])]
        for i in range(4):
            optimizer.zero_grad()
            loss_of(model, task.batch(i)).backward()
            optimizer.step()
        for each in attached:
            each.detach()
        found.append([o.values["state_norm"] for o in of_part(recorder, "activations")])
        assert len(of_part(recorder, "precision")) == 2
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    alone = recorder_with(every={"activations": 2})
    trained(dense(), task, MAKERS["tokens"](start=0), alone, n_steps=4)
    np.testing.assert_allclose(found[0], [o.values["state_norm"] for o in of_part(alone, "activations")], rtol=1e-5)
