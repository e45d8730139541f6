"""Drivers without pixels: order, signs, and bars that add up to the whole."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.plots.panels import bokeh_panels, elements, ends, note, words
from workbench.errors import OptionError, SchemaError
from workbench.plots.drivers_figure import Bars, drivers
from workbench.plots.outcome_colors import DIVERGED, SURVIVED
from workbench.risk.features import FEATURES

pytestmark = pytest.mark.render

FEATURE = next(iter(FEATURES))


@pytest.fixture
def contributions():
    names = ["learning_rate", FEATURE, "small", "d"]
    return xr.DataArray([1.5, -2.0, 0.1, -0.2], {"feature": names}, ["feature"], attrs={"mean": -1.0})


def test_bars_are_the_contributions_biggest_first(contributions):
    (panel,) = figure = drivers(contributions)
    up, down = elements(panel, "Rectangles")
    np.testing.assert_allclose(ends(up)[:, [0, 2]], [[0, 1.5], [0, 0.1]])
    np.testing.assert_allclose(ends(up)[:, [1, 3]].mean(1), [-1, -3])
    np.testing.assert_allclose(ends(down)[:, [0, 2]], [[0, -2.0], [0, -0.2]])
    np.testing.assert_allclose(ends(down)[:, [1, 3]].mean(1), [0, -2])
    np.testing.assert_allclose(up["factor"], np.exp([1.5, 0.1]))
    assert words(panel)["-2.00"][0] < -2
    assert words(panel)["+1.50"][0] > 1.5
    (frame,) = bokeh_panels(figure)
    fills = [part.glyph.fill_color for part in frame.renderers if type(part.glyph).__name__ == "Quad"]
    assert fills == [DIVERGED, SURVIVED]
    names = [frame.yaxis[0].major_label_overrides[-i] for i in range(4)]
    assert names == [FEATURES[FEATURE].long_name, "learning rate", "d", "small"]


def test_the_rest_is_summed_up_and_the_note_gives_the_risk(contributions):
    bars = Bars.of(contributions, n=2)
    assert bars.features[2] == "2 others together"
    np.testing.assert_allclose(bars.values, [[-2.0, 1.5, -0.1]])
    assert bars.note(0) == ["mean run -1.00, bars -0.60: risk 17 %"]  # 1 / (1 + exp(1.6))
    assert Bars.of(contributions, n=3).features[-1] == "small"  # a single one keeps its name
    assert Bars.of(contributions.drop_attrs(), n=2).note(0) == ["together -0.60"]


@given(arrays(float, (3, 6), elements=st.floats(-5, 5)), st.integers(1, 8))
def test_bars_add_up_to_the_whole(values, n):
    bars = Bars.of(xr.DataArray(values, dims=["run", "feature"]), n=n)
    np.testing.assert_allclose(bars.values.sum(1), values.sum(1), atol=1e-9)
    sizes = np.abs(bars.values[:, : min(n, 6)]).max(0)
    assert (np.diff(sizes) <= 1e-12).all()
    assert len(bars.features) == min(n, 6) + (n < 6)


def test_several_runs_are_panels_of_the_same_rows(contributions):
    several = xr.concat([contributions, -2 * contributions], "run").assign_coords(architecture=("run", ["a", "b"]))
    figure = drivers(several, n=2)
    first, second = bokeh_panels(figure)
    assert (first.title.text, second.title.text) == ("a", "b")
    assert first.x_range.end == second.x_range.end > 4
    assert second.yaxis[0].major_label_overrides[0] == ""
    one, other = figure
    np.testing.assert_allclose(
        sorted(ends(part)[0, 2] for part in elements(other, "Rectangles")),
        sorted(-2 * ends(part)[0, 2] for part in elements(one, "Rectangles")),
    )
    assert note(second) == "mean run -1.00, bars +1.20: risk 55 %"


def test_features_have_the_names_that_come_with_them(contributions):
    named = contributions.assign_coords(long_name=("feature", ["a", "b", "c", "d"]))
    assert Bars.of(named).features == ("b", "a", "d", "c")


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda data: drivers(data, n=0), OptionError, "n is 0, expected a whole number of at least 1"),
        (lambda data: drivers(data, n=1.5), OptionError, "n is 1.5"),
        (lambda data: drivers(data.to_dataset(name="a")), SchemaError, "The drivers are of Dataset, expected an array"),
        (lambda data: drivers(data.rename(feature="f")), SchemaError, "are of dims f, expected an array by feature"),
        (
            lambda data: drivers(data.expand_dims(run=5)),
            SchemaError,
            "have 5 runs and 4 features, expected 1 to 4 runs",
        ),
        (lambda data: drivers(data.isel(feature=[])), SchemaError, "1 runs and 0 features"),
        (lambda data: drivers(data * np.inf), SchemaError, "A driver is not finite"),
        (lambda data: drivers(data, backend="plotly"), OptionError, "plotly"),
    ],
)
def test_wrong_input_says_what_to_do(contributions, call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(contributions)
