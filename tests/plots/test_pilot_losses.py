import math

import numpy as np
import pytest
import xarray as xr

from tests.about import says
from workbench.errors import SchemaError
from workbench.plots import pilot_losses


def pilot(**changes):
    """Return a pilot of two rounds over four rates, the second with two seeds."""
    loss = np.full((2, 4, 2), np.nan)
    loss[0, :, 0] = [3.3, 3.0, 3.1, math.inf]
    loss[1, 1:3] = [[2.5, 2.6], [2.7, 2.8]]
    values = {"trivial_loss": 3.2, "slow_edge": 1.5e-3, "best_rate": 2e-3, "useful_edge": 4e-3} | changes
    values = {"useful_edge_low": 3e-3, "useful_edge_high": 5e-3} | values
    data = xr.Dataset(
        {"loss": (("n_updates", "rate", "seed"), loss), **values},
        {"n_updates": [36, 120], "rate": 1e-3 * 2.0 ** np.arange(4)},
    )
    return data.assign_attrs(n_steps=1000, reason="")


def test_each_number_of_updates_is_a_line_and_each_run_a_dot(drawn):
    pilot_losses(pilot())
    assert [options["label"] for _, options in drawn["line"]] == ["36 updates", "120 updates"]
    (rates, means), _ = drawn["line"][1]
    assert rates.tolist() == [2e-3, 4e-3]
    assert means.tolist() == pytest.approx([2.55, 2.75])
    circles = [args for args, options in drawn["dots"] if options["marker"] == "circle"]
    assert [len(args[0]) for args in circles] == [3, 4]
    assert [options["marker"] for _, options in drawn["dots"]].count("triangle") == 1


def test_the_band_of_useful_rates_its_edges_and_the_best_rate(drawn):
    pilot_losses(pilot())
    ((left, _, right, _),) = (args for args, _ in drawn["boxes"])
    assert (left, right) == (1.5e-3, 4e-3)
    bars = [(args[0], args[2], options.get("dash", "solid")) for args, options in drawn["bars"]]
    assert (4e-3, 4e-3, "solid") in bars  # useful edge
    assert (3e-3, 5e-3, "solid") in bars  # its interval
    assert (2e-3, 2e-3, "dotted") in bars  # best rate


def test_estimates_outside_of_the_rates_tried_are_in_view(drawn):
    pilot_losses(pilot(slow_edge=1e-5, best_rate=1e-4, useful_edge_high=1.0))
    ((_, options), *_) = drawn["panel"]
    (left, right), _ = options["view"]
    assert left < 1e-5
    assert right > 1.0


def test_the_plan_its_limit_and_the_losses_have_the_axis_of_the_estimates(drawn):
    data = pilot(planned_rate=1e-4, upper_rate_limit=2.0)
    pilot_losses(data)
    tried = [args[0] for args, _ in drawn["line"]]
    pilot_losses(data.assign_attrs(rate_factor=1 / 16))  # the estimates are those of a model 16 times as wide
    bars = [(args[0], args[2], options.get("dash", "solid")) for args, options in drawn["bars"]]
    assert bars.count((1e-4, 1e-4, "solid")) == bars.count((2.0, 2.0, "dashed")) == 2
    ((_, first), (_, second)) = drawn["panel"]
    assert all(view["view"][0][0] < 1e-4 < 2.0 < view["view"][0][1] for view in (first, second))
    assert first["names"][0] == "learning rate"
    assert second["names"][0] == "learning rate at the planned width"
    scaled = [args[0] for args, _ in drawn["line"]][len(tried) :]
    assert all(np.allclose(one / 16, other) for one, other in zip(tried, scaled, strict=True))


def test_unknown_estimates_are_not_drawn(drawn):
    ends = ("useful_edge", "useful_edge_low", "useful_edge_high")
    unknown = dict.fromkeys(("trivial_loss", "slow_edge", "best_rate", *ends), np.nan)
    pilot_losses(pilot(**unknown))
    assert "boxes" not in drawn
    assert "bars" not in drawn


def test_invalid_input_is_rejected():
    with pytest.raises(SchemaError, check=says("The pilot lacks best_rate; create it with")):
        pilot_losses(pilot().drop_vars("best_rate"))
    with pytest.raises(SchemaError, check=says("The pilot has no finite loss; repeat it with a smaller")):
        pilot_losses(pilot().assign(loss=pilot()["loss"] * np.nan))
