"""Two processes that train with DDP and compare their gradients; each writes its results. Run by test_reduction.py.

Forking saves importing torch for every rank.
"""

import os
import sys
from collections import deque
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workbench.errors import OptionError
from workbench.probes.gradient_comparison import compare_gradients
from workbench.probes.gradient_projections import GradientProjections
from workbench.probes.reduction import known_answer_all_reduce

N_RANKS = 2
N_STEPS = 9
#: Steps that are compared: from the first one with five steps before it, after DDP has rebuilt its buckets.
COMPARED = range(7, N_STEPS)
_ALL_REDUCE = distributed.all_reduce


class Mixture(nn.Module):
    """Tied embeddings, and experts of which each rank uses one per step and one is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(16, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        states = self.embedding(tokens)
        return self.out(states + self.scale * self.experts[int(tokens[0, 0]) % 3](states).tanh())


def train(
    rank, *, dtype=torch.float32, hook=None, state=None, clip=None, n_micro=1, change=None, probe=True, view=False
):
    """Train, and return the results of the compared steps and the final parameters."""
    model = Mixture().to(dtype)
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.0005, "gradient_as_bucket_view": view}
    parallel = DistributedDataParallel(model, **options)
    if hook is not None:
        parallel.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    projections = GradientProjections(model.parameters())
    generator = torch.Generator().manual_seed(10 + rank)
    found, earlier = [], deque(maxlen=6)
    for i in range(N_STEPS):
        optimizer.zero_grad()
        if probe:
            projections.arm()
        for part in range(n_micro):
            tokens = torch.randint(16, (4, 6), generator=generator)
            with parallel.no_sync() if part < n_micro - 1 else nullcontext():
                cross_entropy(parallel(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if change is not None:
            change(rank, model)
        if probe:
            step = projections.take()
            if i in COMPARED:
                found += [compare_gradients(step, tuple(earlier))]
            earlier.appendleft(step)
        optimizer.step()
    return {"found": found, "parameters": [p.detach().clone() for p in model.parameters()]}


def without_rank_1(state, bucket):
    """Drop the bucket of embedding and experts from rank 1."""
    if distributed.get_rank() == 1:
        bucket.buffer().zero_()
    return allreduce_hook(None, bucket)


def lost_bucket(state, bucket):
    """Replace the last bucket by zeros."""
    future = allreduce_hook(None, bucket)
    return future.then(lambda done: done.value() * 0) if bucket.is_last() else future


def compressed(state, bucket):
    """Call torch's own hook, which DDP accepts only for NCCL if it recognizes its name."""
    return bf16_compress_hook(None, bucket)


def late(kept, bucket):
    """Delay every bucket by two steps."""
    key = tuple(id(p) for p in bucket.parameters())
    future = allreduce_hook(None, bucket)

    def swap(done):
        queue = kept.setdefault(key, deque())
        queue.append(done.value().clone())
        return queue.popleft() if len(queue) > 2 else queue[0].clone()

    return future.then(swap)


def corrupt_on_rank_1(rank, model):
    if rank == 1:
        model.embedding.weight.grad.copy_(model.embedding.weight.grad.flip(0))


@contextmanager
def reducing(before=lambda message: None, after=lambda message: None):
    """Patch all-reduce with a fault."""

    def faulty(message, *args, **kwargs):
        before(message)
        _ALL_REDUCE(message, *args, **kwargs)
        after(message)

    with mock.patch.object(distributed, "all_reduce", faulty):
        yield


def rounded(message):
    message.copy_(message.bfloat16().to(message.dtype))


def on_rank(number, act):
    return lambda message: act(message) if distributed.get_rank() == number else None


def known_answers(rank):
    """Return the known answer for each fault."""
    faults = {
        "none": reducing(),
        "missing": reducing(before=on_rank(1, torch.Tensor.zero_)),
        "doubled": reducing(before=on_rank(1, lambda message: message.mul_(2))),
        "rounded": reducing(before=rounded, after=rounded),
        "one receiver": reducing(after=on_rank(0, lambda message: message[:100].zero_())),
    }
    found = {}
    for name, fault in faults.items():
        with fault:
            found[name] = known_answer_all_reduce(torch.zeros(1))
    return found | {str(t): known_answer_all_reduce(torch.zeros(1, dtype=t)) for t in (torch.bfloat16, torch.float64)}


def sharded(rank):
    """Return the error for parameters sharded by FSDP2."""
    model = fully_shard(nn.Linear(4, 4))
    try:
        GradientProjections(model.parameters())
    except OptionError as error:
        return str(error)
    return ""


SCENARIOS = {
    "known": known_answers,
    "honest": lambda rank: train(rank, clip=0.1),
    "plain": lambda rank: train(rank, clip=0.1, probe=False),
    "accumulated": lambda rank: train(rank, n_micro=3, view=True),
    "bfloat16": lambda rank: train(rank, dtype=torch.bfloat16),
    "rank missing": lambda rank: train(rank, hook=without_rank_1, clip=0.1),
    "lost bucket": lambda rank: train(rank, hook=lost_bucket),
    "compressed": lambda rank: train(rank, hook=compressed),
    "late": lambda rank: train(rank, hook=late, state={}),
    "corrupted": lambda rank: train(rank, change=corrupt_on_rank_1),
    "sharded": sharded,
}


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N_RANKS))
    options = {"rank": rank, "world_size": N_RANKS, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", **options)
    torch.save({name: scenario(rank) for name, scenario in SCENARIOS.items()}, folder / f"rank-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo

    torch.multiprocessing.start_processes(main, (Path(sys.argv[1]),), N_RANKS, start_method="fork")
