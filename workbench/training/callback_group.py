"""The callbacks of one run, called in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from workbench.errors import OptionError
from workbench.training.callback import Callback, TrainingRun
from workbench.training.step_record import NUMBERS

#: Names that callbacks must not use for their metrics.
_RESERVED = frozenset({"step", *NUMBERS})


class CallbackGroup:
    """Callbacks of one run; its methods call those of each callback.

    Args:
        callbacks: Callbacks in the order in which they act.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def setup(self, run: TrainingRun) -> None:
        """Set up all callbacks, or none if one of them raises an exception.

        Raises:
            OptionError: If one cannot act on the run, or acts on another one.
        """
        for callback in self.callbacks:
            if callback.is_running and callback.run is not run and callback.run.has_begun:
                raise OptionError(
                    f"Callback '{callback.name}' acts on another run; end that run first (close() of the generator "
                    "that wb.train() returned, detach() of the callback of a trainer), or create another callback."
                )
        try:
            for callback in self.callbacks:
                callback.setup(run)
        except BaseException:
            self.end(run, is_broken=True)
            raise

    def begin(self, run: TrainingRun) -> None:
        """Begin all callbacks.

        Raises:
            OptionError: If one was set up for another run since `setup`.
        """
        for callback in self.callbacks:
            if not callback.is_running or callback.run is not run:
                raise OptionError(
                    f"Callback '{callback.name}' was passed to another run before this one began; create one callback "
                    "for each run."
                )
        run.has_begun = True
        for callback in self.callbacks:
            callback.begin()

    @property
    def act_in_pass(self) -> bool:
        """Whether a callback overrides ``run_pass``, so that it may repeat a pass or change its gradients."""
        return any(getattr(each.run_pass, "__func__", None) is not Callback.run_pass for each in self.callbacks)

    def change_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the batch after all callbacks have changed it."""
        for callback in self.callbacks:
            inputs, targets = callback.change_batch(inputs, targets)
        return inputs, targets

    @contextmanager
    def around_pass(self) -> Iterator[None]:
        """Enter the contexts of all callbacks around a forward pass and its backward pass."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.around_pass())
            yield

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """Return the auxiliary terms of the loss after all callbacks have changed them."""
        for callback in self.callbacks:
            auxiliary = callback.auxiliary_loss(task_loss, auxiliary)
        return auxiliary

    def rate_factor(self, planned: float = 1.0) -> float:
        """Return the planned fraction of the peak learning rate, multiplied by the factor of each callback."""
        return planned * math.prod(callback.rate_factor for callback in self.callbacks)

    def planned_factor(self, planned: float = 1.0) -> float:
        """Return the same product without the factors of faults."""
        return planned * math.prod(callback.rate_factor for callback in self.callbacks if callback.is_planned)

    def end_step(self, step: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """End a step, passing its metrics from one callback to the next.

        Returns:
            The metrics, including those that the callbacks add.

        Raises:
            OptionError: If a callback does not return one number for each name, or returns a reserved name.
        """
        known = dict(numbers)
        for callback in self.callbacks:
            known |= _checked_numbers(callback, callback.end_step(step, known), known)
        return known

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each callback that has one, by its name."""
        states = {callback.name: callback.state_dict() for callback in self.callbacks}
        return {name: state for name, state in states.items() if state}

    def end(self, run: TrainingRun, *, is_broken: bool) -> None:
        """End all callbacks that act on a run, in their order, even if one of them raises an exception."""
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                if callback.is_running and callback.run is run:
                    stack.callback(callback.end, is_broken=is_broken)


def _checked_numbers(callback: Callback, found: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise OptionError(
            f"end_step() of callback '{callback.name}' returned a {type(found).__name__}, expected a mapping of "
            "numbers or None."
        )
    numbers = {}
    for name, value in found.items():
        if name in known or name in _RESERVED:
            raise OptionError(
                f"end_step() of callback '{callback.name}' returned '{name}', which the run records already; choose "
                "another name."
            )
        if isinstance(value, Tensor | np.ndarray) and value.shape == ():
            value = value.item()
        if not isinstance(name, str) or not isinstance(value, Real | np.bool_):
            raise OptionError(
                f"end_step() of callback '{callback.name}' returned {name} as a {type(value).__name__}, expected one "
                "number; return its mean or another number, and NaN where it is unknown."
            )
        numbers[name] = value
    return numbers
