"""The scripts of the recorded study of alarms: harm, doses, and runs that branch off from their control."""

import dataclasses
import json
import math

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("record_warnings")


@pytest.fixture(autouse=True)
def no_table(script, monkeypatch):
    monkeypatch.setattr(script, "rows_of_table", dict)


def losses(n=2000, *, seed=0, scale=0.05):
    return 2 + np.exp(-np.arange(n) / 300) + scale * np.random.default_rng(seed).normal(size=n)


def test_harm_is_a_lasting_mean_above_the_control(script):
    control = losses()
    worse = losses(seed=1) + 0.1 * (np.arange(2000) >= 1000)
    harm, lasting = script.Harm(control, []), []
    for step, loss in enumerate(worse):
        lasting.append(harm.update(step, float(loss)))
    assert 1000 < harm.since < 1060
    assert 1200 <= lasting.index(True) < 1260
    same = script.Harm(control, [])
    assert not any(same.update(step, float(loss)) for step, loss in enumerate(losses(seed=2)))


def test_late_harm_lasts_from_the_best_loss_to_the_end(script):
    values = losses(4000)
    assert script.late_harm(values.tolist()) is None
    rising = values + np.maximum(np.arange(4000) - 2500, 0) / 2000
    assert 2500 < script.late_harm(rising.tolist()) < 2800
    recovered = values + 0.5 * ((np.arange(4000) > 2000) & (np.arange(4000) < 2500))
    assert script.late_harm(recovered.tolist()) is None


@pytest.mark.parametrize(("n_harmful", "taken"), [(7, [8, 5, 3, 2]), (3, [8, 5, 7, 6]), (1, [8, 5, 7]), (0, [8])])
def test_doses_are_bisected(script, tmp_path, n_harmful, taken):
    import warning_cases

    case = warning_cases.Case("deepnorm lm", 0, "attention", 8)
    doses, found = warning_cases.KINDS["attention"].doses, []
    for dose in script.doses_of(case, tmp_path):
        found.append(dose)
        one = dataclasses.replace(case, dose=dose)
        is_harmful = doses.index(dose) < n_harmful
        script.place_of(one, tmp_path).with_suffix(".json").write_text(json.dumps({"is_harmful": is_harmful}))
    assert found == taken
    assert script.is_searched(case, tmp_path)


@pytest.mark.slow
def test_a_run_that_branches_off_is_the_run_with_the_fault(script, tmp_path, monkeypatch):
    """A copy of the control's process has the same losses as `wb.train` with the fault from the first step on."""
    import warning_cases

    monkeypatch.setitem(warning_cases.N_STEPS, "locked", 330)
    monkeypatch.setattr(warning_cases, "EARLIEST", 300)
    monkeypatch.setattr(warning_cases, "LATEST", 302)
    monkeypatch.setattr(script, "HORIZON", {True: 8, False: 8})
    control = warning_cases.Case("mamba lm", 0)
    cases = [dataclasses.replace(control, kind=kind, dose=dose) for kind, dose in [("stale", 64), ("weights", 300)]]
    script.record_with_faults(control, cases, tmp_path)
    for case in cases:
        observations = script.loaded(script.place_of(case, tmp_path))
        recorded = [float(o.values["loss"]) for o in observations if o.part == "monitors"]
        model, task, plan = warning_cases.build(case)
        direct = []
        for record in wb.train(model, task, **plan):
            direct.append(record.loss)
            if record.step + 1 == len(recorded):
                break
        assert len(recorded) > case.start
        np.testing.assert_allclose(recorded, direct, rtol=1e-5)
        result = json.loads(script.place_of(case, tmp_path).with_suffix(".json").read_text())
        assert result["start"] == case.start
        assert result["n_steps"] == len(recorded)
    assert not math.isnan(recorded[-1])
