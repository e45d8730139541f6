"""Results of one forward pass: the task's loss, auxiliary terms, and the accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

#: Targets that losses leave out, by PyTorch's convention.
_IGNORED = -100
#: Types of the losses of Hugging Face models that compare with the next label; None is that of older classes.
_NEXT_TOKEN = ("ForCausalLM", "ForConditionalGeneration", None)
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

    Cost: a sort of the targets, and the loss of at most 256 of them, evenly spread over those that count.

    Args:
        logits: Logits, shape (..., class).
        targets: Class numbers, shape (...); what is no class, such as -100, is left out. NaN if nothing is left.
    """
    flat = targets.flatten()
    counts = (flat >= 0) & (flat < logits.shape[-1])
    n_counted, n = counts.sum(), min(_N_SAMPLED, len(flat))
    place = torch.arange(n, device=flat.device)
    # Those that count come first; where they are more than are looked at, evenly spaced ones. Nothing waits.
    ordered = counts.to(torch.uint8).argsort(descending=True, stable=True)
    chosen = ordered[torch.where(n_counted > n, place * n_counted // n, place)]
    is_known, wanted = counts[chosen], flat[chosen]
    rows = logits[_places(chosen, targets.shape)].float()
    losses = cross_entropy(rows, wanted.where(is_known, _IGNORED), reduction="none")
    largest = losses.masked_fill(~is_known, -math.inf).sort(descending=True).values
    n_largest = (is_known.sum() / 8).ceil()
    return largest.where(place < n_largest, 0.0).sum() / n_largest


def _places(number: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Indices of entries by their number in a tensor of that shape; torch's function makes the host wait."""
    found = []
    for size in reversed(shape[1:]):
        found.append(number % size)
        number = number // size
    return (number, *reversed(found))


def targets_of(model: nn.Module, inputs: Any, output: Any) -> tuple[Tensor, Tensor] | None:
    """The logits and the labels that a Hugging Face model compares, aligned; None if that is not known.

    Args:
        model: The model that got the inputs.
        inputs: Mapping with ``labels``.
        output: Its output, with ``logits``.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    logits = prediction_of(output)
    if not (isinstance(labels, Tensor) and isinstance(logits, Tensor)) or not hasattr(model, "loss_type"):
        return None
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if model.loss_type in _NEXT_TOKEN and is_decoder:  # such models compare each position with the next label
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
