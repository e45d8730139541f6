"""Checks of the model and the optimizer, without their wrappers, before KSS is attached."""

from __future__ import annotations

import torch
from torch import nn

from workbench.errors import OptionError, SnapshotError
from workbench.models.wrapping import is_split


def check_attachable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse models and optimizers that KSS cannot act on.

    Raises:
        OptionError: If it cannot.
    """
    name = type(model).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("KSS cannot act inside LBFGS, which evaluates the loss several times a step; use Adam.")
    if is_split(model):
        raise OptionError(f"The weights of {name} are split over processes, which KSS cannot read; train with DDP.")
    weights = {id(p) for p in model.parameters() if p.requires_grad}
    if not any(id(p) in weights for group in optimizer.param_groups for p in group["params"]):
        raise OptionError(f"The optimizer moves no weight of {name}; attach KSS to the model that it trains.")


def is_trained(module: nn.Module) -> bool:
    """Whether any of its parameters is trained."""
    return any(p.requires_grad for p in module.parameters())


def recomputation_error(model: nn.Module) -> SnapshotError:
    """An error that says that activation checkpointing hides the states from hooks."""
    return SnapshotError(
        f"{type(model).__name__} recomputes its activations even in eval mode, which hides them from KSS; use "
        "torch.utils.checkpoint only while module.training is True."
    )
