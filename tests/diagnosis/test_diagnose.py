import json

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from tests.about import about, says
from tests.data_scripts import load_script
from workbench.diagnosis import CAUSES, Rules
from workbench.diagnosis.diagnose import diagnose
from workbench.diagnosis.experiment_runs import run_experiment
from workbench.errors import CheckpointError, OptionError, SchemaError, StoreError
from workbench.models.checkpoint import save_checkpoint

pytestmark = pytest.mark.medium

SIZES = {"d_model": 16, "n_layers": 3, "n_heads": 2, "vocab_size": 10, "max_length": 5}
N_STEPS, JUMP = 90, 55


def fresh():
    return wb.zoo.transformer(norm="none", initialization="xavier", **SIZES, seed=5), wb.tasks.associative_recall(
        length=5, vocab_size=10, n_pairs=2, batch_size=16, seed=5
    )


def jump(step):
    """Return the factor of the learning rate, which jumps by 40 at a step."""
    return 40.0 if step >= JUMP else 1.0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Store of a run whose schedule jumps, after which it diverges."""
    path = tmp_path_factory.mktemp("failed") / "run.zarr"
    model, task = fresh()
    recorder = wb.Recorder(every={"attention": 20, "optimizer": 5, "activations": 5}, n_probe_tokens=40)
    *_, last = wb.train(
        model, task, n_steps=N_STEPS, learning_rate=4e-3, schedule=jump, store=path, recorder=recorder,
        checkpoint_every=20, spectra_every=40, profile_options={"n_snapshots": 128, "n_workers": 1},
    )  # fmt: skip
    assert last.diverged
    assert last.step > JUMP
    return path


@pytest.fixture(scope="module")
def tree(store):
    return diagnose(store)


def test_the_tree_follows_its_description(store, tree):
    assert tree.attrs["kind"] == "diagnosis"
    assert tree.attrs["subject"] == "transformer without norm, 3 blocks of width 16"
    assert tree.attrs["failure_kind"] == "diverged"
    assert JUMP - 3 <= tree.attrs["failure_step"] <= N_STEPS
    causes = tree["causes"].to_dataset()
    assert sorted(causes["cause"].values.tolist()) == sorted([*CAUSES, "unknown"])
    assert float(causes["probability"].sum()) == pytest.approx(1)
    assert (np.diff(causes["probability"].values) <= 0).all()
    best = str(causes["cause"].values[0])
    assert tree.attrs["fault"] == CAUSES[best].kind
    assert CAUSES[best].title in tree.attrs["summary"]
    assert bool(causes["is_possible"][0])
    assert float(causes["mechanism_probability"].sum()) == pytest.approx(1)
    assert (tree.attrs["view"], tree.attrs["coverage"]) == ("store", 0.9)
    assert sum(json.loads(tree.attrs["fault_probabilities"]).values()) == pytest.approx(1, abs=1e-3)
    for name in causes.data_vars:
        assert {"units", "long_name", "meaning"} <= set(causes[name].attrs)


def test_a_jump_of_the_rate_is_attributed_to_the_schedule(tree):
    assert str(tree["causes"]["cause"].values[0]) == "schedule"
    assert tree.attrs["fault"] == "hyperparameter"


def test_evidence_is_where_it_says(store, tree):
    run, evidence = wb.open_run(store).load(), tree["evidence"].to_dataset()
    n_checked = 0
    for i in range(evidence.sizes["evidence"]):
        row = evidence.isel(evidence=i)
        path, variable, selection = (
            str(row["path"].values),
            str(row["variable"].values),
            json.loads(str(row["selection"].values)),
        )
        if not path:
            continue
        part = run[path]
        assert variable in part.data_vars
        chosen = part.to_dataset()[variable]
        for dim, value in selection.items():
            assert dim in chosen.dims
            assert value in chosen[dim].values.tolist()
            n_checked += 1
    assert n_checked > 20
    weight, cause = evidence["weight"].values, evidence["cause"].values
    assert (weight > 0).any()
    assert (weight < 0).any()
    for one in set(cause.tolist()):
        assert (np.diff(weight[cause == one]) <= 0).all()


def test_a_tree_and_a_path_have_the_same_diagnosis(store, tree):
    again = diagnose(wb.open_run(store).load(), checkpoints=store.with_suffix(".checkpoints"))
    xr.testing.assert_identical(again["causes"].to_dataset(), tree["causes"].to_dataset())


def test_it_can_be_stored(tree, tmp_path):
    opened = wb.open_run(wb.save(tree, tmp_path / "diagnosis.zarr")).load()
    assert opened.attrs["summary"] == tree.attrs["summary"]
    assert opened["evidence"]["sentence"].values.tolist() == tree["evidence"]["sentence"].values.tolist()


def test_experiments_are_in_the_order_of_information_per_cost(tree):
    table = tree["experiments"].to_dataset()
    gain = table["information"].values / (table["cost"].values + 0.05)
    assert (np.diff(gain) <= 1e-12).all()
    for text, cause in zip(table["change"].values, table["cause"].values, strict=True):
        assert json.loads(str(text))["setting"] == str(cause)
    own = table.isel(experiment=int(np.flatnonzero(table["cause"].values == "schedule")[0]))
    change = json.loads(str(own["change"].values))
    assert change["at"] == JUMP
    assert change["hold"] == pytest.approx(4e-3)
    assert int(own["from_step"]) in (40, 60)


def test_the_experiment_decides_for_the_cause_and_changes_no_input(store, tree):
    model, task = fresh()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    files = {path: path.stat().st_mtime_ns for path in store.parent.rglob("*")}
    random = torch.random.get_rng_state()
    done = run_experiment(tree, "schedule", model=model, task=task)
    table = done["experiments"].to_dataset().set_index(experiment="cause")
    row = table.sel(experiment="schedule")
    assert bool(row["is_done"])
    assert bool(row["supports"])
    assert str(row["outcome"].values).startswith("This supports the cause")
    assert np.isfinite(float(row["value"]))
    assert np.isnan(float(row["twin_value"]))
    assert int(table["is_done"].sum()) == 1
    assert "outcome" not in tree["experiments"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert files == {path: path.stat().st_mtime_ns for path in store.parent.rglob("*")}
    assert torch.equal(random, torch.random.get_rng_state())
    again = run_experiment(tree, "schedule", model=model, task=task)
    xr.testing.assert_identical(again["experiments"].to_dataset(), done["experiments"].to_dataset())


def test_the_experiment_decides_against_another_cause(tree):
    model, task = fresh()
    at = [str(cause) for cause in tree["experiments"]["cause"].values]
    if "optimizer_eps" not in at:
        table = tree["experiments"].to_dataset().isel(experiment=[0])
        other = tree.copy()
        table["cause"] = ("experiment", ["optimizer_eps"])
        table["change"] = ("experiment", [json.dumps({"setting": "optimizer_eps", "value": 1e-8})])
        other["experiments"] = xr.DataTree(table)
        tree = other
    done = run_experiment(tree, "optimizer_eps", model=model, task=task)
    row = done["experiments"].to_dataset().set_index(experiment="cause").sel(experiment="optimizer_eps")
    assert not bool(row["supports"])
    assert str(row["outcome"].values).startswith("This is evidence against the cause")


def test_the_unchanged_replay_is_the_run(store, tree):
    """The losses of the control equal the recorded ones from the checkpoint on."""
    from workbench.diagnosis.experiment_runs import Replay
    from workbench.diagnosis.failed_run import read_record

    model, task = fresh()
    replay = Replay(read_record(store), store, model, task, 40, 20, (), None, {})
    recorded = wb.open_run(store)["monitors"]["loss"].sel(step=slice(40, 59)).values
    losses = replay.losses({})
    n = len(recorded) - 1  # the loss of the diverged step is omitted
    np.testing.assert_array_equal(losses[:n], recorded[:n])
    assert np.isnan(losses[n:]).all()


def test_the_outcome_updates_the_causes(tree):
    model, task = fresh()
    done = run_experiment(tree, "schedule", model=model, task=task)
    before = dict(zip(tree["causes"]["cause"].values.tolist(), tree["causes"]["probability"].values, strict=True))
    causes = done["causes"].to_dataset()
    expected = Rules.shipped().after(before, "schedule", supports=True)
    assert causes["cause"].values.tolist() == list(expected)
    np.testing.assert_allclose(causes["probability"].values, list(expected.values()), rtol=1e-9)
    assert expected["schedule"] > before["schedule"]
    assert done.attrs["n_replays"] == 1
    assert "coverage" not in done.attrs  # the coverage was measured without replays
    again = run_experiment(done, "schedule", model=model, task=task)
    xr.testing.assert_identical(again["causes"].to_dataset(), causes)  # repeating a replay adds no information
    last = done["experiments"].to_dataset().set_index(experiment="cause").sel(experiment="schedule")
    assert float(last["information"]) == 0
    assert done.attrs["summary"].startswith(tree.attrs["what_happened"])
    worth = done["experiments"]["information"].values / (done["experiments"]["cost"].values + 0.05)
    assert (np.diff(worth[np.argsort(done["experiments"]["order"].values)]) <= 1e-12).all()
    assert tree["causes"]["cause"].values.tolist() == list(before)  # the tree that was passed is unchanged


def test_a_failure_that_does_not_recur_changes_no_probability(tree):
    model, task = fresh()
    done = run_experiment(tree, "schedule", model=model, task=task, n_steps=3)
    outcomes = done["experiments"].to_dataset().set_index(experiment="cause")["outcome"]
    assert "Undecided" in str(outcomes.sel(experiment="schedule").values)
    xr.testing.assert_identical(done["causes"].to_dataset(), tree["causes"].to_dataset())


def test_settings_alone_have_no_stated_coverage(store):
    found = diagnose(store, uses=("configuration",))
    assert found.attrs["view"] == "other"
    assert "coverage" not in found.attrs


def test_a_run_without_a_failure_shows_none(store):
    healthy = wb.open_run(store)["monitors"].to_dataset().isel(step=slice(0, JUMP - 5))
    found = diagnose(healthy)
    assert found.attrs["shows_failure"] == 0
    assert found.attrs["view"] == "log"
    assert bool(found["causes"].to_dataset().sel(cause="nothing")["is_possible"])
    assert diagnose(store).attrs["shows_failure"] == 1


def from_the_start(tree):
    """Return the diagnosis with an experiment that begins at step 0."""
    table = tree["experiments"].to_dataset().isel(experiment=[0])
    table["from_step"], table["n_steps"] = ("experiment", [0]), ("experiment", [6])
    tree = tree.copy()
    tree["experiments"] = xr.DataTree(table)
    return tree


def test_a_replay_from_the_start_needs_the_initial_parameters(store, tree, tmp_path):
    tree = from_the_start(tree)
    model, task = fresh()
    assert run_experiment(tree, model=model, task=task)["experiments"]["is_done"].item()
    later = wb.open_checkpoint(store.with_suffix(".checkpoints") / "step-00000040").model
    with pytest.raises(OptionError, check=says("pass the model with the initial parameters of the run, and")):
        run_experiment(tree, model=later, task=task)
    save_checkpoint(model, tmp_path / "step-00000000")
    assert run_experiment(tree, model=model, task=task, checkpoints=tmp_path)["experiments"]["is_done"].item()
    with torch.no_grad():
        model.blocks[1].attention.out.weight[0, 0] += 0.01
    with pytest.raises(CheckpointError, check=says("pass the model with its initial parameters, which")):
        run_experiment(tree, model=model, task=task, checkpoints=tmp_path)


def test_impossible_experiments_are_rejected(store, tree, tmp_path):
    model, task = fresh()
    causes = tuple(tree["experiments"]["cause"].values.tolist())
    with pytest.raises(OptionError, check=about("experiment", "weather", causes)):
        run_experiment(tree, "weather", model=model, task=task)
    few = load_script("fitting").fit_rules([({"abrupt": 1.0}, "data"), ({"abrupt": 0.0}, "batch")])
    with pytest.raises(OptionError, check=says("The diagnosis was made with other rules than these; pass")):
        run_experiment(tree, "schedule", model=model, task=task, rules=few)
    with pytest.raises(OptionError, check=about("n_steps", 0)):
        run_experiment(tree, "schedule", model=model, task=task, n_steps=0)
    with pytest.raises(CheckpointError, check=says("pass the checkpoint of this model.")):
        run_experiment(tree, "schedule", model=wb.zoo.transformer(norm="none", **{**SIZES, "d_model": 24}), task=task)
    with pytest.raises(CheckpointError, check=says("holds no checkpoint; pass a folder with step-*,")):
        run_experiment(tree, "schedule", model=model, task=task, checkpoints=tmp_path)


def test_a_run_that_cannot_be_diagnosed_is_rejected(tmp_path):
    with pytest.raises(StoreError, check=about("path", tmp_path / "none.zarr")):
        diagnose(tmp_path / "none.zarr")
    with pytest.raises(SchemaError, check=says("The run has no monitors with a loss to diagnose; record it")):
        diagnose(xr.Dataset({"accuracy": ("step", [1.0])}, coords={"step": [0]}))
    with pytest.raises(SchemaError, check=says("recorded steps, too few to diagnose; record more.")):
        diagnose(xr.Dataset({"loss": ("step", [1.0, 0.9])}, coords={"step": [0, 1]}))
    with pytest.raises(StoreError, check=about("run", (1, 2))):
        diagnose([1, 2])
    with pytest.raises(OptionError, check=about("uses", "weather", ("mechanism", "log", "configuration", "fact"))):
        diagnose(tmp_path, uses=("weather",))
