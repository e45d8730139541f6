"""Stores of the stages of a pipeline are read as one run of one model."""

import shutil

import fsspec
import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.io.test_far_stores import put
from workbench.errors import StoreError
from workbench.io.run_index import last_change, metrics_of, status_of
from workbench.io.store import open_run
from workbench.widgets.timeline_parts.followed_run import FollowedRun

NAN = np.nan
NORMS = ("stage_grad_norm", "stage_change_norm", "stage_weight_norm")


def stage(number, n_stages, *, loss, norms, steps=(0, 1, 2), n_layers=2, state="finished", logged=None, events=()):
    """Return the run of one stage, whose planted values name the stage."""
    of_steps = ("step", np.full(len(steps), number + 1.0))
    monitors = {name: ("step", np.array(values, float)) for name, values in zip(NORMS, norms, strict=True)}
    grad_norm = monitors[NORMS[0]] if logged is None else ("step", np.array(logged, float))
    monitors |= {"loss": ("step", np.array(loss, float)), "grad_norm": grad_norm, "learning_rate": of_steps}
    monitors |= dict.fromkeys(
        ("batch_size", "n_tokens", "token_entropy", "repeated_examples", "repeated_batch"), of_steps
    )
    monitors |= dict.fromkeys(("update_ratio", "is_skipped", "lookahead"), of_steps)
    at, n_heads = np.array(steps), number + 1
    names = [f"layers.{i}" for i in range(n_layers)]
    layer = {"step": at, "layer": np.arange(n_layers), "layer_name": ("layer", names), "head": np.arange(n_heads)}
    entropy = (("step", "layer", "head"), np.full((len(at), n_layers, n_heads), number + 1.0))
    activations = {
        name: (("step", "layer"), np.full((len(at), n_layers), number + 1.0)) for name in wb.schema.ACTIVATIONS
    }
    activations["log_z"] = ("step", np.full(len(at), NAN if number + 1 < n_stages else 7.0))
    module = {"module": np.arange(n_layers + 1), "module_name": ("module", [*names, "outside"])}
    module |= {"step": at, "layer": ("module", [*range(n_layers), -1])}
    weights = np.full((len(at), n_layers + 1), number + 1.0)
    weights[:, -1] = number + 1.0 if number in (0, n_stages - 1) else NAN  # no embedding, no head
    rows = [(0, "started", "", "Started.", -1), *events, (3, "finished", "", "Finished.", -1)]
    step, kind, source, message, where = (np.array(column) for column in zip(*rows, strict=True))
    part = {"kind": kind, "source": source, "message": message, "layer": where, "head": np.full(len(rows), -1)}
    part |= {"step": step, "score": np.full(len(rows), NAN)}
    run = {
        "monitors": xr.Dataset(monitors, {"step": at}),
        "attention": xr.Dataset({"attention_entropy": entropy}, layer),
        "activations": xr.Dataset(activations, {name: layer[name] for name in ("step", "layer", "layer_name")}),
        "optimizer": xr.Dataset({"module_weight_norm": (("step", "module"), weights)}, module),
        "events": xr.Dataset({name: ("event", values) for name, values in part.items()}),
    }
    tree = xr.DataTree.from_dict({f"/{name}": values for name, values in run.items()})
    tree.attrs = {"subject": "Toy", "state": state, "stage": number, "n_stages": n_stages, "schema_version": 1}
    return tree


def saved(folder, *stages):
    for run in stages:
        wb.save(run, folder / f"a.stage{run.attrs['stage']}.zarr")
    return folder / "a.zarr"


@pytest.fixture
def three(of_three, tmp_path):
    """Return a copy of three stages."""
    return shutil.copytree(of_three.parent, tmp_path / "runs") / "a.zarr"


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    """Save three stages, of which the second begins and ends a step later, and the third has two alarms."""
    alarms = [(1, "alarm", "loss", "The loss jumped.", -1), (2, "alarm", "kurtosis", "Kurtosis of layer 1 rose.", 1)]
    return saved(
        tmp_path_factory.mktemp("three"),
        stage(0, 3, loss=[NAN] * 3, norms=([2, 2, 2], [1, 1, 1], [3, 3, 3])),
        stage(1, 3, loss=[NAN] * 3, norms=([3, 3, 3], [2, 2, 2], [4, 4, 4]), steps=(1, 2, 3)),
        stage(2, 3, loss=[5, 4, 3], norms=([6, 6, 6], [2, 2, 2], [12, 12, 12]), events=alarms, state="stopped"),
    )


