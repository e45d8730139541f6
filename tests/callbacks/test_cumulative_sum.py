"""Cumulative sums: direct computation, known jumps, drift, and missing numbers."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.callbacks.alarms.run_evidence import CumulativeSum


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
