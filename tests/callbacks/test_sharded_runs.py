"""Runs whose parameters are split over ranks are recorded as in one process; results come from ranked_shards.py."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks import ranked_shards

pytestmark = pytest.mark.subprocess

#: Relative difference that another order of summation may make.
TOLERANCE = 1e-5
#: Means over the ranks that read parts of a batch, which are other numbers for the whole batch.
OF_DATA = ("token_entropy", "label_entropy", "largest_losses", "lookahead")
#: Number of ranks and scenarios of each group of processes.
GROUPS = {
    "small": (2, ["tp"]),
    "two": (2, ["fsdp", "fsdp bf16", "fsdp shaped", "tp shaped"]),
    "four": (4, ["2d", "2d bf16", "2d shaped"]),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return a function from a group to the folder of its stores and the results of each rank."""
    found = {}

    def results(group):
        if group not in found:
            folder, (n_ranks, names) = tmp_path_factory.mktemp(group), GROUPS[group]
            command = [sys.executable, "-m", "tests.callbacks.ranked_shards", str(folder), str(n_ranks), *names]
            subprocess.run(command, check=True, timeout=300, capture_output=True)
            ranks = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(n_ranks)]
            found[group] = folder, ranks
        return found[group]

    return results


def parts_in(path):
    """Return the parts of a run as arrays, part -> variable -> values."""
    run = wb.open_run(path)
    return {part: run[part].to_dataset() for part in run.children if part != "events"}


def assert_same_record(path, expected, *, is_whole):
    """All that is measured is equal, up to means over parts of the data and errors of rounding."""
    found = parts_in(path)
    assert found.keys() == expected.keys()
    for part, dataset in expected.items():
        for name in dataset.data_vars:
            value, other = found[part][name].values, dataset[name].values
            if other.dtype.kind not in "biuf" or (name in OF_DATA and not is_whole) or "excess" in name:
                continue
            scale = max(1.0 if part == "precision" else 0.0, np.nan_to_num(np.abs(other)).max(initial=1e-12))
            np.testing.assert_allclose(value, other, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=f"{part} {name}")


def events_in(path):
    return wb.open_run(path)["events"]["kind"].values.tolist()


SLOW = pytest.mark.slow
KINDS = [
    pytest.param("small", "tp", id="tp"),
    pytest.param("two", "fsdp", marks=SLOW, id="fsdp"),
    pytest.param("two", "fsdp bf16", marks=SLOW, id="fsdp bf16"),
    pytest.param("four", "2d", marks=SLOW, id="2d"),
    pytest.param("four", "2d bf16", marks=SLOW, id="2d bf16"),
]


@pytest.mark.parametrize(("group", "name"), KINDS)
def test_a_watched_run_is_bit_identical_and_its_record_complete(ran, group, name):
    folder, ranks = ran(group)
    for rank in ranks:
        plain, watched = rank[name]["plain"], rank[name]["watched"]
        assert plain["losses"] == watched["losses"]
        assert all(torch.equal(a, b) for a, b in zip(plain["weights"], watched["weights"], strict=True))
        assert watched["alarms"] == []
    assert events_in(folder / f"{name}.zarr") == ["started", "finished"]


@pytest.mark.parametrize(("group", "name"), [each for each in KINDS if "bf16" not in each.id])
def test_the_record_is_that_of_one_process(ran, tmp_path, group, name):
    folder, _ = ran(group)
    ranked_shards.train(ranked_shards.titan(), tmp_path / "one.zarr", has_loss=name != "tp")
    expected = parts_in(tmp_path / "one.zarr")
    names = {"monitors", "attention", "optimizer", "activations", "precision", "reduction"}
    assert expected.keys() == (names if name == "tp" else {*names, "update"})
    assert_same_record(folder / f"{name}.zarr", expected, is_whole=name == "tp")


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), [("two", "fsdp bf16"), ("four", "2d bf16")])
def test_the_arithmetic_is_that_of_the_policy(ran, group, name):
    precision = parts_in(ran(group)[0] / f"{name}.zarr")["precision"]
    errors = precision["output_error"].values
    assert ((errors > 2.0**-12) & (errors < 2.0**-5)).all()
    assert (precision["error_excess"].values < 2).all()


@pytest.mark.slow
@pytest.mark.parametrize(("group", "kind"), [("two", "fsdp"), ("two", "tp"), ("four", "2d")])
def test_kss_acts_as_in_one_process(ran, group, kind):
    _, expected = ranked_shards.shaped("one")
    assert sum(n for n, *_ in expected) > 0
    ranks = [rank[f"{kind} shaped"] for rank in ran(group)[1]]
    for _, acts in ranks:
        np.testing.assert_allclose(acts, expected, rtol=TOLERANCE)
