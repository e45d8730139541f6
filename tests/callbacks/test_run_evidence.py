"""Evaluated steps of a run, and the place of a change."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.callbacks.alarms.run_evidence import CumulativeSum, LossShift, RunEvidence
from workbench.callbacks.alarms.watched import FALL, RISE
from workbench.callbacks.observation import Observation

TERMS = np.array(["D2", "D3", "dWq", "dWk", "W"])


def monitors(step, **values):
    return Observation(step, "monitors", {name: np.array(float(value)) for name, value in values.items()})


def evaluated(rates, signal="grad_norm"):
    """Return the steps at which a signal is evaluated, for given learning rates."""
    evidence = RunEvidence()
    rows = (monitors(step, learning_rate=rate, **{signal: 2}) for step, rate in enumerate(rates))
    found = [evidence.update(row)[0] for row in rows]
    return [reading.step for reading in found if reading.is_evaluated]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1e-3] * 400, range(200, 400)),
        ([math.nan] * 400, range(200, 400)),
        # A warm-up to step 300, and 100 steps at the full rate.
        ([1e-3 * min(1, (i + 1) / 300) for i in range(500)], range(384, 500)),
        # It rises again.
        ([1e-3] * 300 + [2e-3] * 200, [*range(200, 300), *range(399, 500)]),
        # The end of a schedule.
        ([1e-3 * (1 - i / 500) for i in range(500)], range(200, 491)),
    ],
)
def test_steps_are_evaluated_while_the_rate_is_steady(rates, expected):
    assert evaluated(rates) == list(expected)


def test_more_evidence_is_needed_while_the_rate_rises():
    random = np.random.default_rng(0)
    noise = 0.05 * random.normal(size=400)
    steady, rising = RunEvidence(), RunEvidence()
    for step in range(400):
        loss = 2 + noise[step] + (step >= 399)
        one, *_ = steady.update(monitors(step, loss=loss, learning_rate=1e-3))
        other, *_ = rising.update(monitors(step, loss=loss, learning_rate=1e-6 * (step + 1)))
    assert one.is_evaluated
    assert other.is_evaluated
    assert other.evidence == pytest.approx(one.evidence / 1.5)


def test_the_worst_layer_and_head_and_the_onset_are_named():
    random, evidence = np.random.default_rng(0), RunEvidence()
    coords = {"layer": np.array([0, 4]), "head": np.arange(3), "term": TERMS}
    for step in range(9, 1200, 10):
        rank = 2 + 0.1 * random.random((2, 3, 5))
        if step >= 1000:
            rank[1, 2, 0] = 1.01
        readings = {
            r.watched.name: r for r in evidence.update(Observation(step, "attention", {"effective_rank": rank}, coords))
        }
        if step == 1029:
            break
    found = readings["effective_rank D2"]
    assert (found.layer, found.head, found.value, found.is_rise) == (4, 2, 1.01, False)
    assert found.evidence > 6 > 3 > found.opposite
    assert 989 <= found.onset <= 1009
    assert max(r.evidence for name, r in readings.items() if name != "effective_rank D2") < 4


def test_signals_that_follow_the_rate_are_divided_by_it():
    random, evidence = np.random.default_rng(0), RunEvidence()
    for step in range(900):
        rate = 1e-3 if step < 600 else 5e-4
        values = {"learning_rate": rate, "update_ratio": rate * math.exp(0.05 * random.normal())}
        values["update_ratio"] *= 3 if step >= 800 else 1
        (found,) = evidence.update(monitors(step, **values))
        assert (found.evidence > 7) == (step == 800) or step > 800 or math.isnan(found.evidence)


def test_the_entropy_of_tokens_is_bad_both_ways():
    for sign in (1, -1):
        random, evidence = np.random.default_rng(0), RunEvidence()
        for step in range(400):
            entropy = 3 + 0.02 * random.normal() + sign * (step >= 399)
            (found,) = evidence.update(monitors(step, token_entropy=entropy))
        assert found.evidence > 7
        assert found.is_rise == (sign > 0)


def test_losses_near_zero_need_not_be_steady():
    """Changes of a tiny loss are negligible relative to the first losses."""
    random, evidence = np.random.default_rng(0), RunEvidence()
    for step in range(1200):
        loss = 4 * math.exp(-step / 50) + 1e-4 * random.random() + 2e-2 * (step >= 1100)
        found, *_ = evidence.update(monitors(step, loss=loss))
        assert not found.evidence > 4


def test_it_is_causal_and_restarts_by_step():
    random = np.random.default_rng(1)
    values = [monitors(step, loss=2 + random.normal()) for step in range(500)]
    whole, part = RunEvidence(), RunEvidence()
    found = [whole.update(each)[0] for each in values]
    assert str([part.update(each)[0] for each in values[:350]]) == str(found[:350])  # NaN equals NaN
    later = RunEvidence(first_step=150)
    assert [later.update(each)[0].is_evaluated for each in values].index(True) == 350


def test_missing_measurements_are_not_broken():
    """Metrics that are absent at a step are missing; a loss that is not finite is broken."""
    evidence = RunEvidence()
    for step in range(30):
        values = {"loss": 2.0, "largest_losses": 5.0, "grad_norm": 1.0, "update_ratio": 1e-3}
        values |= {"largest_losses": math.nan, "update_ratio": math.nan} if step >= 20 else {}
        values |= {"loss": math.inf} if step == 29 else {}
        found = {reading.watched.name for reading in evidence.update(monitors(step, **values)) if reading.is_broken}
        assert found == ({"loss"} if step == 29 else set())
    coords = {"layer": np.array([0]), "head": np.arange(2), "term": TERMS}
    for step in range(9, 60, 10):
        values = {"attention_logit_max": np.ones((1, 2)), "effective_rank": np.full((1, 2, 5), 2.0)}
        if step == 39:  # after a resume the window is not full
            values["effective_rank"] = np.full((1, 2, 5), np.nan)
        readings = evidence.update(Observation(step, "attention", values, coords))
        assert not any(reading.is_broken for reading in readings)


def sums(values, *, least_scale=0.01):
    values = np.asarray(values, dtype=float)
    found = CumulativeSum(np.array([least_scale]))
    return np.array([found.update(np.array([value]))[0] for value in values]), found


def test_against_a_direct_computation():
    values = np.random.default_rng(0).normal(size=400)
    values[250:260] += 5
    mean, variance, total, expected = 0.0, 0.0, 0.0, []
    for n, value in enumerate(values, start=1):
        scale = max(variance**0.5, 0.01)
        if n > 20:
            total = min(max(0.0, total + min((value - mean) / scale, 8) - 2), 100)
        step = value - mean if n <= 20 else min(max(value - mean, -4 * scale), 4 * scale)
        share = 1 / min(n, 200)
        mean, variance = mean + share * step, (1 - share) * (variance + share * step**2)
        expected.append(total)
    found, _ = sums(values)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_a_jump_accumulates_from_its_first_step_and_ends_soon():
    noise = np.random.default_rng(1).normal(size=500)
    found, last = sums(noise + 5.0 * ((np.arange(500) >= 300) & (np.arange(500) < 320)))
    assert found[:300].max() < 5
    assert found[305] > 10
    assert found[380:].max() < 5
    assert last.n_since[0] < 60
    assert sums(-noise - 5.0 * (np.arange(500) >= 300))[0][300:].max() < 5  # falls do not count


def test_drift_does_not_accumulate():
    noise = np.random.default_rng(2).normal(size=2000)
    assert sums(noise + np.arange(2000) / 500)[0].max() < 8


def test_a_constant_has_the_least_scale_and_missing_numbers_change_nothing():
    found, _ = sums([1.0] * 100 + [1.3])
    assert found[:100].max() == 0
    assert found[100] == 6  # counted as eight deviations
    values = np.random.default_rng(3).normal(size=100)
    with_gaps = np.insert(values, [40, 40, 70], np.nan)
    assert sums(with_gaps)[0][-1] == pytest.approx(sums(values)[0][-1])


def test_after_a_restart_the_spread_is_known_and_the_level_is_learned_again():
    found, noise = CumulativeSum(np.array([0.01])), np.random.default_rng(4)
    for value in noise.normal(size=100):
        found.update(np.array([value]))
    found.update(np.array([9.0]))
    assert found.value[0] > 4
    found.restart()
    assert found.value[0] == 0
    assert max(found.update(np.array([9.0 + value]))[0] for value in noise.normal(size=100)) < 4
    assert found.update(np.array([18.0]))[0] > 4


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


@pytest.mark.slow
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


def curves(n, seed):
    """Return healthy losses over all steps: noise and a walk about a power law, noise about a logarithm of time."""
    random, step = np.random.default_rng(seed), np.arange(n)
    noise, walk, level = random.normal(size=n), np.zeros(n), 0.0
    for i in range(n):
        level = 0.98 * level + 0.2 * random.normal()
        walk[i] = level
    power = 1 + 3 * (1 + step / 50) ** -0.5
    return {
        "noise": power + 0.08 * noise,
        "walk": power + 0.1 * walk,
        "logarithm": 5 - 0.45 * np.log1p(step) + 0.03 * noise,
    }


@pytest.mark.parametrize("curve", ["noise", "walk", "logarithm"])
@pytest.mark.parametrize(("first", "then"), [(3, 12), (12, 3)])
def test_another_cadence_raises_no_alarm_by_itself_and_a_jump_after_it_is_found(curve, first, then):
    """Updates are examined at irregular intervals, in the second half four times as often, or a fourth."""
    random, losses = np.random.default_rng(0), curves(6000, 0)[curve]
    healthy, harmed, step = wb.Alarms(), wb.Alarms(), 0
    while step < 6000:
        norm = math.exp(0.25 * random.normal())
        for alarms, jump in ((healthy, 0), (harmed, 3 * (step >= 5000))):
            alarms.observe(monitors(step, loss=losses[step] + jump, grad_norm=norm, learning_rate=1e-3))
        step += int((first if step < 3000 else then) * random.choice([1, 1.5, 2]))
    assert not healthy.raised
    assert "loss" in {alarm.signal for alarm in harmed.raised}
    assert all(5000 <= alarm.step < 5100 for alarm in harmed.raised[:1])
