"""Predictors as a chart and as a table with the same numbers, ours next to the published."""

import numpy as np
import pytest
import xarray as xr

from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, ends, note, places, words
from workbench.errors import OptionError, SchemaError
from workbench.plots import predictor_frame, predictor_table

pytestmark = pytest.mark.render

NAN = np.nan


@pytest.fixture
def table():
    columns = {
        "auroc": [0.7654, 0.4, NAN],
        "low": [0.7, NAN, NAN],
        "high": [0.8, NAN, NAN],
        "n_runs": [50, 50, 0],
        "n_diverged": [20, 20, 0],
        "published_auroc": [0.995, NAN, 0.621],
        "published_low": [0.986, NAN, NAN],
        "published_high": [1.0, NAN, NAN],
        "auroc_within_architecture": [0.5, NAN, NAN],
    }
    return xr.Dataset(
        {name: ("predictor", values) for name, values in columns.items()}, {"predictor": ["M", "rho", "grad norm"]}
    )


@pytest.mark.slow
def test_our_and_published_values_are_in_the_row_of_their_predictor(table):
    (panel,) = figure = predictor_table(table)
    chance, ours_bars, their_bars = elements(panel, "Segments")
    ours, theirs, within = elements(panel, "Points")
    assert ends(chance)[0, [0, 2]].tolist() == [0.5, 0.5]
    np.testing.assert_allclose(places(ours), [[0.7654, 0.14], [0.4, -0.86]])
    np.testing.assert_allclose(places(theirs), [[0.995, -0.14], [0.621, -2.14]])
    np.testing.assert_allclose(places(within), [[0.5, 0.14]])
    np.testing.assert_allclose(ends(ours_bars), [[0.7, 0.14, 0.8, 0.14]])
    np.testing.assert_allclose(ends(their_bars), [[0.986, -0.14, 1.0, -0.14]])
    (frame,) = bokeh_panels(figure)
    assert [frame.yaxis[0].major_label_overrides[-i] for i in range(3)] == ["M", "rho", "grad norm"]


def test_numbers_are_next_to_the_chart_and_unknown_values_are_a_dash(table):
    (panel,) = predictor_table(table)
    shown = words(panel)
    assert {"ours", "published", "0.765 [0.700, 0.800]", "0.400", "0.995 [0.986, 1.000]", "0.621", "–"} == set(shown)
    assert shown["0.765 [0.700, 0.800]"][1] == 0
    assert shown["0.621"][1] == -2
    assert all(place[0] > 1 for place in shown.values())


@pytest.mark.slow
def test_the_note_states_counts_only_if_they_are_equal(table):
    (frame,) = bokeh_panels(predictor_table(table))
    assert "50 runs" not in note(frame)
    assert "△ ours within architectures" in note(frame)
    (frame,) = bokeh_panels(predictor_table(table.isel(predictor=[0, 1])))
    assert "50 runs, 20 diverged" in note(frame)


def test_without_published_values_and_with_long_names(table):
    bare = table[["auroc", "low", "high"]].assign_coords(long_name=("predictor", ["mass", "radius", "gradient"]))
    (panel,) = figure = predictor_table(bare)
    assert len(elements(panel, "Points")) == 1
    np.testing.assert_allclose(places(elements(panel, "Points")[0])[:, 1], [0, -1])
    (frame,) = bokeh_panels(figure)
    assert frame.yaxis[0].major_label_overrides[-1] == "radius"
    assert "published" not in note(frame)


def test_the_table_has_the_same_numbers(table):
    frame = predictor_frame(table, digits=2)
    assert frame.index.tolist() == ["M", "rho", "grad norm"]
    assert frame["ours", "AUROC"].tolist()[:2] == [0.77, 0.4]
    assert frame["published", "AUROC"].tolist()[2] == 0.62
    assert frame["ours", "runs"].tolist() == [50, 50, 0]
    assert frame["ours", "within architecture"].tolist()[0] == 0.5
    assert ("published", "AUROC") not in predictor_frame(table[["auroc", "low", "high"]]).columns
    assert "0.77" in frame.to_html()


@pytest.mark.parametrize(
    ("call", "error", "check"),
    [
        (
            lambda data: predictor_table(data.drop_vars("auroc")),
            SchemaError,
            says("The table of predictors lacks auroc; create it with"),
        ),
        (
            lambda data: predictor_table(data.isel(predictor=[2])),
            SchemaError,
            says("The table of predictors has no AUROC, which needs both runs"),
        ),
        (lambda data: predictor_table(data.to_array()), OptionError, about("table")),
        (lambda data: predictor_table(data, backend="plotly"), OptionError, about("backend", "plotly")),
        (lambda data: predictor_frame(data, digits=0), OptionError, about("digits", 0)),
    ],
)
def test_invalid_input_is_rejected(table, call, error, check):
    with pytest.raises(error, check=check):
        call(table)
