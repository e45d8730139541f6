"""Two processes that train by DDP or FSDP2 are equivalent to one; their results come from ranked_training.py."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import workbench as wb
from tests.training import ranked_training

pytestmark = pytest.mark.subprocess

KINDS = ["ddp", "fsdp", "ddp resumed", "fsdp resumed", "ddp kss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.training.ranked_training", str(folder)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Results of one process, without and with KSS."""
    folder = tmp_path_factory.mktemp("alone")
    found = {}
    for name, kss in (("alone", None), ("alone kss", wb.KSS())):
        model = ranked_training.model()
        found[name] = ranked_training.results(model, model, folder, name, kss=kss)
    return found | {"folder": folder}


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_train_as_one_process(ranks, alone, kind):
    expected = alone["alone kss" if kind.endswith("kss") else "alone"]
    for rank in ranks:
        assert np.array(rank[kind]["records"]) == pytest.approx(np.array(expected["records"]), rel=1e-6)
        for found, weight in zip(rank[kind]["weights"], expected["weights"], strict=True):
            assert torch.allclose(found, weight, rtol=0, atol=1e-6)
    start = [weight.detach() for weight in ranked_training.model().parameters()]
    assert max(float((a - b).abs().max()) for a, b in zip(start, expected["weights"], strict=True)) > 1e-3


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp resumed"])
def test_the_record_is_that_of_one_process(folder, alone, kind):
    found, expected = (
        wb.open_run(place / f"{name}.zarr") for place, name in ((folder, kind), (alone["folder"], "alone"))
    )
    assert found.attrs["state"] == "finished"
    assert found["monitors"]["step"].values.tolist() == list(range(ranked_training.N_STEPS))
    for part, name in (("monitors", "loss"), ("monitors", "grad_norm"), ("spectra", "spectral_radius")):
        assert found[part][name].values == pytest.approx(expected[part][name].values, rel=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_checkpoint_of_ranks_is_one_of_a_model(folder, ranks, kind):
    place = max((folder / f"{kind}.checkpoints").iterdir())
    model = wb.open_checkpoint(place).model
    for loaded, weight in zip(model.parameters(), ranks[0][kind]["weights"], strict=True):
        assert torch.equal(loaded, weight)


def test_errors_are_raised_on_all_ranks(ranks):
    for rank in ranks:
        assert "ddp.zarr exists already" in rank["refused"]["taken"]
        assert "7 examples cannot be divided among 2 ranks" in rank["refused"]["odd"]


def test_batches_of_the_user_are_those_of_each_rank(ranks, alone):
    expected = [loss for _, loss, *_ in ranks[0]["ddp"]["records"]][:1]
    for rank in ranks:
        assert rank["own batches"][:1] == pytest.approx(expected, rel=1e-7)


def test_a_failure_on_one_rank_ends_both_and_names_it(folder, ranks):
    assert [len(rank["failed"]) for rank in ranks] == [1, 1]
    events = wb.open_run(folder / "failed.zarr")["events"].to_dataset()
    message = events["message"].values[events["kind"].values == "divergence"].item()
    assert "Rank 1: Forward pass: blocks.1 returns" in message


def test_another_number_of_processes_cannot_resume(folder):
    model = ranked_training.model()
    with pytest.raises(wb.WorkbenchError, match="is of 2 processes, but 1 resume it"):
        ranked_training.records(model, folder, "ddp", resume=True)
