"""Evidence of changes relative to the own past: known changes, invariances, and false alarms of noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.callbacks.alarms.own_past import WINDOWS, OwnPast, contrasts


def evidence(values, *, least_scale=0.01, is_noise=True):
    values = np.asarray(values, dtype=float)
    values = values[:, None] if values.ndim == 1 else values
    n = values.shape[1]
    past = OwnPast(np.full(n, least_scale), is_noise=np.full(n, is_noise))
    found = [past.update(row) for row in values]
    return np.array([each.rise for each in found]), np.array([each.fall for each in found]), found


@pytest.mark.parametrize("time", [9, 40, 300, 1_152, 5_000, 10**6])
def test_contrasts_remove_a_line_in_the_logarithm_of_time(time):
    weights, per_unit = contrasts(time)
    lags = np.arange(weights.shape[1])[::-1]
    at = np.log(np.maximum(time - lags, 1))
    is_known = np.abs(weights).sum(1) > 0
    assert is_known[0] or time < 9
    assert is_known.all() == (time >= 9 * WINDOWS[-1])
    np.testing.assert_allclose(weights[is_known] @ np.ones(len(at)), 0, atol=1e-9)
    np.testing.assert_allclose(weights[is_known] @ at, 0, atol=1e-9 * np.abs(at).max() * np.sqrt(len(at)))
    np.testing.assert_allclose((weights[is_known] ** 2).sum(1), 1, rtol=1e-9)
    for row, window in enumerate(WINDOWS):
        if is_known[row]:
            assert weights[row] @ (lags < window) == pytest.approx(per_unit[row, 0])


def test_a_known_change_is_found_in_time():
    random = np.random.default_rng(1)
    noise = random.normal(size=1500)
    for size, within in [(8.0, 0), (3.0, 14), (2.0, 40)]:
        values = noise + size * (np.arange(1500) >= 1000)
        rise, fall, _ = evidence(values)
        first = int(np.flatnonzero(rise[1000:, 0] > 7)[0])
        assert first <= within
        assert np.nanmax(rise[200:1000]) < 6
        rise, fall, _ = evidence(-values)
        assert int(np.flatnonzero(fall[1000:, 0] > 7)[0]) == first


def test_the_window_with_the_strongest_evidence_is_as_long_as_the_change():
    random = np.random.default_rng(2)
    values = random.normal(size=1300) + 2.0 * (np.arange(1300) >= 1200)
    found = evidence(values)[2]
    assert int(found[1215].rise_window[0]) in (8, 16, 32)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    offset=st.floats(-1e3, 1e3), slope=st.floats(-5, 5), scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_neither_level_nor_trend_nor_unit_matters(offset, slope, scale, seed):
    noise = np.random.default_rng(seed).normal(size=250)
    rise, _, _ = evidence(noise, least_scale=1e-9)
    # In the first 300 measurements the weights are exact.
    drifting = scale * (noise + slope * np.log(np.arange(1, 251))) + offset
    again, _, _ = evidence(drifting, least_scale=1e-9 * scale)
    np.testing.assert_allclose(again[10:], rise[10:], atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-170, 1.0, 1e70, 1e150])
@pytest.mark.parametrize("jump", [1e30, 1e80])
def test_evidence_is_finite_for_numbers_of_any_size(scale, jump):
    values = scale * np.random.default_rng(4).normal(size=200)
    values[100] = scale * jump
    rise, fall, _ = evidence(values, least_scale=1e-200)
    assert np.isfinite(rise[90:]).all()
    assert np.isfinite(fall[90:]).all()


def test_a_series_that_begins_late_or_has_gaps_is_not_a_jump():
    random = np.random.default_rng(3)
    values = 50 + random.normal(size=(600, 2))
    values[:300, 0] = np.nan
    values[400:420, 1] = np.nan
    rise, fall, _ = evidence(values)
    assert np.isnan(rise[300:309, 0]).all()
    assert np.nanmax(rise) < 6
    assert np.nanmax(fall) < 6
    assert not np.isnan(rise[-1]).any()


def test_noise_below_the_least_scale_is_no_evidence():
    values = np.ones(500)
    values[300:] += 1e-4 * np.random.default_rng(4).normal(size=200)
    rise, fall, _ = evidence(values, least_scale=0.01)
    assert np.nanmax(rise) < 0.5
    assert np.nanmax(fall) < 0.5


def test_after_a_restart_the_spread_is_still_known():
    random = np.random.default_rng(5)
    past = OwnPast(np.array([0.01]), is_noise=np.array([True]))
    for value in random.normal(size=400):
        past.update(np.array([value]))
    past.restart()
    found = [past.update(np.array([value])).rise[0] for value in 100 + random.normal(size=20)]
    assert np.isnan(found[:8]).all()
    assert np.nanmax(found) < 4  # the new level is not a change
    assert past.update(np.array([115.0])).rise[0] > 6


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["normal", "heavy", "correlated"])
def test_noise_reaches_a_p_value_about_as_often_as_expected(kind):
    random = np.random.default_rng(6)
    shape = 2000, 40
    values = random.standard_t(4, size=shape) if kind == "heavy" else random.normal(size=shape)
    if kind == "correlated":
        for i in range(1, len(values)):
            values[i] += 0.7 * values[i - 1]
    rise, _, _ = evidence(values, is_noise=kind != "correlated")
    # 68,000 measurements, of which neighbors are correlated; p values are less accurate for heavy tails.
    assert np.nanmean(rise[300:] > 2) < 0.01
    assert np.nanmean(rise[300:] > 3) < 0.002
    assert np.nanmax(rise[300:]) < (9 if kind == "heavy" else 6)
