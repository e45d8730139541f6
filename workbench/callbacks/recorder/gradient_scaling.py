"""The gradient scaler of a training loop, found without being passed, and the updates that it skips."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from workbench.callbacks.recorder.joint_optimizer import JointOptimizer

#: Number of parameters whose changes are counted.
_N_VERSIONS = 64


class ScalerWatch:
    """The scaler that multiplies the losses of a loop, if there is one.

    A scaler that finds infinite gradients never calls the optimizer, whose hooks therefore do not see such a step. It
    keeps what it did with each optimizer until the end of its own step. Nothing is changed, and no call waits for a
    device.

    Args:
        optimizer: Optimizers of the loop.
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
