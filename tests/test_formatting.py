"""Formatting of numbers, percentages, names, sizes and durations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.formatting import (
    clipped,
    compact,
    duration,
    file_size,
    fine_percent,
    fixed,
    percent,
    short,
    units_in_words,
    with_interval,
)


@given(fraction=st.floats(0, 1))
def test_only_exact_values_are_0_and_100_percent(fraction):
    assert (percent(fraction) == "0 %") == (fraction == 0)
    assert (percent(fraction) == "100 %") == (fraction == 1)


@given(st.floats(-1e12, 1e12))
def test_three_digits_are_within_half_a_unit_of_the_third(value):
    assert float(short(value).replace(",", "")) == pytest.approx(value, rel=6e-3)
    assert float(compact(value)) == pytest.approx(value, rel=6e-2, abs=1e-3)


def test_unknown_values_are_a_dash():
    assert [percent(math.nan), percent(None), fixed(None), fixed(math.nan), compact(math.nan)] == ["–"] * 5
    assert [fixed(math.inf), compact(-math.inf), fine_percent(math.nan)] == ["∞", "-∞", "not finite"]


def test_large_errors_have_all_their_digits_and_counts_a_plural():
    assert [fine_percent(0.0312), fine_percent(9.5), fine_percent(-847.684)] == ["3.1 %", "950 %", "-84,768 %"]
    assert [units_in_words("measurement", n) for n in (1, 10)] == ["measurement", "measurements"]


def test_an_interval_needs_both_ends():
    assert with_interval(0.5, 0.25, 0.75) == "0.500 [0.250, 0.750]"
    assert with_interval(0.5, math.nan, 0.75, write=percent) == "50 %"


def test_long_names_lose_their_end_or_their_middle():
    assert clipped("abcdef", 6) == "abcdef"
    assert clipped("abcdefgh", 6) == "abcde…"
    assert clipped("abcdefgh", 6, keep_end=True) == "abc…gh"


def test_file_sizes_and_durations():
    assert [file_size(3), file_size(2_345_678)] == ["1 kB", "2.3 MB"]
    assert [duration(90), duration(7200), duration(50 * 3600)] == ["2 min", "2 h", "2 days"]
