"""States and confidences, compared with the normal distribution that they are based on."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from workbench.assessment.verdict import CriterionReading, HealthyBand, band_of, evaluate

BAND = HealthyBand(low=1.0, high=4.0, failing_low=0.25, failing_high=16.0)


@pytest.mark.parametrize(
    ("value", "state"),
    [(0.2, "failing"), (0.5, "at risk"), (1.0, "healthy"), (4.0, "healthy"), (8.0, "at risk"), (17.0, "failing")],
)
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_an_exact_value_has_the_state_of_its_range_with_confidence_1(value, state, scale):
    assert evaluate(CriterionReading(value), BAND, scale=scale) == (state, 1.0)


@given(st.floats(0.3, 15.0), st.floats(0.01, 5.0))
def test_confidence_is_the_probability_of_the_state(value, spread):
    state, confidence = evaluate(CriterionReading(value, spread), BAND)
    draws = norm.ppf((np.arange(20_000) + 0.5) / 20_000, value, spread)
    inside = (draws >= BAND.low) & (draws <= BAND.high)
    within = (draws >= BAND.failing_low) & (draws <= BAND.failing_high)
    fraction = {"healthy": inside, "at risk": within & ~inside, "failing": ~within}[state].mean()
    assert confidence == pytest.approx(fraction, abs=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fails_with_confidence_1(value):
    assert evaluate(CriterionReading(value), BAND) == ("failing", 1.0)


def test_zero_lies_below_every_logarithm():
    assert evaluate(CriterionReading(0.0, 0.1), BAND, scale="log")[0] == "failing"
    assert evaluate(CriterionReading(0.0), HealthyBand(high=2.0), scale="log")[0] == "healthy"


def test_few_reference_runs_limit_the_confidence():
    _, confidence = evaluate(CriterionReading(2.0), HealthyBand(low=1.0, high=4.0, n_reference=9))
    assert confidence == pytest.approx(0.8)  # 1 - 2 / (9 + 1)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_a_band_contains_its_values_and_fails_only_beyond_it(values):
    band = band_of(values, scale="linear")
    assert band.n_reference == len(values)
    assert band.failing_low < band.low <= min(values)
    assert max(values) <= band.high < band.failing_high


def test_a_logarithmic_band_ignores_values_without_a_logarithm():
    band = band_of([0.0, 1.0, 100.0, math.nan], scale="log", margin=0.5)
    assert (band.low, band.high) == pytest.approx((0.1, 1000.0))
    assert band.n_reference == 2


def test_a_band_of_fractions_lies_between_0_and_1():
    band = band_of([0.5, 0.99], scale="share")
    assert 0 < band.failing_low < band.low < 0.5
    assert 0.99 < band.high < 1
    assert band.failing_high == math.inf  # no fraction is that large


def test_fractions_that_reach_an_end_leave_that_side_open():
    assert band_of([0.2, 1.0], scale="share").high == math.inf
    assert band_of([0.0, 0.5], scale="share").low == -math.inf
