"""The recorded study of runs with injected faults: the answers of the rules for families of the test set."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from failure_cases import cases

import workbench as wb
from tests.data_scripts import load_script
from workbench.course import failure_runs
from workbench.diagnosis import CAUSES, Rules
from workbench.diagnosis.diagnose import diagnose
from workbench.diagnosis.experiment_runs import run_experiment

pytestmark = pytest.mark.recorded

DATA = Path(__file__).parents[2] / "data"
NOTHING = list(CAUSES).index("nothing")


@pytest.fixture(scope="module")
def script():
    return load_script("make_failures")


@pytest.fixture(scope="module")
def runs():
    with xr.open_dataset(DATA / "failures.nc", engine="netcdf4") as data:
        return data.load()


@pytest.fixture(scope="module")
def accuracy():
    with (DATA / "diagnosis_accuracy.csv").open() as file:
        return {(row["set"], row["answer"]): row for row in csv.DictReader(file)}


def of_set(runs, name):
    return runs.isel(run=(runs["set"] == name).values)


def test_no_family_is_in_two_sets(runs):
    planned = {name: {c.name for c in cases(name)} for name in ("fit", "choose", "locked")}
    families = [set(of_set(runs, name)["family"].values.tolist()) for name in planned]
    assert sum(map(len, families)) == len(set.union(*families))
    for name, known in planned.items():
        assert set(of_set(runs, name)["name"].values.tolist()) <= known
        assert json.loads(runs.attrs["recorded"])[name] == len(known)
    assert str(int((of_set(runs, "locked")["is_cause"].values[:, NOTHING]).sum())) not in Rules.shipped().about.split()


def test_settings_are_drawn_before_the_fault_and_shared_with_the_control():
    for case in cases("locked")[::40]:
        assert failure_runs.base_of(case.setup, case.base) == failure_runs.base_of(
            case.control.setup, case.control.base
        )
        made, control = failure_runs.build(case), failure_runs.build(case.control)
        assert made.plan["seed"] == control.plan["seed"]
        if not case.plants:
            assert made.plan == control.plan
            assert not made.faults


def test_the_table_of_accuracy_follows_from_the_recorded_answers(runs, accuracy):
    """The counts are recomputed run by run."""
    for name in ("fit", "choose", "locked"):
        chosen = of_set(runs, name)
        for view in chosen["view"].values:
            one = chosen.sel(view=view)
            right = covered = size = missed = n_failed = n_sound = called = 0
            for i in range(one.sizes["run"]):
                truth = one["is_cause"].values[i]
                first = int(np.argmax(one["probability"].values[i]))
                inside = one["is_in_set"].values[i]
                assert inside[first]
                if truth[NOTHING]:
                    n_sound, called = n_sound + 1, called + (first == NOTHING)
                    continue
                n_failed += 1
                right += bool(truth[first])
                covered += all(inside[k] for k in np.flatnonzero(truth))
                size += int(inside.sum())
                missed += first == NOTHING
            row = accuracy[name, str(view)]
            assert (int(row["failed"]), int(row["sound"])) == (n_failed, n_sound)
            for label, value in (
                ("first", right / n_failed), ("covered", covered / n_failed), ("size", size / n_failed),
                ("missed", missed / n_failed), ("healthy", called / n_sound),
            ):  # fmt: skip
                assert float(row[label]) == pytest.approx(value, abs=6e-4), (name, view, label)


def test_answers_are_better_than_the_majority_class_and_than_curves(accuracy):
    for name in ("choose", "locked"):
        mechanism, curves = accuracy[name, "mechanism"], accuracy[name, "curves"]
        majority = float(accuracy[name, "majority class"]["first"])
        assert float(mechanism["first"]) > 2 * majority
        assert float(mechanism["first"]) > float(curves["first"]) > majority


def test_the_shipped_rules_return_the_recorded_answers_for_the_test_set(runs):
    rules = Rules.shipped()
    locked = of_set(runs, "locked")
    for i in range(0, locked.sizes["run"], 5):
        row = locked.isel(run=i)
        pairs = zip(row["symptom"].values, row["strength"].values, strict=True)
        found = rules.probabilities({str(name): float(v) for name, v in pairs if np.isfinite(v)})
        recorded = row.sel(view="store")
        order = [str(c) for c in recorded["ranked_cause"].values]
        np.testing.assert_allclose([found[c] for c in order], recorded["probability"].values, atol=2e-3)


def test_a_cause_is_missing_from_sets_of_recorded_runs_as_rarely_as_stated(runs):
    """On the runs that the shipped thresholds were set on, each cause is missed in at most a tenth of them."""
    known = runs.isel(run=(runs["set"] != "locked").values)
    for view in known["view"].values:
        one = known.sel(view=view)
        for k, cause in enumerate(CAUSES):
            has_it = one["is_cause"].values[:, k]
            outside = ~one["is_in_set"].values[has_it, k]
            assert outside.sum() <= math.floor(0.1 * (has_it.sum() + 1)), (str(view), cause)


def unknown_rows():
    with (DATA / "unknown_causes.csv").open() as file:
        return list(csv.DictReader(file))


def test_another_cause_costs_few_right_answers_and_saves_many_sure_and_wrong_ones():
    rows = {(row["set"], row["view"], row["answer"]): row for row in unknown_rows()}
    assert set(Rules.shipped().unknown) == {view for _, view, _ in rows}
    for name, view in {(name, view) for name, view, _ in rows}:
        alone, other = (rows[name, view, answer] for answer in ("named causes alone", "with another cause"))
        assert float(alone["unknown"]) == 0
        assert float(alone["right"]) - 0.03 <= float(other["right"]) <= float(alone["right"])
        assert float(other["sure_and_wrong"]) < float(alone["sure_and_wrong"])
        assert float(other["nothing"]) <= float(alone["nothing"])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_answers_for_kinds_that_were_left_out_are_computed_again(script, tmp_path, monkeypatch):
    (tmp_path / "failures.nc").write_bytes((DATA / "failures.nc").read_bytes())
    (tmp_path / "rules.json").write_bytes((script.SHIPPED / "rules.json").read_bytes())
    monkeypatch.setattr(script, "OUT", tmp_path)
    monkeypatch.setattr(script, "SHIPPED", tmp_path)
    script.judge_unknown()
    assert Rules.open(tmp_path / "rules.json").unknown == Rules.shipped().unknown
    with (tmp_path / "unknown_causes.csv").open() as file:
        again = list(csv.DictReader(file))
    for one, other in zip(again, unknown_rows(), strict=True):
        assert [one[name] for name in ("set", "view", "answer")] == [other[name] for name in ("set", "view", "answer")]
        for name in ("right", "unknown", "nothing", "sure_and_wrong"):
            assert float(one[name]) == pytest.approx(float(other[name]), abs=0.011)  # fits differ between processors


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_repeated_runs_are_diagnosed_as_recorded(script, runs, tmp_path):
    """A run that fails early and a healthy one are repeated from their seeds."""
    locked = of_set(runs, "locked")
    failed = int(np.flatnonzero((locked["how"] == "diverged").values)[0])
    sound = int(np.flatnonzero(locked["is_cause"].values[:, NOTHING])[0])
    for i in (failed, sound):
        row = locked.isel(run=i)
        case = next(case for case in cases("locked") if case.name == row["name"].item())
        script.record(case, tmp_path)
        tree = diagnose(tmp_path / f"{case.name}.nc")
        recorded = row.sel(view="store")
        assert str(tree["causes"]["cause"].values[0]) == str(
            recorded["ranked_cause"].values[recorded["probability"].values.argmax()]
        )


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "cause", "block"),
    [("architecture", "architecture", 1), ("hyperparameter", "schedule", -1), ("precision", "precision", 2)],
)
def test_the_examples_are_diagnosed_and_decided(name, cause, block):
    place = DATA / "failures" / f"{name}.nc"
    run = wb.open_run(place)
    assert "faults" not in json.loads(run.attrs["configuration"])
    assert "fault" not in run["events"]["kind"].values.tolist()
    tree = diagnose(place)
    causes = tree["causes"].to_dataset().set_index(cause="cause")
    assert bool(causes.sel(cause=cause)["is_possible"])
    assert int(causes.sel(cause=cause)["layer"]) == block
    examples = load_script("make_failure_examples")
    made = examples.build(examples.EXAMPLES[name])
    checkpoint = next(place.with_suffix(".checkpoints").glob("step-*"))
    done = run_experiment(tree, cause, model=wb.open_checkpoint(checkpoint).model, task=made.task, faults=made.faults)
    row = done["experiments"].to_dataset().set_index(experiment="cause").sel(experiment=cause)
    assert bool(row["supports"])
    assert np.isfinite(float(row["value"]))
    assert np.isnan(float(row["twin_value"]))
    assert str(done["causes"]["cause"].values[0]) == cause


def test_nothing_is_found_in_the_healthy_example():
    tree = diagnose(DATA / "failures" / "healthy.nc")
    assert str(tree["causes"]["cause"].values[0]) == "nothing"
    assert tree.attrs["state"] == "nothing found"
    assert "Nothing found in what was recorded" in tree.attrs["summary"]
    assert "%" not in tree.attrs["summary"]
