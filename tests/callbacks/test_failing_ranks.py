"""What fails on one rank is left out on all, with an event, and training goes on; results from ranked_failures.py."""

import subprocess
import sys

import pytest
import torch

import workbench as wb

pytestmark = pytest.mark.subprocess


def results_in(folder, size):
    command = [sys.executable, "-m", "tests.callbacks.ranked_failures", str(folder), size]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    return folder, results_in(folder, "short")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    return folder, results_in(folder, "long")


def missing_in(path):
    """Return the events of what is not recorded, part -> message; there are no alarms."""
    events = wb.open_run(path)["events"].to_dataset()
    assert "alarm" not in events["kind"].values
    is_missing = events["kind"].values == "not recorded"
    return dict(zip(events["source"].values[is_missing], events["message"].values[is_missing], strict=True))


@pytest.mark.slow
def test_a_watch_on_one_rank_alone_ends_with_a_sentence(short):
    folder, (first, second) = short
    sentence = first["alone"][0]
    assert "wb.watch was called on rank 0 but not on rank 1 within" in sentence
    assert sentence.count("only rank 0 writes the store") == 2  # a warning, then the error
    assert second["alone"][0] == ""
    assert not (folder / "alone.zarr").exists()
    for rank in (first, second):
        _, plain, watched = rank["alone"]
        assert plain == watched
    assert wb.open_run(folder / "together.zarr")["monitors"].sizes["step"] == 6


def test_a_pass_that_fails_on_one_rank_ends_on_all(short):
    folder, ranks = short
    for rank in ranks:
        assert rank["fsdp2 pass"] == rank["fsdp2"]
    missing = missing_in(folder / "fsdp2 pass.zarr")
    assert "on rank 1: OutOfMemoryError: no memory is left" in missing["probe"]
    run = wb.open_run(folder / "fsdp2 pass.zarr")
    assert run["monitors"].sizes["step"] == 6
    assert run["activations"]["step"].values.tolist() == [1]
    assert run["optimizer"]["step"].values.tolist() == [1, 3, 5]


def test_fsdp1_trains_on_without_passes_of_the_recorder(short):
    folder, ranks = short
    for rank in ranks:
        assert rank["fsdp1"] == rank["fsdp1 watched"]
    run, missing = wb.open_run(folder / "fsdp1.zarr"), missing_in(folder / "fsdp1.zarr")
    assert run["monitors"].sizes["step"] == 6
    assert run["optimizer"].sizes["step"] == 3
    assert "Shard it with fully_shard (FSDP2)." in missing["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("fault", ["pass", "memory", "methods"])
def test_training_is_identical_whatever_fails(long, kind, fault):
    folder, ranks = long
    for rank in ranks:
        assert rank[f"{kind} {fault}"] == rank[kind]
    run, missing = wb.open_run(folder / f"{kind} {fault}.zarr"), missing_in(folder / f"{kind} {fault}.zarr")
    assert run["monitors"].sizes["step"] == 6
    assert missing
    others = [message for message in missing.values() if "sharded over ranks" not in message]
    assert others
    assert all("on rank 1: " in message for message in others)
    parts = {"pass": {"probe"}, "memory": {"optimizer"}, "methods": {"optimizer", "reduction"}}
    assert parts[fault] <= missing.keys()
