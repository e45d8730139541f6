import numpy as np
import pytest
import xarray as xr

from tests.about import says
from workbench.errors import SchemaError
from workbench.plots import risk_curve, style

RATES = 1e-3 * 10.0 ** np.arange(4)


def over_rates(**changes):
    """Return the risk at four rates, each ten times the previous one."""
    failure = np.array([0.6, 0.2, 0.4, 0.9])
    edges = {"slow_edge": 2e-3, "useful_edge": 1e-1, "useful_edge_low": 3e-2, "useful_edge_high": 3e-1}
    probabilities = {"failure": failure, "failure_low": failure - 0.1, "failure_high": failure + 0.1}
    probabilities["explosion"] = np.array([0.01, 0.05, 0.1, 0.5])
    data = {name: ("learning_rate", values) for name, values in probabilities.items()} | edges | changes
    return xr.Dataset(data, {"learning_rate": RATES}, {"n_steps": 1000, "d_model": 64, "reason": ""})


def test_one_run_has_two_lines_and_the_band_of_its_useful_rates(drawn):
    assert len(risk_curve(over_rates(), learning_rate=1e-2)) == 1
    assert [options["label"] for _, options in drawn["line"]] == ["not learning well", "explosion"]
    assert drawn["line"][1][0][1].tolist() == [0.01, 0.05, 0.1, 0.5]
    ((box, _),) = drawn["boxes"]
    assert (box[0], box[2]) == (2e-3, 1e-1)
    assert [(args[0], args[2]) for args, _ in drawn["bars"]] == [(1e-1, 1e-1), (3e-2, 3e-1)]
    (((_, low, high), _),) = drawn["band"]
    assert (high - low).tolist() == pytest.approx([0.2] * 4)
    (((x, y), _),) = drawn["dots"]
    assert (x, y) == ([1e-2], [pytest.approx(0.2)])
    assert "within 1,000 updates at width 64" in drawn["panel"][0][1]["note"][0]


def test_a_planned_rate_between_or_outside_of_the_rates_of_the_dataset(drawn):
    risk_curve(over_rates(), learning_rate=10**-2.5)
    (((_, y), _),) = drawn["dots"]
    assert y == [pytest.approx(0.4)]  # the midpoint of both on the logarithmic axis
    drawn.clear()
    risk_curve(over_rates(), learning_rate=1e-5)
    assert "dots" not in drawn


def test_edges_are_clipped_to_the_view_and_unknown_edges_are_not_drawn(drawn):
    risk_curve(over_rates(slow_edge=1e-6, useful_edge_high=50.0))
    ((box, _),) = drawn["boxes"]
    assert (box[0], box[2]) == (1e-3, 1e-1)
    assert drawn["bars"][1][0][2] == 1.0
    drawn.clear()
    edges = ("slow_edge", "useful_edge", "useful_edge_low", "useful_edge_high")
    certain = {"failure": ("learning_rate", np.ones(4))}  # a model that diverges at initialization
    risk_curve(over_rates(**certain, **dict.fromkeys(edges, np.nan)))
    assert "boxes" not in drawn
    assert drawn["panel"][0][1]["note"] == []


def test_several_designs_have_one_line_each_with_a_mark_at_the_largest_useful_rate(drawn):
    figure = risk_curve({"wide": over_rates(), "deep": over_rates(useful_edge=10**-1.5)})
    assert len(figure) == 1
    assert not {"band", "boxes", "bars"} & set(drawn)
    assert [options["label"] for _, options in drawn["line"]] == ["wide", "deep"]
    looks = [style.model_style(place) for place in (0, 1)]
    assert [(options["color"], options["dash"]) for _, options in drawn["line"]] == [
        (look["color"], look["dash"]) for look in looks
    ]
    marks = [(args[0][0], args[1][0], options["marker"]) for args, options in drawn["dots"]]
    assert marks == [(1e-1, pytest.approx(0.4), looks[0]["marker"]), (10**-1.5, pytest.approx(0.3), looks[1]["marker"])]


def test_designs_with_different_rates_share_the_axes_and_an_unknown_edge_has_no_mark(drawn):
    other = over_rates(useful_edge=np.nan).assign_coords(learning_rate=RATES / 100)
    risk_curve({"one": over_rates(useful_edge=5.0), "other": other})
    assert "dots" not in drawn
    assert drawn["panel"][0][1]["view"][0] == (1e-5, 1.0)


def test_invalid_input_is_rejected():
    with pytest.raises(SchemaError, check=says("The risk lacks useful_edge; create it with")):
        risk_curve(over_rates().drop_vars("useful_edge"))
    unknown = over_rates(failure=("learning_rate", np.full(4, np.nan))).assign_attrs(reason="Too little was measured.")
    with pytest.raises(
        SchemaError,
        match=r"The risk of 'two' is unknown. Too little was measured.",
        check=says("is unknown. Too little was measured."),
    ):
        risk_curve({"one": over_rates(), "two": unknown})
    with pytest.raises(SchemaError, check=says("The risk is an empty dict, expected a dataset from")):
        risk_curve({})
