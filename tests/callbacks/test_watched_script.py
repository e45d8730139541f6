"""A training script is watched without a change to it."""

import json
import subprocess
import sys

import pytest
import torch

import workbench as wb

pytestmark = [pytest.mark.subprocess, pytest.mark.medium]

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
frozen = nn.Linear(8, 8).requires_grad_(False)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
{create}
for step in range(12):
    inputs = frozen(torch.randn(16, 8))
    loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(float(loss).hex())
torch.save(model.state_dict(), sys.argv[1])
{end}
"""
ADAM = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)"


def run(tmp_path, *words, create=ADAM, end=""):
    (tmp_path / "train.py").write_text(SCRIPT.format(create=create, end=end))
    command = [sys.executable, *words, str(tmp_path / "train.py"), str(tmp_path / f"{len(words)}.pt")]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)


def test_the_training_is_the_same_and_recorded(tmp_path):
    words = ("-m", "workbench", "watch", "--store", "a.zarr", "--json", "--", "python")
    plain, watched = run(tmp_path), run(tmp_path, *words)
    assert watched.returncode == 0, watched.stderr
    losses = plain.stdout.split()
    assert [line for line in watched.stderr.splitlines() if line.startswith("0x")] == losses
    first, second = (torch.load(tmp_path / f"{n}.pt") for n in (0, len(words)))
    assert all(torch.equal(first[name], second[name]) for name in first)
    found = json.loads(watched.stdout)
    assert (found["state"], found["exit_status"]) == ("finished", 0)
    record = wb.open_run(tmp_path / "a.zarr")
    assert record["events"]["step"].values[-1] == 12
    monitors = record["monitors"]
    expected = [float.fromhex(loss) for loss in losses]
    assert monitors["loss"].values == pytest.approx([expected[step] for step in monitors["step"].values], rel=1e-6)


def test_the_status_of_a_broken_script_is_kept(tmp_path):
    done = run(tmp_path, "-m", "workbench", "watch", "--store", "a.zarr", "--", "python", end="raise SystemExit(7)")
    assert done.returncode == 7
    assert "no alarm" in done.stdout


def test_a_script_without_an_optimizer_of_torch_is_named(tmp_path):
    own = "class Own:\n zero_grad = lambda self: model.zero_grad()\n step = lambda self: None\noptimizer = Own()"
    done = run(tmp_path, "-m", "workbench", "watch", "--store", "a.zarr", "--", "python", create=own)
    assert done.returncode == 3
    assert "No training was found to watch" in done.stderr
    assert "Traceback" not in done.stderr
