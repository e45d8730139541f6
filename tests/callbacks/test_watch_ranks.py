"""Two processes that train one model and are watched; ranked_watching.py computes the results of each rank."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks.ranked_watching import N_STEPS

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]

MISSING = "The gradients of rank 1 are missing in"
ZEROS = "The optimizer receives zeros instead of the computed gradients in"
OTHERS = "The gradients that the optimizer receives are not those computed"
KINDS = ["ddp float32", "ddp bfloat16", "fsdp float32", "fsdp bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.callbacks.ranked_watching", str(folder)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """Results of each rank, by scenario."""
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", KINDS)
def test_training_is_bitwise_identical_and_hooks_are_removed(ranks, name):
    for rank in ranks:
        watched, control = rank[name], rank[f"{name} not watched"]
        assert len(watched["weights"]) == len(control["weights"])
        for one, other in zip(watched["weights"], control["weights"], strict=True):
            assert torch.equal(one, other)
        assert (watched["n_hooks_left"], watched["alarms"]) == (0, [])


@pytest.mark.parametrize("name", KINDS)
def test_only_the_first_rank_writes_and_shows(folder, ranks, name):
    run = wb.open_run(folder / f"{name}.zarr")
    assert run.attrs["state"] == "finished"
    assert run["monitors"]["step"].values.tolist() == list(range(N_STEPS))
    assert run["events"]["kind"].values.tolist().count("started") == 1
    assert run["reduction"]["gradient_verdict"].values.tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(run["reduction"]["receiving_rank"].values).all()
    assert run["precision"].sizes["step"] == 3
    assert run["attention"].sizes["step"] == 3
    first, second = (rank[name]["shown"] for rank in ranks)
    assert second == ""
    assert first.count("\n") == 1
    assert f"step {N_STEPS - 1} · loss" in first.split("\r\x1b[2K")[-1]


def test_ranks_agree_on_the_default_path(folder, ranks):
    paths = {rank["gradients lost on one rank"]["path"] for rank in ranks}
    (path,) = paths
    assert [each.name for each in (folder / "runs").iterdir() if each.name != ".index"] == [path.name]


@pytest.mark.parametrize(
    ("name", "step", "signal", "message"),
    [
        ("gradients lost on one rank", 1, "gradients", f"{MISSING} 21 % of the parameters"),
        ("gradients lost on all ranks", 1, "gradients", f"{ZEROS} 21 % of"),
        ("low precision on one rank", 3, "arithmetic", "On rank 1 the gradient of the queries of layer"),
        ("dropped on one rank", 3, "gradients", f"{ZEROS} 100 % of the parameters on rank 1"),
        ("lossy shards", 1, "gradients", f"{MISSING} 100 % of the parameters"),
        ("dropped shards", 3, "gradients", f"{ZEROS} 100 % of"),
        ("dropped shards on one rank", 3, "gradients", OTHERS),
        ("changed setting", 4, "weight_decay", "On rank 1 the weight decay rose from 0.01 to 0.5"),
    ],
)
def test_a_fault_and_its_rank_are_named_on_all_ranks(ranks, name, step, signal, message):
    first, second = (rank[name]["alarms"] for rank in ranks)
    assert first == second
    assert first[0][:2] == (step, signal)
    assert first[0][2].startswith(message)
    # The gradient is exactly 0, and an update does not follow from the gradients that the backward pass has computed.
    contract = "contract update_as_predicted"
    more = {"dropped shards": [contract, "limits"], "dropped on one rank": [contract]}
    more["dropped shards on one rank"] = [contract]
    assert [each[1] for each in first[1:]] == more.get(name, [])
    shown = ranks[0][name]["shown"]
    assert name == "gradients lost on one rank" or shown.count(f"step {step}: {first[0][2]}") == 1
    assert ranks[1][name]["shown"] == ""


def test_the_record_names_the_rank_of_a_fault(folder):
    run = wb.open_run(folder / "attention.zarr")
    np.testing.assert_array_equal(run["precision"]["broken_rank"].values, [np.nan, 1.0, 1.0])
    events = run["events"].to_dataset()
    alarm = events["message"].values[events["kind"].values == "alarm"].item()
    assert alarm.startswith("On rank 1 the gradient")
    replayed = wb.alarms.replay(run, wb.Alarms())
    assert [each.message for each in replayed] == [alarm]


def test_an_alarm_about_one_rank_stops_both(ranks):
    for rank in ranks:
        assert (rank["alarm stops"]["ended"], rank["alarm stops"]["status"]) == ("arithmetic", 3)
        assert rank["alarm stops"]["n_hooks_left"] == 0


def test_an_error_on_one_rank_does_not_block_the_other(folder, ranks):
    ends = [rank["one raises"]["ended"] for rank in ranks]
    assert ends == ["stopped by the loop", "an error of rank 1 alone"]
    for rank in ranks:
        assert rank["one raises"]["n_hooks_left"] == 0
    assert wb.open_run(folder / "raises.zarr")["monitors"].sizes["step"] == 3
    weights = [rank["one raises"]["weights after"] for rank in ranks]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_rank_in_eval_mode_is_recorded_like_the_other(folder, ranks):
    assert wb.open_run(folder / "eval.zarr")["reduction"]["gradient_verdict"].values.tolist() == [0.0, 0.0, 0.0]
    for rank in ranks:
        assert (rank["eval on one"]["alarms"], rank["eval on one"]["status"]) == ([], N_STEPS - 1)
