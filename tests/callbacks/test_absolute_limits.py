"""Metrics beyond limits that need no past: from the first step on, and not in sound runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

import workbench as wb
from workbench.callbacks.alarms import Alarms
from workbench.callbacks.alarms.absolute_limits import LIMITS, AbsoluteLimits, LogitLimit
from workbench.callbacks.observation import Observation

SOUND = {
    "loss": 3.0, "grad_norm": 0.7, "batch_size": 8.0, "n_tokens": 384.0, "token_entropy": 3.0, "label_entropy": 3.0,
    "ignored_labels": 0.2, "loss_scale": 65536.0, "is_skipped": 0.0, "learning_rate": 1e-3,
}  # fmt: skip
#: What is wrong -> metrics, number of updates until the alarm, word of its message, and the cause.
WRONG = {
    "labels": ({"label_entropy": 0.0}, 3, "labels", "corrupted_data"),
    "ignored": ({"ignored_labels": 1.0, "label_entropy": math.nan}, 3, "ignored", "corrupted_data"),
    "tokens": ({"token_entropy": 0.25}, 5, "entropy 0.25 nat", "corrupted_data"),
    "no gradient": ({"grad_norm": 0.0}, 3, "exactly 0", "no_gradient"),
    "no label": ({"grad_norm": 0.0, "loss": math.nan}, 3, "exactly 0", "no_gradient"),
    "clip before unscale": ({"grad_norm": 2.0**-16}, 5, "power of 2 (1.53e-05)", "loss_scale"),
    "infinite": ({"loss": math.inf, "grad_norm": math.nan}, 3, "not finite", "unknown"),
    "nan": ({"loss": math.nan, "grad_norm": math.nan}, 3, "not finite", "unknown"),
    "scale": ({"loss_scale": 0.25}, 3, "0.25", "loss_scale"),
    "skipped": ({"is_skipped": 1.0, "grad_norm": math.inf}, 12, "skipped", "loss_scale"),
    "no mask": ({"lookahead": 0.2, "label_agreement": 1.0}, 10, "causal mask", "unknown"),
    "cleared": ({"is_skipped": 1.0, "loss_scale": math.nan}, 12, "cleared without an update", "gradients_discarded"),
}


def monitors(step, **values):
    return Observation(step, "monitors", {name: np.array(value) for name, value in (SOUND | values).items()})


@pytest.mark.parametrize("start", [0, 30])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_alarm_is_raised_once_within_a_few_updates(wrong, start):
    values, n, word, cause = WRONG[wrong]
    alarms = wb.Alarms()
    for step in range(start + 40):
        alarms.observe(monitors(step, **(values if step >= start else {})))
    (alarm,) = [alarm for alarm in alarms.raised if alarm.signal == "limits"]
    assert alarm.step == start + n - 1
    assert word in alarm.message
    assert alarms.attribute().cause == cause
    assert math.isnan(alarms.attribute().score) == (cause == "unknown")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"label_entropy": 0.0, "n_tokens": 8.0},  # few labels may be the same
        {"label_entropy": 0.0, "n_tokens": math.nan},  # of eight examples too
        {"label_entropy": math.nan, "ignored_labels": math.nan, "token_entropy": math.nan},  # unknown
        {"grad_norm": 1.0},  # every gradient is clipped
        {"grad_norm": 0.0, "loss": 0.0},  # everything is learned
        {"loss": math.nan},  # not logged
        {"loss": math.nan, "grad_norm": math.nan, "batch_size": math.nan},  # a log without them
        {"loss_scale": math.nan, "is_skipped": math.nan},
        {"lookahead": 0.2, "label_agreement": 0.9},  # every token may be seen if labels are not the next ones
        {"lookahead": 0.01, "label_agreement": 1.0},  # rounding
    ],
)
def test_sound_or_unknown_metrics_raise_no_alarm(values):
    limits = AbsoluteLimits()
    assert not any(limits.update(SOUND | values) for _ in range(50))


def test_now_and_then_an_update_overflows_in_float16():
    """The first loss scale is usually too large, and grows again every 2,000 updates."""
    alarms = wb.Alarms()
    for step in range(400):
        is_skipped = step < 8 or step in (250, 251)
        alarms.observe(monitors(step, **({"is_skipped": 1.0, "grad_norm": math.inf} if is_skipped else {})))
    assert alarms.raised == []


def test_the_table_is_consistent():
    assert all(1 <= limit.n_rows <= limit.of_last for limit in LIMITS)
    assert {limit.variable for limit in LIMITS} <= set(wb.schema.MONITORS)
    assert all(limit.sentence.format(value=1.0).endswith(".") for limit in LIMITS)


def test_batches_at_a_limit_that_alternate_with_others_raise_one_alarm_and_another_limit_its_own():
    alarms = wb.Alarms()
    for step in range(120):
        is_wrong = step % 20 < 10
        alarms.observe(monitors(step, **({"token_entropy": 0.25} if is_wrong else {})))
    for step in range(120, 130):
        alarms.observe(monitors(step, grad_norm=0.0))
    raised = [(alarm.step, alarm.message) for alarm in alarms.raised if alarm.signal == "limits"]
    assert [step for step, _ in raised] == [4, 122]
    assert "exactly 0" in raised[1][1]


COORDS = {"layer": np.array([1, 4]), "head": np.arange(3)}


def measured(step, largest, *, layer=1, head=2):
    logits = np.full((2, 3), 5.0)
    logits[layer, head] = largest
    return Observation(step, "attention", {"attention_logit_max": logits}, COORDS)


def test_growth_beyond_the_limit_raises_one_alarm_with_its_place():
    alarms = Alarms()
    heard = [
        alarm
        for i, value in enumerate([20, 9000, 10_000, 10_010, 50_000])
        for alarm in alarms.observe(measured(i, value))
    ]
    (alarm,) = heard
    assert (alarm.step, alarm.signal, alarm.layer, alarm.head, alarm.value) == (3, "logits", 4, 2, 10_010)
    assert not alarm.is_outcome
    assert alarms.attribute().cause == "logit_growth"


def test_another_finding_is_named_before_large_logits():
    alarms = Alarms()
    for i, value in enumerate([20, 20_000]):
        alarms.observe(measured(i, value))
    setting = {"setting": np.array("learning_rate"), "message": np.array("It rose.")}
    alarms.observe(Observation(2, "settings", {"factor": np.array(10.0)}, setting))
    assert alarms.attribute().cause == "large_rate"


def test_after_recovery_it_may_be_raised_again():
    alarms = Alarms()
    values = [20, 20_000, *[500] * 3, 30_000]
    heard = [alarm.step for i, value in enumerate(values) for alarm in alarms.observe(measured(i, value))]
    assert heard == [1, 5]


@pytest.mark.parametrize("values", [{}, {"attention_logit_max": np.full((2, 3), np.nan)}])
def test_without_logits_no_alarm_is_raised(values):
    limit = LogitLimit()
    assert limit.update({"attention_logit_max": np.full((2, 3), 1.0)}, COORDS) is None
    assert limit.update(values, COORDS) is None


def test_a_model_beyond_the_limit_from_the_first_measurement_on_raises_no_alarm():
    limit = LogitLimit()
    assert all(limit.update(measured(0, 20_000.0).values, COORDS) is None for _ in range(5))
