"""radar without rendering: positions of values on the axes, gaps, and texts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.about import about, says
from tests.plots.panels import bokeh_panels
from workbench.errors import OptionError, SchemaError
from workbench.plots.comparison_figures import LOGARITHMIC, RadarAxis, RadarChart, Texts, axes_of, outline, radar

pytestmark = pytest.mark.render


def test_axes_go_clockwise_from_the_top(comparison):
    axes = axes_of(comparison, ["near_unit_mass", "expansive_mass", "contractive_mass", "intermediate_mass"])
    points = np.array([axis.point(1.0) for axis in axes])
    np.testing.assert_allclose(points, [(0, 1), (1, 0), (0, -1), (-1, 0)], atol=1e-12)


def test_places_on_linear_and_logarithmic_axes():
    linear, logarithmic = RadarAxis("a", "a", 0, 1, False, 0.0), RadarAxis("b", "b", 1, 100, True, 0.0)
    assert [linear.place(x) for x in (0, 0.25, 1)] == [0, 0.25, 1]
    assert [logarithmic.place(x) for x in (1, 10, 100)] == pytest.approx([0, 0.5, 1])
    assert all(math.isnan(linear.place(x)) for x in (math.nan, math.inf))
    assert math.isnan(logarithmic.place(0.0))


@given(st.lists(st.floats(1e-6, 1e9), min_size=2, max_size=6), st.sampled_from(sorted(LOGARITHMIC)))
def test_every_value_is_between_center_and_rim(values, measure):
    import xarray as xr

    if LOGARITHMIC[measure] is not None:
        values = [max(value, 1.0) for value in values]
    table = xr.Dataset({measure: (("architecture", "source"), np.array([values, values]).T)})
    axis = axes_of(table, [measure] * 3)[0]
    places = [axis.place(value) for value in values]
    assert min(places) >= -1e-4
    assert max(places) <= 1 + 1e-4
    assert round(axis.lowest / 10 ** math.floor(math.log10(axis.lowest) + 1e-9), 3) in (1, 2, 5, 10)


def test_outlines_have_gaps_at_unknown_values(comparison):
    axes = axes_of(comparison)
    chart = RadarChart.of(comparison, axes, "none", 1)
    ours, published = (outline(axes, chart.values[source]) for source in ("ours", "published"))
    assert np.isfinite(ours["x"]).all()
    assert (ours["x"][0], ours["y"][0]) == (ours["x"][-1], ours["y"][-1])
    # No eigenvector condition is published.
    assert np.isnan(published["x"]).tolist() == [False, False, False, False, True, False]
    assert np.hypot(published["x"], published["y"])[:2] == pytest.approx([0.19, 0.79])


def test_an_infinite_value_is_written_and_not_drawn(comparison):
    measures = ["near_unit_mass", "expansive_mass", "kreiss_constant"]
    assert np.isinf(comparison.kreiss_constant.sel(architecture="none", source="ours"))
    axes = axes_of(comparison, measures)
    chart = RadarChart.of(comparison, axes, "none", 1)
    assert Texts.of(axes, chart, has_key=False).at_axes[2].endswith("\n∞")
    assert np.isnan(outline(axes, chart.values["ours"])["x"][2])
    panel = next(iter(radar(comparison.sel(architecture=["none"]), measures=measures)))
    assert not panel.Polygons.keys()


def test_texts(comparison):
    axes = axes_of(comparison)
    texts = Texts.of(axes, RadarChart.of(comparison, axes, "none", 1), has_key=True)
    assert texts.note == "step 0, diverged at step 12"
    mass = float(comparison.near_unit_mass.sel(architecture="none", source="ours"))
    assert texts.at_axes[1] == f"near-unit\nmass M\n{mass:.2f} (0.79)"
    assert "expansive mass, near-unit mass M, nonlinearity ratio 0 to 1" in texts.key.replace("\xa0", " ")
    assert "spectral radius" in texts.key.replace("\xa0", " ")
    assert "logarithmic" in texts.key
    assert Texts.of(axes, RadarChart.of(comparison, axes, "bare", 2), has_key=False).note == "no published values"


def test_an_uninformative_architecture(comparison):
    silent = comparison.copy(deep=True)
    silent["is_informative"][0] = False
    for name in ("near_unit_mass", "expansive_mass", "spectral_radius", "nonlinearity_ratio", "eigenvector_condition"):
        silent[name][0, 0] = np.nan
    axes = axes_of(silent)
    chart = RadarChart.of(silent, axes, "Pre-LN", 0)
    assert chart.note == "step 0, update too small for a spectrum"
    assert len(radar(silent)) == 3


@pytest.mark.slow
def test_each_architecture_has_a_chart(comparison):
    panels = bokeh_panels(radar(comparison))
    assert [panel.title.text for panel in panels] == ["Pre-LN", "none", "bare"]


def test_a_comparison_without_published_values(runs, comparison):
    ours = comparison.sel(source=["ours"])
    assert len(radar(ours)) == 3


def test_invalid_input_is_rejected(comparison, calm):
    with pytest.raises(SchemaError, check=says("The dataset has no variables by architecture and source;")):
        radar(calm)
    with pytest.raises(SchemaError, check=about("measures", "loss")):
        radar(comparison, measures=["loss", "near_unit_mass", "expansive_mass"])
    with pytest.raises(OptionError, check=about("measures", ("near_unit_mass", "expansive_mass"))):
        radar(comparison, measures=["near_unit_mass", "expansive_mass"])
    with pytest.raises(OptionError, check=about("backend", "plotly")):
        radar(comparison, backend="plotly")
