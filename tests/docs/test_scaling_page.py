"""The numbers of the page on scaling are recomputed from the recorded studies by code of its own."""

import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from tests.data_scripts import load_script
from tests.docs.page_numbers import ROOT, check_page, page_module

pytestmark = pytest.mark.recorded

PAGE = "docs/results/scaling.md"


@pytest.fixture(scope="module")
def data():
    return xr.load_dataset(ROOT / "data" / "scaling.nc")


@pytest.fixture(scope="module")
def edges(data):
    """One row per architecture: last model of the ladder, prediction, measurement, and the simple rule."""
    of = data.sel(quantity="explosion_edge")
    names = ["at_target", "at_target_low", "at_target_high", "measured_at_target", "coordinate_state", "target_width",
             "parametrization"]  # fmt: skip
    table = pd.DataFrame({name: of[name].values for name in names}, index=of["architecture"].values)
    table["last"], table["last_width"] = of["explosion_edge"].values[:, -1], of["width"].values[:, -1]
    share = (table["last_width"] / table["target_width"]).where(table["parametrization"] == "", 1)
    table["rule"] = table["last"] * share
    table["is_deeper"] = table.index.str.endswith("deeper")
    return table


def factor(one, other):
    return np.maximum(one / other, other / one)


def test_every_number_is_that_of_the_data(data, edges):
    script, narrow = load_script("make_scaling"), xr.load_dataset(ROOT / "data" / "matched_width.nc")
    wide, deep = edges[~edges["is_deeper"]], edges[edges["is_deeper"]]
    error, of_rule = (factor(wide[name], wide["measured_at_target"]) for name in ("at_target", "rule"))
    same_way = np.sign(wide["at_target"] - wide["last"]) == np.sign(wide["measured_at_target"] - wide["last"])
    assert same_way.all()
    within, others = error[error < 2], error[error >= 2]
    assert others.index.tolist() == ["Llama-style"]
    assert (of_rule < 2).all()
    deep_error, unchanged = (factor(deep[name], deep["measured_at_target"]) for name in ("at_target", "rule"))
    inside = edges["measured_at_target"].between(edges["at_target_low"], edges["at_target_high"])
    assert inside.all()
    standard = wide[wide["parametrization"] == ""]
    assert (standard["coordinate_state"] == "grows").all()
    assert (wide.drop(standard.index)["coordinate_state"] == "passes").all()
    loss = narrow["loss_over_guess"].to_pandas()
    assert factor(loss["matched"], loss["target"]).idxmax() == "mamba-130m"
    proxy, target = loss.loc["mamba-130m", ["matched", "target"]]
    widths, depths = (" and ".join([f"{a}, {b}", str(c)]) for a, b, c in (script.WIDTHS, script.DEPTHS))
    claims = [
        f"for {len(within)} of {len(wide)} architectures",
        f"width {widths} predict the edge at width {script.TARGET_WIDTH}, and ladders of {depths} blocks the edge at "
        f"{script.TARGET_DEPTH} blocks, with three seeds and {data.attrs['n_steps']} steps",
        f"right for all {len(wide)} architectures of different widths. The factors are {within.min():.2f} to "
        f"{within.max():.2f} for {len(within)} of them, and {others.item():.2f} for the Llama-style one. The rule has "
        f"factors of {of_rule.min():.2f} to {of_rule.max():.2f}",
        f"the ladder has factors of {deep_error.iloc[0]:.2f} and {deep_error.iloc[1]:.2f}, and no change "
        f"{unchanged.iloc[0]:.2f} and {unchanged.iloc[1]:.2f}",
        f"The intervals of {100 * data.attrs['level']:.0f} % contain all {inside.sum()} measured edges",
        f"All {len(standard)} architectures in the standard parametrization",
        f"the interval of {100 * data.attrs['level']:.0f} % that the ladder predicts",
        f"beyond a factor of {script.TARGET_WIDTH // script.WIDTHS[-1]} in size",
        f"initialized model of width {narrow.attrs['thin_width']} are scaled",
        f"over {narrow.sizes['design']} designs up to width {int(narrow['width'].max()):,} and depth "
        f"{int(narrow['depth'].max())}",
        f"it is {proxy:.2f} instead of {target:.2f} times that of a uniform guess",
        f"targets of at most width {int(data['target_width'].max())} or {int(data['target_depth'].max())} blocks",
    ]
    assert len(json.loads(data.attrs["seeds"])) == 3
    check_page(PAGE, claims, settings=("factor of 2", "1 / width"))


def test_the_tables_have_the_values_of_the_data(data, edges):
    page = page_module(PAGE)
    shown = page.edges().set_index("architecture")
    for column, name in (("factor", "at_target"), ("factor of the rule", "rule")):
        expected = factor(edges[name], edges["measured_at_target"])
        assert shown[column].tolist() == [f"{value:.2f}" for value in expected]
    inside = data["measured_at_target"].sel(quantity="near_unit_mass").to_series().between(
        *(data[name].sel(quantity="near_unit_mass").to_series() for name in ("at_target_low", "at_target_high"))
    )  # fmt: skip
    counts = page.coverage().set_index("quantity")["in the 95 % interval"]
    assert counts["near unit mass"] == f"{inside.sum()} of {len(inside)}"
    narrow = xr.load_dataset(ROOT / "data" / "matched_width.nc")["growth_by_depth"].to_pandas()
    for column, size in (("unscaled", "thin"), ("scaled", "matched")):
        mean = np.exp(np.sqrt((np.log(narrow[size] / narrow["target"]) ** 2).mean()))
        assert page.proxies().set_index("quantity").loc["growth of the residual stream", column] == f"x {mean:.3g}"
