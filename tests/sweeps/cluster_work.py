"""Functions that tests send to the workers of a cluster: they measure a design, and check a script."""

import subprocess
import sys

import workbench as wb
from workbench.contracts.script import check_script
from workbench.sweeps.execution import _one_thread

SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for i in range(100):
    tokens = torch.randint(0, 8, (4, 9))
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    {clear}
"""
#: How a script clears its gradients.
SCRIPTS = {"sound": "optimizer.zero_grad()", "uncleared": "pass"}


def measured(norm):
    """Return the spectra of a small design, without the time at which they were made."""
    model = wb.zoo.transformer(norm, d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
    inputs, _ = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=16).batch(0)
    with _one_thread():
        spectra = wb.profile(model, inputs, n_snapshots=64)
    return spectra.drop_attrs(deep=False)


def checked(path):
    """Return the status of each contract of a script."""
    report = check_script([sys.executable, path], progress=False, output=subprocess.DEVNULL)
    return {each.id: (each.status.value, each.where) for each in report.checks}
