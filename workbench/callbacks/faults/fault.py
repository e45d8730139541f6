"""A fault of training that can be switched on and off while a model trains."""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.callbacks.observers import Observers
from workbench.errors import OptionError
from workbench.tasks.task import require_whole

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(kw_only=True, eq=False)
class Fault:
    """A fault and its switch; `workbench.faults.catalog` lists the kinds.

    ``fault.enabled`` is a plain attribute. It is read once per step, so a script, a schedule or a button may change it
    at any time, from any thread; every switch is an event of the run. Nothing else of a fault can change: it is part of
    the run's configuration.

    Attributes:
        start: Step from which it is on; None: off until it is switched on by hand.
        stop: Step from which it is off again; None: on to the end. A switch by hand overrides both from then on.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.LargeRate(factor=5.0)
        >>> isinstance(fault, wb.faults.Fault), fault.enabled
        (True, False)
        >>> fault.enabled = True
        >>> fault.enabled
        True
    """

    kind: ClassVar[str]
    meaning: ClassVar[str]
    start: int | None = None
    stop: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            if getattr(self, name) is not None:
                require_whole(0, **{name: getattr(self, name)})
        if self.stop is not None and self.start is None:
            raise OptionError(f"stop is {self.stop} but start is not given; pass start= too, or switch by hand.")
        if self.stop is not None and self.start is not None and self.stop <= self.start:
            raise OptionError(f"stop is {self.stop}, expected a step after start = {self.start}.")
        self._lock = threading.RLock()
        self._observers = Observers()
        self._by_hand: bool | None = None
        self._by_schedule = False
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "enabled" and not name.startswith("_") and getattr(self, "_is_made", False):
            raise OptionError(
                f"{name} of {self.name} cannot be changed, only enabled can; make a new fault for another {name}."
            )
        super().__setattr__(name, value)

    @property
    def name(self) -> str:
        """Its name in records and events: its kind, as a run has at most one fault of each kind."""
        return self.kind

    @property
    def effect(self) -> str:
        """Its effect while it is on, in plain words."""
        raise NotImplementedError

    @property
    def enabled(self) -> bool:
        """Whether it is on."""
        with self._lock:
            return self._by_schedule if self._by_hand is None else self._by_hand

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._turn(_by_hand=bool(value))

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int = 0, seed: int = 0) -> Any:
        """Break a loop of one's own: ``with fault.attach(model, optimizer): ...`` around it.

        Each update counts as a step. Switch it by ``enabled`` or by ``start`` and ``stop``; what it does while it is
        off is nothing. `workbench.train` and `workbench.trainer_callback` take faults by themselves.

        Args:
            model: The module that the loop calls.
            optimizer: Its optimizer.
            step: Updates done.
            seed: Seed of its random draws.

        Returns:
            The attached fault, with ``detach()``, and ``change_batch(inputs, targets)`` for faults of data where the
            labels do not go through the model.

        Raises:
            OptionError: If it changes what only `workbench.train` lets it change.

        Example:
            >>> import torch
            >>> import workbench as wb
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> before = model.weight.detach().clone()
            >>> with wb.faults.LargeRate(factor=10.0, start=0).attach(model, optimizer):
            ...     model(torch.ones(1, 2)).sum().backward()
            ...     optimizer.step()
            >>> (before - model.weight).detach().round(decimals=3)
            tensor([[1., 1.]])
        """
        # By name, as that file builds on all faults.
        return importlib.import_module("workbench.callbacks.faults.attached_fault").AttachedFault(
            self, model, optimizer, step=step, seed=seed
        )

    def begin_step(self, step: int) -> bool:
        """Apply the schedule, and return whether the fault is on in this step.

        Args:
            step: Updates done before it.
        """
        is_due = self.start is not None and self.start <= step and (self.stop is None or step < self.stop)
        return self._turn(_by_schedule=is_due)

    def observe(self, observer: Callable[[str, Any, Any], None]) -> Callable[[], None]:
        """Call ``observer("enabled", before, after)`` after each switch, in the thread that made it.

        Returns:
            A function that unsubscribes it.
        """
        return self._observers.add(observer)

    def describe(self) -> dict[str, Any]:
        """Everything but the switch, as plain values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """The switch, for a checkpoint; None for ``by_hand`` means that the schedule applies."""
        return {"by_hand": self._by_hand}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the switch to what `state_dict` gave."""
        self._turn(_by_hand=state["by_hand"])

    def _turn(self, **change: bool | None) -> bool:
        """Change what the schedule or the user has set, notify observers, and return the state of the switch."""
        with self._lock:
            before = self.enabled
            vars(self).update(change)
            after = self.enabled
        if before != after:
            self._observers.call("enabled", before, after)
        return after


def require_share(share: float) -> None:
    """Refuse a share that is not above 0 and at most 1.

    Raises:
        OptionError: If it is not; the message gives the value.
    """
    if not (isinstance(share, Real) and 0 < share <= 1):
        raise OptionError(f"share is {share}, expected a number above 0 and at most 1.")


def require_positive(**options: float) -> None:
    """Refuse options that are not positive, finite numbers.

    Raises:
        OptionError: If one is not; the message names the option.
    """
    for name, value in options.items():
        if not (isinstance(value, Real) and value > 0 and math.isfinite(value)):
            raise OptionError(f"{name} is {value}, expected a positive number.")
