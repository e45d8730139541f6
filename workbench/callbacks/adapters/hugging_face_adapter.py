"""Callbacks of the workbench in a Hugging Face ``Trainer``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.callbacks.attachment import Attachment
from workbench.callbacks.gathering import AnyCallback, gather
from workbench.errors import OptionError

if TYPE_CHECKING:
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
    """Hooks on a Hugging Face model through which callbacks act around its passes.

    Args:
        attachment: Attachment of the callbacks.
        model: Model that the trainer calls, which returns an output with ``loss``.
        n_batches: Number of batches whose gradients are accumulated for one update.
    """

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
                f"The output of {type(module).__name__} has no loss, to which penalties are added; pass labels with "
                "each batch."
            )
        output.loss = self._attachment.with_auxiliary(output.loss, self._fraction)
        return output


def _n_labels(batch: Mapping[str, Any]) -> int:
    """Return the number of labels of a batch that count in the loss; 1 if there are no labels."""
    labels = batch.get("labels")
    return int((labels != _IGNORED).sum()) if isinstance(labels, Tensor) else 1
