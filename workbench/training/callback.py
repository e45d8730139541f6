"""Protocol of callbacks (regularizers, faults, penalties, recorders, alarms, and custom ones), and records of steps.

class LargeGradients(wb.Callback):
    def end_step(self, step, numbers):
        norm = numbers.get("grad_norm", 0)
        if norm > 10:
            self.event(step, "large gradient", score=norm, message="The gradient norm is above 10.")

wb.train(model, task, n_steps=200, store="run.zarr", callbacks=[LargeGradients()])
transformers.Trainer(..., callbacks=[wb.trainer_callback(LargeGradients(), recorder)])
lightning.Trainer(..., callbacks=[wb.lightning_callback(LargeGradients(), recorder)])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from workbench.errors import OptionError
from workbench.io.run_output import RunOutput
from workbench.models.readable_weights import read_numbers
from workbench.schema.events import Event

if TYPE_CHECKING:
    import torch
    import xarray as xr


#: Metrics of a step that the trainer itself provides.
NUMBERS = ("loss", "auxiliary_loss", "accuracy", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class StepRecord:
    """Record of one step; all measurements are of the parameters before its update.

    Attributes:
        step: Number of updates before this one.
        loss: Loss of the batch, without auxiliary terms, in nats for cross entropy.
        auxiliary_loss: Weighted auxiliary terms that were added, such as the balance loss of a router or a penalty;
            NaN if there are none.
        accuracy: Fraction of targets with the largest probability; NaN if not defined.
        grad_norm: Norm of all gradients together, before clipping; NaN if the loss is not finite.
        learning_rate: Largest learning rate of the parameter groups.
        cause: Reason why the step diverged: ``"loss"``, ``"grad_norm"`` or ``"non-finite"``; empty if it did not.
        spectra: Spectra dataset with a ``step`` dimension of size one; None if not due.
        numbers: Metrics of callbacks to record, such as ``kss_penalty`` and ``batch_size``.
        outcomes: Results of callbacks, by their names.
    """

    step: int
    loss: float
    auxiliary_loss: float
    accuracy: float
    grad_norm: float
    learning_rate: float
    cause: str = ""
    spectra: xr.Dataset | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    outcomes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shaping(self) -> Any:
        """Record of KSS, a `workbench.callbacks.kss.Shaping`; None if the run has no KSS."""
        return self.outcomes.get("kss")

    @property
    def active_faults(self) -> tuple[str, ...]:
        """Names of the active faults."""
        return self.outcomes.get("faults", ())

    @property
    def alarms(self) -> tuple[Any, ...]:
        """Alarms raised in this step, as `workbench.alarms.Alarm`."""
        return self.outcomes.get("guard", ())

    @property
    def kss_enabled(self) -> bool:
        """Whether KSS was enabled in this step."""
        return self.shaping is not None and self.shaping.control.enabled

    @property
    def kss_strength(self) -> float:
        """Strength of KSS in this step; NaN if the run has none."""
        return math.nan if self.shaping is None else self.shaping.control.strength

    @property
    def diverged(self) -> bool:
        """Whether the step diverged."""
        return bool(self.cause)

    def monitors(self) -> dict[str, float]:
        """Return the metrics of the step; names as in ``schema.MONITORS``."""
        return {name: getattr(self, name) for name in NUMBERS} | dict(self.numbers)


@dataclass(frozen=True)
class PassResult:
    """Result of a forward and backward pass; the gradients are on the parameters.

    The host waits for the device when a number is read first. `workbench.train` reads all numbers of a step at once,
    and clears the gradients if the total loss is not finite.

    Attributes:
        losses: Total loss, loss of the task and, if there are any, weighted auxiliary terms, on the device; for each
            part of the batch, if the pass was run in parts. All parts have equal weight.
        logits: Logits of the model.
    """

    losses: Sequence[Sequence[Tensor]]
    logits: Tensor
    _read: list[list[float]] = field(default_factory=list, init=False, repr=False)

    def read(self, also: Sequence[Tensor] = (), means: Callable[[Sequence[float]], list[float]] = list) -> list[float]:
        """Read the losses, and return the numbers in other tensors, read together; ``means`` are those over ranks."""
        numbers = iter(means(read_numbers([*chain(*self.losses), *also])))
        self._read[:] = [[next(numbers) for _ in part] for part in self.losses]
        return [*numbers]

    @property
    def loss(self) -> float:
        """Loss of the task; NaN if the pass was run in parts and is not finite."""
        return self._mean(1)

    @property
    def auxiliary_loss(self) -> float:
        """Weighted auxiliary terms; NaN if there are none."""
        return self._mean(2)

    @property
    def is_finite(self) -> bool:
        """Whether the total loss is finite."""
        if not self._read:
            self.read()
        return all(math.isfinite(total) for total, *_ in self._read)

    def _mean(self, place: int) -> float:
        is_defined = self.is_finite or len(self._read) == 1
        return math.fsum((*part, math.nan)[place] for part in self._read) / len(self._read) if is_defined else math.nan


#: Forward and backward pass over some examples: inputs and targets -> its result. It clears the gradients first.
PassFunction = Callable[[Any, Any], PassResult]


@dataclass
class TrainingRun:
    """Training run on which callbacks act, in any loop.

    Attributes:
        model: Model in training, as the loop calls it.
        optimizer: Optimizer of its parameters.
        on_event: Function that receives the events of the run.
        step: Number of updates before the run begins, above 0 if it is resumed.
        probe: Function from a number of tokens to inputs for measurements, on the device of the model; None if there
            is none.
        probe_loss: Function from the model to its loss on held-out examples; None if there is none.
        targets: Targets of the current batch; None if unknown.
        planned_rates: Planned learning rate of each parameter group in this step; empty if unknown.
        owns_loop: Whether the loop is `workbench.train`, the only one that can repeat a pass.
        output: Output in which `workbench.train` records the run; in another trainer it writes nothing.
        checkpoints: Folder of the checkpoints of `workbench.train`; None if there is none.
        scaler: Gradient scaler for float16; None if there is none, or the trainer keeps it.
        stop_reason: Reason for stopping after this step, such as ``"by an alarm"``; empty if the run continues.
        has_begun: Whether the callbacks are active.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    on_event: Callable[[Event], None]
    step: int = 0
    probe: Callable[[int], Any] | None = None
    probe_loss: Callable[[nn.Module], Tensor] | None = None
    targets: Any = None
    planned_rates: Sequence[float] = ()
    owns_loop: bool = False
    output: RunOutput = field(default_factory=lambda: RunOutput(None))
    checkpoints: Path | None = None
    scaler: torch.amp.GradScaler | None = None
    stop_reason: str = ""
    has_begun: bool = False

    def stop(self, reason: str) -> None:
        """End the run after this step.

        Args:
            reason: End of the sentence "Stopped after 7 steps, ...", such as ``"by an alarm"``.
        """
        self.stop_reason = reason


