"""A script whose model is split over ranks is checked as one of a whole model, and a planted fault alone is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.contracts.results import CheckReport

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
#: What passes in each, whatever is split how.
SOUND = {
    "labels_aligned", "causal", "examples_independent", "order_matters", "gradients_reach_all", "descends",
    "precision_by_position", "ranks_see_different_data", "gradients_reduced", "optimizer_covers", "update_as_predicted",
    "clipping_order",
}  # fmt: skip


def checked(kind, n_ranks, fault="none"):
    script = ["torchrun", "--nproc_per_node", str(n_ranks), str(ROOT / "tests/contracts/split_script.py"), kind, fault]
    command = [sys.executable, "-m", "workbench", "check", "--json", "--quiet", "--", *script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, timeout=240, capture_output=True, text=True, env=environment)
    import json

    return CheckReport.of_json(json.loads(done.stdout[done.stdout.index("{") :]))


def of(report, status):
    return {each.id for each in report.checks if str(each.status) == status}


@pytest.mark.parametrize(
    ("kind", "n_ranks", "fault"), [("fsdp", 2, "none"), ("fsdp", 2, "bf16"), ("tp", 2, "none"), ("2d", 4, "none")]
)
def test_a_sound_script_keeps_all_contracts(kind, n_ranks, fault):
    report = checked(kind, n_ranks, fault)
    assert of(report, "failed") == set()
    assert of(report, "passed") >= SOUND


@pytest.mark.parametrize(
    ("kind", "n_ranks", "fault", "words"),
    [
        ("tp", 2, "own data", "Ranks 0 and 1 compute parts of one pass with other inputs in 6 passes."),
        ("fsdp", 2, "same data", "Ranks 0 and 1 have the same inputs in all 6 passes."),
        ("2d", 4, "same data", "Ranks 0 and 2 have the same inputs in all 6 passes."),
    ],
)
def test_data_of_the_wrong_ranks_are_found_alone(kind, n_ranks, fault, words):
    report = checked(kind, n_ranks, fault)
    assert of(report, "failed") == {"ranks_see_different_data"}
    assert report["ranks_see_different_data"].evidence == words
