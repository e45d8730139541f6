"""What acts during training: the one protocol for regularizers, faults, penalties, recorders, alarms, and your own.

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

from collections.abc import Callable, Mapping
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
    """What a forward and backward pass gave; its gradients are on the parameters.

    Attributes:
        loss: Of the task.
        auxiliary_loss: Weighted terms beside it; NaN if there are none.
        logits: As the model gave them.
        is_finite: Whether the total is; otherwise there was no backward pass.
    """

    loss: float
    auxiliary_loss: float
    logits: Tensor
    is_finite: bool


#: One forward and backward pass over some examples: inputs and targets -> what it gave; it clears the gradients first.
PassFunction = Callable[[Any, Any], PassResult]


@dataclass
class TrainingRun:
    """The training that callbacks act on, whoever runs its loop.

    Attributes:
        model: In training, as the loop calls it.
        optimizer: Over its parameters.
        on_event: Takes the events of the run.
        step: Updates done when it begins, above 0 where it is resumed.
        probe: From a number of tokens to inputs to measure the model on, on its device; None: the trainer has none.
        owns_loop: Whether the loop is `workbench.train`, which alone can repeat a pass or skip a batch.
        output: Where `workbench.train` records the run, from its first step on; in another trainer it writes nothing.
        checkpoints: Folder of the checkpoints of `workbench.train`; None: there are none.
        scaler: Of the gradients in float16; None: there is none, or the trainer keeps it.
        n_skipped: Batches left out so far.
        stop_reason: Why the run stops after this step, such as ``"by an alarm"``; empty: it goes on.
        has_begun: Whether its callbacks act.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    on_event: Callable[[Event], None]
    step: int = 0
    probe: Callable[[int], Any] | None = None
    owns_loop: bool = False
    output: RunOutput = field(default_factory=lambda: RunOutput(None))
    checkpoints: Path | None = None
    scaler: torch.amp.GradScaler | None = None
    n_skipped: int = 0
    stop_reason: str = ""
    has_begun: bool = False

    def stop(self, reason: str) -> None:
        """Let the run end after this step.

        Args:
            reason: How the sentence "Stopped after 7 steps, ..." ends, such as ``"by an alarm"``.
        """
        self.stop_reason = reason

    def skip_batches(self, n_batches: int) -> None:
        """Leave out the next batches.

        Raises:
            OptionError: If the trainer cannot.
        """
        if n_batches and not self.owns_loop:
            raise OptionError("Only wb.train() can skip batches; set skip=0 in this trainer.")
        self.n_skipped += n_batches


class Callback:
    """What acts during training; override what is needed.

    The methods are called in this order: `setup`, before anything is done; `begin`; in each step `begin_step`,
    `change_batch`, `run_pass` with `around_pass` and `auxiliary_loss` in it, `before_update`, `end_step`, `after_step`;
    `end`. Every method of this class leaves the training as it is, to the bit.

    Attributes:
        name: What checkpoints and configurations call it; one of a name in a run.

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
            OptionError: If there is none.
        """
        if self._run is None:
            raise OptionError(
                f"{type(self).__name__} acts on no training run now; pass it to wb.train(callbacks=), "
                "wb.trainer_callback() or wb.lightning_callback(), and ask while that run lasts."
            )
        return self._run

    def describe(self) -> Mapping[str, Any]:
        """What decides the run's numbers, as plain values; a run is resumed only with the same."""
        return {}

    def setup(self, run: TrainingRun) -> None:
        """Learn which training it will act on, and refuse one that it cannot; nothing of it is changed yet.

        Args:
            run: The training.
        """
        self._run = run

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, in a run that is resumed: after `setup`, before `begin`."""

    def begin(self) -> None:
        """Take hold of the model: training begins, no store is made yet."""

    def begin_step(self, step: int) -> None:
        """A step begins.

        Args:
            step: Updates done before it.
        """

    @property
    def rate_factor(self) -> float:
        """By what the planned learning rate is multiplied in this step."""
        return 1.0

    def change_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """The batch of this step as this callback leaves it."""
        return inputs, targets

    def run_pass(self, one_pass: PassFunction, inputs: Any, targets: Any) -> PassResult:
        """Do the forward and backward pass; whoever overrides this may repeat it or change the gradients it leaves.

        Only `workbench.train` asks for it.
        """
        return one_pass(inputs, targets)

    def around_pass(self) -> AbstractContextManager[Any]:
        """Entered before each forward pass, left after its backward pass."""
        return nullcontext()

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """The terms beside the task's loss as this callback leaves them.

        Args:
            task_loss: 0-dim, with its graph.
            auxiliary: The model's own and those of callbacks before, 0-dim; None: there are none.
        """
        return auxiliary

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Gradients are there, parameters are still the old ones.

        Args:
            step: Updates done before this one.
            numbers: Known of the step by now, such as ``loss``.
        """

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, Any] | None:
        """The update is made.

        Args:
            step: Updates done before it.
            numbers: Known of the step: ``loss``, ``grad_norm``, ``learning_rate``, ... as far as the trainer knows.

        Returns:
            Numbers to record beside them; None: none.
        """
        return None

    def outcome(self) -> Any:
        """What `StepRecord.outcomes` holds of it, asked after `end_step`; None: nothing."""
        return None

    def after_step(self, step: int) -> None:
        """The step is recorded and its checkpoint written; the model may be changed now.

        Args:
            step: Updates done.
        """

    def to_log(self) -> dict[str, float]:
        """Numbers that a trainer with logs of its own may show, of the last step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on alike: plain values and tensors."""
        return {}

    def take_event(self, event: Event) -> None:
        """An event of any callback, in a trainer that keeps none itself; a recorder writes it down."""

    def end(self, *, is_broken: bool = False) -> None:
        """Let go of the model; hooks are gone. May be called again.

        Args:
            is_broken: Whether training ended by an error.
        """
        self._run = None

    def event(self, step: int, kind: str, **what: Any) -> None:
        """Note something that happened; nothing is noted outside of a run.

        Args:
            step: Updates before it.
            kind: What happened.
            **what: Further fields of `workbench.schema.Event`: ``source``, ``score``, ``message``, ``layer``, ``head``.
        """
        if self._run is not None:
            self._run.on_event(Event(step, kind, **what))


def checked(callbacks: list[Callback]) -> list[Callback]:
    """The callbacks, each of its own name.

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
