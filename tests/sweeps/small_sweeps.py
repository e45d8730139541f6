"""Sweeps so small that a run takes a fraction of a second."""

import workbench as wb

TASK = {"name": "associative_recall", "length": 8, "vocab_size": 16, "n_pairs": 2, "batch_size": 4}
SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 16, "max_length": 8}
NORMS = {"Pre-LN": {"norm": "pre_ln"}, "No-Norm": {"norm": "none"}}


def small_grid(**changes):
    """Return runs of two norms, one learning rate that converges and one that diverges, and two seeds."""
    options = {"learning_rate": [1e-3, 30.0], "n_steps": 5, "task": TASK, "seed": [0, 1], "n_snapshots": 64, **SIZE}
    return wb.sweeps.grid(NORMS, **{**options, **changes})


def run_sequentially(runs, path):
    """Execute a sweep sequentially in this process."""
    store = wb.sweeps.SweepStore(path, runs)
    for index in store.missing():
        store.write(index, wb.sweeps.make_run(runs[index].as_dict()))
    return wb.open_sweep(path)


def without_seconds(sweep):
    return sweep.drop_vars("seconds")


def my_model(width, seed):
    """Create a custom model, for ``make``."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            return x + torch.tanh(self.linear(x))

    class CustomModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, width)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(width, 16)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CustomModel()
