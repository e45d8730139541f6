"""Backward passes of a training loop: which calls of a model they reach, and the loss that is differentiated."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
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


#: Number of parameters whose changes are counted.
_N_VERSIONS = 16


class ScalerWatch:
    """The scaler that multiplies the losses of a loop, if there is one.

    A scaler that finds infinite gradients never calls the optimizer, whose hooks therefore do not see such a step. It
    keeps what it did with each optimizer until the end of its own step. Nothing is changed, and no call waits for a
    device.
    """

    def __init__(self, optimizer: JointOptimizer) -> None:
        self._optimizer = optimizer
        self._scalers: dict[int, weakref.ref[GradScaler]] = {}
        self._key: int | None = None
        self._n_searches = 0
        self._states: dict[int, Any] = {}  # of the optimizers by scaler, while the last backward pass ran

    def search(self) -> None:
        """Search for scalers among all objects; at most twice, as this takes some milliseconds."""
        if self._key is None and self._n_searches < 2:
            self._n_searches += 1
            found = (each for each in gc.get_objects() if issubclass(type(each), GradScaler))
            self._scalers = {id(each): weakref.ref(each) for each in found if getattr(each, "_scale", None) is not None}

    def begin_pass(self) -> dict[int, Tensor]:
        """Note that a backward pass begins, and return copies of the scales of all scalers, 0-dim."""
        if not self._n_searches:
            self.search()
        alive = self._alive()
        self._states = {key: scaler._per_optimizer_states for key, scaler in alive.items()}
        return {key: scaler._scale.detach().clone() for key, scaler in alive.items() if scaler._scale is not None}

    @property
    def key(self) -> int | None:
        """Key of the scaler of the optimizers, which is known once it has had to do with one; None if there is none."""
        alive = self._alive()
        if self._key is None:
            states = {key: [self._states.get(key, {}), each._per_optimizer_states] for key, each in alive.items()}
            own = [
                key
                for key, of in states.items()
                if any(id(each) in kept for kept in of for each in self._optimizer.parts)
            ]
            if len(own) == 1:
                self._key = own[0]
        return self._key if self._key in alive else None

    def has_ended_step(self) -> bool | None:
        """Return whether the scaler has ended its step since the last backward pass, and with it that of the optimizer.

        Returns:
            None if there is no scaler, or it has had nothing to do with the optimizer.
        """
        if (key := self.key) is None or key not in self._states:
            return None
        states = self._states[key]
        known = [states[id(each)]["stage"] for each in self._optimizer.parts if id(each) in states]
        is_over = self._alive()[key]._per_optimizer_states is not states
        return is_over and OptState.STEPPED in known if known else None

    def _alive(self) -> dict[int, GradScaler]:
        found = {key: reference() for key, reference in self._scalers.items()}
        return {key: scaler for key, scaler in found.items() if scaler is not None}


def are_cleared(parameters: Iterable[Tensor]) -> bool:
    """Return whether no parameter has a gradient."""
    return all(parameter.grad is None for parameter in parameters)


def versions_of(parameters: Iterable[Tensor]) -> list[int]:
    """Return how often the first parameters have been changed in place, which tells a perturbation from no change."""
    return [parameter._version for parameter, _ in zip(parameters, range(_N_VERSIONS), strict=False)]
