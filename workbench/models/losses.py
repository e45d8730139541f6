"""Losses, auxiliary terms and accuracy of one forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workbench.errors import OptionError

#: Target that losses ignore, by the convention of PyTorch.
_IGNORED = -100
#: Types of losses of Hugging Face models that compare with the next label; older classes have None.
_NEXT_TOKEN = ("ForCausalLM", "ForConditionalGeneration", None)
#: Depth at which tensors are searched in an output.
_DEPTH = 3
#: Maximum number of targets of which `largest_losses` computes the loss.
_N_SAMPLED = 256
#: Number of logits from which `accuracy_on_device` is faster on a CPU if it looks for the largest first.
_N_FAST = 2**16


def prediction_of(output: Any) -> Any:
    """Return the part of an output from which a loss is computed: a tensor itself, or the logits, if there are any."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in the output of a model: its ``loss``, as in Hugging Face models, or the number in a tuple."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, tuple | list):
        loss = next((each for each in output if isinstance(each, Tensor) and not each.ndim), loss)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None


def tensors_in(output: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in any nesting of containers and objects, down to some depth."""
    if isinstance(output, Tensor):
        yield output
    elif depth:
        parts = output if isinstance(output, tuple | list) else getattr(output, "__dict__", {}).values()
        for part in output.values() if isinstance(output, Mapping) else parts:
            yield from tensors_in(part, depth - 1)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits (..., class) over targets (...), in nats; -100 is ignored."""
    return cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def largest_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the largest eighth of the token losses, in nats, where wrong labels are visible first.

    The cost is a sort of the targets, and the loss of at most 256 of them, evenly spaced among the valid ones. Targets
    that are not classes, such as -100, are ignored. The result is a 0-dim tensor; NaN if no target is valid.
    """
    flat = targets.flatten()
    rank = ((flat >= 0) & (flat < logits.shape[-1])).cumsum(0)
    n_valid, n = rank[-1:].sum(), min(_N_SAMPLED, len(flat))
    place = torch.arange(n, device=flat.device)
    # Valid targets come first; if there are more than n, evenly spaced ones are chosen. The host never waits.
    wanted = place * n_valid.clamp(min=n) // n
    chosen, is_valid = torch.searchsorted(rank, wanted, right=True).clamp_(max=len(flat) - 1), wanted < n_valid
    sampled = logits[_places(chosen, targets.shape)].float()
    losses = cross_entropy(sampled, flat[chosen].where(is_valid, _IGNORED), reduction="none")
    largest = losses.where(is_valid, -math.inf).topk(-(-n // 8)).values
    n_largest = (n_valid.clamp(max=n) / 8).ceil()
    return largest.where(place[: len(largest)] < n_largest, 0.0).sum() / n_largest


def _places(number: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Convert flat indices to indices along each axis; `torch.unravel_index` would make the host wait."""
    found = []
    for size in reversed(shape[1:]):
        found.append(number % size)
        number = number // size
    return (number, *reversed(found))


def targets_of(model: nn.Module, inputs: Any, output: Any) -> tuple[Tensor, Tensor] | None:
    """Return the logits and labels that a Hugging Face model compares, aligned; None if they are unknown."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    logits = prediction_of(output)
    if not (isinstance(labels, Tensor) and isinstance(logits, Tensor)) or not hasattr(model, "loss_type"):
        return None
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if model.loss_type in _NEXT_TOKEN and is_decoder:  # such models compare each position with the next label
        logits, labels = logits[:, :-1], labels[:, 1:]
    return (logits, labels) if are_classes(logits, labels) else None


def are_classes(logits: Any, targets: Any) -> bool:
    """Return whether targets are class indices, one for each vector of logits."""
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)) or not logits.ndim:
        return False
    return not targets.is_floating_point() and logits.shape[:-1] == targets.shape


def auxiliary_loss(model: nn.Module, output: Any) -> Tensor | None:
    """Return the weighted auxiliary terms of the loss, from the model or its output; None if there are none."""
    if callable(own := getattr(model, "auxiliary_loss", None)):
        return own()
    term = None if isinstance(output, Tensor) else getattr(output, "aux_loss", None)
    if not isinstance(term, Tensor):
        return None
    return term * getattr(getattr(model, "config", None), "router_aux_loss_coef", 1.0)


def accuracy_of(logits: Any, targets: Tensor) -> float:
    """Return the fraction of targets that have the largest logit; NaN if it is not defined."""
    found = accuracy_on_device(logits, targets)
    return math.nan if found is None else float(found)


def accuracy_on_device(logits: Any, targets: Tensor) -> Tensor | None:
    """Return `accuracy_of` as a 0-dim tensor, without waiting for the device; None if it is not defined."""
    if not are_classes(logits, targets):
        return None
    logits, n_targets = logits.detach(), (targets != _IGNORED).sum()
    if logits.device.type == "cpu" and logits.numel() >= _N_FAST:
        # Here `argmax` takes 15 times as long as `amax`: it is left to the rows in which the target is the largest,
        # where ties and NaN decide, unless these are most rows.
        own = logits.gather(-1, targets.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        rows = (own < logits.amax(-1)).logical_not_().nonzero(as_tuple=True)
        if 2 * len(rows[0]) < targets.numel():
            logits, targets = logits[rows], targets[rows]
    return (logits.argmax(-1) == targets).sum() / n_targets


def require_graph(loss: object) -> Tensor:
    """Return a loss of a user if it is a 0-dim tensor with a graph, or raise OptionError."""
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        remedy = "return the loss of model(inputs), computed with gradients enabled"
        raise OptionError.of("loss_of(model)", loss, "a 0-dim tensor with a graph", remedy=remedy)
    return loss
