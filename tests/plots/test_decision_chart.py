"""The decision chart without rendering: zones, points, names that cover nothing, and notes on omitted points."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, ends, legend, note, places, words
from workbench.errors import OptionError, SchemaError
from workbench.plots.decision_chart_figure import Box, decision_chart, place_labels
from workbench.plots.outcome_colors import CONVERGED, DIVERGED

pytestmark = pytest.mark.render

NAN = np.nan


@pytest.fixture
def models():
    return xr.Dataset(
        {
            "near_unit_mass": ("model", [0.1, 0.4, 0.8, 0.9, NAN]),
            "eigenvector_condition": ("model", [10.0, 20.0, 30.0, np.inf, 5.0]),
            "has_diverged": ("model", [0.0, 1.0, 0.0, 1.0, 1.0]),
        },
        {"model": ["Pre-LN", "MoE", "Post-LN", "No-Norm", "lost"]},
    )


def zones_of(panel):
    """Return the zones as (left, bottom, right, top)."""
    return [tuple(ends(part)[0].tolist()) for part in elements(panel, "Rectangles")]


def test_without_numbers_for_kappa_the_zones_are_those_of_the_mass(models):
    (panel,) = figure = decision_chart(models)
    assert [(left, right) for left, _, right, _ in zones_of(panel)] == [(-0.03, 0.3), (0.3, 0.5), (0.5, 1.03)]
    (frame,) = bokeh_panels(figure)
    assert "zones: Fig. 7" in note(frame)
    assert "the paper states no threshold for κ; only M decides" in note(frame)
    fills = [part.glyph.fill_color for part in frame.renderers if type(part.glyph).__name__ == "Quad"]
    assert (fills[0], fills[2]) == (CONVERGED, DIVERGED)


def test_the_zones_fill_the_view_and_follow_the_rule(models):
    limits = wb.published.decision_chart(modest_condition=15, large_condition=50)
    (panel,) = figure = decision_chart(models, limits=limits)
    boxes = zones_of(panel)
    assert len(boxes) == 9
    (frame,) = bokeh_panels(figure)
    fills = [part.glyph.fill_color for part in frame.renderers if type(part.glyph).__name__ == "Quad"]
    random = np.random.default_rng(0)
    mass, condition = random.random(300), np.exp(random.uniform(0, np.log(frame.y_range.end), 300))
    zone_of = {CONVERGED: "proceed", DIVERGED: "high risk"}
    for m, k, expected in zip(mass, condition, wb.published.decision_zones(mass, condition, chart=limits), strict=True):
        inside = [
            zone_of.get(fill, "caution")
            for (left, bottom, right, top), fill in zip(boxes, fills, strict=True)
            if left <= m < right and bottom <= k < top
        ]
        assert inside == [expected]
    assert "κ is moderate below 15, large above 50 (our thresholds; the paper states none)" in note(frame)


def test_points_are_at_mass_and_kappa_with_the_style_of_their_outcome(models):
    (panel,) = figure = decision_chart(models)
    diverged, converged = elements(panel, "Points")
    np.testing.assert_allclose(places(converged), [[0.1, 10], [0.8, 30]])
    np.testing.assert_allclose(places(diverged), [[0.4, 20], [0.9, 100]])  # the infinite value is at the top
    assert diverged["name"].tolist() == ["MoE", "No-Norm"]
    (frame,) = bokeh_panels(figure)
    assert legend(frame) == {"converged": {CONVERGED}, "diverged": {DIVERGED}}
    assert "1 with infinite κ, drawn at the top" in note(frame)
    assert "1 point without a value not shown" in note(frame)


def test_each_zone_states_how_many_of_its_runs_diverged(models):
    (panel,) = decision_chart(models)
    joined = " ".join(words(panel))
    assert "0/1 diverged" in joined
    assert "1/1 diverged" in joined
    assert "1/2 diverged" in joined
    (panel,) = decision_chart(models.drop_vars("has_diverged"))
    assert not any("diverged" in word for word in words(panel))


def test_divergence_rates_are_classified_as_none_some_or_all(models):
    rates = models.drop_vars("has_diverged").assign(divergence_rate=("model", [0.0, 0.3, 1.0, NAN, 0.0]))
    (frame,) = bokeh_panels(decision_chart(rates))
    assert set(legend(frame)) == {"converged", "some runs diverged", "diverged", "outcome unknown"}


def test_names_of_many_points_are_only_in_tooltips():
    n = 30
    many = xr.Dataset(
        {"near_unit_mass": ("run", np.linspace(0, 1, n)), "eigenvector_condition": ("run", np.full(n, 9.0))},
        {"name": ("run", [f"run {i}" for i in range(n)])},
    )
    (panel,) = decision_chart(many)
    assert not any(word.startswith("run ") for word in words(panel))
    assert len(elements(panel, "Points")[0]) == n


# ---- names


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200), st.integers(0, 12)), max_size=25))
def test_labels_cover_neither_each_other_nor_points_and_stay_inside(items):
    points = [(x, y) for x, y, _ in items]
    labels = ["x" * n for _, _, n in items]
    words_of_zone = Box(0, 180, 80, 200)
    boxes = place_labels(points, labels, (300, 200), [words_of_zone])
    placed = [box for box in boxes if box is not None]
    assert all(box is None for box, label in zip(boxes, labels, strict=True) if not label)
    for i, box in enumerate(placed):
        assert box.left >= 0
        assert box.bottom >= 0
        assert box.right <= 300
        assert box.top <= 200
        assert not box.meets(words_of_zone)
        assert not any(box.meets(other) for other in placed[:i])
        assert not any(box.left < x < box.right and box.bottom < y < box.top for x, y in points)


def test_a_single_label_is_on_the_right_and_at_the_edge_on_the_left():
    right, left = place_labels([(50, 100), (295, 100)], ["one", "two"], (300, 200))
    assert right.left > 50
    assert left.right < 295
    assert right.bottom < 100 < right.top


# ---- errors


@pytest.mark.parametrize(
    ("call", "error", "check"),
    [
        (
            lambda m: decision_chart(m.drop_vars(["near_unit_mass", "eigenvector_condition"])),
            SchemaError,
            says("The set of points lacks near_unit_mass,"),
        ),
        (
            lambda m: decision_chart(m.isel(model=[4])),
            SchemaError,
            says("No point has both near_unit_mass and eigenvector_condition;"),
        ),
        (
            lambda m: decision_chart(m.expand_dims(layer=2)),
            SchemaError,
            says("In the set of points, near_unit_mass has dimensions layer,"),
        ),
        (lambda m: decision_chart(m, backend="plotly"), OptionError, about("backend", "plotly")),
    ],
)
def test_invalid_input_is_rejected(models, call, error, check):
    with pytest.raises(error, check=check):
        call(models)
