"""The recorded study of alarms is consistent with itself and with the library's names."""

from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import load_script
from workbench.callbacks.alarms import WATCHED, Attributor, Calibration

pytestmark = pytest.mark.recorded

#: Causes that no fault of the catalog produces.
DAMAGED = {"damaged_weights", "damaged_optimizer_state", "repeated_data"}
#: Causes that a limit names.
OF_LIMITS = {"no_gradient", "gradients_discarded"}
OTHERS = {"", "unknown", "arithmetic", "changed_setting", "logit_growth"}
#: Signals of alarms without calibration.
SETTLED = {"arithmetic", "gradients", "data", "limits", "logits", "learning_rate", "batch_size", "auxiliary_loss"}


@pytest.fixture(scope="module")
def runs():
    return wb.samples.open("early_warning")


@pytest.fixture(scope="module")
def locked(runs):
    return wb.early_warning.of_set(runs, "locked")


def test_setups_of_the_test_set_are_in_no_other_set(runs, locked):
    of_faults = locked.isel(run=np.flatnonzero(locked["kind"].values != "late"))
    families = set(of_faults["family"].values.tolist())
    script = load_script("warning_cases")
    others = {setup.family for setup in script.SETUPS.values() if setup.set != "locked"}
    assert others.isdisjoint(families)
    assert len(families) >= 12
    assert int(wb.early_warning.harmful(locked).sum()) >= 50


def test_it_is_consistent_with_itself(runs):
    start = runs["start"].fillna(0)
    for name in ("first_step", "mechanism_step", "loss_step", "grad_norm_step", "harm_step"):
        step = runs[name]
        assert ((step >= 0) & (step < runs["n_steps"]) | step.isnull()).all()
        if name != "harm_step":
            assert ((step >= start) | step.isnull()).all()
    has_alarm = runs["first_step"].notnull().values
    np.testing.assert_array_equal(has_alarm, runs["n_alarms"].values > 0)
    np.testing.assert_array_equal(has_alarm, runs["first_signal"].values != "")
    assert not ((runs["mechanism_step"] < runs["first_step"]).values).any()
    np.testing.assert_array_equal(runs["is_harmful"].values, runs["harm_step"].notnull().values)
    assert set(runs["first_signal"].values.tolist()) <= {watched.name for watched in WATCHED} | SETTLED | {""}
    causes = set(wb.faults.catalog()) | DAMAGED | OF_LIMITS | OTHERS
    assert set(runs["first_cause"].values.tolist()) | set(runs["expected_cause"].values.tolist()) <= causes
    is_healthy = runs["kind"].values == ""
    assert (runs["divergence"].values[is_healthy] == "").all()


def test_healthy_runs_are_as_long_as_planned(runs):
    script = load_script("warning_cases")
    for row in range(runs.sizes["run"]):
        run = runs.isel(run=row)
        if str(run["kind"].values) == "":
            plan = script.plan_of(script.Case(str(run["setup"].values), int(run["plan"])))
            assert int(run["n_steps"]) == plan["n_steps"]


def test_the_shipped_calibration_was_fitted_to_many_healthy_steps():
    calibration = Calibration.shipped()
    assert calibration.n_steps >= 100_000
    assert set(calibration.tails) <= {watched.name for watched in WATCHED}
    calibrated = {watched.name for watched in WATCHED if watched.part != "router" and not watched.threshold > 0}
    assert calibrated <= set(calibration.tails)
    assert set(Attributor.shipped().causes) <= set(wb.faults.catalog()) | DAMAGED


@pytest.mark.slow
def test_a_repeated_fault_is_found_at_the_same_step(locked, tmp_path):
    """The probe finds a large arithmetic fault at its cadence, so the step does not depend on rounding."""
    is_it = (locked["first_signal"] == "arithmetic").values & (locked["kind"] == "attention").values
    rows = np.flatnonzero(is_it)
    row = locked.isel(run=rows[np.argmin(locked["start"].values[rows])])
    judging = load_script("judge_warnings")
    script = load_script("record_warnings")
    case = load_script("warning_cases").Case(
        str(row["setup"].values), int(row["plan"]), "attention", float(row["dose"])
    )
    assert case.start == int(row["start"])
    run = script.Recorded(case)
    run.later.become(case)
    for record in run:
        if record.step > row["first_step"]:
            break
    place = script.place_of(case, tmp_path)
    result = run.save(place, start=case.start) | {"set": "locked", "place": Path(place)}
    again = judging.judge(result)
    for name in ("first_step", "first_signal", "first_cause"):
        assert again[name] == row[name].values.item()
