"""Two processes that train one model, are watched, and save the results of each rank; run by test_watch_ranks.py."""

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
    """A terminal that stores the written text."""

    def isatty(self):
        return True


class AlarmError(Exception):
    """Raised by an alarm."""


def wrapped(kind, dtype=torch.float32):
    """Return the model, and the module that the loop calls."""
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
    """Return the number of hooks on the model and the optimizer."""
    tables = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for module in model.modules():
        tables += [module._forward_pre_hooks, module._forward_hooks]
    return sum(map(len, tables))


def train(
    rank, kind, store=None, *, dtype=torch.float32, hook=None, fault=None, before=lambda i: None, after=lambda i: None,
    in_eval=False, is_watched=True, n_steps=N_STEPS, **options,
):  # fmt: skip
    """Train in a standard loop that is watched, and return the results on this rank."""
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
    """Reduce gradients as a hook of DDP that loses those of rank 1 in one bucket."""
    if distributed.get_rank() == 1 and bucket.index() == 0:
        bucket.buffer().zero_()
    return default_hooks.allreduce_hook(None, bucket)


def without_a_bucket(state, bucket):
    """Reduce gradients as a hook of DDP that loses one bucket on all ranks."""
    if bucket.index() == 0:
        bucket.buffer().zero_()
    return default_hooks.allreduce_hook(None, bucket)


def pairs(rank, folder):
    """Train with each kind of parallelism and number format, watched and not watched."""
    found = {}
    for kind in ("ddp", "fsdp"):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            found[name] = train(rank, kind, folder / f"{name}.zarr", dtype=dtype)
            found[f"{name} not watched"] = train(rank, kind, dtype=dtype, is_watched=False)
    return found


def one_raises(rank, folder):
    """End training on rank 1 by an error and on rank 0 by the loop, then train again."""

    def leave(i):
        if i == 3:
            raise AlarmError("an error of rank 1 alone" if rank == 1 else "stopped by the loop")

    found = train(rank, "ddp", folder / "raises.zarr", before=leave)
    return found | {"weights after": train(rank, "ddp", is_watched=False, n_steps=2)["weights"]}


def alarm_stops(rank, folder):
    """Train with a fault on one rank, whose alarm ends the training on both."""

    def stop(alarm):
        raise AlarmError(alarm.signal)

    fault = wb.faults.low_precision_attention(n_bits=6, start=3) if rank == 1 else None
    return train(rank, "ddp", folder / "stops.zarr", fault=fault, on_alarm=stop)


def lossy_shards(rank, folder):
    """Train with FSDP2 while the gradients of rank 1 are lost in the reduction."""
    name = "reduce_scatter_single" if hasattr(distributed, "reduce_scatter_single") else "reduce_scatter_tensor"
    correct = getattr(distributed, name)

    def without_second(output, input, **kwargs):
        if rank == 1:
            input.zero_()
        return correct(output, input, **kwargs)

    setattr(distributed, name, without_second)
    try:
        return train(rank, "fsdp", folder / "shards.zarr")
    finally:
        setattr(distributed, name, correct)


def changed_weight_decay(rank, folder):
    """Train while the weight decay changes on rank 1 only."""
    steps = []

    def change(optimizer):
        steps.append(len(steps))
        if rank == 1 and len(steps) == 4:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    return train(rank, "fsdp", folder / "weight_decay.zarr", after=change)


def on_one_rank(rank, make):
    """Return a fault on rank 1, and None on rank 0."""
    return make() if rank == 1 else None


SCENARIOS = {
    "gradients lost on one rank": lambda rank, _: train(rank, "ddp", shows=False, hook=without_second_rank),
    "gradients lost on all ranks": lambda rank, folder: train(rank, "ddp", folder / "all.zarr", hook=without_a_bucket),
    "low precision on one rank": lambda rank, folder: train(
        rank, "ddp", folder / "attention.zarr",
        fault=on_one_rank(rank, lambda: wb.faults.low_precision_attention(n_bits=6, start=2)),
    ),
    "dropped on one rank": lambda rank, folder: train(
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
    "dropped shards on one rank": lambda rank, folder: train(
        rank, "fsdp", folder / "dropped_one.zarr", dtype=torch.bfloat16,
        fault=on_one_rank(rank, lambda: wb.faults.dropped_bucket(share=1.0, start=2)),
    ),
    "changed setting": changed_weight_decay,
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
