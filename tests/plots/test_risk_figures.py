"""Figures of divergence without rendering: explosion edge and reliability diagram."""

import numpy as np
import pytest
import xarray as xr

from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, ends, legend, note, places
from tests.studies.test_outcomes import grid_of
from workbench.errors import OptionError, SchemaError
from workbench.plots import explosion_edge
from workbench.plots.risk_figures import bins_of, dodged, edges_of, reliability, spread
from workbench.plots.style import MODEL_COLORS

pytestmark = pytest.mark.render

RATES = {"none": (0.0, 0.5, 1.0), "clip 1.0": (None, 0.1, 0.9), "KSS, best": (0.0, 0.0, 0.1), "worse": (1.0, 1.0, 1.0)}


@pytest.fixture(scope="module")
def sweep():
    return grid_of(RATES)


def test_edges_are_the_rates_of_the_table(sweep):
    edges = {edge.control: edge for edge in edges_of(sweep)}
    assert list(edges) == list(RATES)
    np.testing.assert_allclose(edges["none"].columns["fraction"], RATES["none"])
    assert edges["none"].columns["n_runs"].tolist() == [10, 10, 10]
    assert edges["clip 1.0"].columns["learning_rate"].tolist() == [0.002, 0.003]
    assert edges["clip 1.0"].missing == (0.001,)
    assert [edge.largest for edge in edges.values()] == [0, 0, 2, None]


def test_labels_state_the_largest_rate_without_explosion(sweep):
    assert [edge.label for edge in edges_of(sweep)] == [
        "none: up to 0.001",
        "clip 1.0: up to 0.002",
        "KSS, best: up to at least 0.003",
        "worse: no rate",
    ]
    assert edges_of(sweep, below=0.6)[0].label == "none: up to 0.002"


def test_elements_of_the_edge_figure(sweep):
    (panel,) = explosion_edge(sweep)
    curves = panel.traverse(lambda part: part, ["Curve"])
    rings = [part for part in panel.traverse(lambda part: part, ["Points"]) if len(part) == 1]
    assert [curve.dimension_values(1).tolist() for curve in curves] == [
        [rate for rate in of_control if rate is not None] for of_control in RATES.values()
    ]
    assert [float(ring.dimension_values(1)[0]) for ring in rings] == [0.0, 0.1, 0.1]
    whiskers = panel.traverse(lambda part: part, ["Segments"])[0].dframe()
    assert (whiskers.iloc[:, 1].values <= RATES["none"]).all()
    assert (whiskers.iloc[:, 3].values >= RATES["none"]).all()
    (figure,) = bokeh_panels(explosion_edge(sweep))
    note = figure.select_one({"name": "note_above"}).text
    assert note == (
        "10 runs per point, 95 % Wilson intervals   large marker: largest rate with less than 20 % diverged   "
        "clip 1.0 not run at 0.001"
    )


def test_controls_are_offset_and_labels_do_not_overlap():
    rates = [np.array([0.001, 0.002, 0.004])] * 4
    places = np.array(dodged(rates))
    assert len(np.unique(places.round(9))) == 12
    assert (places.max(0)[:-1] < places.min(0)[1:]).all()
    np.testing.assert_allclose(np.exp(np.log(places).mean(0)), rates[0])
    assert dodged([np.array([0.001])] * 2)[0].tolist() == [0.001]
    heights = spread([1.0, 1.0, 0.0, 0.0, 0.5], 0.1)
    assert heights == pytest.approx([1.0, 0.9, 0.1, 0.0, 0.5])


def test_styles_of_the_edge_figure_follow_places(sweep):
    some = sweep.isel(run=np.isin(sweep["control"], ["none", "KSS, best"]))
    (figure,) = bokeh_panels(explosion_edge(some, places={"none": 0, "clip 1.0": 1, "KSS, best": 2}))
    lines = [
        part.glyph.line_color for part in figure.renderers if type(getattr(part, "glyph", None)).__name__ == "Line"
    ]
    assert lines == [MODEL_COLORS[i] for i in (0, 2)]
    with pytest.raises(OptionError, check=says("places has no number for")):
        explosion_edge(some, places={"KSS, best": 2})


@pytest.mark.parametrize(
    ("call", "error", "check"),
    [
        (lambda data: explosion_edge(data, backend="plotly"), OptionError, about("backend", "plotly")),
        (lambda data: explosion_edge(data, below=2), OptionError, about("below", 2)),
        (
            lambda data: explosion_edge(data.isel(run=[])),
            SchemaError,
            says("The table of outcomes has no run; select at least one."),
        ),
    ],
)
def test_invalid_edges_are_rejected(sweep, call, error, check):
    with pytest.raises(error, check=check):
        call(sweep)


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
def test_invalid_bins_are_rejected(call, error, check):
    with pytest.raises(error, check=check):
        call()
