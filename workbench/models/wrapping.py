"""Unwrapping of models and optimizers: subjects, ``torch.compile``, DDP, Lightning, accelerate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from workbench.errors import AnatomyError
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from workbench.models.subject import Subject


def unwrap(model: Subject | nn.Module) -> nn.Module:
    """Return the module of a subject or of ``torch.compile``, whose code ignores hooks that are added later."""
    module = module_of(model)
    return getattr(module, "_orig_mod", module)


def runnable(model: Subject | nn.Module) -> nn.Module:
    """Return the module to call: unwrapped, and taken out of modules without forward, such as a LightningModule.

    Such a module must contain exactly one part with parameters; otherwise AnatomyError is raised.
    """
    module = unwrap(model)
    if not isinstance(module, nn.Module) or _has_forward(module):
        return module
    parts = {name: part for name, part in module.named_children() if any(True for _ in part.parameters())}
    if len(parts) == 1:
        return runnable(*parts.values())
    example = f", such as model.{next(iter(parts))}" if parts else ""
    raise AnatomyError(
        f"{type(module).__name__} has no forward, and {len(parts) or 'none'} of its parts have parameters, expected "
        f"one; pass the part that maps inputs to outputs{example}."
    )


def _has_forward(module: nn.Module) -> bool:
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return "forward" in vars(module) or owner.__name__ not in ("Module", "LightningModule")


def subject_in(model: Subject | nn.Module) -> Subject | None:
    """Return the subject; None for a module."""
    return None if isinstance(model, nn.Module) or unwrap(model) is model else model


def as_written() -> AbstractContextManager:
    """Return a context in which modules run uncompiled, because compiled code ignores hooks that are added later."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and DDP."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return bare(model.module)
    inner = unwrap(model)
    return model if inner is model else bare(inner)


def entrances(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a training loop may call to run the full model, outermost first.

    Each contains every trainable parameter. A LightningModule, for example, often only wraps the model that its
    training step calls.
    """
    chain, weights = [model], {id(p) for p in model.parameters() if p.requires_grad}
    while True:
        inner = [m for m in chain[-1].children() if weights <= {id(p) for p in m.parameters()}]
        if len(inner) != 1:
            return [module for module in chain if _has_forward(module)] or chain
        chain.append(inner[0])


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that updates the parameters, without its wrappers (accelerate, Lightning, SAM)."""
    for name in ("base_optimizer", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return innermost(inner)
    return optimizer


def acting_on_gradients(
    optimizer: torch.optim.Optimizer, args: tuple, kwargs: Mapping[str, Any], act: Callable[[Any], None]
) -> tuple[tuple, dict[str, Any]] | None:
    """Run an action between the computation of gradients and the update, from a pre-hook of the optimizer's step.

    If a closure computes the gradients, as in Lightning, the action runs after the closure, with its return value each
    time; otherwise once with None. Return the new arguments of the step for the hook to return, or None.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        act(None)
        return None

    def closure_and_action() -> Any:
        loss = closure()
        act(loss)
        return loss

    others = {name: value for name, value in kwargs.items() if name != "closure"}
    return (optimizer, closure_and_action, *args[2:]), others


def is_split(model: nn.Module) -> bool:
    """Return whether a rank holds only parts of the weights (FSDP, tensor parallelism, DeepSpeed)."""
    is_flat = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return is_flat or any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


def is_shared() -> bool:
    """Return whether there are several ranks."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def message_device() -> torch.device:
    """Return the device for messages between ranks: the CPU if the backend supports it, so no step waits for a GPU."""
    can_use_host = "cpu" in distributed.get_backend_config()
    return torch.device("cpu") if can_use_host else torch.device("cuda", torch.cuda.current_device())
