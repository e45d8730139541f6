"""The recorded assessments: what they conclude follows from the numbers that they hold, and from no others."""

import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.data_scripts import load_script
from workbench.assessment.assess import conclude
from workbench.assessment.design_comparison import dominated
from workbench.assessment.plan_risk import plan_risk
from workbench.reports.make_report import document_of

pytestmark = pytest.mark.recorded

PLAN = Path(__file__).parents[2] / "notebooks" / "plan.toml"
NAMES = ("gpt2", "llama-2-7b", "mixtral-8x7b", "mamba-130m")


@pytest.fixture(scope="module")
def comparison():
    return wb.samples.assessments().load()


def assert_same(found, recorded):
    assert set(found) == set(recorded)
    for name in found:
        if found[name].dtype.kind == "f":
            np.testing.assert_allclose(found[name].values, recorded[name].values, rtol=1e-6)
        else:
            assert found[name].values.tolist() == recorded[name].values.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_conclusions_follow_from_the_numbers(comparison, name):
    recorded = comparison[name].copy()
    tree = recorded.copy(deep=True)
    conclude(tree, wb.hardware.read_plan(PLAN))
    for node in ("criteria", "failure_modes", "decisions"):
        assert_same(tree[node].to_dataset(), recorded[node].to_dataset())
    for attribute in ("verdict", "exit_status", "summary"):
        assert tree.attrs[attribute] == recorded.attrs[attribute]


def test_the_script_concludes_the_same_again(comparison):
    again = load_script("make_assessments").concluded_again(comparison)
    assert_same(again["designs"].to_dataset(), comparison["designs"].to_dataset())
    for name in NAMES:
        assert_same(again[name]["risk"].to_dataset(), comparison[name]["risk"].to_dataset())


@pytest.mark.parametrize("name", NAMES)
def test_a_design_too_large_to_be_run_has_no_number_that_was_not_measured_on_it(comparison, name):
    tree = comparison[name].copy()
    assert (tree.attrs["verdict"], tree.attrs["exit_status"], tree.attrs["is_stand_in"]) == ("cannot say", 4, 1)
    risk = tree["risk"].to_dataset()
    assert np.isnan([value.item() for value in risk.data_vars.values() if value.dtype.kind == "f"]).all()
    assert "a stand-in 64 wide with 4 blocks" in risk.attrs["warning"]
    assert "risk_over_rates" not in tree
    assert np.isnan(tree["failure_modes"]["confidence"].values).all()
    document = document_of(tree)
    for fact in document.facts:
        assert "rate" not in fact.label.split()
        assert "of a stand-in 64 wide with 4 blocks" in fact.remark
    for section in (document.sections[0], document.sections[1], document.sections[3]):
        for sentence in section.sentences:
            assert "confidence" not in sentence.text
            assert not re.search(r"(learning well|useful rate|an explosion) is \d", sentence.text), sentence.text
    assert "a stand-in 64 wide with 4 blocks" in tree.attrs["summary"]
    assert "wb.Recorder" in tree.attrs["summary"]


def test_the_same_case_would_have_a_risk_by_its_size_alone(comparison):
    """Why a stand-in has to be known for one: nothing in its case tells it from a small model."""
    case = comparison["gpt2"]["case"].to_dataset()
    assert plan_risk(case).attrs["warning"].startswith("Too little was measured over 20,000 updates")
    near = wb.sweeps.replan(case, n_steps=400, warmup=20)
    assert np.isfinite(plan_risk(near)["failure"].item())
    assert np.isnan(plan_risk(near, stand_in="It is a stand-in.")["failure"].item())


def test_the_table_has_neither_risks_nor_rates_of_stand_ins(comparison):
    table = comparison["designs"].to_dataset()
    assert table["design"].values.tolist() == list(NAMES)
    for name in ("failure", "explosion", "rate_margin", "useful_edge", "slow_edge"):
        assert np.isnan(table[name].values).all()
    np.testing.assert_array_equal(dominated(table), table["is_dominated"].values)
    xr.testing.assert_allclose(table["relative_step_time"].min(), xr.DataArray(1.0))
    document = document_of(comparison)
    assert document.verdict == f"{document.facts[0].label}: cannot say"
    assert {fact.remark for fact in document.facts} == {"risk not known"}
    assert document.actions[0].text.startswith("None of them can be recommended on what was measured")
