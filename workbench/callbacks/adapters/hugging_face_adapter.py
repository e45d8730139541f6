"""Any callback inside a Hugging Face ``Trainer``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.callbacks.attachment import Attachment, first_states
from workbench.callbacks.gathering import gather
from workbench.errors import OptionError

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_NAME = "WorkbenchCallback"
#: The label of tokens that do not count in the loss.
_IGNORED = -100


def trainer_callback(*callbacks: Any, seed: int = 0) -> TrainerCallback:
    """One callback for a Hugging Face ``Trainer`` by which any callbacks act: ``Trainer(..., callbacks=[it])``.

    They are attached when training begins and detached at its end. If training ends by an error, callbacks are not
    notified: they then stay attached until the next ``train()``, ``callback.detach()``, or the deletion of the callback
    itself. Their numbers (``kss_strength``, ``kss_penalty``, ...) go into the training logs, that is, into
    ``trainer.state.log_history`` and to the callbacks after it: to see them in TensorBoard and the like, set
    ``report_to="none"`` and pass its callback after this one. Their states are part of the checkpoints.

    A recorder counts the Trainer's steps. Loss and gradient norm are those of the Trainer's logs where it logs every
    step, and otherwise those that the recorder computes: the losses in the model's outputs, and the norm of the
    gradients after clipping. Resuming continues with its store, if it exists, and with the same probe.

    Args:
        *callbacks: `workbench.Callback` objects, KSS, a recorder, alarms, actions, faults, penalties.
        seed: Seed of the random draws of faults and penalties.

    Raises:
        OptionError: If an argument is no callback. When training begins, if one needs the loop of `workbench.train`.

    Example:
        >>> import workbench as wb
        >>> import transformers
        >>> callback = wb.trainer_callback(wb.KSS.recommended())
        >>> isinstance(callback, transformers.TrainerCallback)
        True
        >>> trainer = transformers.Trainer(model, arguments, callbacks=[callback])  # doctest: +SKIP
    """
    from transformers.trainer_callback import ExportableState, TrainerCallback

    gathered = gather(callbacks, seed=seed)

    class WorkbenchCallback(TrainerCallback, ExportableState):
        """Callbacks of the workbench attached to one Trainer."""

        def __init__(self) -> None:
            self.attachment = Attachment(gathered)
            self.passes: _PassHooks | None = None
            weakref.finalize(self, self.attachment.end, is_broken=True).atexit = False

        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
        ) -> None:
            model, optimizer = others["model"], others["optimizer"]
            by_name: Any = state.stateful_callbacks  # transformers annotates a list; in a Trainer it is a dictionary
            saved = by_name.setdefault(_NAME, {})
            if isinstance(saved, list):
                raise OptionError(
                    "A Trainer takes one callback of the workbench, not several; pass all to one wb.trainer_callback()."
                )
            resumed = _states_in(by_name) if state.global_step else None
            self.attachment.begin(model, optimizer, step=state.global_step, state=resumed)
            self.passes = None
            if self.attachment.overrides("change_batch", "around_pass", "auxiliary_loss"):
                self.passes = _PassHooks(self.attachment, model, args.gradient_accumulation_steps)
                self.attachment.at_end.append(self.passes.remove)

        def on_step_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
        ) -> None:
            self.attachment.begin_step(state.global_step)

        def on_pre_optimizer_step(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
        ) -> None:
            if self.passes is not None:
                self.passes.close()
            self.attachment.before_update(state.global_step, {})

        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
        ) -> None:
            self.attachment.updated(state.global_step - 1)
            logs_each = args.logging_strategy == "steps" and args.logging_steps == 1
            if not logs_each:  # otherwise the loss is the mean of several steps
                control.should_training_stop |= self.attachment.end_step({})

        def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
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

        def on_train_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
        ) -> None:
            self.attachment.end()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": self.attachment.state()}}

        def detach(self) -> None:
            """Take the callbacks off the model, where training ended by an error."""
            self.attachment.end(is_broken=True)

    return WorkbenchCallback()


class _PassHooks:
    """Hooks on a Hugging Face model by which callbacks act around its passes.

    Args:
        attachment: Attachment of the callbacks.
        model: Model that the trainer calls; returns an output with ``loss``.
        n_batches: Number of batches whose gradients add up in one update.
    """

    def __init__(self, attachment: Attachment, model: nn.Module, n_batches: int) -> None:
        self._attachment, self._n_batches = attachment, n_batches
        self._open: ExitStack | None = None
        self._share = 1.0
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, with_kwargs=True),
        ]

    def close(self) -> None:
        """Called after the backward pass."""
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
        if changed.get("num_items_in_batch") is not None:  # of the whole update, of which the loss is a share
            changed["num_items_in_batch"] *= _n_items(changed) / _n_items(kwargs)
        # A loss that is a share of the update's is not divided by the trainer any more.
        self._share = 1 / self._n_batches if kwargs.get("num_items_in_batch") is not None else 1.0
        self._open = ExitStack()
        self._open.enter_context(self._attachment.callbacks.around_pass())
        return args, changed

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if self._open is None or not self._attachment.overrides("auxiliary_loss"):
            return None
        if getattr(output, "loss", None) is None:
            raise OptionError(
                f"{type(module).__name__} gives no loss that penalties could be added to; pass labels with each batch."
            )
        output.loss = self._attachment.with_auxiliary(output.loss, self._share)
        return output


def _n_items(batch: Mapping[str, Any]) -> int:
    """Labels of a batch that count in the loss."""
    labels = batch.get("labels")
    return int((labels != _IGNORED).sum()) if isinstance(labels, Tensor) else 1


def _states_in(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """The states that a Trainer's checkpoint holds of our callbacks, those of the first version included."""
    saved = {
        name: exported.get("attributes", {}).get("saved")
        for name, exported in by_name.items()
        if isinstance(exported, Mapping)
    }
    return first_states(saved) | (saved.get(_NAME) or {})
