"""Results of one forward pass: the task's loss, auxiliary terms, and the accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def prediction_of(output: Any) -> Any:
    """What a loss is computed from: an output that is a tensor, else its logits; the whole output if it has none."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def loss_in(output: Any) -> Tensor | None:
    """The loss that a model returns with its output, as Hugging Face models do when they get labels."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the targets, in nats.

    Args:
        logits: Logits, shape (..., class).
        targets: Class numbers, shape (...); -100 is left out.
    """
    return cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def auxiliary_loss(model: nn.Module, output: Any) -> Tensor | None:
    """Weighted auxiliary terms of the loss: the zoo's own method, or what Hugging Face routers return."""
    if callable(own := getattr(model, "auxiliary_loss", None)):
        return own()
    term = None if isinstance(output, Tensor) else getattr(output, "aux_loss", None)
    if not isinstance(term, Tensor):
        return None
    return term * getattr(getattr(model, "config", None), "router_aux_loss_coef", 1.0)


def accuracy_of(logits: Any, targets: Tensor) -> float:
    """Share of the targets that were most likely; NaN if that is not defined."""
    found = accuracy_on_device(logits, targets)
    return math.nan if found is None else float(found)


def accuracy_on_device(logits: Any, targets: Tensor) -> Tensor | None:
    """`accuracy_of` as a 0-dim tensor that may still be computed; None if it is not defined."""
    if not isinstance(logits, Tensor) or not logits.ndim or targets.is_floating_point():
        return None
    if logits.shape[:-1] != targets.shape:
        return None
    is_target = targets != -100
    right = (logits.detach().argmax(-1) == targets) & is_target
    return right.sum() / is_target.sum()
