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


@pytest.mark.slow
def test_modules_that_share_an_optimizer_are_watched_together(tmp_path):
    two = ADAM.replace("model.parameters()", "[*model.parameters(), *head.parameters()]")
    two = f"head, body = nn.Linear(4, 4), model\nbody(torch.randn(2, 8))\n{two}\nmodel = lambda x: head(body(x))"
    done = run(tmp_path, "-m", "workbench", "watch", "--store", "a.zarr", "--", "python", create=two, end="quit()")
    record = wb.open_run(tmp_path / "a.zarr")
    assert record["events"]["step"].values[-1] == 12, done.stderr
    assert (record["monitors"]["grad_norm"] > 0).any()
    assert record["monitors"]["loss"].isnull().all()  # not seen, so that nothing is said about it
    assert "no alarm" in done.stdout


@pytest.mark.slow
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


LIGHTNING = """
import lightning, torch
from torch import nn

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)
        self.automatic_optimization = AUTOMATIC

    def training_step(self, batch, i):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(80, 8), torch.randint(2, (80,)))
options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(accelerator="cpu", **options)
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=8))
"""


@pytest.mark.framework
@pytest.mark.slow
@pytest.mark.parametrize("automatic", ["True", "False"])
def test_a_module_of_lightning_is_watched_from_its_first_update(automatic, tmp_path):
    (tmp_path / "train.py").write_text(LIGHTNING.replace("AUTOMATIC", automatic))
    command = [sys.executable, "-m", "workbench", "watch", "--store", "a.zarr", "--", "python", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    record = wb.open_run(tmp_path / "a.zarr")
    assert record["monitors"]["step"].values[0] == 0
    assert record["events"]["step"].values[-1] == 10
