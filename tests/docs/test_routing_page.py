"""The numbers of the page on routing are recomputed from the recorded runs by code of its own."""

import json

import numpy as np
import pytest
import xarray as xr

from tests.data_scripts import load_script
from tests.docs.page_numbers import ROOT, check_page, page_module

pytestmark = pytest.mark.recorded

PAGE = "docs/results/moe_routing.md"
LARGE, SMALL = ["rate x 10", "rate x 40"], ["batch of 2", "batch of 2, no auxiliary loss"]


@pytest.fixture(scope="module")
def data():
    return xr.load_dataset(ROOT / "data" / "routing.nc")


def changes(data, name):
    """Mean of the last 100 steps minus that of the balanced run; and the standard deviation of the latter."""
    last = data[name].sel(step=data["step"] >= 200)
    balanced = last.sel(case="balanced")
    return last.mean("step") - balanced.mean("step"), balanced.to_pandas().std(axis="columns").to_xarray()


def listed(values, form="{:.2f}"):
    *first, last = [form.format(value) for value in values]
    return f"{', '.join(first)} and {last}"


def test_every_number_is_that_of_the_data(data):
    model, plan = json.loads(data.attrs["model"]), json.loads(data.attrs["plan"])
    start, step = data.attrs["start"], data["step"].values
    similarity = data["router_similarity"]
    is_above = (similarity.sel(case="rate x 10") > similarity.sel(case="balanced")).values
    after = step >= start
    assert not is_above[:, after][:, 0].any()
    delay = [int(step[after][np.flatnonzero(~row[after])[-1] + 1]) - start for row in is_above]
    entropy, _ = changes(data, "routing_entropy_share")
    similar, _ = changes(data, "router_similarity")
    for of, sign in ((entropy, -1), (similar, 1)):
        assert (sign * of.sel(case="rate x 40") > sign * of.sel(case="rate x 10")).all()
    violation, deviation = changes(data, "max_violation")
    assert (violation.sel(case=LARGE) > 2 * deviation).all()
    dead = data["dead_experts"].sel(step=step >= 200).mean("step")
    assert (dead.sel(case="rate x 40").round() == 1).all()
    assert not dead.sel(case=["balanced", "no auxiliary loss", *SMALL]).any()
    loss, noise = changes(data, "loss")
    assert (loss.sel(case=[*LARGE, *SMALL]) > 2 * noise).all()
    assert (np.abs(loss.sel(case="no auxiliary loss")) < 2 * noise).all()
    rank = data["smallest_rank"].sel(step=step >= 200).mean("step")
    ratio = rank / rank.sel(case="balanced")
    large, small, alone = (loss.sel(case=case).values for case in (LARGE, SMALL, "no auxiliary loss"))
    claims = [
        f"a mixture of {model['n_experts']} experts of width {model['d_model']} with {model['n_layers']} blocks, here "
        f"with three seeds and {plan['n_steps']} steps",
        f"Faults act from step {start} on",
        f"on {data.attrs['n_probe_tokens']} tokens",
        f"only {min(delay)} to {max(delay)} steps after the fault began",
        f"balanced run is {listed(ratio.sel(case='rate x 10').values)}. At 40 times it is "
        f"{listed(ratio.sel(case='rate x 40').values)}",
        f"one of the {model['n_experts']} experts",
        f"increases by {large.min():.1f} to {large.max():.1f} nat at the large learning rates and by "
        f"{small.min():.1f} to {small.max():.1f} nat with small batches",
        f"changes by at most {np.abs(alone).max():.2f} nat",
    ]
    settings = ("the last 100 steps", "a value of 2 to 4", "40 times", "10 times")
    check_page(PAGE, claims, settings=settings)


def test_the_tables_have_the_values_of_the_data(data):
    page = page_module(PAGE)
    shown = page.changes().set_index("run, seeds 1, 2, 3")
    for name, column in page.NAMES.items():
        difference, deviation = changes(data, name)
        for case in shown.index:
            expected = (difference.sel(case=case) / deviation).values
            assert shown.loc[case, column] == ", ".join(f"{value:+.1f}" for value in expected)
    counts = page.published().set_index(["run", "published"])["seeds in which it is clear"]
    entropy, deviation = changes(data, "routing_entropy_share")
    for case, name, sign in page.PUBLISHED:
        difference, deviation_of = changes(data, name)
        assert (sign * difference.sel(case=case) > -2 * deviation_of).all()
    n_clear = int((entropy.sel(case="batch of 2") < -2 * deviation).sum())
    assert counts["batch of 2", "normalized routing entropy decreases"] == f"{n_clear} of 3"


@pytest.mark.slow
def test_the_beginning_of_a_run_is_repeatable(data, tmp_path):
    repeated = load_script("make_routing").record("rate x 10", 1, tmp_path / "run.zarr", n_steps=20)
    before = data.sel(case="rate x 10", seed=1, step=repeated["step"])
    for name in ("router_similarity", "routing_entropy_share", "loss"):
        np.testing.assert_allclose(repeated[name], before[name], atol=0.01)
