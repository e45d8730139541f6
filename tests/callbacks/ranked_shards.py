"""Ranks that train a model whose parts they hold, with and without a watch; run by test_sharded_runs.py."""

import os
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.callbacks.sharded_models import LENGTH, VOCAB, split, titan
from workbench.callbacks.kss import TrustRegion

N_STEPS, BATCH = 6, 8
EVERY = {"attention": 2, "router": 2, "optimizer": 2, "activations": 2, "precision": 2, "reduction": 2, "update": 2}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    return tokens, tokens.roll(-1, 1)


def probe(*, has_loss):
    tokens = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(99))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)} if has_loss else tokens


def train(model, store=None, *, n_parts=1, part=0, has_loss=True, after=lambda step: None, **options):
    """Train in a loop as torchtitan's, watched if there is a store; return losses, weights and alarms of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, watched = [], None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if store is not None:
            options = {"every": EVERY, "shows": False} | options
            watched = wb.watch(model, optimizer, store=store, **options)
            watched.recorder._attached.batches.probe = probe(
                has_loss=has_loss
            )  # instead of examples of the first batch
        for step in range(N_STEPS):
            tokens, targets = (each[part::n_parts] for each in batch(step))
            optimizer.zero_grad()
            if has_loss:
                _, loss = model(tokens, targets)
            else:
                loss = cross_entropy(model(tokens).flatten(0, 1).double(), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if watched is not None:
                watched.log(loss=loss)
            optimizer.step()
            losses.append(loss.item())
            after(step)
        if watched is not None:
            watched.close()
    weights = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    found = {"losses": losses, "weights": [each.detach().clone() for each in weights]}
    if watched is not None:
        found["alarms"] = [(alarm.step, alarm.signal, alarm.message) for alarm in watched.alarms.raised]
    return found


def run(kind, folder, *, dtype=torch.float64, param_dtype=None, reshards=True, name=None, has_loss=True):
    """Train without a watch and with one."""
    found = {}
    for store in (None, folder / f"{name or kind}.zarr"):
        model, n_parts, part = split(titan(dtype), kind, param_dtype=param_dtype, reshards=reshards)
        found["plain" if store is None else "watched"] = train(
            model, store, n_parts=n_parts, part=part, has_loss=has_loss
        )
    return found


def shaped(kind, *, n_parts=1, part=0):
    """Train with KSS at a rate at which it acts, and return losses and what it did in each step."""
    model = titan()
    if kind != "one":
        model, n_parts, part = split(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # All states of a batch, however it is split, and a narrow band.
    options = {"n_snapshots": BATCH * LENGTH, "trust_region": TrustRegion(highest=1.0, rise=0.0005)}
    kss = wb.KSS.recommended(options=replace(wb.KSS.recommended().options, **options))
    acts, losses = [], []
    with kss.attach(model, optimizer) as shaper:
        for step in range(N_STEPS):
            tokens, targets = (each[part::n_parts] for each in batch(step))
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            acts.append((shaper.last.n_acting, shaper.last.update_size, shaper.last.spectral_radius))
            losses.append(loss.item())
    return losses, acts


BF16 = {"dtype": torch.float32, "param_dtype": torch.bfloat16}
SCENARIOS = {
    "fsdp": lambda folder: run("fsdp", folder),
    "tp": lambda folder: run("tp", folder, has_loss=False),
    "2d": lambda folder: run("2d", folder),
    **{f"{kind} shaped": lambda folder, kind=kind: shaped(kind) for kind in ("fsdp", "tp", "2d")},
    "fsdp bf16": lambda folder: run("fsdp", folder, reshards=False, name="fsdp bf16", **BF16),
    "2d bf16": lambda folder: run("2d", folder, name="2d bf16", **BF16),
}


def main(rank, n_ranks, folder, names):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n_ranks))
    options = {"rank": rank, "world_size": n_ranks, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", **options)
    found = {}
    for name in names:
        found[name] = SCENARIOS[name](folder)
        torch.save(found, folder / f"rank-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo

    n_ranks = int(sys.argv[2])
    arguments = (n_ranks, Path(sys.argv[1]), sys.argv[3:])
    torch.multiprocessing.start_processes(main, arguments, n_ranks, start_method="fork")
