"""Tests of trends: agreement with SciPy and textbook formulas, coverage, and reasons why none is supported."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ladder_trend import along_trend, fit_trend, line_through
from scipy import stats

WIDTHS, DEPTHS = np.array([16, 32, 64]), np.array([4, 4, 4])


def power_law(exponent, *, scatter, n_seeds=3, widths=WIDTHS, depths=None, depth_exponent=0.0, seed=0):
    """Return values c width^p depth^q with log-normal scatter, shape (rung, seed)."""
    depths = np.full(len(widths), 4) if depths is None else depths
    noise = np.random.default_rng(seed).normal(scale=scatter, size=(len(widths), n_seeds))
    return 3.0 * (widths**exponent * depths**depth_exponent)[:, None] * np.exp(noise)


@given(st.floats(-2, 2), st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_a_known_exponent_is_found_and_extrapolated(exponent, seed):
    trend = fit_trend(power_law(exponent, scatter=1e-6, seed=seed), WIDTHS, DEPTHS, (256, 4))
    assert trend.width.slope == pytest.approx(exponent, abs=1e-4)
    assert trend.at_target == pytest.approx(3 * 256**exponent, rel=1e-4)
    assert trend.is_supported
    assert math.isnan(trend.depth.slope)


def test_slope_and_interval_agree_with_scipy():
    values = power_law(-0.6, scatter=0.3)
    x, y = np.repeat(np.log(WIDTHS), 3), np.log(values).ravel()
    expected = stats.linregress(x, y)
    half = stats.t.ppf(0.975, 7) * expected.stderr
    line = line_through(np.log(WIDTHS), np.log(values))
    np.testing.assert_allclose(
        [line.slope, line.slope_low, line.slope_high], expected.slope + half * np.array([0, -1, 1])
    )


def test_the_prediction_interval_agrees_with_the_textbook_formula():
    values = power_law(-0.6, scatter=0.3)
    x, y = np.repeat(np.log(WIDTHS), 3), np.log(values).ravel()
    line = stats.linregress(x, y)
    s = np.sqrt(np.sum((y - line.intercept - line.slope * x) ** 2) / 7)
    goal = math.log(256)
    half = stats.t.ppf(0.975, 7) * s * math.sqrt(1 / 3 + 1 / 9 + (goal - x.mean()) ** 2 / np.sum((x - x.mean()) ** 2))
    middle = line.intercept + line.slope * goal
    trend = fit_trend(values, WIDTHS, DEPTHS, (256, 4))
    np.testing.assert_allclose(
        [trend.at_target, trend.at_target_low, trend.at_target_high], np.exp([middle, middle - half, middle + half])
    )


@pytest.mark.medium
def test_intervals_have_their_nominal_coverage():
    inside = 0
    for seed in range(400):
        trend = fit_trend(power_law(-0.5, scatter=0.2, seed=seed), WIDTHS, DEPTHS, (256, 4), level=0.9)
        truth = 3 * 256**-0.5 * np.exp(np.random.default_rng(10_000 + seed).normal(scale=0.2, size=3).mean())
        inside += trend.at_target_low < truth < trend.at_target_high
    assert 0.86 < inside / 400 < 0.94


def test_width_and_depth_act_independently():
    widths, depths = np.array([16, 32, 64, 64, 64]), np.array([2, 2, 2, 4, 8])
    values = power_law(-0.5, scatter=1e-3, widths=widths, depths=depths, depth_exponent=-1.0)
    trend = fit_trend(values, widths, depths, (256, 32))
    assert (trend.width.slope, trend.depth.slope) == (pytest.approx(-0.5, abs=0.01), pytest.approx(-1.0, abs=0.01))
    assert trend.at_target == pytest.approx(3 * 256**-0.5 / 32, rel=0.05)
    assert trend.is_supported


def test_fractions_are_clipped_to_their_bounds():
    values = np.array([0.2, 0.5, 0.8])[:, None] + np.array([0, 1e-3])
    trend = fit_trend(values, WIDTHS, DEPTHS, (256, 4), scale="linear", bounds=(0.0, 1.0))
    assert trend.width.slope == pytest.approx(0.3 / math.log(2), rel=1e-6)
    assert trend.at_target == trend.at_target_high == 1.0


def test_the_curve_passes_through_the_prediction():
    values = power_law(-0.6, scatter=0.2)
    trend = fit_trend(values, WIDTHS, DEPTHS, (256, 4))
    curve = along_trend(values, WIDTHS, DEPTHS, np.array([[16, 4], [256, 4]]))
    np.testing.assert_allclose(curve[:, 1], [trend.at_target, trend.at_target_low, trend.at_target_high])
    widths = np.log(curve[2] / curve[1])
    assert widths[0] < widths[1]


@pytest.mark.parametrize(
    ("values", "widths", "depths", "target", "reason"),
    [
        (power_law(-0.5, scatter=0.01), WIDTHS, DEPTHS, (257, 4), "The target width differs"),
        (power_law(-0.5, scatter=0.01), WIDTHS, DEPTHS, (2, 4), "The target width differs"),
        (power_law(-0.5, scatter=0.01), WIDTHS, DEPTHS, (128, 8), "The ladder has 1 depth, but"),
        (power_law(-0.5, scatter=0.01)[:2], WIDTHS[:2], DEPTHS[:2], (64, 4), "The ladder has 2 widths, but"),
        (power_law(-0.5, scatter=1.0), WIDTHS, DEPTHS, (256, 4), "The 95% interval at the target spans a factor of"),
        (power_law(-0.5, scatter=0.1, n_seeds=1)[:2], WIDTHS[:2], DEPTHS[:2], (32, 4), "There are too few runs"),
    ],
)  # fmt: skip
def test_an_unsupported_prediction_has_a_reason(values, widths, depths, target, reason):
    trend = fit_trend(values, widths, depths, target)
    assert not trend.is_supported
    assert trend.reason.startswith(reason)


def test_a_bend_is_detected():
    widths = np.array([8, 16, 32, 64])
    bent = np.exp(-0.3 * np.log(widths / 8.0) ** 2)[:, None] * np.exp(
        np.random.default_rng(0).normal(scale=0.05, size=(4, 3))
    )
    trend = fit_trend(bent, widths, np.full(4, 4), (256, 4))
    assert trend.reason.startswith(
        "The trend bends with the width, which would change the value at the target by a factor"
    )
    straight = fit_trend(power_law(-0.5, scatter=0.05, widths=widths), widths, np.full(4, 4), (256, 4))
    assert straight.is_supported


def test_a_bend_extends_the_interval_to_the_value_of_a_parabola():
    widths = np.array([8, 16, 32, 64])
    noise = np.random.default_rng(0).normal(scale=0.003, size=(4, 3))
    x = np.log(widths / 8.0)
    bent = np.exp((-0.5 * x - 0.02 * x**2)[:, None] + noise)
    trend = fit_trend(bent, widths, np.full(4, 4), (256, 4))
    truth = math.exp(-0.5 * math.log(32) - 0.02 * math.log(32) ** 2)
    assert trend.at_target_low == pytest.approx(truth, rel=0.05)
    assert trend.at_target > 1.1 * truth
    assert trend.is_supported


def test_some_quantities_are_not_predicted_beyond_the_ladder():
    trend = fit_trend(power_law(-0.5, scatter=0.01), WIDTHS, DEPTHS, (65, 4), largest_reach=1)
    assert trend.reason.startswith(
        "The target width lies beyond the ladder, where trends of this quantity did not hold"
    )
    assert fit_trend(power_law(-0.5, scatter=0.01), WIDTHS, DEPTHS, (48, 4), largest_reach=1).is_supported


def test_a_wide_interval_of_a_fraction_is_too_uncertain():
    values = np.array([[0.2, 0.6], [0.5, 0.1], [0.3, 0.7]])
    trend = fit_trend(values, WIDTHS, DEPTHS, (256, 4), scale="linear", bounds=(0.0, 1.0))
    assert trend.reason.startswith("The 95% interval at the target has a width of")


@pytest.mark.parametrize("outside", [math.inf, 0.0])
def test_an_edge_outside_the_range_supports_no_prediction(outside):
    values = power_law(-0.5, scatter=0.01)
    values[0, 1] = outside
    trend = fit_trend(values, WIDTHS, DEPTHS, (256, 4))
    assert trend.reason == "It lies outside the range that was tried on 1 of 3 rungs."
    assert math.isfinite(trend.at_target)
    nowhere = fit_trend(np.full((3, 2), outside), WIDTHS, DEPTHS, (256, 4))
    assert nowhere.reason == "It lies outside the range that was tried on most rungs."
    assert math.isnan(nowhere.at_target)


def test_a_quantity_that_was_not_measured_is_not_predicted():
    trend = fit_trend(np.full((3, 2), np.nan), WIDTHS, DEPTHS, (256, 4))
    assert trend.reason == "It was not measured on most rungs."
    assert np.isnan(along_trend(np.full((3, 2), np.nan), WIDTHS, DEPTHS, np.array([[256, 4]]))).all()
