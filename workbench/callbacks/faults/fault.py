"""Faults that can be switched while a model trains: the base class, and faults of rate, batch, loss and data."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from workbench.callbacks.observation import Observers
from workbench.errors import OptionError
from workbench.models.batches import count_examples, take_examples
from workbench.option_checks import check_fields, checked
from workbench.option_kinds import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, one_of


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
                "stop", self.stop, "None if there is no start", remedy="pass start= too, or set enabled"
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
            raise OptionError(f"{name} of {self.name} cannot be changed; create a fault with another {name}.")
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


@dataclass(kw_only=True, eq=False)
class LargeRate(Fault):
    """Fault: the learning rate is multiplied by a factor.

    Attributes:
        factor: Factor on the scheduled learning rate, above 0.
        ramp: Steps over which the factor changes linearly from 1 to its value, each time the fault is switched on;
            0 applies it immediately.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.LargeRate(factor=5.0, ramp=4, start=0)
        >>> [fault.rate_factor(n) for n in (1, 2, 4, 8)]
        [3.0, 4.0, 5.0, 5.0]

    See Also:
        `workbench.faults.SmallBatch`: Raises the ratio of learning rate to batch size in the other way.
        `workbench.find_rate`: Finds a suitable learning rate.
    """

    kind: ClassVar[str] = "large_rate"
    meaning: ClassVar[str] = "the learning rate is multiplied"
    factor: PositiveFloat = 10.0
    ramp: NonNegativeInt = 0

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        return f"the learning rate is multiplied by {self.factor:g}" + (
            f", reached over {self.ramp} steps" if self.ramp else ""
        )

    def rate_factor(self, n_steps_on: int) -> float:
        """Return the factor on the learning rate, after ``n_steps_on`` steps in which the fault was on."""
        return 1 + (self.factor - 1) * (min(1.0, (n_steps_on + 1) / self.ramp) if self.ramp else 1.0)


@dataclass(kw_only=True, eq=False)
class SmallBatch(Fault):
    """Fault: only the first examples of each batch are used.

    Attributes:
        n_rows: Number of examples that are used.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> fault = wb.faults.SmallBatch(n_rows=2)
        >>> tokens, targets = fault.batch(torch.zeros(8, 4), torch.zeros(8, 4))
        >>> tuple(tokens.shape)
        (2, 4)

    See Also:
        `workbench.faults.LargeRate`: Raises the ratio of learning rate to batch size in the other way.
    """

    kind: ClassVar[str] = "small_batch"
    meaning: ClassVar[str] = "only the first examples of each batch are used"
    n_rows: PositiveInt = 2

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        if self.n_rows == 1:
            return "only the first example of each batch is used"
        return f"only the first {self.n_rows} examples of each batch are used"

    def batch(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """Return the inputs and targets of a batch that are used.

        Raises:
            OptionError: If the batch has fewer than ``n_rows`` examples.
        """
        if (n_examples := count_examples(inputs)) < self.n_rows:
            raise OptionError.of("n_rows", self.n_rows, f"at most {n_examples}, the number of examples of the batch")
        return take_examples(inputs, slice(0, self.n_rows)), targets[: self.n_rows]


@dataclass(kw_only=True, eq=False)
class NoAuxiliaryLoss(Fault):
    """Fault: the auxiliary loss of the model, such as the balance of a router, is left out.

    Penalties are not affected. The recorded ``auxiliary_loss`` is that of the remaining terms; 0 if there are none.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.moe(d_model=16, n_layers=1, n_heads=2, n_experts=4)
        >>> fault = wb.faults.NoAuxiliaryLoss(start=1)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, faults=[fault])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, False]

    See Also:
        `workbench.router_weights`: Returns the weights of the routers.
        `workbench.monitors.max_violation`: Measures the imbalance of experts.
    """

    kind: ClassVar[str] = "no_auxiliary_loss"
    meaning: ClassVar[str] = "the model's auxiliary loss, such as a router's balance, is left out"

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        return "the model's auxiliary loss is left out"


@dataclass(kw_only=True, eq=False)
class CorruptedData(Fault):
    """Fault: labels or tokens are replaced by values drawn at random from those of the batch.

    Attributes:
        what: Values to replace: ``"labels"`` (all targets except -100) or ``"tokens"`` (of the inputs).
        share: Probability that a value is replaced; above 0, at most 1.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.CorruptedData(what="labels", share=0.5, start=100, stop=200)
        >>> fault.name, fault.enabled
        ('corrupted_data', False)

    See Also:
        `workbench.faults.Fault`: Describes ``start`` and ``stop``.
        `workbench.tasks`: Tasks with clean data.
    """

    kind: ClassVar[str] = "corrupted_data"
    meaning: ClassVar[str] = "labels or tokens are replaced by random ones"
    what: Annotated[str, one_of(("labels", "tokens"))] = "labels"
    share: Fraction = 1.0

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        return f"{100 * self.share:g} % of the {self.what} are replaced by random ones of the batch"

    def batch(self, inputs: Any, targets: Tensor, generator: torch.Generator) -> tuple[Any, Tensor]:
        """Return a corrupted copy of a batch; the arguments are not changed.

        Args:
            inputs: Inputs of the model.
            targets: Targets of the inputs.
            generator: Generator on the CPU.

        Raises:
            OptionError: If the targets are not whole numbers, or the inputs have no token ids.
        """
        if self.what == "labels":
            if targets.is_floating_point():
                raise OptionError.of(
                    "targets",
                    str(targets.dtype),
                    "whole numbers, which corrupted_data replaces",
                    remedy="leave the fault out",
                )
            return inputs, self._replaced(targets, targets != -100, generator)
        return _with_tokens(
            inputs, lambda tokens: self._replaced(tokens, torch.ones_like(tokens) > 0, generator)
        ), targets

    def _replaced(self, values: Tensor, may_change: Tensor, generator: torch.Generator) -> Tensor:
        """Return values of which a random part of those that may change is replaced."""
        distinct = values[may_change].unique()
        if not len(distinct):
            return values
        # Drawn on the CPU, so that the numbers do not depend on the device.
        is_replaced = (torch.rand(values.shape, generator=generator) < self.share).to(values.device) & may_change
        drawn = torch.randint(len(distinct), values.shape, generator=generator).to(values.device)
        return torch.where(is_replaced, distinct[drawn], values)


def _with_tokens(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return inputs (a tensor, ``input_ids`` of a mapping, or the first positional argument) with changed token ids."""
    if isinstance(inputs, Mapping) and isinstance(tokens := inputs.get("input_ids"), Tensor):
        return {**inputs, "input_ids": change(tokens)}
    if isinstance(inputs, tuple | list) and inputs and isinstance(inputs[0], Tensor) and _are_tokens(inputs[0]):
        return (change(inputs[0]), *inputs[1:])
    if isinstance(inputs, Tensor) and _are_tokens(inputs):
        return change(inputs)
    raise OptionError.of("inputs", inputs, "token ids, which the fault replaces", remedy="set what='labels' instead")


def _are_tokens(values: Tensor) -> bool:
    return not values.is_floating_point() and values.dtype != torch.bool
