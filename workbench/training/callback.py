"""The protocol of callbacks: regularizers, faults, penalties, recorders, alarms, and the user's own.

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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import OptionError
from workbench.io.run_output import RunOutput
from workbench.schema.events import Event

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class PassResult:
    """The result of a forward and backward pass; its gradients are on the parameters.

    Attributes:
        loss: Loss of the task.
        auxiliary_loss: Weighted further terms; NaN if there are none.
        logits: Logits of the model.
        is_finite: Whether the total loss is finite; otherwise there are no gradients.
    """

    loss: float
    auxiliary_loss: float
    logits: Tensor
    is_finite: bool


#: One forward and backward pass over some examples: inputs and targets -> its result; it clears the gradients first.
PassFunction = Callable[[Any, Any], PassResult]


@dataclass
class TrainingRun:
    """The training that callbacks act on, in any loop.

    Attributes:
        model: Model in training, as the loop calls it.
        optimizer: Optimizer of its parameters.
        on_event: Function that takes the events of the run.
        step: Updates done when it begins, above 0 where it is resumed.
        probe: Function from a number of tokens to inputs to measure the model on, on its device; None: there is none.
        probe_loss: Function from the model to its loss on some examples that it is not trained on; None: there is none.
        targets: Targets of the present batch; None: the loop does not know them.
        planned_rates: Learning rate of each group that is planned for this step; empty: not known.
        owns_loop: Whether the loop is `workbench.train`, the only one that can repeat a pass or skip a batch.
        output: Output in which `workbench.train` records the run, from its first step on; in another trainer it writes
            nothing.
        checkpoints: Folder of the checkpoints of `workbench.train`; None: there are none.
        scaler: Gradient scaler for float16; None: there is none, or the trainer keeps it.
        n_skipped: Number of batches skipped so far.
        stop_reason: Reason for stopping after this step, such as ``"by an alarm"``; empty: it continues.
        has_begun: Whether its callbacks act.
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
    n_skipped: int = 0
    stop_reason: str = ""
    has_begun: bool = False

    def stop(self, reason: str) -> None:
        """End the run after this step.

        Args:
            reason: End of the sentence "Stopped after 7 steps, ...", such as ``"by an alarm"``.
        """
        self.stop_reason = reason

    def skip_batches(self, n_batches: int) -> None:
        """Skip the next batches.

        Raises:
            OptionError: If the trainer cannot.
        """
        if n_batches and not self.owns_loop:
            raise OptionError("Only wb.train() can skip batches; set skip=0 in this trainer.")
        self.n_skipped += n_batches


class Callback:
    """Base class of callbacks, which act during training; override the methods you need.

    The methods are called in this order: `setup`, before anything is done; `begin`; in each step `begin_step`,
    `change_batch`, `run_pass` with `around_pass` and `auxiliary_loss` in it, `before_update`, `end_step`, `after_step`;
    `end`. Every method of this class leaves the training as it is, to the bit.

    Attributes:
        name: Its name in checkpoints and configurations, unique in a run.
        is_planned: Whether its `rate_factor` belongs to the plan of the run; that of a fault does not.

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
    """

    name: str = ""
    is_planned: bool = True
    _run: TrainingRun | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name") or cls.__name__

    @property
    def is_running(self) -> bool:
        """Whether it acts on a training: from `setup` to `end`."""
        return self._run is not None

    @property
    def run(self) -> TrainingRun:
        """The training it acts on, from `setup` to `end`.

        Raises:
            OptionError: If no run is active.
        """
        if self._run is None:
            raise OptionError(
                f"{type(self).__name__} acts on no training run now; pass it to wb.train(callbacks=), "
                "wb.trainer_callback() or wb.lightning_callback(), and ask while that run lasts."
            )
        return self._run

    def describe(self) -> Mapping[str, Any]:
        """The settings that affect the run's numbers, as plain values; a run is resumed only with the same."""
        return {}

    def setup(self, run: TrainingRun) -> None:
        """Receive the training to act on, and refuse it if that is impossible; nothing of it is changed yet.

        Args:
            run: Training to act on.
        """
        self._run = run

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, in a run that is resumed: after `setup`, before `begin`."""

    def begin(self) -> None:
        """Attach to the model: training begins, no store is made yet."""

    def begin_step(self, step: int) -> None:
        """Called at the beginning of a step.

        Args:
            step: Updates done before it.
        """

    @property
    def rate_factor(self) -> float:
        """The factor on the planned learning rate in this step."""
        return 1.0

    def change_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the batch of this step, changed or not."""
        return inputs, targets

    def run_pass(self, one_pass: PassFunction, inputs: Any, targets: Any) -> PassResult:
        """Run the forward and backward pass; an override may repeat it or change its gradients.

        Only `workbench.train` calls it.
        """
        return one_pass(inputs, targets)

    def around_pass(self) -> AbstractContextManager[Any]:
        """Return a context that is entered before each forward pass and left after its backward pass."""
        return nullcontext()

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """Return the auxiliary terms of the loss, changed or not.

        Args:
            task_loss: Loss of the task, 0-dim, with its graph.
            auxiliary: Terms of the model and of earlier callbacks, 0-dim; None: there are none.
        """
        return auxiliary

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Called when gradients are computed and parameters are not yet updated.

        Args:
            step: Updates done before this one.
            numbers: Numbers of the step so far, such as ``loss``.
        """

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, Any] | None:
        """Called after the update.

        Args:
            step: Updates done before it.
            numbers: Numbers of the step: ``loss``, ``grad_norm``, ``learning_rate``, ... as far as the trainer knows.

        Returns:
            Further numbers to record; None: none.
        """
        return None

    def outcome(self) -> Any:
        """The entry of this callback in `StepRecord.outcomes`, read after `end_step`; None: nothing."""
        return None

    def after_step(self, step: int) -> None:
        """Called when the step is recorded and its checkpoint written; the model may be changed now.

        Args:
            step: Updates done.
        """

    def to_log(self) -> dict[str, float]:
        """The numbers of the last step for a trainer with its own logs."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs: plain values and tensors."""
        return {}

    def take_event(self, event: Event) -> None:
        """Called with an event of any callback, in a trainer that does not record events; a recorder writes it."""

    def end(self, *, is_broken: bool = False) -> None:
        """Release the model and remove hooks. May be called again.

        Args:
            is_broken: Whether training ended by an error.
        """
        self._run = None

    def event(self, step: int, kind: str, **what: Any) -> None:
        """Record an event; does nothing outside of a run.

        Args:
            step: Number of updates before it.
            kind: Kind of event.
            **what: Further fields of `workbench.schema.Event`: ``source``, ``score``, ``message``, ``layer``, ``head``.
        """
        if self._run is not None:
            self._run.on_event(Event(step, kind, **what))


def checked(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks after checking that they are valid and have different names.

    Raises:
        OptionError: If two have one name, or something is no callback.
    """
    names: set[str] = set()
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise OptionError(
                f"callbacks holds a {type(callback).__name__}, expected a wb.Callback, wb.KSS, wb.Recorder, a fault or "
                "a penalty."
            )
        if callback.name in names:
            raise OptionError(f"Two callbacks are called '{callback.name}', expected one of a name; rename one.")
        names.add(callback.name)
    return callbacks
