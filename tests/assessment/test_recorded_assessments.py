"""The recorded assessments: what they conclude follows from the numbers that they hold."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from workbench.assessment.decisions import decide
from workbench.assessment.design_comparison import dominated
from workbench.assessment.failure_modes import judged
from workbench.assessment.verdict import verdict_of

PLAN = Path(__file__).parents[2] / "notebooks" / "plan.toml"
NAMES = ("gpt2", "llama-2-7b", "mixtral-8x7b", "mamba-130m")


@pytest.fixture(scope="module")
def comparison():
    return wb.samples.assessments().load()


@pytest.mark.parametrize("name", NAMES)
def test_conclusions_follow_from_the_numbers(comparison, name):
    tree = comparison[name].copy()
    criteria, modes = judged(tree)
    for found, node in ((criteria, "criteria"), (modes, "failure_modes")):
        recorded = tree[node].to_dataset()
        for variable in found:
            if found[variable].dtype.kind == "f":
                np.testing.assert_allclose(found[variable].values, recorded[variable].values, rtol=1e-6)
            else:
                assert found[variable].values.tolist() == recorded[variable].values.tolist()
    assert verdict_of(modes) == tree.attrs["verdict"]
    affordable = float(comparison["designs"]["steps_in_budget"].sel(design=name))
    decisions = decide(tree, wb.hardware.read_plan(PLAN), affordable=affordable)
    assert decisions["text"].values.tolist() == tree["decisions"]["text"].values.tolist()
    assert tree.attrs["summary"].startswith(name)
    worst = [str(modes["title"].values[i]).lower() for i in np.flatnonzero(modes["state"] == "at risk")]
    assert all(title in tree.attrs["summary"] for title in worst)


def test_no_design_is_dominated_but_those_that_are(comparison):
    table = comparison["designs"].to_dataset()
    assert table["design"].values.tolist() == list(NAMES)
    np.testing.assert_array_equal(dominated(table), table["is_dominated"].values)
    xr.testing.assert_allclose(table["relative_step_time"].min(), xr.DataArray(1.0))
