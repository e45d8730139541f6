import numpy as np
import pytest
import xarray as xr

from tests.about import says
from workbench.errors import SchemaError
from workbench.plots import rate_bands


def outcomes(**changes):
    values = {
        "best_rate": [2e-3, 4e-3, np.nan], "best_loss": [2.0, 2.1, np.inf], "slow_edge": [1e-3, np.nan, np.nan],
        "useful_edge": [5e-3, 6e-3, np.nan], "explosion_edge": [np.nan, 2e-2, 1e-4], "smallest_rate": [1e-4] * 3,
        "largest_rate": [1.0] * 3,
    }  # fmt: skip
    names = {"architecture": ["Pre-LN", "No norm", "Pre-LN"], "study": ["none", "none", "KSS"]}
    data = {name: ("cell", value) for name, value in (values | changes).items()}
    return xr.Dataset(data, {"cell": list("abc"), **{name: ("cell", value) for name, value in names.items()}})


def test_designs_of_one_architecture_are_adjacent(drawn):
    figure = rate_bands(outcomes(), by="study")
    assert len(figure) == 2
    ((_, first), (_, second)) = drawn["panel"]
    assert [name for _, name in first["ticks"][1]] == ["Pre-LN", "No norm"]
    assert first["view"][1] == second["view"][1]
    bars = [args for args, _ in drawn["bars"]]
    assert [(start, end) for start, _, end, _ in bars] == [(1e-3, 5e-3), (1e-4, 6e-3)]
    # Rows are 1 apart, and 0.6 more after an architecture with several rows.
    assert [at for _, at, _, _ in bars] == [0.0, -2.6]


def test_an_unknown_edge_is_hollow_and_a_design_that_did_not_learn_has_no_bar(drawn):
    rate_bands(outcomes())
    hollow = [(args[0], options["marker"]) for args, options in drawn["dots"] if options.get("is_hollow")]
    assert hollow == [([1e-4], "square"), ([2e-2], "inverted_triangle"), ([1e-4], "inverted_triangle")]
    assert len(drawn["bars"]) == 2


def test_each_value_has_a_color_and_an_entry_in_the_legend(drawn):
    rate_bands(outcomes(), by="study", places={"none": 3, "KSS": 1})
    labels = {options["label"]: options["color"] for _, options in drawn["dots"] if options.get("label")}
    assert list(labels) == ["none", "KSS"]
    assert labels["none"] != labels["KSS"]


def test_invalid_input_is_rejected():
    with pytest.raises(SchemaError, check=says("The table of outcomes lacks best_rate, best_loss,")):
        rate_bands(xr.Dataset())
    with pytest.raises(SchemaError, check=says("The table of outcomes lacks control; create it with")):
        rate_bands(outcomes(), by="control")
    with pytest.raises(SchemaError, check=says("No design has a finite loss; add runs at smaller learning")):
        rate_bands(outcomes(best_loss=[np.inf, np.nan, np.inf]))
