"""Ranks that train stages of a pipeline, with and without a watch; run by test_pipeline_runs.py."""

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.callbacks.ranked_shards import batch
from tests.callbacks.sharded_models import stage_of_titan, titan
from workbench.io.run_output import RecordingWarning
from workbench.io.run_writer import RunWriter

N_STEPS, N_BLOCKS, N_PASSES = 6, 4, 4
EVERY = {"attention": 2, "router": 2, "optimizer": 2, "activations": 2, "precision": 2, "reduction": 2, "update": 2}
#: Update before which a rank fails.
FAILS_AT = 3
#: Seconds after which the others give up that wait for a rank.
TIMEOUT = 12


def loss_of(output, targets):
    return cross_entropy(output.flatten(0, 1).double(), targets.flatten())


def train(
    folder, name, schedule, *, watches=True, n_chunks=1, before=lambda step, models: None, during=None, **options
):
    """Train in pipeline stages; return losses, weights and alarms of this rank."""
    rank, n_ranks = distributed.get_rank(), distributed.get_world_size()
    indices = range(rank, n_ranks * n_chunks, n_ranks)
    models = [stage_of_titan(titan(n_layers=N_BLOCKS), i, n_ranks * n_chunks) for i in indices]
    stages = [
        PipelineStage(model, i, n_ranks * n_chunks, torch.device("cpu"))
        for model, i in zip(models, indices, strict=True)
    ]
    run = schedule(stages if n_chunks > 1 else stages[0], N_PASSES, loss_fn=loss_of)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    watches = [
        wb.watch(model, optimizer, store=folder / f"{name}.zarr", every=EVERY, shows=False, **options)
        for model, optimizer in zip(models, optimizers, strict=True)
        if watches
    ]
    losses = []
    try:
        for step in range(N_STEPS):
            tokens, targets = batch(step)
            before(step, models)
            for optimizer in optimizers:
                optimizer.zero_grad()
            own = []
            given = {"target": targets, "losses": own} if rank == n_ranks - 1 else {}
            run.step(*([tokens] if rank == 0 else []), **given)
            losses += [torch.stack(own).mean().item()] if own else []
            if during is not None:
                during(step)
            for optimizer in optimizers:
                optimizer.step()
            for watched in watches if step == FAILS_AT - 1 else ():
                watched.recorder.state_dict()  # writes all rows, as with a checkpoint
    finally:
        for watched in watches:
            watched.close(is_broken=sys.exc_info()[0] is not None)
    alarms = [(each.step, each.signal, each.layer) for watched in watches for each in watched.alarms.raised]
    weights = [each.detach().clone() for model in models for each in model.parameters()]
    return {"losses": losses, "weights": weights, "alarms": alarms}


def both(folder, name, schedule, **options):
    """Train without a watch and with one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {
            key: train(folder, name, schedule, watches=key == "watched", **options) for key in ("plain", "watched")
        }
    sentences = [str(each.message) for each in caught if issubclass(each.category, RecordingWarning)]
    return found | {"warnings": sentences}


def failing(folder, name, *, of, how):
    """Train until one rank fails before the fourth update."""

    def fail(step, models=None):
        if step != FAILS_AT or distributed.get_rank() != of % distributed.get_world_size():
            return
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "silent":
            time.sleep(2 * TIMEOUT)
        if how == "in a pass":
            models[0].layers["0" if distributed.get_rank() == 0 else str(N_BLOCKS - 1)].register_forward_hook(stumble)
            return
        raise ArithmeticError("a planted error")

    def stumble(*call):
        raise ArithmeticError("a planted error")

    at = {"during": fail} if how == "before the update" else {"before": fail}
    return train(folder, name, Schedule1F1B if of else ScheduleGPipe, **at)


def exploding(folder):
    """Train with a stage whose weights are spoiled before the fourth update."""

    def spoil(step, models):
        if step == FAILS_AT and distributed.get_rank() == 1:
            with torch.no_grad():
                next(iter(models[0].layers.values())).feed_forward.w1.weight.fill_(torch.nan)

    return train(folder, "exploding", Schedule1F1B, before=spoil)


def resumed(folder):
    """Train twice in the same store, from whose first part the first stage has lost its last rows."""
    train(folder, "resumed", Schedule1F1B)
    if distributed.get_rank() == 0:
        RunWriter.reopen(folder / "resumed.stage0.zarr", before_step=4).release()
    distributed.barrier()
    return train(folder, "resumed", Schedule1F1B, resume=True)


HOW = ("raising", "in a pass", "before the update", "killed", "silent")
SCENARIOS = {
    "1f1b": lambda folder: both(folder, "1f1b", Schedule1F1B),
    "gpipe": lambda folder: both(folder, "gpipe", ScheduleGPipe),
    "interleaved": lambda folder: both(folder, "interleaved", ScheduleInterleaved1F1B, n_chunks=2),
    "exploding": exploding,
    "resumed": resumed,
    **{
        f"{how} {of}": lambda folder, how=how, of=of: failing(folder, f"{how} {of}".replace(" ", "_"), of=of, how=how)
        for how in HOW
        for of in (0, -1)
    },
}


def main(rank, n_ranks, folder, name):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n_ranks))
    options = {"rank": rank, "world_size": n_ranks, "timeout": timedelta(seconds=TIMEOUT if " " in name else 60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/{name}.ranks".replace(" ", "_"), **options)
    begun = time.monotonic()
    try:
        found = SCENARIOS[name](folder)
    except Exception as error:
        told = {"error": f"{error!r}, {error.__cause__!r}", "seconds": time.monotonic() - begun}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(told))
        raise
    torch.save(found, folder / f"{name}.{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo
    import xarray  # noqa: F401  (once, before the ranks are forked)
    import zarr  # noqa: F401

    import workbench.callbacks.watch

    # Each rank ends by itself, whatever happens to the others.
    for scenario in sys.argv[3:]:
        context = torch.multiprocessing.get_context("fork")
        arguments = [(rank, int(sys.argv[2]), Path(sys.argv[1]), scenario) for rank in range(int(sys.argv[2]))]
        processes = [context.Process(target=main, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
