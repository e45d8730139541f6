"""Two processes that train together and are watched; each writes what it saw. Run by test_watch_ranks.py."""

import contextlib
import io
import os
import sys
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from tests.callbacks.ranked_recording import N_RANKS, own_rows

N_STEPS = 6
EVERY = {"attention": 2, "router": 2, "optimizer": 2, "activations": 3, "precision": 2, "reduction": 2, "update": 2}


class Terminal(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self):
        return True


class AlarmError(Exception):
    """Raised by an alarm."""


def wrapped(kind, dtype=torch.float32):
    """The model, and what the loop calls."""
    options = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16, "seed": 1}
    model = wb.zoo.transformer("pre_ln", **options)
    if kind == "ddp":
        model = model.to(dtype)
        return model, DistributedDataParallel(model, bucket_cap_mb=0.01)
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return model, fully_shard(model, mp_policy=policy)


def n_hooks(model, optimizer):
    """How many hooks there are."""
    tables = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for module in model.modules():
        tables += [module._forward_pre_hooks, module._forward_hooks]
    return sum(map(len, tables))


def train(
    rank, kind, store=None, *, dtype=torch.float32, hook=None, fault=None, before=lambda i: None, after=lambda i: None,
    in_eval=False, is_watched=True, n_steps=N_STEPS, **options,
):  # fmt: skip
    """A plain loop, watched; what came of it on this rank."""
    model, called = wrapped(kind, dtype)
    if hook is not None:
        called.register_comm_hook(None, hook)
    called.train(not in_eval)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    n_before, shown, ended, watched = n_hooks(called, optimizer), Terminal(), None, None
    with contextlib.redirect_stderr(shown), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_watched:
            watched = wb.watch(called, optimizer, store=store, every=EVERY, **options)
        try:
            with watched or nullcontext(), nullcontext() if fault is None else fault.attach(called, optimizer):
                for i in range(n_steps):
                    before(i)
                    tokens, targets = own_rows(rank, i)
                    optimizer.zero_grad()
                    loss = cross_entropy(called(tokens).flatten(0, 1).float(), targets.flatten())
                    loss.backward()
                    if watched is not None:
                        watched.log(loss=loss)
                    optimizer.step()
                    after(optimizer)
        except AlarmError as error:
            ended = str(error)
    weights = [weight.detach() for weight in model.parameters()]
    found = {
        "weights": [weight.to_local().clone() if hasattr(weight, "to_local") else weight.clone() for weight in weights],
        "n_hooks_left": n_hooks(called, optimizer) - n_before,
        "shown": shown.getvalue(),
        "ended": ended,
    }
    if watched is not None:
        found |= {
            "alarms": [(alarm.step, alarm.signal, alarm.message) for alarm in watched.alarms.raised],
            "path": watched.path,
            "status": watched.status.step,
        }
    return found


def without_second_rank(state, bucket):
    """A hook of DDP that loses what rank 1 computed in one of the buckets."""
    if distributed.get_rank() == 1 and bucket.index() == 0:
        bucket.buffer().zero_()
    return default_hooks.allreduce_hook(None, bucket)


def without_a_bucket(state, bucket):
    """A hook of DDP that loses one of the buckets."""
    if bucket.index() == 0:
        bucket.buffer().zero_()
    return default_hooks.allreduce_hook(None, bucket)


def pairs(rank, folder):
    """Each kind of ranks and number format, watched and not."""
    found = {}
    for kind in ("ddp", "fsdp"):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            found[name] = train(rank, kind, folder / f"{name}.zarr", dtype=dtype)
            found[f"{name} alone"] = train(rank, kind, dtype=dtype, is_watched=False)
    return found


def one_raises(rank, folder):
    """Rank 1 ends by an error, the other one because it is told to; then they train on together."""

    def leave(i):
        if i == 3:
            raise AlarmError("an error of rank 1 alone" if rank == 1 else "a word of the loop")

    found = train(rank, "ddp", folder / "raises.zarr", before=leave)
    return found | {"weights after": train(rank, "ddp", is_watched=False, n_steps=2)["weights"]}


def alarm_stops(rank, folder):
    """An alarm about one rank ends the training of both."""

    def stop(alarm):
        raise AlarmError(alarm.signal)

    fault = wb.faults.low_precision_attention(n_bits=6, start=3) if rank == 1 else None
    return train(rank, "ddp", folder / "stops.zarr", fault=fault, on_alarm=stop)


def lossy_shards(rank, folder):
    """What rank 1 computed is lost while FSDP2 adds up gradients."""
    name = "reduce_scatter_single" if hasattr(distributed, "reduce_scatter_single") else "reduce_scatter_tensor"
    honest = getattr(distributed, name)

    def without_second(output, input, **kwargs):
        if rank == 1:
            input.zero_()
        return honest(output, input, **kwargs)

    setattr(distributed, name, without_second)
    try:
        return train(rank, "fsdp", folder / "shards.zarr")
    finally:
        setattr(distributed, name, honest)


def changed_rate(rank, folder):
    """Rank 1 alone has another rate."""

    def change(optimizer):
        if rank == 1 and watched_steps.append(0) is None and len(watched_steps) == 4:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    watched_steps = []
    return train(rank, "fsdp", folder / "rate.zarr", after=change)


def on_one_rank(rank, make):
    """A fault on rank 1 alone."""
    return make() if rank == 1 else None


SCENARIOS = {
    "lost of one rank": lambda rank, _: train(rank, "ddp", shows=False, hook=without_second_rank),
    "lost of all": lambda rank, folder: train(rank, "ddp", folder / "all.zarr", hook=without_a_bucket),
    "broken attention": lambda rank, folder: train(
        rank, "ddp", folder / "attention.zarr",
        fault=on_one_rank(rank, lambda: wb.faults.low_precision_attention(n_bits=6, start=2)),
    ),
    "dropped on one": lambda rank, folder: train(
        rank, "ddp", folder / "one.zarr",
        fault=on_one_rank(rank, lambda: wb.faults.dropped_bucket(share=1.0, start=2)),
    ),
    "eval on one": lambda rank, folder: train(rank, "ddp", folder / "eval.zarr", in_eval=rank == 1),
    "one raises": one_raises,
    "alarm stops": alarm_stops,
    "lossy shards": lossy_shards,
    "dropped shards": lambda rank, folder: train(
        rank, "fsdp", folder / "dropped.zarr", fault=wb.faults.dropped_bucket(share=1.0, start=2)
    ),
    "dropped shards of one": lambda rank, folder: train(
        rank, "fsdp", folder / "dropped_one.zarr", dtype=torch.bfloat16,
        fault=on_one_rank(rank, lambda: wb.faults.dropped_bucket(share=1.0, start=2)),
    ),
    "changed setting": changed_rate,
}  # fmt: skip


def main(rank, folder):
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N_RANKS))
    options = {"rank": rank, "world_size": N_RANKS, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", **options)
    found = pairs(rank, folder) | {name: scenario(rank, folder) for name, scenario in SCENARIOS.items()}
    torch.save(found, folder / f"rank-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo

    torch.multiprocessing.start_processes(main, (Path(sys.argv[1]),), N_RANKS, start_method="fork")
