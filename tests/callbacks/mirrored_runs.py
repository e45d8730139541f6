"""A small training that is watched, with an alarm for certain: its learning rate changes without a plan."""

from contextlib import nullcontext

import torch
from torch.nn import functional

import workbench as wb

N_STEPS, AT = 30, 12


def trained(*, each=None, changes_rate=True, n_steps=N_STEPS, is_context=False, is_open=False, **options):
    """Train a model and return its losses and the watch; without options it is not watched."""
    torch.manual_seed(0)
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"every": {"optimizer": 5}, "budget": None} | options if options else options
    watched = wb.watch(model, optimizer, shows=False, **options) if options else None
    losses = []
    with watched if is_context else nullcontext():
        for i in range(n_steps):
            inputs, targets = task.batch(i)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            if changes_rate and i == AT:
                optimizer.param_groups[0]["lr"] *= 20
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if each is not None:
                each(i, losses[-1])
    if watched is not None and not is_open:
        watched.close()
    return losses, watched
