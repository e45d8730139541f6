"""Process that forks a child for each path on its standard input; the child trains there until it is killed.

Forking avoids repeated imports of torch. The child prints each step after its record, so that the test knows which rows
had been written when it was killed.
"""

import importlib
import os
import sys

import torch

import workbench as wb

SETTINGS = {
    "n_steps": 400,
    "learning_rate": 1e-3,
    "flush_every": 3,
    "checkpoint_every": 7,
    "spectra_every": 5,
    "profile_options": {"n_snapshots": 48, "n_workers": 1},
}


def model():
    return wb.zoo.transformer("pre_ln", d_model=8, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=1)


def task():
    return wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=4, seed=3)


def main() -> None:
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "threadpoolctl", "safetensors.torch", "xarray", "zarr", "workbench.callbacks.train"):
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        path = line.strip()
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            for record in wb.train(model(), task(), store=path, **SETTINGS):
                print(f"{record.step}\n", end="", flush=True)  # in one write
            print("done", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print("over", flush=True)


if __name__ == "__main__":
    main()
