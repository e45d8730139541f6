"""Results of one forward pass: the task's loss, auxiliary terms, and the accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

#: Targets that losses leave out, by PyTorch's convention.
_IGNORED = -100
#: Largest number of targets that `largest_losses` looks at.
_N_SAMPLED = 256


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


def largest_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of the largest eighth of the token losses, in nats, 0-dim: wrong labels show there first.

    Cost: the loss of at most 256 targets, evenly spread over the batch.

    Args:
        logits: Logits, shape (..., class).
        targets: Class numbers, shape (...); -100 is left out. NaN if nothing is left.
    """
    logits, targets = logits.flatten(0, -2), targets.flatten()
    spacing = max(1, len(targets) // _N_SAMPLED)
    logits, targets = logits[::spacing][:_N_SAMPLED], targets[::spacing][:_N_SAMPLED]
    losses = cross_entropy(logits.float(), targets, reduction="none")
    ordered = losses.masked_fill(targets == _IGNORED, -math.inf).sort(descending=True).values
    n_largest = ((targets != _IGNORED).sum() / 8).ceil()
    is_largest = torch.arange(len(ordered), device=ordered.device) < n_largest
    return ordered.where(is_largest, 0.0).sum() / n_largest


def targets_of(model: nn.Module, inputs: Any, output: Any) -> tuple[Tensor, Tensor] | None:
    """The logits and the labels that a Hugging Face model compares, aligned; None if that is not known.

    Args:
        model: The model that got the inputs.
        inputs: Mapping with ``labels``.
        output: Its output, with ``logits``.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    logits, kind = prediction_of(output), getattr(model, "loss_type", None)
    if not (isinstance(labels, Tensor) and isinstance(logits, Tensor)) or kind is None:
        return None
    if kind == "ForCausalLM":  # such models compare each position with the next label
        logits, labels = logits[:, :-1], labels[:, 1:]
    return (logits, labels) if are_classes(logits, labels) else None


def are_classes(logits: Any, targets: Any) -> bool:
    """Whether targets are class numbers, one for each row of the logits."""
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)) or not logits.ndim:
        return False
    return not targets.is_floating_point() and logits.shape[:-1] == targets.shape


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
    if not are_classes(logits, targets):
        return None
    is_target = targets != _IGNORED
    right = (logits.detach().argmax(-1) == targets) & is_target
    return right.sum() / is_target.sum()
