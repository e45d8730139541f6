"""Two processes that train one model and are watched in one line; what each of them saw is of ranked_watching.py."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks.ranked_watching import N_STEPS

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]

KINDS = ["ddp float32", "ddp bfloat16", "fsdp float32", "fsdp bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.callbacks.ranked_watching", str(folder)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """What each rank saw, by scenario."""
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", KINDS)
def test_training_is_the_same_to_the_bit_and_no_hook_is_left(ranks, name):
    for rank in ranks:
        watched, alone = rank[name], rank[f"{name} alone"]
        assert len(watched["weights"]) == len(alone["weights"])
        for one, other in zip(watched["weights"], alone["weights"], strict=True):
            assert torch.equal(one, other)
        assert (watched["n_hooks_left"], watched["alarms"]) == (0, [])


@pytest.mark.parametrize("name", KINDS)
def test_the_first_rank_alone_writes_and_shows(folder, ranks, name):
    run = wb.open_run(folder / f"{name}.zarr")
    assert run.attrs["state"] == "finished"
    assert run["monitors"]["step"].values.tolist() == list(range(N_STEPS))
    assert run["events"]["kind"].values.tolist().count("started") == 1
    assert run["reduction"]["gradient_verdict"].values.tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(run["reduction"]["receiving_rank"].values).all()
    # The arithmetic is checked where each rank has all weights.
    assert ("precision" in run.children) == name.startswith("ddp")
    assert run["attention"].sizes["step"] == 3
    first, second = (rank[name]["shown"] for rank in ranks)
    assert second == ""
    assert first.count("\n") == 1
    assert f"step {N_STEPS - 1} · loss" in first.split("\r\x1b[2K")[-1]


def test_ranks_agree_on_a_path_of_their_own(folder, ranks):
    paths = {rank["lost of one rank"]["path"] for rank in ranks}
    (path,) = paths
    assert [each.name for each in (folder / "runs").iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "step", "signal", "message"),
    [
        ("lost of one rank", 1, "gradients", "The gradients of rank 1 are missing in 19 % of the parameters"),
        ("lost of all", 1, "gradients", "The optimizer gets zeros instead of the computed gradients in 19 % of"),
        ("broken attention", 3, "arithmetic", "On rank 1 the gradient of the queries of layer"),
        ("dropped on one", 3, "gradients", "The optimizer gets zeros instead of the computed gradients in 100 % of the "
         "parameters on rank 1"),
        ("lossy shards", 1, "gradients", "The gradients of rank 1 are missing in 100 % of the parameters"),
        ("dropped shards", 3, "gradients", "The optimizer gets zeros instead of the computed gradients in 100 % of"),
        ("dropped shards of one", 3, "gradients", "The gradients that the optimizer gets are not those that this step"),
        ("changed setting", 4, "weight_decay", "On rank 1 the weight decay rose from 0.01 to 0.5"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_rank_by_all_of_them(ranks, name, step, signal, message):
    first, second = (rank[name]["alarms"] for rank in ranks)
    assert first == second
    assert first[0][:2] == (step, signal)
    assert first[0][2].startswith(message)
    assert len(first) == 1
    told = ranks[0][name]["shown"]
    assert name == "lost of one rank" or told.count(f"step {step}: {first[0][2]}") == 1
    assert ranks[1][name]["shown"] == ""


def test_a_broken_rank_stands_in_the_record(folder):
    run = wb.open_run(folder / "attention.zarr")
    np.testing.assert_array_equal(run["precision"]["broken_rank"].values, [np.nan, 1.0, 1.0])
    events = run["events"].to_dataset()
    alarm = events["message"].values[events["kind"].values == "alarm"].item()
    assert alarm.startswith("On rank 1 the gradient")
    again = wb.alarms.replay(run, wb.Alarms())
    assert [each.message for each in again] == [alarm]


def test_an_alarm_about_one_rank_stops_both(ranks):
    for rank in ranks:
        assert (rank["alarm stops"]["ended"], rank["alarm stops"]["status"]) == ("arithmetic", 3)
        assert rank["alarm stops"]["n_hooks_left"] == 0


def test_one_rank_that_raises_holds_nobody_up(folder, ranks):
    ends = [rank["one raises"]["ended"] for rank in ranks]
    assert ends == ["a word of the loop", "an error of rank 1 alone"]
    for rank in ranks:
        assert rank["one raises"]["n_hooks_left"] == 0
    assert wb.open_run(folder / "raises.zarr")["monitors"].sizes["step"] == 3
    weights = [rank["one raises"]["weights after"] for rank in ranks]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_rank_whose_gradients_nobody_saw_holds_nobody_up(folder, ranks):
    """Rank 1 trains in eval mode, where no batch is seen: then nothing is compared."""
    assert wb.open_run(folder / "eval.zarr")["reduction"]["gradient_verdict"].values.tolist() == [-1.0, -1.0, -1.0]
    for rank in ranks:
        assert (rank["eval on one"]["alarms"], rank["eval on one"]["status"]) == ([], N_STEPS - 1)
