"""The recorded assessments: their conclusions follow from their measurements."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from workbench.assessment.assess import conclude, dominated
from workbench.reports.make_report import document_of

pytestmark = pytest.mark.recorded

PLAN = Path(__file__).parents[2] / "notebooks" / "plan.toml"


@pytest.fixture(scope="module")
def comparison():
    return wb.samples.open("assessments").load()


@pytest.fixture(scope="module")
def names(comparison):
    return comparison["designs"]["design"].values.tolist()


def assert_same(found, recorded):
    assert set(found) == set(recorded)
    for name in found:
        if found[name].dtype.kind == "f":
            np.testing.assert_allclose(found[name].values, recorded[name].values, rtol=1e-6)
        else:
            assert found[name].values.tolist() == recorded[name].values.tolist()


def test_conclusions_follow_from_the_measurements(comparison, names):
    for name in names:
        recorded = comparison[name].copy()
        tree = recorded.copy(deep=True)
        conclude(tree, wb.hardware.read_plan(PLAN))
        for node in ("criteria", "failure_modes", "decisions"):
            assert_same(tree[node].to_dataset(), recorded[node].to_dataset())
        for attribute in ("verdict", "exit_status", "summary", "structure_state", "pilot_state"):
            assert tree.attrs[attribute] == recorded.attrs[attribute]


def test_designs_that_are_known_to_train_are_not_flagged_for_their_structure(comparison, names):
    for name in names:
        tree = comparison[name]
        assert (tree.attrs["structure_state"], tree.attrs["is_stand_in"]) == ("healthy", 1), name
        assert tree["flow"].sizes["layer"] == tree.attrs["depth"]


def test_the_table_repeats_the_assessments(comparison, names):
    table = comparison["designs"].to_dataset()
    for i, name in enumerate(names):
        assert str(table["verdict"].values[i]) == comparison[name].attrs["verdict"]
        found = float(comparison[name]["pilot"]["useful_edge"])
        np.testing.assert_equal(float(table["useful_edge"].values[i]), found)
    np.testing.assert_array_equal(dominated(table), table["is_dominated"].values)
    xr.testing.assert_allclose(table["relative_step_time"].min(), xr.DataArray(1.0))
    document = document_of(comparison)
    assert next(fact.label for fact in document.facts) in names