def test_stages_are_one_run(three):
    run = wb.open_run(three)
    monitors = run["monitors"].to_dataset()
    assert monitors["step"].values.tolist() == [1, 2]  # those of all stages
    np.testing.assert_array_equal(monitors["loss"], [4, 3])
    np.testing.assert_array_equal(monitors["grad_norm"], [7, 7])  # the root of 4 + 9 + 36
    np.testing.assert_array_equal(monitors["update_ratio"], [3 / 13, 3 / 13])
    np.testing.assert_array_equal(monitors["batch_size"], [1, 1])  # of the first stage
    assert monitors["lookahead"].isnull().all()
    assert not {*NORMS} & {*monitors}
    for part in ("attention", "activations"):
        assert run[part]["layer"].values.tolist() == [0, 1, 2, 3, 4, 5]
    entropy = run["attention"]["attention_entropy"].sel(step=1)
    np.testing.assert_array_equal(entropy, [[1, NAN, NAN]] * 2 + [[2, 2, NAN]] * 2 + [[3, 3, 3]] * 2)
    np.testing.assert_array_equal(run["activations"]["log_z"], [7, 7])
    modules = run["optimizer"].to_dataset()
    assert modules["layer"].values.tolist() == [0, 1, -1, 2, 3, 4, 5, -1]
    assert modules["module_name"].values.tolist()[2::5] == ["outside of stage 0", "outside of stage 2"]
    np.testing.assert_array_equal(modules["module_weight_norm"].sel(step=1), [1, 1, 1, 2, 2, 3, 3, 3])
    assert run.attrs["state"] == "stopped"
    assert "stage" not in run.attrs


def test_events_name_their_stage(three):
    events = wb.open_run(three)["events"].to_dataset()
    assert events["message"].values.tolist() == [
        "Started.",
        "Stage 2: The loss jumped.",
        "Stage 2: Kurtosis of layer 1 rose.",
        "Finished.",
    ]
    assert events["layer"].values.tolist() == [-1, -1, 5, -1]


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ([[9, 9], [9, 9]], [9, 9]),  # of all stages, as each stage was told
        ([[3, 6], [4, 8]], [5, 10]),  # of its own stage
        ([[NAN, NAN], [9, 9]], [9, 9]),  # on the last stage alone
    ],
)
def test_norms_that_the_loop_logs(tmp_path, logged, expected):
    stages = [
        stage(i, 2, loss=[1, 1], norms=([NAN, NAN], [1, 1], [1, 1]), steps=(0, 1), logged=logged[i]) for i in range(2)
    ]
    np.testing.assert_array_equal(wb.open_run(saved(tmp_path, *stages))["monitors"]["grad_norm"], expected)


def test_a_run_of_stages_is_listed_and_followed_as_one(three):
    status = status_of(three)
    assert (status["name"], status["state"], status["loss"], status["n_alarms"]) == ("a", "stopped", 3.0, 2)
    assert status["first_alarm"]["message"] == "Stage 2: The loss jumped."
    row = wb.list_runs(three.parent).loc["a"]
    assert (row["state"], row["loss"], row["n_alarms"], row["first_alarm"]) == ("stopped", 3.0, 2, 1)
    assert row["path"] == str(three)
    np.testing.assert_array_equal(metrics_of(three, "loss"), [[1, 2], [4, 3]])
    followed, before = FollowedRun("a", three, 0), last_change(three)
    assert not followed.poll()
    assert last_change(three) == before
    wb.save(wb.open_run(three.with_name("a.stage1.zarr")).load(), three.with_name("a.stage1.zarr"), overwrite=True)
    assert last_change(three) != before
    assert followed.poll()


def test_a_missing_stage_is_named(three):
    three.with_name("a.stage1.zarr").rename(three.with_name("away.zarr"))
    with pytest.raises(StoreError, match=r"has 3 stages, but .*a\.stage1\.zarr is missing"):
        wb.open_run(three)
    assert last_change(three) is None


def test_a_store_of_its_own_comes_first(three):
    wb.save({"monitors": open_run(three)["monitors"].to_dataset().isel(step=[0])}, three)
    assert wb.open_run(three)["monitors"].sizes["step"] == 1


def test_stages_far_away_are_the_run_here(three):
    fsspec.filesystem("memory").store.clear()
    for i in range(3):
        put(three.with_name(f"a.stage{i}.zarr"), f"memory://runs/a.stage{i}.zarr")
    xr.testing.assert_identical(wb.open_run("memory://runs/a.zarr"), wb.open_run(three))
    assert status_of("memory://runs/a.zarr")["n_alarms"] == 2
    assert last_change("memory://runs/a.zarr") is not None
    assert wb.list_runs("memory://runs").index.tolist() == ["a"]
