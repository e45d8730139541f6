"""The reliability diagram without rendering: bins, intervals, counts, and missing values."""

import numpy as np
import pytest
import xarray as xr

from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, ends, legend, note, places
from workbench.errors import OptionError, SchemaError
from workbench.plots.risk_figures import bins_of, reliability
from workbench.plots.style import MODEL_COLORS

pytestmark = pytest.mark.render

NAMES = ("mean_probability", "rate", "low", "high", "n_runs")


def table_of(rows, **attrs):
    columns = np.array(rows, dtype=float).T
    return xr.Dataset({name: ("bin", column) for name, column in zip(NAMES, columns, strict=True)}, attrs=attrs)


EMPTY = (np.nan, np.nan, np.nan, np.nan, 0)
ONE = table_of([(0.1, 0.0, 0.0, 0.2, 30), EMPTY, (0.8, 0.9, 0.6, 1.0, 10)], ece=0.0312, level=0.9)
OTHER = table_of([(0.5, 0.25, 0.1, 0.5, 40)], ece=0.25, n_left_out=3)


def test_each_bin_with_runs_has_a_dot_an_interval_and_a_bar():
    above, below = reliability(ONE)
    diagonal, line = elements(above, "Curve")
    assert places(diagonal).tolist() == [[0, 0], [1, 1]]
    assert places(line).tolist() == [[0.1, 0.0], [0.8, 0.9]]
    assert ends(elements(above, "Segments")[0]).tolist() == [[0.1, 0.0, 0.1, 0.2], [0.8, 0.6, 0.8, 1.0]]
    (dots,) = elements(above, "Points")
    assert places(dots).tolist() == [[0.1, 0.0], [0.8, 0.9]]
    assert dots["n_runs"].tolist() == [30, 10]
    assert ends(elements(below, "Segments")[0]).tolist() == [[0.1, 0, 0.1, 30], [0.8, 0, 0.8, 10]]


def test_two_predictions_are_offset():
    above, below = reliability({"ours": ONE, "M": OTHER})
    ours, other = elements(above, "Points")
    shift = 0.1 - float(places(ours)[0, 0])
    assert 0 < shift < 0.02
    np.testing.assert_allclose(places(other)[:, 0], 0.5 + shift)
    np.testing.assert_allclose(ends(elements(below, "Segments")[1])[:, 0], 0.5 + shift)
    first, second = bokeh_panels(reliability({"ours": ONE, "M": OTHER}))
    assert legend(first) == {
        "ours: ECE 0.031": {MODEL_COLORS[0]},
        "M: ECE 0.250, 3 runs without prediction": {MODEL_COLORS[1]},
    }
    assert second.y_range.end > 40


@pytest.mark.slow
def test_the_note_explains_the_bars():
    assert note(bokeh_panels(reliability(ONE))[0]).startswith("40 runs, one dot per bin   bars: 90 % Wilson intervals")
    both = note(bokeh_panels(reliability({"a": ONE, "b": OTHER.assign(n_runs=("bin", [1.0]))}))[0])
    assert both.startswith("one dot per bin")


def test_bins_are_sorted():
    (bins,) = bins_of(ONE.isel(bin=[2, 1, 0]))
    assert bins.columns["mean_probability"].tolist() == [0.1, 0.8]
    assert bins.label == "ECE 0.031"


@pytest.mark.parametrize(
    ("call", "error", "check"),
    [
        (lambda: reliability({}), SchemaError, says("The reliability table is an empty dict, expected a dataset")),
        (
            lambda: reliability(ONE.drop_vars("rate")),
            SchemaError,
            says("The reliability table lacks rate; create it with"),
        ),
        (
            lambda: reliability({"a": ONE.isel(bin=[1])}),
            SchemaError,
            says("holds a run; create it with wb.risk.reliability()."),
        ),
        (lambda: reliability({"a": ONE.drop_attrs()}), SchemaError, says("lacks the attribute ece; create it with")),
        (lambda: reliability(ONE, backend="plotly"), OptionError, about("backend", "plotly")),
    ],
)
def test_invalid_input_is_rejected(call, error, check):
    with pytest.raises(error, check=check):
        call()
