"""Evaluated steps of a run, and the place of a change."""

import math

import numpy as np
import pytest

from workbench.callbacks.alarms import WATCHED
from workbench.callbacks.alarms.run_evidence import RunEvidence
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


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1e-3 * min(1, (i + 1) / 300) for i in range(500)], range(200, 500)),  # a warm-up
        ([1e-3] * 300 + [3e-3] * 200, [*range(200, 300), *range(399, 500)]),  # at once
    ],
)
def test_losses_are_evaluated_while_the_rate_rises_slowly(rates, expected):
    assert evaluated(rates, "loss") == list(expected)


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


def test_every_watched_signal_has_a_description():
    assert len({watched.name for watched in WATCHED}) == len(WATCHED)
    assert all(watched.points_to and watched.least_scale > 0 for watched in WATCHED)


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


def test_a_loss_that_is_logged_now_and_then_is_not_broken():
    evidence = RunEvidence()
    for step in range(300):
        found, *_ = evidence.update(monitors(step, loss=2.0 if step % 10 == 0 else math.nan))
        assert not found.is_broken
