"""Logits beyond the limit: reported only if they have grown, once, with layer and head."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.callbacks.alarms import Alarms, Observation
from workbench.callbacks.alarms.absolute_limits import LogitLimit

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
