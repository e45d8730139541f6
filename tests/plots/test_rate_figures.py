"""Figures of learning rates: marks of runs and pilots, bands of useful rates, and the axes."""

import math

import numpy as np
import pytest
import xarray as xr

from tests.about import says
from workbench.errors import SchemaError
from workbench.plots import pilot_losses, rate_bands, rate_curve


def outcome(**changes):
    rate = 1e-3 * 1.5 ** np.arange(6)
    loss = np.array([[2.4, 2.5], [2.1, 2.2], [2.0, 2.0], [2.05, 2.15], [6.0, 2.6], [math.inf, np.nan]])
    values = {
        "best_rate": rate[2], "slow_edge": 1.6e-3, "useful_edge": 3.6e-3, "explosion_edge": 6e-3, "trivial_loss": 3.2,
        "is_learned": True,
    }  # fmt: skip
    losses = {"loss": (("rate", "seed"), loss), "mean_loss": ("rate", np.nanmean(loss, axis=1))}
    return xr.Dataset({**losses, **values, **changes}, {"rate": rate, "seed": [0, 1]})


def test_every_run_has_a_mark_and_the_band_is_the_range_of_useful_rates(drawn):
    rate_curve(outcome())
    (first, _, last, _), _ = drawn["boxes"][0]
    assert (first, last) == (1.6e-3, 3.6e-3)
    circles, triangles = (
        [args for args, options in drawn["dots"] if options.get("marker") == marker and options["size"] == 6]
        for marker in ("circle", "triangle")
    )
    assert len(circles[0][0]) == 9
    assert triangles[0][0].tolist() == pytest.approx([1e-3 * 1.5**4, 1e-3 * 1.5**5])
    mean = drawn["line"][0][0][1]
    assert mean[:4].tolist() == pytest.approx([2.45, 2.15, 2.0, 2.1])
    assert np.isnan(mean[5])


def test_several_designs_share_the_axes(drawn):
    figure = rate_curve({"one": outcome(), "two": outcome(best_rate=1e-3)})
    assert len(figure) == 1
    assert [options["label"] for _, options in drawn["line"]] == ["one", "two"]


def test_useful_rates_of_several_designs_do_not_overlap(drawn):
    rate_curve({"one": outcome(), "two": outcome()})
    assert "boxes" not in drawn
    (_, options), *_ = drawn["panel"]
    (bottom, _), least = options["view"][1], float(np.nanmin(outcome()["loss"].where(np.isfinite(outcome()["loss"]))))
    heights = [args[1] for args, each in drawn["bars"] if each.get("width") == 5]
    assert len(set(heights)) == 2
    assert all(bottom < height < least for height in heights)


def test_an_open_band_reaches_the_end_of_the_view(drawn):
    rate_curve(outcome(slow_edge=np.nan, explosion_edge=np.nan))
    (first, *_), _ = drawn["boxes"][0]
    assert first == pytest.approx(1e-3 / 1.3)
    assert len(drawn["bars"]) == 1  # only the trivial loss


def test_a_band_with_unknown_edges_fills_the_view_and_without_learning_there_is_no_band(drawn):
    unknown = {"slow_edge": np.nan, "useful_edge": np.nan}
    rate_curve(outcome(**unknown))
    (first, _, last, _), _ = drawn["boxes"][0]
    assert (first, last) == pytest.approx((1e-3 / 1.3, 1e-3 * 1.5**5 * 1.3))
    rate_curve(outcome(**unknown, is_learned=False))
    assert len(drawn["boxes"]) == 1


def test_invalid_curves_are_rejected():
    with pytest.raises(SchemaError, check=says("The outcome lacks best_rate; create it with")):
        rate_curve(outcome().drop_vars("best_rate"))
    empty = outcome()
    empty["loss"] = empty["loss"] * np.nan
    with pytest.raises(SchemaError, check=says("has no finite loss; add runs at smaller learning rates.")):
        rate_curve({"one": empty})


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


def test_invalid_pilots_are_rejected():
    with pytest.raises(SchemaError, check=says("The pilot lacks best_rate; create it with")):
        pilot_losses(pilot().drop_vars("best_rate"))
    with pytest.raises(SchemaError, check=says("The pilot has no finite loss; repeat it with a smaller")):
        pilot_losses(pilot().assign(loss=pilot()["loss"] * np.nan))


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


def test_invalid_bands_are_rejected():
    with pytest.raises(SchemaError, check=says("The table of outcomes lacks best_rate, best_loss,")):
        rate_bands(xr.Dataset())
    with pytest.raises(SchemaError, check=says("The table of outcomes lacks control; create it with")):
        rate_bands(outcomes(), by="control")
    with pytest.raises(SchemaError, check=says("No design has a finite loss; add runs at smaller learning")):
        rate_bands(outcomes(best_loss=[np.inf, np.nan, np.inf]))
