"""Two processes record the same as one process on all examples; their observations come from ranked_recording.py."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks import ranked_recording

pytestmark = pytest.mark.subprocess

#: Difference of the final weights after training on the same examples with another order of summation.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.callbacks.ranked_recording", str(folder)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """Return the observations of each rank, by scenario."""
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def in_one_process(kind, recorder):
    rows = [[ranked_recording.own_rows(rank, i) for rank in range(2)] for i in range(ranked_recording.N_STEPS)]
    batches = [tuple(torch.cat(part) for part in zip(*of_ranks, strict=True)) for of_ranks in rows]
    return ranked_recording.train(ranked_recording.model(kind), recorder, batches)["heard"]


OF_PARTS = (
    "token_entropy", "label_entropy", "label_agreement", "largest_losses", "ignored_labels", "repeated_examples",
    "lookahead",
)  # fmt: skip


def assert_same(found, expected):
    assert [key[:2] for key in found] == [key[:2] for key in expected]
    for (step, part, values), (_, _, others) in zip(found, expected, strict=True):
        for name, value in values.items():
            if name in ("eigenvector_condition", "residual", "covariance_condition"):
                continue  # for few tokens they amplify rounding errors
            if name in OF_PARTS:
                continue  # of a part of batch or weights: the mean over ranks is not the full value
            scale = np.nan_to_num(np.abs(others[name])).max(initial=1e-12)
            assert value == pytest.approx(others[name], rel=TOLERANCE, abs=TOLERANCE * scale, nan_ok=True), (
                step,
                part,
                name,
            )


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        pytest.param("ddp", "moe", marks=pytest.mark.slow),
        pytest.param("fsdp", "dense", marks=pytest.mark.slow),
        ("fsdp prepared", "dense"),
    ],
)
def test_two_ranks_observe_the_same_as_one_process(ranks, scenario, kind):
    expected = in_one_process(kind, ranked_recording.recorder())
    parts = {"monitors", "attention", "optimizer", "activations", "reduction", "spectra"}
    parts |= {"router"} if kind == "moe" else set()
    assert {part for _, part, _ in expected} == parts
    for rank in ranks:
        assert_same(rank[scenario]["heard"], expected)
    assert all(
        values["batch_size"] == 8 and values["n_tokens"] == 96 for _, part, values in expected if part == "monitors"
    )


def test_recording_does_not_change_sharded_training(ranks):
    """Measurements gather weights, which the next forward pass must not use."""
    for rank in ranks:
        assert all(
            torch.equal(a, b) for a, b in zip(rank["fsdp"]["weights"], rank["fsdp plain"]["weights"], strict=True)
        )


def test_the_probe_is_that_of_the_first_rank(ranks):
    recorder = ranked_recording.recorder()
    recorder.probe = ranked_recording.own_rows(0, 0)[0]
    expected = in_one_process("dense", recorder)
    for rank in ranks:
        assert_same(rank["first batch"]["heard"], expected)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_first_rank_writes(folder, ranks, name):
    run = wb.open_run(folder / f"{name}.zarr")
    assert run.attrs["state"] == "finished"
    rows = [values for _, part, values in ranks[1][name]["heard"] if part == "monitors"]
    assert run["monitors"]["loss"].values == pytest.approx([float(values["loss"]) for values in rows])
    assert run["attention"].sizes["step"] == 3
    assert run["events"]["kind"].values.tolist() == ["started", "finished"]


def test_metrics_logged_by_one_rank_do_not_block_the_others(ranks):
    """The loss is that of the rank that logged it; a custom metric stays on its rank."""
    first, second = ([values for _, part, values in rank["one logs"]["heard"] if part == "monitors"] for rank in ranks)
    assert [float(values["loss"]) for values in first] == [float(values["loss"]) for values in second]
    assert float(first[0]["mine"]) == 3.0
    assert "mine" not in second[0]


def test_all_ranks_raise_if_the_first_one_cannot_write(ranks):
    for rank in ranks:
        assert (
            "taken.zarr exists already; pass resume=True to continue it, overwrite=True to replace it"
            in rank["refused"]
        )


def test_a_rank_whose_gradients_are_lost_is_named(ranks):
    for rank in ranks:
        assert rank["honest gradients"] == ([], [0.0, 0.0, 0.0])
        assert rank["sharded gradients"] == ([], [0.0, 0.0, 0.0])
        (message,), _ = rank["lost gradients"]
        assert message.startswith("The gradients of rank 1 are missing in 100 % of the parameters")


def test_parts_that_are_split_by_hand_are_not_taken_for_replicas(ranks):
    for rank in ranks:
        alarms, verdicts = rank["split by hand"]
        assert (alarms, len(verdicts)) == ([], 3)
        assert set(verdicts) == {0.0}
