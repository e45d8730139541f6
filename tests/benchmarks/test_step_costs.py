"""What a recorder and KSS ask of a device other than the CPU, counted on one whose tensors have no values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step_costs import (
    AT_EVERY_UPDATE,
    BY_CADENCE,
    LIMITS,
    MOST_WAITS,
    SHAPING,
    Shape,
    cadences,
    count,
    section,
)

pytestmark = [pytest.mark.subprocess, pytest.mark.medium]
ROOT = Path(__file__).parents[2]
DEPTHS = 2, 5

#: Prints what single operations cost, as (launches, bytes, copies to the host, waits).
_OPERATIONS = """
import json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from benchmarks.made_up_device import COSTS, DEVICE, make_up
from workbench.models.losses import largest_losses

make_up()
with FakeTensorMode():
    x, row = torch.empty(8, 8, device=DEVICE), torch.empty(8, device=DEVICE)
    many, host, tokens = [row] * 100, torch.empty(8), torch.zeros(2, 4, device=DEVICE, dtype=torch.int64)
    logits = torch.empty(2, 4, 8, device=DEVICE)
    asked = {
        "view": lambda: x.view(-1)[3:].T,
        "allocation": lambda: torch.empty(4, device=DEVICE),
        "product": lambda: x @ x,
        "in place": lambda: x.add_(1),
        "expanded": lambda: row.expand(8, 8).clone(),
        "on the host": lambda: host + host,
        "item": row[0].item,
        "bool": lambda: bool(row[0]),
        "to the host": row.cpu,
        "to the host, later": lambda: row.to("cpu", non_blocking=True),
        "to the device": lambda: host.to(DEVICE),
        "to the device, later": lambda: host.to(DEVICE, non_blocking=True),
        "index by mask": lambda: x[x > 0],
        "list": lambda: torch._foreach_add_(many, 1.0),
        "concatenation": lambda: torch.cat(many * 2),
        "largest losses": lambda: largest_losses(logits, tokens),
    }
    found = {}
    with COSTS:
        for name, ask in asked.items():
            COSTS.begin()
            ask()
            cost = COSTS.of_part[""]
            found[name] = cost.n_launches, cost.n_bytes, cost.n_reads, cost.n_waits
print(json.dumps(found))
"""


def test_operations_copies_and_waits_are_counted():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _OPERATIONS], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    found = {name: tuple(counts) for name, counts in json.loads(done.stdout).items()}
    of_losses = found.pop("largest losses")
    assert found == {
        "view": (0, 0, 0, 0),
        "allocation": (0, 0, 0, 0),
        "product": (1, 3 * 256, 0, 0),
        "in place": (1, 2 * 256, 0, 0),
        "expanded": (1, 32 + 256, 0, 0),
        "on the host": (0, 0, 0, 0),
        "item": (0, 0, 1, 1),
        "bool": (0, 0, 1, 1),
        "to the host": (1, 32, 1, 1),
        "to the host, later": (1, 32, 1, 0),
        "to the device": (1, 32, 0, 1),
        "to the device, later": (1, 32, 0, 0),
        "index by mask": (2, 2 * 256 + 2 * 64 + 256, 1, 1),
        "list": (1, 200 * 32, 0, 0),
        "concatenation": (2, 2 * 200 * 32, 0, 0),
    }
    assert of_losses[0] > 1
    assert of_losses[2:] == (0, 0)  # the largest losses are found without waiting


@pytest.fixture(scope="module")
def found():
    """Costs by part, by depth."""
    shapes = [Shape(32, depth, 2, 64, (2, 16), "float32", milliseconds=20) for depth in DEPTHS]
    return dict(zip(DEPTHS, count(shapes), strict=True))


@pytest.mark.parametrize("part", LIMITS)
def test_a_part_launches_few_operations_and_waits_rarely(found, part):
    constant, of_block, n_waits = LIMITS[part]
    for depth, costs in found.items():
        cost = costs.get(part)
        assert cost is not None or part in ("activations", "settings")  # they have no operations of their own
        if cost is not None:
            assert cost.n_launches <= constant + of_block * depth, (part, depth)
            assert cost.n_waits <= n_waits, (part, depth, cost.waits)


def test_every_part_has_a_limit(found):
    for costs in found.values():
        assert costs.keys() - {""} <= LIMITS.keys()
    assert LIMITS.keys() <= AT_EVERY_UPDATE.keys() | BY_CADENCE.keys() | SHAPING.keys()


def test_a_step_that_measures_all_parts_copies_once_and_does_not_wait(found):
    for depth, costs in found.items():
        waits = {part: cost.waits for part, cost in costs.items() if part and part not in SHAPING and cost.n_waits}
        assert sum(map(sum, (each.values() for each in waits.values()))) <= MOST_WAITS, (depth, waits)
        assert costs["row"].n_reads + costs["copy"].n_reads == 1
        assert not costs[""].waits  # the training itself waits for nothing


def test_cadences_are_those_of_the_budget(found):
    def shape(milliseconds):
        return Shape(32, 5, 2, 64, (2, 16), "float32", milliseconds)

    usual, is_in_turn = cadences(shape(1e9), found[5])
    assert not is_in_turn
    assert usual.items() >= {"attention": 10, "probe": 10, "precision": 20, "batch": 1, "sample": 1, "row": 1}.items()
    tight, is_in_turn = cadences(shape(5.0), found[5])
    assert is_in_turn
    assert all(n >= usual[part] for part, n in tight.items())
    assert tight["update"] > 50
    assert "**0.0%** at those of the budget." in "\n".join(section("long steps", shape(1e9), found[5]))
    text = "\n".join(section("short steps", shape(50.0), found[5]))
    share = float(text.partition("**")[2].partition("%")[0])
    assert share <= 2.0
    assert "one block at a time" in text
