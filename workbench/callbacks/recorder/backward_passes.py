"""Backward passes of a training loop: which calls of a model they reach, and the loss that is differentiated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from workbench.models.losses import tensors_in

#: Maximum number of tensors of an output that are followed.
_MOST_TENSORS = 16
#: Code of the function through which every loss is differentiated, whoever calls ``loss.backward()``.
_BACKWARD = torch.autograd.backward.__code__
#: A gradient is that of a cross entropy if it sums to 0 up to this fraction over the classes, and one class has at
#: least this fraction of what is negative.
_MAX_SUM, _LEAST_LABEL = 0.05, 0.5


def differentiable_in(output: Any) -> list[Tensor]:
    """Return the tensors with a graph in the output of a model: a tensor, or any nesting of containers and objects."""
    found: dict[int, Tensor] = {}
    for tensor in tensors_in(output):
        if len(found) == _MOST_TENSORS:
            break
        if tensor.grad_fn is not None:
            found[id(tensor)] = tensor
    return [*found.values()]


def follow(tensor: Tensor, act: Callable[[Tensor | None], None]) -> None:
    """Call a function whenever a backward pass reaches a tensor, with the gradient that arrives.

    The hook is one of the graph, so that the tensor itself can still be copied and saved. It changes no gradient.
    """
    node, place = tensor.grad_fn, tensor.output_nr
    assert node is not None

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        act(gradients[place] if place < len(gradients) else None)

    node.register_prehook(hook)


def current_pass() -> int:
    """Return the number of the backward pass that is running; -1 if there is none."""
    return torch._C._current_graph_task_id()


def differentiated_loss() -> Tensor | None:
    """Return the loss on which ``backward`` was called in the pass that is running, without its graph.

    PyTorch does not tell the roots of a pass, but they are an argument of a function that waits for it, in this thread
    or, for a model on a GPU, in another one.

    Returns:
        A 0-dim tensor, whose value may not be computed yet; None if there is no pass, or several, or its root is not
        one number.
    """
    # No variable of this function holds its own frame: such a cycle would keep the graph of the loss alive.
    given = _roots(sys._getframe())
    if given is None:
        found = [roots for frame in sys._current_frames().values() if (roots := _roots(frame)) is not None]
        given = found[0] if len(found) == 1 else ()
    roots = [given] if isinstance(given, Tensor) else [*given]
    if not all(isinstance(root, Tensor) and root.numel() == 1 for root in roots):
        return None
    losses = [root.detach().reshape(()) for root in roots]
    return losses[0] if len(losses) == 1 else sum(losses[1:], start=losses[0]) if losses else None


def _roots(frame: FrameType | None) -> Any:
    """Return the tensors on which ``backward`` is called in a thread; None if it is not."""
    while frame is not None and frame.f_code is not _BACKWARD:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("tensors")


@torch.no_grad()
def labels_from_gradient(gradient: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return the labels of a cross entropy, from the gradient of its logits: negative at the label, else positive.

    Args:
        gradient: Gradient of the logits, shape (..., class).
        ignored: Label of tokens that do not count, whose gradient is 0.

    Returns:
        The labels, shape (...), and as a 0-dim tensor whether the gradient is that of a cross entropy.
    """
    lowest, labels = gradient.min(-1)
    total, size = gradient.sum(-1, dtype=torch.float32), gradient.abs().sum(-1, dtype=torch.float32)
    negative = (size - total) / 2
    counts = size > 0
    fits = (total.abs() <= _MAX_SUM * size) & (-lowest.float() >= _LEAST_LABEL * negative)
    return labels.where(counts, ignored), (fits | ~counts).all() & counts.any()
