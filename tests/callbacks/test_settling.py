"""Alarms and their calibration begin after the warm-up, which they read from the run's own record."""

import math

import numpy as np
import pytest

from tests.callbacks.test_alarms import OPTIONS, as_run, attributor, calibration  # noqa: F401
from workbench.callbacks.alarms import WATCHED, Alarms, calibrate, calibrate_paired, observations
from workbench.callbacks.alarms.calibrating import departures
from workbench.callbacks.alarms.replaying import replay
from workbench.callbacks.alarms.settling import Settling
from workbench.callbacks.recorder import Observation

PEAK = 3e-3
#: Steps of warm-up; OPTIONS settle for 20.
LONG = 60
TERMS = np.array(["D2", "D3", "dWq", "dWk", "W"])


def linear(step):
    """As wb.train has it."""
    return PEAK * min(1.0, (step + 1) / LONG)


def from_zero(step):
    """As schedulers of torch and transformers have it: full at step LONG, one later."""
    return PEAK * min(1.0, step / LONG)


#: Schedules, and the first step at which the rate has stopped rising.
SCHEDULES = {
    "linear": (linear, LONG),
    "from zero": (from_zero, LONG + 1),
    "rounded to two digits": (lambda step: float(f"{linear(step):.1e}"), LONG),
    "rounded to steps of 5": (lambda step: PEAK * min(1.0, (step // 5 * 5 + 1) / (LONG + 1)), LONG + 1),
    "in half precision": (lambda step: float(np.float16(linear(step))), LONG),
    "with noise of rounding": (lambda step: linear(step) * (1 + 1e-12 * (-1) ** step), LONG),
    "per epoch": (lambda step: PEAK * min(1.0, (step // 15 + 1) / 5), LONG + 1),
    "per epoch, from zero": (lambda step: PEAK * min(1.0, (step // 20) / 3), LONG + 1),
    "joined within an epoch": (lambda step: PEAK * min(1.0, ((step + 12) // 18 + 1) / 5), LONG + 1),
    "at every fifth step": (lambda step: linear(step) if step % 5 == 4 else math.nan, LONG),
    "cosine both ways": (
        lambda step: (
            PEAK * (1 - math.cos(math.pi * (step + 1) / LONG)) / 2
            if step < LONG
            else PEAK * (1 + math.cos(math.pi * (step + 1 - LONG) / 300)) / 2
        ),
        LONG,
    ),
}


def drift(schedule, n=220, *, end=LONG, fault=None, offset=0):
    """A run whose signals drift until step ``end`` and stay; the D2 rank of one head falls from step ``fault`` on."""
    random = np.random.default_rng(0)
    coords = {"layer": np.arange(2), "head": np.arange(4), "term": TERMS}
    for step in range(n):
        progress = min(1.0, step / end)
        if (step + 1) % 10 == 0:
            rank = 3.0 - 1.9 * progress + 0.05 * random.random((2, 4, 5))
            if fault is not None and step >= fault:
                rank[1, 2, 0] = 1.0001
            yield Observation(step + offset, "attention", {"effective_rank": rank}, coords)
        numbers = {"loss": 1 + 6 * progress + 0.01 * random.random(), "grad_norm": 1.0 + 20 * progress}
        numbers |= {"batch_size": 32.0, "auxiliary_loss": math.nan}
        if (rate := schedule(step)) is not None:
            numbers["learning_rate"] = rate
        yield Observation(step + offset, "monitors", {name: np.array(value) for name, value in numbers.items()})


@pytest.fixture
def make_alarms(calibration, attributor):  # noqa: F811
    def make(**options):
        return Alarms(calibration=calibration, attributor=attributor, **options)

    return make


def heard(alarms, looks):
    return [alarm for look in looks for alarm in alarms.observe(look)]


@pytest.mark.medium
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_drifts_during_the_warm_up_is_no_alarm_and_a_fault_after_it_is(make_alarms, name):
    schedule, settled = SCHEDULES[name]
    alarms, looks = make_alarms(), list(drift(schedule, 220, end=settled, fault=180))
    live = heard(alarms, looks)
    assert [(alarm.signal, alarm.step, alarm.layer, alarm.head) for alarm in live] == [("effective_rank D2", 189, 1, 2)]
    assert alarms.settled_at == settled
    assert replay(as_run(looks), make_alarms()) == live


def test_it_is_the_warm_up_that_makes_the_difference(make_alarms):
    """Where no rate is recorded, all is as the options say."""
    alarms = make_alarms()
    assert {alarm.signal for alarm in heard(alarms, drift(lambda step: None))} >= {"loss"}
    assert alarms.settled_at == OPTIONS.settle
    assert heard(make_alarms(), drift(lambda step: math.nan)) == alarms.raised
    assert heard(make_alarms(), drift(lambda step: PEAK)) == alarms.raised


def constant_until(step, factor):
    return lambda at: PEAK * (factor if at >= step else 1)


@pytest.mark.parametrize(
    "schedule",
    [
        constant_until(51, 10.0),  # a jump, once a healthy start could have been learned
        lambda step: PEAK * (1 + max(0, step - 51) / 40),  # a ramp
        lambda step: linear(6 * step) * (10 if step >= 40 else 1),  # after a short warm-up that rose at every step
        lambda step: linear(6 * step) * (1 + max(0, step - 21)),
        lambda step: PEAK * (0.5 if 5 <= step < 12 else 1.0 + (step >= 14)),  # a second warm-up
        lambda step: linear(step) * (0.3 if step >= 18 else 1.0),  # cut on the way, and rising again
    ],
)
def test_a_rate_that_rises_later_is_no_warm_up(schedule):
    settling = Settling(OPTIONS)
    for step in range(300):
        settling.update(step, {"learning_rate": schedule(step)})
    assert settling.end == OPTIONS.settle


def test_a_rate_that_rises_from_a_fault_on_is_evidence_and_one_that_warms_up_is_not(make_alarms):
    heard(alarms := make_alarms(), drift(linear))
    assert alarms.features()["rate_change"] == 0
    heard(alarms := make_alarms(), drift(lambda step: linear(step) * (10 if step >= 200 else 1)))
    assert alarms.features()["rate_change"] == pytest.approx(math.log(10))
    assert alarms.settled_at == LONG


@pytest.mark.parametrize("cut", [5, 30, 59, 60, 61, 75])
def test_a_run_resumed_in_its_warm_up_is_heard_as_if_it_had_run_through(make_alarms, cut):
    looks = list(drift(linear, fault=200))
    through = heard(make_alarms(), looks)
    resumed = make_alarms()
    assert replay(as_run(look for look in looks if look.step < cut), resumed) == []
    assert heard(resumed, (look for look in looks if look.step >= cut)) == through != []


@pytest.mark.medium
def test_settling_is_causal_and_ends_before_anything_is_compared(make_alarms):
    for schedule, settled in SCHEDULES.values():
        ends, alarms = [], make_alarms()
        for look in drift(schedule, 130, end=settled):
            alarms.observe(look)
            ends.append(alarms.settled_at)
            if any(alarms.departures().values()):
                assert look.step >= settled + OPTIONS.start
        assert ends == sorted(ends)


@pytest.mark.parametrize("has_pair", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_departures_are_those_of_a_run_that_begins_later(name, has_pair):
    """The oracle: without the rate, and without the steps that the warm-up took beyond the options' own."""
    schedule, settled = SCHEDULES[name]
    shift = settled - OPTIONS.settle
    whole = list(drift(schedule, 140, end=settled))
    later = [
        Observation(look.step - shift, look.part, {k: v for k, v in look.values.items() if k != "learning_rate"},
                    look.coords)
        for look in whole if look.step >= shift
    ]  # fmt: skip
    other = list(drift(schedule, 140, end=40))
    pairs = (None, None)
    if has_pair:
        shifted = [Observation(o.step - shift, o.part, o.values, o.coords) for o in other if o.step >= shift]
        pairs = as_run(other), as_run(shifted)
    found = departures(as_run(whole), OPTIONS, pair=pairs[0])
    expected = departures(as_run(later), OPTIONS, pair=pairs[1])
    assert found == expected
    assert {"loss", "grad_norm", "effective_rank D2"} <= found.keys()


@pytest.mark.medium
def test_calibrations_of_runs_that_warm_up_hold_nothing_of_it():
    runs = [as_run(drift(linear, 160)) for _ in range(5)]
    without = [as_run(drift(lambda step: None, 160)) for _ in range(5)]
    kept, drifted = calibrate(runs, options=OPTIONS), calibrate(without, options=OPTIONS)
    for name in ("loss", "grad_norm"):
        assert kept.scale[name]["level"] < 0.05 < 0.3 < drifted.scale[name]["level"]
    paired = calibrate_paired([(run, run) for run in runs], options=OPTIONS)
    assert paired.highest["outcome"] == (0.0,) * 5


def test_against_a_paired_run_the_warm_up_is_left_out_too(make_alarms):
    healthy = as_run(drift(linear))
    steeper = list(drift(linear, end=30))  # another way through the warm-up, to the same place
    assert heard(make_alarms(paired=healthy), steeper) == []
    raised = heard(make_alarms(paired=healthy), drift(linear, end=30, fault=200))
    assert [(alarm.signal, alarm.step) for alarm in raised] == [("effective_rank D2", 209)]


def test_after_a_reset_the_warm_up_counts_from_there(make_alarms):
    alarms = make_alarms()
    heard(alarms, drift(linear, 100))
    alarms.reset(step=500)
    assert alarms.settled_at == 520
    raised = heard(alarms, drift(linear, offset=500, fault=200))
    assert alarms.settled_at == 500 + LONG
    assert [(alarm.signal, alarm.step) for alarm in raised] == [("effective_rank D2", 709)]
    # What still comes from before is no first step.
    alarms.reset(step=10)
    heard(alarms, (look for look in drift(linear) if look.step >= 4))
    assert alarms.settled_at == LONG


def test_a_rest_in_the_warm_up_does_no_harm(make_alarms):
    alarms, raised = make_alarms(), []
    for look in drift(linear, fault=200):
        raised += alarms.observe(look)
        if look.step in (25, 58) and look.part == "monitors":
            alarms.rest(look.step, n_steps=40)
    assert [(alarm.signal, alarm.step) for alarm in raised] == [("effective_rank D2", 209)]


def test_looks_come_in_the_order_in_which_a_recorder_tells_them():
    """The numbers of an update, and with them its rate, come after its other parts: so the last step of the rise counts
    for the warm-up in every part."""
    order = [look.part for look in observations(as_run(drift(linear, 60))) if look.step == LONG - 1]
    assert order == ["attention", "monitors"]
    assert {watched.part for watched in WATCHED} >= set(order)
