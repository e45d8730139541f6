"""Two processes that train one model while one of them fails in the recorder; run by test_failing_ranks.py."""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from tests.callbacks.ranked_recording import N_RANKS, own_rows
from workbench.callbacks.recorder import options as ranks
from workbench.callbacks.recorder.collectors import Collectors
from workbench.callbacks.recorder.updates import UpdateCollector
from workbench.errors import OptionError
from workbench.probes.gradient_projections import GradientProjections

N_STEPS = 6
EVERY = {"attention": 2, "router": None, "optimizer": 2, "activations": 2, "precision": 2, "reduction": 2, "update": 2}


class BrokenBlock(torch.nn.Module):
    """A block that runs out of memory in passes that are not those of the training, on one rank."""

    def __init__(self, block):
        super().__init__()
        self.block, self.n_left = block, -1

    def forward(self, states):
        if not self.training and self.n_left == 0:
            raise torch.OutOfMemoryError("no memory is left")
        self.n_left -= not self.training
        return self.block(states)


def wrapped(kind):
    """Return the module that the loop calls, and its blocks."""
    model = wb.zoo.transformer("pre_ln", d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=16, seed=1)
    model.blocks[1] = BrokenBlock(model.blocks[1])
    blocks = [*model.blocks]
    if kind == "ddp":
        return DistributedDataParallel(model), blocks
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")), blocks
    for block in blocks:
        fully_shard(block)
    return fully_shard(model), blocks


def train(rank, kind, store=None, *, before=lambda step, blocks: None):
    """Train in a loop, which is watched if there is a store, and return the losses of this rank and the events."""
    called, blocks = wrapped(kind)
    optimizer, losses = torch.optim.AdamW(called.parameters(), lr=1e-2), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watched = None if store is None else wb.watch(called, optimizer, store=store, every=EVERY, shows=False)
        for step in range(N_STEPS):
            before(step, blocks)
            tokens, targets = own_rows(rank, step)
            optimizer.zero_grad()
            loss = cross_entropy(called(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if watched is not None:
            watched.close()
    return losses


def raising(owner, name):
    """Make a method raise from now on."""

    def broken(*args, **kwargs):
        raise MemoryError("no memory is left")

    setattr(owner, name, broken)


def out_of_memory(rank, step, blocks):
    if rank == 1 and step == 3:
        blocks[1].n_left = 0


def little_memory(rank, step, blocks):
    if rank == 1 and step == 2:
        own = Collectors._require_memory
        Collectors._require_memory = lambda self, n_bytes: own(self, 1 << 60)


def methods(rank, step, blocks):
    if rank == 1 and step == 2:
        raising(UpdateCollector, "_measure")
        raising(GradientProjections, "_received")


def alone(rank, folder):
    """Watch on rank 0 alone, then train without and with a watch on both."""
    found, (patience, limit) = "", (ranks.PATIENCE, ranks.LIMIT)
    ranks.PATIENCE, ranks.LIMIT = 0.2, 1.0
    if rank == 0:
        called = torch.nn.Linear(2, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                wb.watch(called, torch.optim.SGD(called.parameters()), store=folder / "alone.zarr", shows=False)
            except OptionError as error:
                found = f"{caught[0].message} | {error}"
    ranks.PATIENCE, ranks.LIMIT = patience, limit
    distributed.barrier()
    return found, train(rank, "ddp"), train(rank, "ddp", folder / "together.zarr")


def main(rank, folder, is_long):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N_RANKS))
    options = {"rank": rank, "world_size": N_RANKS, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", **options)
    found = {"alone": alone(rank, folder)}
    faults = {"pass": out_of_memory, "memory": little_memory, "methods": methods}
    for kind in ("ddp", "fsdp2") if is_long else ("fsdp2",):
        found[kind] = train(rank, kind)
        for name, fault in faults.items() if is_long else (("pass", out_of_memory),):
            kept = [(owner, dict(vars(owner))) for owner in (Collectors, UpdateCollector, GradientProjections)]
            store = folder / f"{kind} {name}.zarr"
            found[f"{kind} {name}"] = train(rank, kind, store, before=lambda *at, act=fault: act(rank, *at))
            for owner, before in kept:
                for method, value in before.items():
                    if vars(owner)[method] is not value:
                        setattr(owner, method, value)
    found["fsdp1"], found["fsdp1 watched"] = train(rank, "fsdp1"), train(rank, "fsdp1", folder / "fsdp1.zarr")
    torch.save(found, folder / f"rank-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo

    arguments = (Path(sys.argv[1]), sys.argv[2] == "long")
    torch.multiprocessing.start_processes(main, arguments, N_RANKS, start_method="fork")
