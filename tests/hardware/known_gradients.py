"""Models with known gradients."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from workbench.hardware import read_plan
from workbench.hardware.emulation import Emulation
from workbench.models.losses import token_loss


class Known(nn.Module):
    """A model that returns ``scale * weight`` for each example and ignores the inputs."""

    def __init__(self, n: int = 4, *, weight: float = 1.0, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((n,), weight))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.weight).expand(len(x), -1)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a loss whose gradient is the scale of the model, for each parameter and every batch."""
    return logits.sum(-1).mean()


def batches(n_batches: int = 4, n_rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return batches of zeros."""
    return [(torch.zeros(n_rows, 3), torch.zeros(n_rows, dtype=torch.int64)) for _ in range(n_batches)]


def emulation(model: nn.Module, plan: dict, *, loss: Any = summed, data: Any = None, seed: int = 0) -> Emulation:
    """Return an emulation of a plan on a model."""
    return Emulation(model, batches() if data is None else data, read_plan(plan), loss=loss, seed=seed)


def on_task(model: nn.Module, plan: dict, *, n_rows: int = 8, n_batches: int = 2) -> Emulation:
    """Return an emulation with the task of the plan, for a model with 64 tokens."""
    task = read_plan(plan).make_task(64, max_length=16, n_rows=n_rows)
    return emulation(model, plan, loss=token_loss, data=list(itertools.islice(task.stream(), n_batches)))
