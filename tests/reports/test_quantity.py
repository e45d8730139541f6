"""References to numbers: their location and text, and errors if they are missing."""

import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.about import about, says
from tests.reports import made_trees
from workbench.errors import SchemaError
from workbench.formatting import band_in_words, listed, number_in_words
from workbench.reports.document import Numbers, _anchor

PERCENT = "\N{NO-BREAK SPACE}%"


@pytest.fixture(scope="module")
def numbers():
    return Numbers(made_trees.assessment())


def test_a_value_has_its_location(numbers):
    found = numbers.value("flow", "signal_gain", layer=1)
    assert (found.value, found.text, found.where) == (1.3, "1.3", "/flow signal_gain, layer 1")
    assert found.anchor == "n-flow-signal_gain-layer-1"
    assert found.meaning == "signal gain"


def test_a_criterion_and_its_source_are_the_same_quantity(numbers):
    criterion = numbers.criterion("gradient_gain_worst")
    assert (criterion.band, criterion.state, criterion.where) == (
        "0.6 to 1.8",
        "failing",
        "/flow gradient_gain, layer 2",
    )
    assert numbers.value("flow", "gradient_gain", layer=2) == criterion
    assert numbers.value("flow", "gradient_gain", layer=-1) == criterion
    assert numbers.value("pilot", "rate_over_edge") == numbers.criterion("rate_over_edge")


def test_counts_are_those_of_the_table(numbers):
    states = numbers.texts("criteria", "state")
    for state in set(states):
        assert numbers.count("criteria", "state", state, meaning="").value == states.count(state)


@pytest.mark.parametrize(
    ("path", "variable", "selection", "check"),
    [
        ("nowhere", "x", {}, says("which its report cites; create the tree again.")),
        ("flow", "nothing", {}, says("at /flow for its report; create the tree again.")),
        ("flow", "signal_gain", {}, says("signal_gain is not a single value; select along layer")),
        ("flow", "signal_gain", {"layer": 9}, says("signal_gain has no layer")),
        ("flow", "signal_gain", {"head": 0}, says("signal_gain has no dimension")),
    ],
)
def test_missing_values_are_rejected(numbers, path, variable, selection, check):
    with pytest.raises(SchemaError, check=check):
        numbers.value(path, variable, **selection)


def test_unknown_criteria_and_attributes_are_rejected(numbers):
    with pytest.raises(SchemaError, check=about("criterion", "luck")):
        numbers.criterion("luck")
    with pytest.raises(SchemaError, check=says("for its report; create the tree again.")):
        numbers.attribute("mood")


def test_a_selection_that_is_not_json_is_rejected():
    tree = made_trees.assessment()
    data = tree["criteria"].to_dataset()
    data["selection"] = data["selection"].astype(object)
    data["selection"][0] = "layer 2"
    tree["criteria"] = xr.DataTree(data)
    with pytest.raises(SchemaError, check=says("expected JSON of dimension and index.")):
        Numbers(tree)


@pytest.mark.slow
@pytest.mark.medium
@given(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), min_size=2, max_size=6, unique=True))
def test_anchors_are_valid_for_links(parts):
    for pair in parts:
        anchor = _anchor(*pair)
        assert anchor.startswith("n-")
        assert all(sign.isascii() and (sign.isalnum() or sign in "-_") for sign in anchor)


@pytest.mark.parametrize(
    ("value", "is_share", "words"),
    [
        (0.0021, False, "0.0021"), (3.2e-5, False, "3.2e-5"), (1.5e9, False, "1.5 billion"),
        (124_439_808, False, "124 million"), (math.inf, False, "infinite"), (0.0, True, f"0{PERCENT}"),
        (10_432, False, "10,432"), (2.0, False, "2"), (-0.4, False, "-0.4"), (6.02e23, False, "6.02e23"),
        (math.nan, False, "not measured"), (True, False, "yes"), ("at risk", True, "at risk"),
        (0.62, True, f"62{PERCENT}"), (0.071, True, f"7.1{PERCENT}"), (0.0002, True, f"below 0.1{PERCENT}"),
        (1.0, True, f"100{PERCENT}"), (0.9996, True, f"above 99.9{PERCENT}"), (0.994, True, f"99.4{PERCENT}"),
        (np.float32(0.5), False, "0.5"), (1 + 2j, False, "1 + 2i"),
    ],
)  # fmt: skip
def test_numbers_in_words(value, is_share, words):
    assert number_in_words(value, is_fraction=is_share) == words


@given(st.floats(1e-3, 1 - 1e-3))
def test_percent_is_near_the_fraction(share):
    assert float(number_in_words(share, is_fraction=True).removesuffix(PERCENT)) == pytest.approx(100 * share, abs=0.51)


@given(st.floats(1e-12, 1e12))
def test_three_digits_are_kept(value):
    words = number_in_words(value)
    for scale, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if words.endswith(word):
            words = str(float(words.removesuffix(word)) * scale)
    assert float(words.replace(",", "")) == pytest.approx(value, rel=6e-3)


def test_bands_and_lists():
    assert band_in_words(0.2, 1.5) == "0.2 to 1.5"
    assert band_in_words(math.nan, 1.5) == "at most 1.5"
    assert band_in_words(0.3, math.inf, is_fraction=True) == f"at least 30{PERCENT}"
    assert band_in_words(math.nan, math.nan) == "none known"
    assert [listed([]), listed("a"), listed("ab"), listed("abc")] == ["", "a", "a and b", "a, b and c"]
