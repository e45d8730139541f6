"""The base class of faults, which can be switched on and off while a model trains."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.callbacks.observation import Observers
from workbench.errors import OptionError
from workbench.option_checks import NonNegativeInt, check_fields, checked

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(kw_only=True, eq=False)
class Fault:
    """Base class of faults: a defect of training and its switch.

    The attribute ``enabled`` is read once per step: a script, a schedule or a button may change it at any time and from
    any thread. Every switch is an event of the run. All other attributes are part of the configuration of the run and
    cannot be changed.

    Attributes:
        start: Step from which the fault is on; None leaves it off until ``enabled`` is set.
        stop: Step from which the fault is off again; None leaves it on to the end. Setting ``enabled`` overrides both
            from then on.

    Raises:
        OptionError: If ``stop`` is not after ``start``, or an option is out of range.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.LargeRate(factor=5.0)
        >>> fault.name, fault.effect, fault.enabled
        ('large_rate', 'the learning rate is multiplied by 5', False)
        >>> fault.enabled = True
        >>> fault.enabled
        True

    See Also:
        `workbench.faults.catalog`: Lists all kinds of faults.
        `workbench.train`: Injects faults by its argument ``faults``.
    """

    kind: ClassVar[str]
    meaning: ClassVar[str]
    start: NonNegativeInt | None = None
    stop: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stop is not None and self.start is None:
            raise OptionError.of(
                "stop", self.stop, "None if there is no start", remedy="pass start= too, or set enabled during the run"
            )
        if self.stop is not None and self.start is not None and self.stop <= self.start:
            raise OptionError.of("stop", self.stop, f"after start = {self.start}")
        self._lock = threading.RLock()
        self._observers = Observers()
        self._by_hand: bool | None = None
        self._by_schedule = False
        self._is_frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "enabled" and not name.startswith("_") and getattr(self, "_is_frozen", False):
            raise OptionError(
                f"{name} of {self.name} cannot be changed, unlike enabled; create a new fault with another {name}."
            )
        super().__setattr__(name, value)

    @property
    def name(self) -> str:
        """Name in records and events: the kind, as a run has at most one fault of each kind."""
        return self.kind

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        raise NotImplementedError

    @property
    def enabled(self) -> bool:
        """Whether the fault is on."""
        with self._lock:
            return self._by_schedule if self._by_hand is None else self._by_hand

    @enabled.setter
    @checked  # reached through `__setattr__`, which is a call from the package
    def enabled(self, enabled: bool) -> None:
        self._switch(_by_hand=enabled)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int = 0, seed: int = 0) -> Any:
        """Inject the fault into any training loop, as a context around the loop.

        Each update counts as a step. The fault is switched by ``enabled``, or by ``start`` and ``stop``; while it is
        off it has no effect. `workbench.train` and `workbench.trainer_callback` take faults without this method.

        Args:
            model: Module that the loop calls.
            optimizer: Optimizer of its parameters.
            step: Number of updates so far.
            seed: Seed of the random draws of the fault.

        Returns:
            The attached fault, with the methods ``detach()``, and ``change_batch(inputs, targets)`` for faults of the
            data where the model does not receive the labels.

        Raises:
            OptionError: If the fault needs the loop of `workbench.train`.
        """
        # Imported here, as that module depends on all faults.
        return importlib.import_module("workbench.callbacks.faults.injection").AttachedFault(
            self, model, optimizer, step=step, seed=seed
        )

    def begin_step(self, step: int) -> bool:
        """Apply ``start`` and ``stop``, and return whether the fault is on in a step.

        Args:
            step: Number of updates before the step.
        """
        is_due = self.start is not None and self.start <= step and (self.stop is None or step < self.stop)
        return self._switch(_by_schedule=is_due)

    def observe(self, observer: Callable[[str, Any, Any], None]) -> Callable[[], None]:
        """Call ``observer("enabled", before, after)`` after each switch, in the thread of the switch.

        Returns:
            A function that removes the observer.
        """
        return self._observers.add(observer)

    def describe(self) -> dict[str, Any]:
        """Return all attributes except the switch, as plain values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the switch for a checkpoint; ``by_hand`` is None if ``enabled`` was never set."""
        return {"by_hand": self._by_hand}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the switch to a state that `state_dict` returned."""
        self._switch(_by_hand=state["by_hand"])

    def _switch(self, **change: bool | None) -> bool:
        """Change the setting of the schedule or of the user, notify observers, and return whether the fault is on."""
        with self._lock:
            before = self.enabled
            vars(self).update(change)
            after = self.enabled
        if before != after:
            self._observers.call("enabled", before, after)
        return after
