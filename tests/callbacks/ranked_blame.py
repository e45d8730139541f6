"""Two processes that train one model and ask who spoiled an update; run by test_blame.py."""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import workbench as wb

N_STEPS = 40


def train(rank, folder, kind, *, is_watched):
    """Train with two micro-batches an update, one of which is spoiled at some steps."""
    model = wb.zoo.transformer(d_model=32, n_layers=2, n_heads=2, vocab_size=64, max_length=32, seed=1)
    if kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
    called = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    task = wb.tasks.associative_recall(length=32, vocab_size=64, n_pairs=4, batch_size=8, seed=2)
    watched = wb.watch(called, optimizer, store=folder / "run.zarr", shows=False, budget=None) if is_watched else None
    losses, answers = [], {}
    for i in range(N_STEPS):
        for m in range(2):
            x, y = task.batch(4 * i + 2 * rank + m)
            weights = torch.ones(len(x), 1)
            weights[5] = 5000.0 if (i, m, rank) == (34, 1, 1) else 1.0
            of_tokens = cross_entropy(called(x).flatten(0, 1), y.flatten(), reduction="none").view(len(x), -1)
            loss = (weights * of_tokens).sum() / (y != -100).sum() / 2
            loss = loss * (6 if (i, m, rank) == (36, 0, 1) else 1)
            (loss * float("nan") if (i, m, rank) == (38, 1, 0) else loss).backward()
            losses.append(loss.item())
        if i == 38:  # as a loop that leaves out an update
            for weight in model.parameters():
                weight.grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
        if watched is not None and i in (30, 34, 36, 38):
            answers[i] = watched.blame()
    if watched is not None:
        watched.close()
    weights = [getattr(weight, "to_local", lambda weight=weight: weight)().detach() for weight in model.parameters()]
    return losses, weights, answers


def main(folder, kind):
    """Run both processes; they are forked, which saves importing torch twice."""
    children = []
    for rank in range(2):
        if not (child := os.fork()):
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            store = distributed.FileStore(str(folder / "store"), 2)
            distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
            losses, weights, answers = train(rank, folder, kind, is_watched=True)
            other = train(rank, folder, kind, is_watched=False)
            found = {"losses": losses, "weights": weights, "answers": answers}
            found |= {"losses not watched": other[0], "weights not watched": other[1]}
            torch.save(found, folder / f"rank-{rank}.pt")
            distributed.barrier()
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
