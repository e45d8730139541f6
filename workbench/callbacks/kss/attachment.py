"""Where KSS takes hold of a model and an optimizer, out of what wraps them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from workbench.callbacks.kss.shared_control import is_split
from workbench.errors import SnapshotError, ThresholdError
from workbench.models.probing import unwrap


def check_attachable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what KSS cannot act on.

    Raises:
        ThresholdError: If it cannot.
    """
    name = type(model).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ThresholdError("KSS cannot act inside LBFGS, which looks at the loss several times a step; use Adam.")
    if is_split(model):
        raise ThresholdError(f"The weights of {name} are split over processes, which KSS cannot read; train with DDP.")
    weights = {id(p) for p in model.parameters() if p.requires_grad}
    if not any(id(p) in weights for group in optimizer.param_groups for p in group["params"]):
        raise ThresholdError(f"The optimizer moves no weight of {name}; attach KSS to the model that it trains.")


def is_trained(module: nn.Module) -> bool:
    """Whether it has weights that learn."""
    return any(p.requires_grad for p in module.parameters())


def recomputation_error(model: nn.Module) -> SnapshotError:
    """Says that activation checkpointing hides the states from whoever looks."""
    return SnapshotError(
        f"{type(model).__name__} recomputes its activations even in eval mode, which hides them from KSS; use "
        "torch.utils.checkpoint only while module.training is True."
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def bare(model: nn.Module) -> nn.Module:
    """The module itself, out of ``torch.compile`` and DDP."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return bare(model.module)
    inner = unwrap(model)
    return model if inner is model else bare(inner)


def entrances(model: nn.Module) -> list[nn.Module]:
    """Modules by which a loop may run the whole model, outermost first: each holds every trainable weight.

    A LightningModule, for one, is often a shell around the model that its training step calls.
    """
    chain, weights = [model], {id(p) for p in model.parameters() if p.requires_grad}
    while True:
        inner = [m for m in chain[-1].children() if weights <= {id(p) for p in m.parameters()}]
        if len(inner) != 1:
            return chain
        chain.append(inner[0])


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that moves the weights, out of what wraps it (accelerate, Lightning, SAM)."""
    for name in ("base_optimizer", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return innermost(inner)
    return optimizer


def named_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as `call_model` takes them: a tuple, or a mapping of keywords."""
    if not kwargs:
        return args
    names = [*inspect.signature(model.forward).parameters]
    return dict(zip(names, args, strict=False)) | kwargs
