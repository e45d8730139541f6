"""Where a loop calls zero_grad decides what the optimizer receives: faults are named, other methods are sound."""

from __future__ import annotations

import pytest
import torch

import workbench as wb
from tests.callbacks.test_recorder import dense, loss_of, task  # noqa: F401
from workbench.probes.gradient_agreement import GradientVerdict

N_STEPS, N_PARTS = 6, 3


def cleared_once(model, optimizer, part, i, **how):
    optimizer.zero_grad(**how)
    for k in range(N_PARTS):
        (part(N_PARTS * i + k) / N_PARTS).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def cleared_each_time(model, optimizer, part, i, **how):
    for k in range(N_PARTS):
        optimizer.zero_grad(**how)
        (part(N_PARTS * i + k) / N_PARTS).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def never_cleared(model, optimizer, part, i, n_parts=1):
    for k in range(n_parts):
        (part(n_parts * i + k) / n_parts).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def sharpness_aware(model, optimizer, part, i, in_data=False):
    part(i).backward()
    steps = [0.05 * weight.grad for weight in model.parameters()]

    def move(sign):
        with torch.no_grad():
            for weight, step in zip(model.parameters(), steps, strict=True):
                (weight.data if in_data else weight).add_(sign * step)

    move(1)
    optimizer.zero_grad()
    part(i).backward()
    move(-1)
    optimizer.step()
    optimizer.zero_grad()


def opposed(model, optimizer, part, i):
    """Two losses with opposite aims, as of a generator and its discriminator."""
    loss = part(i)
    (-loss).backward(retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def by_closure(model, optimizer, part, i):
    def closure():
        optimizer.zero_grad()
        loss = part(i)
        loss.backward()
        return loss

    optimizer.step(closure)


def decayed(model, optimizer, part, i):
    """Keep a part of earlier gradients on purpose."""
    part(i).backward()
    optimizer.step()
    for weight in model.parameters():
        weight.grad.mul_(0.5)


SOUND, UNKNOWN = GradientVerdict.AS_COMPUTED.severity, -1
CASES = {
    "accumulation": (cleared_once, {}, {SOUND}),
    "accumulation, cleared in place": (cleared_once, {"set_to_none": False}, {SOUND}),
    "zero_grad in every micro-batch": (cleared_each_time, {}, {GradientVerdict.DISCARDED.severity}),
    "the same in place": (cleared_each_time, {"set_to_none": False}, {GradientVerdict.DISCARDED.severity}),
    "zero_grad missing": (never_cleared, {}, {GradientVerdict.NOT_CLEARED.severity}),
    "zero_grad missing with accumulation": (never_cleared, {"n_parts": 3}, {GradientVerdict.NOT_CLEARED.severity}),
    "SAM": (sharpness_aware, {}, {SOUND}),
    "SAM that moves weight.data": (sharpness_aware, {"in_data": True}, {SOUND}),
    "LBFGS": (by_closure, {}, {SOUND}),
    "opposed losses": (opposed, {}, {UNKNOWN}),
    "decayed gradients": (decayed, {}, {UNKNOWN}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_optimizer_receives(name, task, tmp_path):  # noqa: F811
    update, how, expected = CASES[name]
    model = dense()
    kind = torch.optim.LBFGS(model.parameters(), max_iter=2) if name == "LBFGS" else torch.optim.SGD(model.parameters())
    with wb.watch(model, kind, store=tmp_path / "a.zarr", every={"reduction": 2}, shows=False) as watched:
        for i in range(N_STEPS):
            update(model, kind, lambda number: loss_of(model, task.batch(number)), i, **how)
    reduction = wb.open_run(tmp_path / "a.zarr")["reduction"].to_dataset()
    codes = {int(each) for each in reduction["gradient_verdict"].values}
    (code,) = expected
    # After an alarm the next update is checked too, of which not all is known.
    assert codes - {UNKNOWN} == expected - {UNKNOWN}
    is_fault = code > GradientVerdict.SCALED.severity
    signals = [alarm.signal for alarm in watched.alarms.raised]
    assert signals[:1] == ["gradients"] * is_fault, [alarm.message for alarm in watched.alarms.raised]
    if is_fault:
        cause = "gradients_discarded" if code == GradientVerdict.DISCARDED.severity else "gradients_not_cleared"
        assert watched.alarms.attribute().cause == cause
        assert "zero_grad() once an update" in watched.alarms.raised[0].message
