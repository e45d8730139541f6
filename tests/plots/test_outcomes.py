"""Figures of outcomes without rendering: positions, labels, and notes on missing values."""

import numpy as np
import pytest

from tests.about import about, says
from tests.plots.panels import bokeh_panels
from tests.studies.test_outcomes import grid_of
from workbench.errors import OptionError, SchemaError
from workbench.plots import explosion_edge
from workbench.plots.risk_figures import dodged, edges_of, spread
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
    with pytest.raises(OptionError, check=says("places has no style number for")):
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
def test_invalid_input_is_rejected(sweep, call, error, check):
    with pytest.raises(error, check=check):
        call(sweep)
