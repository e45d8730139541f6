import math

import numpy as np
import pytest
import xarray as xr

from tests.about import says
from workbench.errors import SchemaError
from workbench.plots import rate_curve


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


def test_invalid_input_is_rejected():
    with pytest.raises(SchemaError, check=says("The outcome lacks best_rate; create it with")):
        rate_curve(outcome().drop_vars("best_rate"))
    empty = outcome()
    empty["loss"] = empty["loss"] * np.nan
    with pytest.raises(SchemaError, check=says("has no finite loss; add runs at smaller learning rates.")):
        rate_curve({"one": empty})
