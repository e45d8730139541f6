"""Figures of outcomes without rendering: positions, labels, and notes on missing values."""

import numpy as np
import pytest

import workbench as wb
from tests.about import about, says
from tests.plots.panels import bokeh_panels
from tests.studies.test_outcomes import KNOWN, grid_of, outcomes_of
from workbench.errors import OptionError, SchemaError
from workbench.plots import dose_response, explosion_edge
from workbench.plots.dose_response_figure import Responses
from workbench.plots.explosion_edge_figure import dodged, edges_of, spread
from workbench.plots.style import MODEL_COLORS

pytestmark = pytest.mark.render

RATES = {"none": (0.0, 0.5, 1.0), "clip 1.0": (None, 0.1, 0.9), "KSS, best": (0.0, 0.0, 0.1), "worse": (1.0, 1.0, 1.0)}


@pytest.fixture(scope="module")
def sweep():
    return grid_of(RATES)


# ---- explosion_edge


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
    assert [curve.dimension_values(1).tolist() for curve in curves[1:]] == [
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
    assert lines[1:] == [MODEL_COLORS[i] for i in (0, 2)]
    with pytest.raises(OptionError, check=says("places has no style number for")):
        explosion_edge(some, places={"KSS, best": 2})


# ---- dose_response


def test_responses_have_the_values_of_the_table():
    table = outcomes_of(KNOWN)
    rates = Responses.of(table, "divergence_rate")
    assert rates.controls == ("none", "KSS")
    assert rates.values.tolist() == [0.25, 0.25]
    assert (rates.intervals[0] < 0.25).all()
    assert (rates.intervals[1] > 0.25).all()
    assert rates.published[0] == pytest.approx(16 / 24)
    assert np.isnan(rates.published[1])  # not in the paper
    assert rates.reference == 0.25
    accuracy = Responses.of(table, "accuracy")
    np.testing.assert_allclose(accuracy.values, [0.4, 0.3])
    assert accuracy.n_runs.tolist() == [3, 3]
    assert accuracy.runs["row"].tolist() == [0, 0, 0, 1, 1, 1]
    assert accuracy.runs["value"].tolist() == [0.2, 0.4, 0.6, 0.3, 0.5, 0.1]
    assert accuracy.reference == pytest.approx(0.4)


def test_elements_of_the_dose_figure(sweep):
    rates, accuracy = dose_response(sweep)
    ours = rates.traverse(lambda part: part, ["Points"])[0]
    assert ours["control"].tolist() == [0.0, -1.0, -2.0, -3.0]
    np.testing.assert_allclose(ours.dimension_values(0), [0.5, 0.5, 1 / 30, 1.0])
    (word,) = accuracy.traverse(lambda part: part, ["Labels"])
    assert [*word.array()[0]] == [0.0, -3.0, "all runs diverged"]
    published = rates.traverse(lambda part: part, ["Points"])[1]
    theirs = wb.published.shaping_table()["divergence_rate"]
    np.testing.assert_allclose(published.dimension_values(0), theirs.sel(control=["none", "clip 1.0"]))
    left, right = bokeh_panels(dose_response(sweep))
    assert left.select_one({"name": "note_above"}).text == "● ours, 20 to 30 runs, 95 % interval   ◇ published   │ none"
    assert right.select_one({"name": "note_above"}).text.startswith("● ours, 0 to 29 runs   ◇")
    assert left.yaxis[0].ticker.ticks == [0, -1, -2, -3]
    assert left.yaxis[0].major_label_overrides[-2] == "KSS, best"


def test_without_published_values_and_without_a_reference():
    table = outcomes_of(KNOWN)
    table = table.assign_coords(control=("run", np.char.add("my ", table["control"].values.astype(str))))
    (rates,) = dose_response(table, measures="divergence_rate")
    assert len(rates.traverse(lambda part: part, ["Points"])) == 1
    assert not rates.traverse(lambda part: part, ["Curve"])


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
        (lambda data: dose_response(data, measures="loss"), SchemaError, about("measures", "loss")),
        (
            lambda data: dose_response(data, measures=[]),
            SchemaError,
            says("measures is empty; choose from divergence_rate, accuracy,"),
        ),
        (lambda data: dose_response(data, backend="plotly"), OptionError, about("backend", "plotly")),
    ],
)
def test_invalid_input_is_rejected(sweep, call, error, check):
    with pytest.raises(error, check=check):
        call(sweep)
