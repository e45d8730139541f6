"""Alarms from findings of probes: at the first measurement or, where one may mislead, at the second."""

import numpy as np
import pytest

from workbench.callbacks.alarms.probe_alarms import ProbeAlarms
from workbench.callbacks.observation import Observation
from workbench.probes.gradient_agreement import GradientVerdict


def precision(step, *, excess=1.0):
    """Return a measurement of two blocks of two heads, the second of which has an excess of error."""
    values = {
        "error_excess": np.array([1.0, excess]),
        "gradient_error": np.array([1e-7, 1e-7 * excess]),
        "query_error_excess": np.array([[1.0, 1.0], [1.0, excess]]),
        "query_gradient_error": np.array([[1e-7, 1e-7], [1e-7, 1e-7 * excess]]),
        "excess_limit": 25.0,
    }
    return Observation(step, "precision", values)


def gradients(step, verdict, *, bits=np.nan):
    values = {
        "gradient_verdict": float(verdict.severity),
        "wrong_parameters": 0.5,
        "significant_bits": bits,
        "missing_rank": np.nan,
        "missing_pass": 1.0 if verdict == GradientVerdict.PASS_MISSING else np.nan,
        "receiving_rank": np.nan,
    }
    return Observation(step, "reduction", values)


SOUND = gradients(4, GradientVerdict.AS_COMPUTED)


def test_broken_arithmetic_raises_an_alarm_at_the_first_measurement():
    alarms = ProbeAlarms()
    assert alarms.observe(precision(19)) == []
    [alarm] = alarms.observe(precision(39, excess=1e4))
    assert (alarm.signal, alarm.layer, alarm.head, alarm.step) == ("arithmetic", 1, 1, 39)
    assert not alarms.is_in_doubt


def test_with_routers_broken_arithmetic_must_be_found_twice():
    alarms = ProbeAlarms()
    alarms.observe(Observation(9, "router", {"router_similarity": np.zeros(2)}))
    assert alarms.observe(precision(19)) == []
    assert alarms.observe(precision(39, excess=1e4)) == []
    assert alarms.is_in_doubt
    assert (alarms.checks["arithmetic"].step, alarms.checks["arithmetic"].is_sound) == (19, True)
    assert alarms.observe(precision(40)) == []  # a token was sent to another expert once
    assert not alarms.is_in_doubt
    assert alarms.observe(precision(59, excess=1e4)) == []
    [alarm] = alarms.observe(precision(60, excess=1e4))
    assert alarm.step == 60
    assert alarms.observe(precision(79, excess=1e4)) == []  # the alarm still stands
    assert not alarms.is_in_doubt


@pytest.mark.parametrize(
    ("verdict", "bits", "cause", "words"),
    [
        (GradientVerdict.PASS_MISSING, np.nan, "dropped_bucket", "The gradients of backward pass 1 of this step are"),
        (GradientVerdict.LOW_PRECISION, 4.0, "low_precision_reduction", "about 4 significant bits"),
        (GradientVerdict.LOW_PRECISION, 1.2, "low_precision_reduction", "not those computed in this step"),
        (GradientVerdict.NOT_COMPUTED, np.nan, "stale_reduction", "not those computed in this step"),
    ],
)
def test_wrong_gradients_are_named(verdict, bits, cause, words):
    alarms = ProbeAlarms()
    assert alarms.observe(SOUND) == []
    [alarm] = alarms.observe(gradients(9, verdict, bits=bits))
    assert words in alarm.message
    assert alarms.standing["gradients"][1][0] == cause


@pytest.mark.parametrize("verdict", [GradientVerdict.PASS_MISSING, GradientVerdict.NOT_COMPUTED])
def test_a_loop_that_changes_gradients_from_the_start_does_so_on_purpose(verdict):
    alarms = ProbeAlarms()
    assert [alarms.observe(gradients(step, verdict)) for step in (4, 9, 14)] == [[]] * 3
