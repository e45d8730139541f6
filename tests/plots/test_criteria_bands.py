"""Criteria against their bands, without rendering: positions and styles of marks, and their texts."""

import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, matplotlib_axes, words
from workbench.errors import OptionError, SchemaError
from workbench.plots.finding_figures import criteria_bands, place_in_band

pytestmark = pytest.mark.render

NAN = math.nan


@pytest.fixture
def criteria():
    rows = [
        ("in the middle", 2.0, 1.0, 3.0, "healthy"),
        ("above its limit", 0.9, NAN, 0.5, "at risk"),
        ("below its limit", 0.1, 0.4, NAN, "failing"),
        ("far above", 1e9, 1.0, 2.0, "failing"),
        ("not seen", NAN, 0.0, 1.0, "not measured"),
        ("without a band", 7.0, NAN, NAN, "not measured"),
    ]
    title, value, low, high, state = zip(*rows, strict=True)
    numbers = {"value": value, "low": low, "high": high}
    data = {name: ("criterion", np.array(column, float)) for name, column in numbers.items()}
    data |= {name: ("criterion", list(column)) for name, column in (("title", title), ("state", state))}
    return xr.Dataset(data | {"units": ("criterion", ["1"] * 5 + ["s"])})


def test_marks_are_at_their_positions_relative_to_the_bands(criteria):
    (panel,) = criteria_bands(criteria)
    marks = {
        str(name): (float(x), float(y))
        for points in elements(panel, "Points")
        for name, x, y in zip(points["name"], points["place"], points["criterion"], strict=True)
    }
    assert len(marks) == 6
    assert [marks[str(title)][1] for title in criteria["title"].values] == [0, -1, -2, -3, -4, -5]
    assert marks["in the middle"][0] == 0.5
    assert marks["above its limit"][0] > 1
    assert marks["below its limit"][0] < 0
    assert marks["far above"][0] == 2.6


def test_every_value_and_every_missing_value_has_a_text(criteria):
    (panel,) = criteria_bands(criteria)
    texts = {str(text) for labels in elements(panel, "Labels") for text in labels["text"]}
    assert {"2  (1 to 3)", "0.9  (≤ 0.5)", "0.1  (≥ 0.4)", "not measured", "7 s  (no band)", "›"} <= texts


def test_the_longest_text_fits_next_to_the_axis(criteria):
    criteria["units"][1] = "of what the batch's sampling noise alone would do to it"
    (shown,) = bokeh_panels(criteria_bands(criteria))
    low, high = shown.x_range.start, shown.x_range.end
    (panel,) = criteria_bands(criteria)
    texts = next(part for part in elements(panel, "Labels") if len(part["text"]) == 6)
    begins = (float(texts["place"][0]) - low) / (high - low) * shown.frame_width
    assert begins + 6 * max(len(text) for text in texts["text"]) < shown.frame_width
    assert begins == pytest.approx(372, abs=8)  # the length of the axis does not depend on the texts


@pytest.mark.parametrize("n_rows", [1, 80])
def test_the_note_overlaps_neither_the_title_nor_the_rows_at_any_height(criteria, n_rows):
    many = criteria.isel(criterion=np.zeros(n_rows, int))
    (frame,) = matplotlib_axes(criteria_bands(many, backend="matplotlib"))
    note = next(text for text in frame.texts if text.get_text().startswith("shaded"))
    title = frame.title if frame.title.get_text() else frame._left_title
    assert note.get_window_extent().y1 < title.get_window_extent().y0
    assert note.get_window_extent().y0 > frame.transData.transform((0, 0.5))[1]
    (panel,) = criteria_bands(many)
    assert any(word.startswith("shaded: healthy band") for word in words(panel))


def test_the_legend_has_a_hollow_mark_only_for_a_state_without_filled_marks(criteria):
    criteria["state"][5] = "healthy"
    (frame,) = matplotlib_axes(criteria_bands(criteria, backend="matplotlib"))
    legend = frame.get_legend()
    faces = {
        text.get_text(): handle.get_markerfacecolor()
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }
    assert faces["not measured"] == "none"
    assert faces["healthy"] != "none"


def test_states_are_distinguished_by_shape(criteria):
    from workbench.plots.finding_figures import STATE_MARKS

    shown = {state: marker for state, (_, marker) in STATE_MARKS.items() if state != "not measured"}
    assert len(set(shown.values())) == len(shown) == 3


@given(st.floats(-1e6, 1e6), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_a_mark_is_inside_exactly_if_the_value_is(value, low, width):
    high = low + width
    inside = low <= value <= high
    if min(abs(value - low), abs(value - high)) > 1e-9 * max(1, abs(value)):
        assert (0 <= place_in_band(value, low, high) <= 1) == inside


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1e-3, 1e3))
def test_larger_values_are_further_right(a, b, limit):
    a, b = sorted((a, b))
    for band in ((limit, 3 * limit), (limit, 300 * limit), (NAN, limit), (limit, NAN)):
        assert place_in_band(a, *band) <= place_in_band(b, *band) + 1e-12


def test_invalid_tables_and_backends_are_rejected(criteria):
    with pytest.raises(SchemaError, check=says("The table of criteria lacks state; create it with")):
        criteria_bands(criteria.drop_vars("state"))
    with pytest.raises(OptionError, check=about("backend", "paint", ("bokeh", "matplotlib"))):
        criteria_bands(criteria, backend="paint")
