"""Checks of a model and an optimizer, without their wrappers, to which KSS is to be attached."""

from __future__ import annotations

import torch
from torch import nn

from workbench.errors import OptionError, SnapshotError
from workbench.models.wrapping import is_split


def check_attachable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `OptionError` if KSS cannot act on a model and its optimizer."""
    name = type(model).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError(
            "KSS cannot act inside LBFGS, which evaluates the loss several times per step; use another optimizer, such "
            "as AdamW."
        )
    if is_split(model):
        raise OptionError(
            f"KSS cannot read the parameters of {name}, which are sharded over processes; train with DDP."
        )
    parameters = {id(p) for p in model.parameters() if p.requires_grad}
    if not any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
        raise OptionError(f"The optimizer updates no parameter of {name}; attach KSS to the model that it trains.")


def is_trained(module: nn.Module) -> bool:
    """Return whether any parameter of a module is trained."""
    return any(p.requires_grad for p in module.parameters())


def recomputation_error(model: nn.Module) -> SnapshotError:
    """Return the error for activation checkpointing in eval mode, which hides the states from hooks."""
    return SnapshotError(
        f"{type(model).__name__} recomputes its activations even in eval mode, which hides them from KSS; use "
        "torch.utils.checkpoint only while module.training is True."
    )
