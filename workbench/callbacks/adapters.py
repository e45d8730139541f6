"""Callbacks of the workbench in the trainers of Hugging Face and Lightning, which are imported only when used."""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.callbacks.attachment import Attachment
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.callbacks.recorder.updates import total_gradient_norm
from workbench.callbacks.train import AnyCallback, gather
from workbench.errors import MissingPackageError, OptionError
from workbench.models.calling import innermost

if TYPE_CHECKING:
    from types import ModuleType

    from lightning.pytorch import Callback as LightningCallback
    from transformers import TrainerCallback


_NAME = "WorkbenchCallback"
#: Label of tokens that do not count in the loss.
_IGNORED = -100


def trainer_callback(*callbacks: AnyCallback, seed: int = 0) -> TrainerCallback:
    """Return a Hugging Face ``TrainerCallback`` through which callbacks of the workbench act in a ``Trainer``.

    They are attached when training begins and detached when it ends. A ``Trainer`` does not notify its callbacks of an
    error; they then remain attached until the next ``train()``, until ``callback.detach()``, or until the callback is
    deleted. Their metrics (such as ``kss_strength`` and ``kss_penalty``) are added to the training logs, that is, to
    ``trainer.state.log_history``, and are passed to the callbacks that follow. To see them in TensorBoard, for example,
    set ``report_to="none"`` and pass the TensorBoard callback after this one. Their states are part of the checkpoints.

    A recorder counts the steps of the ``Trainer``. If the ``Trainer`` logs every step, loss and gradient norm are those
    of its logs. Otherwise the recorder takes the losses from the outputs of the model, and computes the gradient norm
    after clipping. A resumed run continues to write to the store, if it exists, and uses the same probe.

    Args:
        *callbacks: `workbench.Callback` objects, KSS, a recorder, alarms, actions, faults, penalties.
        seed: Seed of the random draws of faults and penalties.

    Raises:
        OptionError: If an argument is not a callback. When training begins, if a callback needs the loop of
            `workbench.train`.

    Example:
        >>> import workbench as wb
        >>> callback = wb.trainer_callback(wb.KSS.recommended(), wb.Recorder("run.zarr"))
        >>> type(callback).__name__
        'WorkbenchCallback'
        >>> trainer = transformers.Trainer(model, arguments, callbacks=[callback])  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    See Also:
        `workbench.lightning_callback`: Does the same for Lightning.
        `workbench.watch`: Attaches a recorder with alarms to a ``Trainer`` in one line.
    """
    from transformers.trainer_callback import ExportableState, TrainerCallback

    gathered = gather(callbacks, seed=seed)

    class WorkbenchCallback(TrainerCallback, ExportableState):
        """Callbacks of the workbench in one ``Trainer``."""

        def __init__(self) -> None:
            self.attachment = Attachment(gathered)
            self.passes: _PassHooks | None = None
            weakref.finalize(self, self.attachment.end, is_broken=True).atexit = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            model, optimizer = others["model"], others["optimizer"]
            saved = state.stateful_callbacks.setdefault(_NAME, {})
            if isinstance(saved, list):
                raise OptionError(
                    f"A Trainer takes one callback of the workbench, got {len(saved)}; pass all of them to one "
                    "wb.trainer_callback()."
                )
            resumed = saved.get("attributes", {}).get("saved") if state.global_step else None
            self.attachment.begin(model, optimizer, step=state.global_step, state=resumed)
            self.passes = None
            if self.attachment.overrides("change_batch", "around_pass", "auxiliary_loss"):
                self.passes = _PassHooks(self.attachment, model, args.gradient_accumulation_steps)
                self.attachment.at_end.append(self.passes.remove)

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.attachment.begin_step(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if self.passes is not None:
                self.passes.close()
            self.attachment.before_update(state.global_step, {})

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.attachment.updated(state.global_step - 1)
            logs_each = args.logging_strategy == "steps" and args.logging_steps == 1
            if not logs_each:  # the loss of the logs would be a mean over several steps
                control.should_training_stop |= self.attachment.end_step({})

        def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            logs = others.get("logs") or {}
            if "loss" not in logs:
                return
            if args.logging_steps == 1:
                control.should_training_stop |= self.attachment.end_step(
                    {name: logs[name] for name in ("loss", "grad_norm", "learning_rate") if name in logs}
                )
            numbers = self.attachment.to_log()
            logs.update(numbers)
            state.log_history[-1].update(numbers)

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.attachment.end()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": self.attachment.state()}}

        def detach(self) -> None:
            """Detach the callbacks from the model after an error ended the training."""
            self.attachment.end(is_broken=True)

    return WorkbenchCallback()


class _PassHooks:
    """Hooks on a Hugging Face model through which callbacks act around its passes."""

    def __init__(self, attachment: Attachment, model: nn.Module, n_batches: int) -> None:
        self._attachment, self._n_batches = attachment, n_batches
        self._open: ExitStack | None = None
        self._fraction = 1.0
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, with_kwargs=True),
        ]

    def close(self) -> None:
        """End the pass; called after the backward pass."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def remove(self) -> None:
        """Remove the hooks."""
        self.close()
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if not (module.training and torch.is_grad_enabled()):
            return None
        self.close()
        changed = dict(self._attachment.change_batch(kwargs))
        if changed.get("num_items_in_batch") is not None:  # the number of labels of all batches of the update
            changed["num_items_in_batch"] *= _n_labels(changed) / _n_labels(kwargs)
        # The model then divides its loss by that number, and the trainer does not divide it by the number of batches.
        self._fraction = 1 / self._n_batches if kwargs.get("num_items_in_batch") is not None else 1.0
        self._open = ExitStack()
        self._open.enter_context(self._attachment.callbacks.around_pass())
        return args, changed

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if self._open is None or not self._attachment.overrides("auxiliary_loss"):
            return None
        if getattr(output, "loss", None) is None:
            raise OptionError(
                f"The output of {type(module).__name__} has no loss to add penalties to; pass labels with each batch."
            )
        output.loss = self._attachment.with_auxiliary(output.loss, self._fraction)
        return output


def _n_labels(batch: Mapping[str, Any]) -> int:
    """Return the number of labels of a batch that count in the loss; 1 if there are no labels."""
    labels = batch.get("labels")
    return int((labels != _IGNORED).sum()) if isinstance(labels, Tensor) else 1


def lightning_callback(*callbacks: AnyCallback, seed: int = 0) -> LightningCallback:
    """Return a Lightning callback through which callbacks of the workbench act in a Lightning ``Trainer``.

    They are attached when training begins and detached when it ends, also after an error. Their metrics (such as
    ``kss_strength`` and ``kss_penalty``) are logged in each step. The loss is the one that is differentiated, averaged
    over accumulated batches, and the gradient norm is that before clipping. Their states are part of the checkpoints.
    The module must have a single optimizer that Lightning steps. For a module that steps its optimizer itself, attach a
    recorder by its method ``attach``.

    Args:
        *callbacks: `workbench.Callback` objects, KSS, a recorder, alarms, actions, faults, penalties.
        seed: Seed of the random draws of faults and penalties.

    Raises:
        MissingPackageError: If Lightning is not installed.
        OptionError: If an argument is not a callback. When training begins, if a callback needs the loop of
            `workbench.train`.

    Example:
        >>> import workbench as wb
        >>> callback = wb.lightning_callback(wb.KSS.recommended())  # doctest: +SKIP
        >>> trainer = lightning.Trainer(callbacks=[callback])  # doctest: +SKIP
        >>> trainer.fit(module, loader)  # doctest: +SKIP

    See Also:
        `workbench.trainer_callback`: Does the same for Hugging Face.
        `workbench.watch`: Attaches a recorder with alarms to a ``Trainer`` in one line.
    """
    base: Any = _lightning().Callback
    gathered = gather(callbacks, seed=seed)

    class WorkbenchCallback(base):
        """Callbacks of the workbench in one ``Trainer``."""

        def __init__(self) -> None:
            self.attachment = Attachment(gathered)
            self.loaded: dict[str, Any] | None = None
            self.losses: list[Tensor] = []
            self.numbers: dict[str, float] = {}
            self.step = 0
            self.passes = ExitStack()

        @property
        def state_key(self) -> str:
            return "WorkbenchCallback"

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            n_optimizers = len(trainer.optimizers)
            needs_steps = any(callback.name != "guard" for callback in gathered)
            if n_optimizers != 1 or (needs_steps and not pl_module.automatic_optimization):
                raise OptionError(
                    f"{type(pl_module).__name__} needs a single optimizer that Lightning steps, but it has "
                    f"{n_optimizers} or steps them itself; attach by kss.attach(model, optimizer) and "
                    "recorder.attach(model, optimizer)."
                )
            loaded, self.loaded = self.loaded, None
            self.losses, self.numbers = [], {}
            self.step = trainer.global_step
            self.attachment.begin(pl_module, trainer.optimizers[0], step=self.step, state=loaded)
            if self.attachment.overrides("change_batch", "around_pass", "auxiliary_loss"):
                self.attachment.at_end.append(_wrap_training_step(pl_module, self.attachment, self.passes))
                self.attachment.at_end.append(self.passes.close)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: Any) -> None:
            self.attachment.begin_step(trainer.global_step)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
            n_batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.losses.append(loss.detach().double() * n_batches / scale)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.passes.close()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            losses, self.losses = self.losses, []
            self.numbers = {"loss": float(sum(losses) / len(losses))} if losses else {}
            self.numbers["grad_norm"] = float(
                total_gradient_norm(JointOptimizer([innermost(optimizer)]))
            )  # clipping comes after this
            self.attachment.before_update(trainer.global_step, self.numbers)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: Any) -> None:
            if trainer.global_step > self.step:
                self.attachment.updated(trainer.global_step - 1)
                self.step = trainer.global_step
                trainer.should_stop |= self.attachment.end_step(self.numbers)
            if numbers := self.attachment.to_log():
                pl_module.log_dict(numbers, on_step=True, on_epoch=False)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.attachment.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
            self.attachment.end(is_broken=True)

        def teardown(self, trainer: Any, pl_module: Any, stage: Any) -> None:
            self.attachment.end()

        def state_dict(self) -> dict[str, Any]:
            return self.attachment.state()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    return WorkbenchCallback()


def _wrap_training_step(module: Any, attachment: Attachment, passes: ExitStack) -> Callable[[], None]:
    """Wrap the training step of a LightningModule so that callbacks act around it."""
    inner, of_instance = module.training_step, vars(module).get("training_step")

    @functools.wraps(inner)  # Lightning reads the arguments from the signature
    def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        passes.close()  # in case the previous batch had no backward pass
        batch = attachment.change_batch(batch)
        passes.enter_context(attachment.callbacks.around_pass())
        output = inner(batch, *args, **kwargs)
        if isinstance(output, Mapping):
            return {**output, "loss": attachment.with_auxiliary(output["loss"])}
        return output if output is None else attachment.with_auxiliary(output)

    def restore() -> None:
        if of_instance is None:
            del module.training_step
        else:
            module.training_step = of_instance

    module.training_step = training_step
    return restore


def _lightning() -> ModuleType:
    """Import Lightning under the name that the caller uses; it has two."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.split(".")[0]):
                raise
    raise MissingPackageError(
        "wb.lightning_callback() needs Lightning; install it with 'pip install lightning'.",
        name="lightning",
        expected="installed",
    )
