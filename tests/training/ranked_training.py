"""Two processes that train one model by `workbench.train`; run by test_train_ranks.py."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import workbench as wb

N_RANKS, N_STEPS = 2, 6
OPTIONS = {
    "learning_rate": 1e-2,
    "warmup": 2,
    "clip_norm": 0.5,
    "spectra_every": 3,
    "profile_options": {"n_snapshots": 64},
}


def task(batch_size=8):
    return wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=batch_size, seed=3)


def model():
    options = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16, "seed": 1}
    return wb.zoo.transformer("pre_ln", **options).double()


def parallel(kind):
    """Return the model, and what is trained."""
    subject = model()
    if kind == "ddp":
        return subject, DistributedDataParallel(subject)
    for block in subject.blocks:
        fully_shard(block)
    return subject, fully_shard(subject)


def records(trained, folder, name, *, n_steps=N_STEPS, kss=None, **options):
    options = OPTIONS | {"store": folder / f"{name}.zarr", "checkpoint_every": 2, **options}
    recorder = wb.Recorder(every={"precision": None, "update": None, "reduction": None}, budget=None)
    steps = wb.train(trained, task(), n_steps=n_steps, recorder=recorder, alarms=wb.Alarms(), kss=kss, **options)
    return [(record.step, record.loss, record.grad_norm, record.accuracy) for record in steps]


def results(trained, subject, folder, name, **options):
    found = records(trained, folder, name, **options)
    weights = [weight.detach() for weight in subject.parameters()]
    return {"records": found, "weights": [w.full_tensor() if hasattr(w, "full_tensor") else w.clone() for w in weights]}


def in_kind(kind, folder):
    subject, trained = parallel(kind)
    found = {kind: results(trained, subject, folder, kind)}
    if kind == "ddp":
        subject, trained = parallel(kind)
        found["ddp kss"] = results(trained, subject, folder, "ddp kss", kss=wb.KSS())
    # Stopped after four steps, and resumed by other processes' objects.
    subject, trained = parallel(kind)
    first = results(trained, subject, folder, f"{kind} resumed", n_steps=4)
    subject, trained = parallel(kind)
    second = results(trained, subject, folder, f"{kind} resumed", resume=True)
    return found | {f"{kind} resumed": {"records": first["records"] + second["records"], "weights": second["weights"]}}


def message(function):
    try:
        function()
    except wb.WorkbenchError as error:
        return str(error)
    return ""


def refused(folder):
    _, trained = parallel("ddp")
    taken = message(lambda: records(trained, folder, "ddp"))
    odd = message(lambda: list(wb.train(trained, task(batch_size=7), n_steps=1)))
    return {"taken": taken, "odd": odd}


def own_batches(rank):
    """Each rank has batches of its own, which are not divided."""
    _, trained = parallel("ddp")
    own = [tuple(part[rank::N_RANKS] for part in task().batch(i)) for i in range(3)]
    steps = wb.train(trained, own, n_steps=3, learning_rate=1e-2)
    return [record.loss for record in steps]


def failed(folder):
    """A value is not finite on one rank alone; both end at the same step."""
    subject, trained = parallel("ddp")
    if distributed.get_rank() == 1:
        subject.blocks[1].register_forward_hook(lambda module, args, output: output * float("nan"))
    return records(trained, folder, "failed")


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N_RANKS))
    options = {"rank": rank, "world_size": N_RANKS, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", **options)
    found = in_kind("ddp", folder) | in_kind("fsdp", folder) | {"refused": refused(folder)}
    found |= {"own batches": own_batches(rank), "failed": failed(folder)}
    torch.save(found, folder / f"rank-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo

    torch.multiprocessing.start_processes(main, (Path(sys.argv[1]),), N_RANKS, start_method="fork")
