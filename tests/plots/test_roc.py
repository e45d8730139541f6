"""ROC curves without rendering: points, legend, and tooltips."""

import numpy as np
import pytest
import xarray as xr

from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, legend, note, places
from workbench.errors import OptionError, SchemaError
from workbench.plots.roc_figure import lines_of, roc
from workbench.plots.style import MODEL_COLORS

pytestmark = pytest.mark.render


def curve_of(rows, **attrs):
    """Return a curve; each row is a false positive rate, a true positive rate and a threshold."""
    names = ("false_positive_rate", "true_positive_rate", "threshold")
    columns = np.array(rows, dtype=float).T
    return xr.Dataset({name: ("point", column) for name, column in zip(names, columns, strict=True)}, attrs=attrs)


GOOD = curve_of(
    [(0, 0, np.inf), (0, 0.5, 2.0), (0.25, 1, 1.0), (1, 1, -3.0)],
    auroc=0.875, low=0.7, high=0.99, n_runs=12, n_diverged=4,
)  # fmt: skip
POOR = curve_of([(0, 0, np.inf), (1, 1, 0.1)], auroc=0.5, n_runs=12, n_diverged=4)


@pytest.fixture
def curves():
    return {"M": GOOD, "kappa": POOR}


def test_curves_pass_through_their_points_and_the_diagonal_is_the_chance_level(curves):
    (panel,) = roc(curves)
    diagonal, good, poor = elements(panel, "Curve")
    assert places(diagonal).tolist() == [[0, 0], [1, 1]]
    assert places(good).tolist() == [[0, 0], [0, 0.5], [0.25, 1], [1, 1]]
    assert places(poor).tolist() == [[0, 0], [1, 1]]


def test_the_legend_states_the_area_and_its_interval(curves):
    assert [line.label for line in lines_of(curves)] == ["M: 0.875 [0.700, 0.990]", "kappa: 0.500"]
    assert lines_of(GOOD)[0].label == "AUROC: 0.875 [0.700, 0.990]"
    (panel,) = bokeh_panels(roc(curves))
    assert legend(panel) == {
        "M: 0.875 [0.700, 0.990]": {MODEL_COLORS[0]},
        "kappa: 0.500": {MODEL_COLORS[1]},
    }
    assert note(panel) == "legend: area under the curve [95 % interval]   12 runs, 4 diverged"


def test_thresholds_are_in_tooltips_of_bokeh_only(curves):
    (panel,) = roc(curves)
    points = elements(panel, "Points")
    assert [dots["threshold"].tolist() for dots in points] == [["inf", "2", "1", "-3"], ["inf", "0.1"]]
    assert places(points[0]).tolist() == places(elements(panel, "Curve")[1]).tolist()
    assert not elements(roc(curves, backend="matplotlib"), "Points")


def test_counts_that_differ_are_not_stated(curves):
    other = POOR.assign_attrs(n_runs=9)
    (panel,) = bokeh_panels(roc({"M": GOOD, "kappa": other}))
    assert note(panel) == "legend: area under the curve [95 % interval]"
    (panel,) = bokeh_panels(roc(POOR))
    assert note(panel) == "legend: area under the curve   12 runs, 4 diverged"


def test_styles_follow_places(curves):
    (panel,) = bokeh_panels(roc({"kappa": POOR}, places={"M": 0, "kappa": 1}))
    assert legend(panel) == {"kappa: 0.500": {MODEL_COLORS[1]}}


@pytest.mark.parametrize(
    ("call", "error", "check"),
    [
        (lambda: roc({}), SchemaError, says("The ROC curve is an empty dict, expected a dataset from")),
        (lambda: roc({"M": [1, 2]}), OptionError, about("curves")),
        (lambda: roc(GOOD.drop_vars("threshold")), SchemaError, says("The ROC curve lacks threshold; create it with")),
        (
            lambda: roc(GOOD.rename(point="run")),
            SchemaError,
            says("In the ROC curve, false_positive_rate has dimensions run,"),
        ),
        (
            lambda: roc(GOOD.isel(point=[])),
            SchemaError,
            says("The ROC curve is empty along point; select less narrowly."),
        ),
        (lambda: roc(GOOD * 2), SchemaError, says("has rates outside of")),
        (lambda: roc({"M": GOOD.drop_attrs()}), SchemaError, says("lacks the attribute auroc; create it with")),
        (lambda: roc(GOOD, backend="plotly"), OptionError, about("backend", "plotly")),
        (lambda: roc({"M": GOOD}, places={"a": 0}), OptionError, says("places has no style number for")),
    ],
)
def test_invalid_input_is_rejected(call, error, check):
    with pytest.raises(error, check=check):
        call()