class Callback:
    """Base class of callbacks, which act during training; override the methods you need.

    The methods are called in this order: `setup`, before training; `begin`; in each step `begin_step`, `change_batch`,
    `run_pass` (which calls `around_pass` and `auxiliary_loss`), `before_update`, `end_step`, `after_step`; `end`. With
    the methods of this class, training is bitwise identical to that without a callback. A step is named by the number
    of updates before it; the metrics of a step, such as ``loss``, ``grad_norm`` and ``learning_rate``, are those that
    the trainer provides.

    Attributes:
        name: Name in checkpoints and configurations, unique in a run; by default that of the class.
        is_planned: Whether `rate_factor` belongs to the plan of the run; that of a fault does not.

    Example:
        >>> import workbench as wb
        >>> class GradNorms(wb.Callback):
        ...     name = "grad_norms"
        ...     def before_update(self, step, numbers):
        ...         print(step, numbers["grad_norm"] > 0)
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> records = list(wb.train(model, wb.tasks.associative_recall(), n_steps=2, callbacks=[GradNorms()]))
        0 True
        1 True

    See Also:
        `workbench.train`: Calls callbacks.
        `workbench.trainer_callback`: Calls them in Hugging Face's Trainer.
        `workbench.lightning_callback`: Calls them in Lightning.
    """

    name: str = ""
    is_planned: bool = True
    _run: TrainingRun | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name") or cls.__name__

    @property
    def is_running(self) -> bool:
        """Whether the callback acts on a run, which it does from `setup` to `end`."""
        return self._run is not None

    @property
    def run(self) -> TrainingRun:
        """Run on which the callback acts, from `setup` to `end`.

        Raises:
            OptionError: If no run is active.
        """
        if self._run is None:
            raise OptionError(
                f"{type(self).__name__} does not act on a run at this time; pass it to wb.train(callbacks=), "
                "wb.trainer_callback() or wb.lightning_callback(), and use it during that run."
            )
        return self._run

    def describe(self) -> Mapping[str, Any]:
        """Return the settings that affect the results of a run, as plain values; resuming requires the same."""
        return {}

    def setup(self, run: TrainingRun) -> None:
        """Receive the run before it begins; raise an exception if the callback cannot act on it.

        An override calls that of the base class, and must not change the model or the optimizer.
        """
        self._run = run

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint into the callback of a resumed run, after `setup` and before `begin`."""

    def begin(self) -> None:
        """Attach to the model when training begins; the store of the run does not exist yet."""

    def begin_step(self, step: int) -> None:
        """Act at the beginning of a step."""

    @property
    def rate_factor(self) -> float:
        """Factor by which the planned learning rate is multiplied in this step."""
        return 1.0

    def change_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the inputs and targets of this step, changed or unchanged."""
        return inputs, targets

    def run_pass(self, one_pass: PassFunction, inputs: Any, targets: Any) -> PassResult:
        """Run the forward and backward pass by ``one_pass``; an override may repeat it or change its gradients.

        Only `workbench.train` calls it.
        """
        return one_pass(inputs, targets)

    def around_pass(self) -> AbstractContextManager[Any]:
        """Return a context that is entered before each forward pass and left after its backward pass."""
        return nullcontext()

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """Return the auxiliary terms of the loss, changed or unchanged.

        Args:
            task_loss: Loss of the task, 0-dim, with its graph.
            auxiliary: Terms of the model and of previous callbacks, 0-dim; None if there are none.
        """
        return auxiliary

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Act after the gradients are computed and before the parameters are updated, with the metrics so far."""

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, Any] | None:
        """Act after the update, and return further metrics to record; None if there are none."""
        return None

    def outcome(self) -> Any:
        """Return the entry of this callback in `StepRecord.outcomes`, read after `end_step`; None if there is none."""
        return None

    def after_step(self, step: int) -> None:
        """Act after ``step`` updates, when the last one is recorded and its checkpoint is written.

        The model may be changed here.
        """

    def to_log(self) -> dict[str, float]:
        """Return the metrics of the last step for a trainer with its own logs."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain values and tensors."""
        return {}

    def take_event(self, event: Event) -> None:
        """Receive an event of any callback, in a trainer that does not record events itself."""

    def end(self, *, is_broken: bool = False) -> None:
        """Release the model and remove hooks. May be called several times.

        An override calls that of the base class.

        Args:
            is_broken: Whether training was ended by an error.
        """
        self._run = None

    def event(self, step: int, kind: str, **what: Any) -> None:
        """Record an event in the run; without an active run, do nothing.

        Args:
            step: Number of updates before the event.
            kind: Kind of event.
            **what: Further fields of `workbench.schema.Event`: ``source``, ``score``, ``message``, ``layer``, ``head``.
        """
        if self._run is not None:
            self._run.on_event(Event(step, kind, **what))


#: Names that callbacks must not use for their metrics.
_RESERVED = frozenset({"step", *NUMBERS})


class CallbackGroup:
    """Callbacks of one run in the order in which they act; its methods call those of each callback."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def setup(self, run: TrainingRun) -> None:
        """Set up all callbacks, or none if one of them raises an exception."""
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
        """Begin all callbacks."""
        for callback in self.callbacks:
            if not callback.is_running or callback.run is not run:
                raise OptionError(
                    f"Callback '{callback.name}' was passed to another run before this one began; create one for each."
                )
        run.has_begun = True
        for callback in self.callbacks:
            callback.begin()

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
        """End a step, passing its metrics from callback to callback; OptionError for a wrong or reserved name."""
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
