"""Out of what wraps a model or an optimizer: subjects, ``torch.compile``, DDP, Lightning, accelerate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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
            return chain
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
