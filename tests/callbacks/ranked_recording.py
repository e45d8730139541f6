"""Two processes that train together and record; each writes its observations. Run by test_recorder_ranks.py.

Forking saves importing torch for every rank.
"""

import os
import sys
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import workbench as wb

N_RANKS = 2
N_STEPS = 6
EVERY = {"attention": 2, "router": 2, "optimizer": 2, "activations": 3, "spectra": 3}


def task():
    return wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)


def model(kind="moe"):
    options = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16, "seed": 1}
    subject = wb.zoo.moe(n_experts=4, **options) if kind == "moe" else wb.zoo.transformer("pre_ln", **options)
    return subject.double()


def recorder(path=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wb.Recorder(path, every=EVERY, probe=task().probe(64), **options)


def train(subject, recording, batches, *, called=None, log=lambda loss: {"loss": loss}):
    """Train in a standard loop, and return the observations and the final weights (of this rank)."""
    called = subject if called is None else called
    optimizer = torch.optim.AdamW(subject.parameters(), lr=1e-2)
    heard = []
    if recording is not None:
        recording.observe(heard.append)
    with nullcontext() if recording is None else recording.attach(called, optimizer):
        for tokens, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(called(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            if recording is not None:
                recording.log(**log(loss))
            optimizer.step()
    numbers = [{name: v for name, v in o.values.items() if v.dtype.kind in "fc"} for o in heard]
    weights = [weight.detach() for weight in subject.parameters()]
    return {
        "heard": [(o.step, o.part, values) for o, values in zip(heard, numbers, strict=True)],
        "weights": [w.to_local().clone() if hasattr(w, "to_local") else w.clone() for w in weights],
    }


def own_rows(rank, i):
    tokens, targets = task().batch(i)
    return tokens[rank::N_RANKS], targets[rank::N_RANKS]


def batches(rank):
    return [own_rows(rank, i) for i in range(N_STEPS)]


def in_ddp(rank, folder):
    """The record equals that of one process on all examples."""
    subject = model()
    return train(subject, recorder(folder / "ddp.zarr"), batches(rank), called=DistributedDataParallel(subject))


def sharded(subject):
    for block in subject.blocks:
        fully_shard(block)
    return fully_shard(subject)


def in_fsdp(rank, folder):
    """Read the sharded model."""
    subject = sharded(model("dense"))
    return train(subject, recorder(folder / "fsdp.zarr"), batches(rank))


def plain_fsdp(rank, folder):
    """Train without a recorder."""
    return train(sharded(model("dense")), None, batches(rank))


def prepared_fsdp(rank, folder):
    """Read the model before sharding it."""
    subject, recording = model("dense"), recorder()
    recording.prepare(subject, task().probe(64))
    return train(sharded(subject), recording, batches(rank))


def with_first_batch(rank, folder):
    """Use the probe of rank 0."""
    subject = model("dense")
    recording = recorder()
    recording.probe = None
    return train(subject, recording, batches(rank), called=DistributedDataParallel(subject))


def one_logs(rank, folder):
    """Only rank 0 logs the loss."""
    subject = model("dense")
    return train(
        subject,
        recorder(),
        batches(rank),
        called=DistributedDataParallel(subject),
        log=lambda loss: {"loss": loss, "mine": 3.0} if rank == 0 else {},
    )


def refused(rank, folder):
    """No rank continues if rank 0 cannot write."""
    (folder / "taken.zarr").mkdir(exist_ok=True)
    distributed.barrier()
    recording = recorder()
    recording.path = folder / "taken.zarr"
    try:
        recording.attach(subject := model(), torch.optim.SGD(subject.parameters()))
    except wb.WorkbenchError as error:
        return str(error)
    return ""


def without_second_rank(state, bucket):
    """Drop the gradients of rank 1 in a hook of DDP."""
    if distributed.get_rank() == 1:
        bucket.buffer().zero_()
    return default_hooks.allreduce_hook(None, bucket)


def checked(rank, *, shards=False, hook=None):
    """Return the alarms about gradients, and the verdicts on them."""
    alarms = wb.Alarms()
    subject = sharded(model("dense")) if shards else model("dense")
    called = subject if shards else DistributedDataParallel(subject)
    if hook is not None:
        called.register_comm_hook(None, hook)
    recording = wb.Recorder(every={"reduction": 2}, probe=task().probe(64), alarms=alarms)
    heard = train(subject, recording, batches(rank), called=called)["heard"]
    verdicts = [float(values["gradient_verdict"]) for _, part, values in heard if part == "reduction"]
    return [alarm.message for alarm in alarms.raised], verdicts


def honest_gradients(rank, folder):
    """Train without a fault."""
    return checked(rank)


def lost_gradients(rank, folder):
    """The reduction drops the gradients of rank 1."""
    return checked(rank, hook=without_second_rank)


def sharded_gradients(rank, folder):
    """A sum with a known answer replaces gradients that no hook sees."""
    return checked(rank, shards=True)


class SumOverRanks(torch.autograd.Function):
    """Sum of partial outputs; its gradient is that of the sum."""

    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        distributed.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SplitByHand(torch.nn.Module):
    """Tensor parallelism as in Megatron: columns, then rows, held as plain tensors; the bias is on every rank."""

    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.up = torch.nn.Parameter(torch.randn(8, 4, generator=generator))
        self.down = torch.nn.Parameter(torch.randn(4, 8, generator=generator))
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return SumOverRanks.apply(torch.tanh(x @ self.up.T) @ self.down.T) + self.bias


def split_by_hand(rank, folder):
    """Parts of one model are not replicas whose gradients would have to be reduced."""
    subject, alarms = SplitByHand(rank), wb.Alarms()
    optimizer = torch.optim.AdamW(subject.parameters(), lr=1e-2)
    heard = []
    recording = wb.Recorder(every={"reduction": 2}, alarms=alarms)
    recording.observe(heard.append)
    with recording.attach(subject, optimizer):
        for i in range(N_STEPS):
            inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(100 + i))
            optimizer.zero_grad()
            loss = (subject(inputs) - inputs.roll(1, 1)).square().mean()
            loss.backward()
            recording.log(loss=loss)
            optimizer.step()
    verdicts = [float(each.values["gradient_verdict"]) for each in heard if each.part == "reduction"]
    return [alarm.message for alarm in alarms.raised], verdicts


SCENARIOS = {
    "split by hand": split_by_hand,
    "ddp": in_ddp,
    "fsdp": in_fsdp,
    "fsdp plain": plain_fsdp,
    "honest gradients": honest_gradients,
    "lost gradients": lost_gradients,
    "sharded gradients": sharded_gradients,
    "fsdp prepared": prepared_fsdp,
    "one logs": one_logs,
    "first batch": with_first_batch,
    "refused": refused,
}


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N_RANKS))
    options = {"rank": rank, "world_size": N_RANKS, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", **options)
    torch.save({name: scenario(rank, folder) for name, scenario in SCENARIOS.items()}, folder / f"rank-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo

    torch.multiprocessing.start_processes(main, (Path(sys.argv[1]),), N_RANKS, start_method="fork")
