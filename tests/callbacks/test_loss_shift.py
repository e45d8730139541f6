"""Shifts of the loss out of its trend: injected ones, healthy curves, and invariances."""

import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.callbacks.alarms.run_evidence import LossShift
from workbench.callbacks.alarms.watched import FALL, RISE


def shifts(losses):
    """Return the shifts up and down, shape (step, 2)."""
    detector = LossShift()
    return np.array([detector.update(loss)[:2] for loss in losses])


def curve(n, seed=0, *, deviation=0.15, correlation=0.0):
    """Return losses that fall from 5.5 towards 2 as a power of time, with noise of an autoregression of order one."""
    noise, found = np.random.default_rng(seed).normal(size=n) * math.sqrt(1 - correlation**2), np.empty(n)
    at = noise[0]
    for i in range(n):
        at = correlation * at + noise[i]
        found[i] = 2 + 3.5 / (1 + i / 20) + deviation * at
    return found


def run_of(losses, rates=None):
    step = np.arange(len(losses))
    rates = np.full(len(losses), 1e-3) if rates is None else rates
    monitors = xr.Dataset({"loss": ("step", losses), "learning_rate": ("step", rates)}, {"step": step})
    return xr.DataTree.from_dict({"/monitors": monitors})


def alarms_of(losses, rates=None):
    raised = wb.alarms.replay(run_of(losses, rates), wb.Alarms())
    return [(alarm.signal, alarm.step) for alarm in raised if alarm.signal in (RISE.name, FALL.name)]


# Injected shifts


@pytest.mark.parametrize("seed", range(3))
def test_a_lasting_rise_of_a_few_deviations_raises_an_alarm_within_25_steps(seed):
    losses = curve(600, seed)
    losses[500:] += 3 * 0.15
    raised = alarms_of(losses)
    assert "loss rise" in dict(raised)
    assert 500 <= dict(raised)["loss rise"] < 525
    assert all(step >= 500 for _, step in raised)


def test_a_memorized_batch_falls_out_of_the_trend():
    losses = curve(600)
    losses[500:] *= np.exp(-np.arange(100) / 15)
    (signal, step), *_ = alarms_of(losses)
    assert signal == "loss fall"
    assert 500 <= step < 525
    alarms = wb.Alarms()
    raised = wb.alarms.replay(run_of(losses), alarms)
    assert "look whether labels leak" in raised[0].message
    found = alarms.attribute()
    assert (found.cause, math.isnan(found.score)) == ("unknown", True)
    assert found.message.startswith("The cause is unknown: The loss has fallen to")
    assert alarms.onset("loss fall") is not None


@pytest.mark.parametrize("size", [5, 50])
def test_a_spike_or_a_shift_back_is_no_lasting_shift(size):
    losses = curve(600)
    losses[500:503] += size
    found = shifts(losses)
    assert np.nanmax(found[200:, 0]) < RISE.threshold
    losses = curve(900)
    losses[300:600] += 1.0  # it recovers at step 600
    assert np.nanmax(shifts(losses)[590:, 1]) < FALL.threshold


# Healthy curves


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_with_any_correlation_raises_no_alarm(correlation):
    largest = [np.nanmax(shifts(curve(500, seed, correlation=correlation))[200:], axis=0) for seed in range(8)]
    assert np.max(largest, axis=0)[0] < RISE.threshold
    assert np.max(largest, axis=0)[1] < FALL.threshold


def test_healthy_falls_raise_no_alarm():
    noise = 0.05 * np.random.default_rng(0).normal(size=2000)
    step = np.arange(2000)
    learned = 2.2 - 1.6 / (1 + np.exp(-(step - 800) / 60)) + noise  # a task that is learned late, over 200 steps
    assert alarms_of(learned) == []
    rates = np.where(step < 800, 1e-3, 1e-4)  # a step schedule, with a sudden gain
    assert alarms_of(2.0 - 0.7 * (step >= 800) + noise, rates) == []
    restarts = 0.05 + 0.475 * (1 + np.cos(np.pi * (step % 700) / 700))
    assert alarms_of(2.0 + 0.6 * restarts + noise, 1e-3 * restarts) == []  # the loss rises with the rate


def test_the_trend_of_a_fall_is_not_taken_for_its_continuation():
    falling = 5 - 0.01 * np.arange(400) + 0.1 * np.random.default_rng(1).normal(size=400)
    assert np.nanmax(shifts(np.r_[falling, np.full(50, falling[-1])])[200:, 0]) < RISE.threshold  # it ends
    assert np.nanmax(shifts(falling)[200:, 1]) < FALL.threshold


# Invariances


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), factor=st.floats(1e-3, 1e3), offset=st.floats(0, 5), height=st.sampled_from([-1.0, 1.0])
)
def test_factors_never_count_and_offsets_do_not_for_rises(seed, factor, offset, height):
    losses = curve(260, seed, deviation=0.4)
    losses[240:] += height
    found, scaled, moved = shifts(losses)[-1], shifts(factor * losses)[-1], shifts(losses + offset)[-1]
    np.testing.assert_allclose(scaled, found, rtol=1e-6)
    assert moved[0] == pytest.approx(found[0], rel=1e-6)


def test_missing_losses_are_skipped():
    losses = curve(400)
    sparse = np.full(800, np.nan)
    sparse[::2] = losses
    np.testing.assert_array_equal(shifts(sparse)[::2], shifts(losses))


def test_the_record_raises_the_same_alarms_as_the_run():
    losses = curve(600)
    losses[500:] += 0.6
    live = wb.Alarms()
    for observation in wb.alarms.observations(run_of(losses)):
        live.observe(observation)
    assert live.raised == wb.alarms.replay(run_of(losses), wb.Alarms()) != []


def test_a_new_past_is_needed_after_a_restart():
    detector, losses = LossShift(), curve(400)
    for loss in losses:
        detector.update(loss)
    detector.restart()
    assert math.isnan(detector.update(9.0).rise)
