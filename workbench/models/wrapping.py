"""Out of what wraps a model or an optimizer: subjects, ``torch.compile``, DDP, Lightning, accelerate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import AnatomyError
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from workbench.models.subject import Subject


def unwrap(model: Subject | nn.Module) -> nn.Module:
    """The module of a subject, out of ``torch.compile``: compiled code ignores hooks that come later.

    Raises:
        AnatomyError: As `module_of`.
    """
    module = module_of(model)
    return getattr(module, "_orig_mod", module)


def runnable(model: Subject | nn.Module) -> nn.Module:
    """The module to call: `unwrap`, and out of a shell without forward, as a LightningModule may be.

    Raises:
        AnatomyError: As `module_of`; or if a module without forward holds several parts.
    """
    module = unwrap(model)
    if not isinstance(module, nn.Module) or _has_forward(module):
        return module
    parts = {name: part for name, part in module.named_children() if any(True for _ in part.parameters())}
    if len(parts) == 1:
        return runnable(*parts.values())
    example = f", such as model.{next(iter(parts))}" if parts else ""
    raise AnatomyError(
        f"{type(module).__name__} has no forward, and {len(parts) or 'none'} of its parts hold parameters, expected "
        f"one; pass the part that maps inputs to outputs{example}."
    )


def _has_forward(module: nn.Module) -> bool:
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return "forward" in vars(module) or owner.__name__ not in ("Module", "LightningModule")


def subject_in(model: Subject | nn.Module) -> Subject | None:
    """The subject, if it is one rather than a module."""
    return None if isinstance(model, nn.Module) or unwrap(model) is model else model


def as_written() -> AbstractContextManager:
    """Modules run as they were written: compiled code ignores hooks that come later."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


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
            return [module for module in chain if _has_forward(module)] or chain
        chain.append(inner[0])


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that moves the parameters, without its wrappers (accelerate, Lightning, SAM)."""
    for name in ("base_optimizer", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return innermost(inner)
    return optimizer


def acting_on_gradients(
    optimizer: torch.optim.Optimizer, args: tuple, kwargs: Mapping[str, Any], act: Callable[[Any], None]
) -> tuple[tuple, dict[str, Any]] | None:
    """Act between the gradients of an update and the update, from a hook of the optimizer before its step.

    Where the optimizer has a closure make the gradients, as under Lightning, the batch is yet to come.

    Args:
        optimizer: Optimizer whose step it is.
        args: Positional arguments of the step, as the hook gets them.
        kwargs: Keyword arguments of the step.
        act: Called with what the closure returns, every time that it ran; once with None where there is no closure.

    Returns:
        What the hook returns.
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
    """Whether a rank holds only parts of the weights (FSDP, tensor parallel, DeepSpeed)."""
    is_flat = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return is_flat or any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())
