"""Any callback inside the trainers of Hugging Face and Lightning; neither is imported before it is asked for."""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.callbacks.gathering import gather
from workbench.errors import MissingPackageError, OptionError, StoreError
from workbench.models.wrapping import innermost
from workbench.training.callback import Callback, TrainingRun
from workbench.training.configuration import first_difference

if TYPE_CHECKING:
    from types import ModuleType

    from lightning.pytorch import Callback as LightningCallback
    from torch.utils.hooks import RemovableHandle
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from workbench.schema.events import Event

#: Callbacks of earlier versions, as checkpoints of Hugging Face name them -> the callback whose state they held.
_FIRST_NAMES = {"KSSCallback": "kss", "RecorderCallback": "guard"}


class Attachment:
    """Callbacks that a trainer attaches and detaches again and again, with their states in that trainer's checkpoints.

    Args:
        callbacks: In the order in which they act.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)
        self.run: TrainingRun | None = None
        self._handles: list[RemovableHandle] = []
        self._peaks: list[Any] = []
        self._state: dict[str, Any] = {}
        self._open_step: int | None = None

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """Attach; go on from a checkpoint's state where there is one.

        Raises:
            OptionError: If a callback cannot act here.
            StoreError: If the checkpoint was made with other options.
        """
        self.end()
        self.run = TrainingRun(model, optimizer, self._take_event, step=step)
        try:
            for callback in self.callbacks:
                callback.setup(self.run)
            for callback in self.callbacks:
                self._load(callback, (state or {}).get(callback.name))
            inner = innermost(optimizer)
            # Outside of what callbacks do to the rate: set before their hooks, taken back after them.
            self._handles.append(inner.register_step_pre_hook(self._cut_rates))
            for callback in self.callbacks:
                callback.begin()
            self._handles.append(inner.register_step_post_hook(self._restore_rates))
        except BaseException:
            self.end(is_broken=True)
            raise

    def end(self, *, is_broken: bool = False) -> None:
        """Detach; the states stay, for a checkpoint at the very end."""
        if self.run is None:
            return
        if not is_broken:
            self.end_step({})
        self._state = self.state()
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.callback(callback.end, is_broken=is_broken)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.run = self._open_step = None

    def begin_step(self, step: int) -> None:
        """The next batch comes; called again within a step where gradients are accumulated."""
        if self._open_step is not None and step > self._open_step:
            self.end_step({})
        if self.run is not None:
            self._open_step = None if self._open_step == step else self._open_step
            for callback in self.callbacks:
                callback.begin_step(step)

    def before_update(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Gradients are there."""
        if self.run is not None:
            for callback in self.callbacks:
                callback.before_update(step, numbers)

    def updated(self, step: int) -> None:
        """The update of a step is made; its numbers may still come."""
        self._open_step = step

    def end_step(self, numbers: Mapping[str, Any]) -> bool:
        """The numbers of the update just made.

        Returns:
            Whether the run is to stop.
        """
        step, self._open_step = self._open_step, None
        if self.run is None or step is None:
            return False
        known = {name: float(value) for name, value in numbers.items() if isinstance(value, Real)}
        for callback in self.callbacks:
            known |= callback.end_step(step, known) or {}
        for callback in self.callbacks:
            callback.after_step(step + 1)
        return bool(self.run.stop_reason)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON takes it."""
        if self.run is None:
            return self._state
        states = {c.name: {"options": _plain(c.describe()), "state": _as_json(c.state_dict())} for c in self.callbacks}
        return {name: state for name, state in states.items() if state["state"]}

    def to_log(self) -> dict[str, float]:
        """Numbers for the trainer's own logs."""
        found: dict[str, float] = {}
        for callback in self.callbacks if self.run is not None else ():
            found |= callback.to_log()
        return found

    def overrides(self, *names: str) -> bool:
        """Whether any callback has a method of its own in the place of one of these."""
        return any(getattr(type(c), name) is not getattr(Callback, name) for c in self.callbacks for name in names)

    def change_batch(self, batch: Any) -> Any:
        """A batch as the callbacks leave it: a mapping with ``labels``, or inputs and targets.

        Raises:
            OptionError: If it is neither.
        """
        if not self.overrides("change_batch"):
            return batch
        if isinstance(batch, Mapping) and "labels" in batch:
            inputs, targets = {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, targets = batch
        else:
            raise OptionError(
                f"A batch is a {type(batch).__name__}, expected inputs and targets or a mapping with 'labels', which "
                "faults of the data and penalties need."
            )
        for callback in self.callbacks:
            inputs, targets = callback.change_batch(inputs, targets)
        return {**inputs, "labels": targets} if isinstance(batch, Mapping) else type(batch)((inputs, targets))

    @contextmanager
    def around_pass(self) -> Iterator[None]:
        """What callbacks put around a forward pass and its backward pass."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.around_pass())
            yield

    def with_auxiliary(self, loss: Tensor, share: float = 1.0) -> Tensor:
        """A loss with the terms that callbacks add; ``share`` of them, where gradients of several batches add up."""
        terms = None
        for callback in self.callbacks:
            terms = callback.auxiliary_loss(loss, terms)
        return loss if terms is None else loss + terms * share

    def _load(self, callback: Callback, saved: Mapping[str, Any] | None) -> None:
        if not saved:
            return
        if (difference := first_difference(saved["options"], _plain(callback.describe()))) is not None:
            name, before, now = difference
            raise StoreError(
                f"The checkpoint was made with {callback.name} options {name} = {before}, this run says {now}; resume "
                "with the same options, or start anew."
            )
        callback.load_state_dict(_of_json(saved["state"]))

    def _take_event(self, event: Event) -> None:
        for callback in self.callbacks:
            callback.take_event(event)

    def _cut_rates(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        factor = 1.0
        for callback in self.callbacks:
            factor *= callback.rate_factor
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        if factor != 1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _restore_rates(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        for group, peak in zip(optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak


class _PassHooks:
    """What callbacks do around the passes of a Hugging Face model, by hooks on it.

    Args:
        attachment: Of the callbacks.
        model: As the trainer calls it; returns an output with ``loss``.
        n_batches: Whose gradients add up in one update.
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
        """The backward pass is over."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def remove(self) -> None:
        """Take the hooks off."""
        self.close()
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if not (module.training and torch.is_grad_enabled()):
            return None
        self.close()
        changed = self._attachment.change_batch(kwargs)
        # A loss that is a share of the update's is not divided by the trainer any more.
        self._share = 1 / self._n_batches if kwargs.get("num_items_in_batch") is not None else 1.0
        self._open = ExitStack()
        self._open.enter_context(self._attachment.around_pass())
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


def trainer_callback(*callbacks: Any, seed: int = 0) -> TrainerCallback:
    """One callback for a Hugging Face ``Trainer`` by which any callbacks act: ``Trainer(..., callbacks=[it])``.

    They are attached when training begins and detached at its end. An error in training ends it without a word to
    callbacks: they then stay attached until the next ``train()``, ``callback.detach()``, or the end of the callback
    itself. What they have to log (``kss_strength``, ``kss_penalty``, ...) goes into the training logs, which means into
    ``trainer.state.log_history`` and to the callbacks after it: to see it in TensorBoard and the like, set
    ``report_to="none"`` and pass its callback after this one. Their states go with the checkpoints.

    A recorder counts the Trainer's steps. Loss and gradient norm are those of the Trainer's logs where it logs every
    step, and else what the recorder sees itself: the losses in the model's outputs, and the norm of the gradients after
    clipping. Resuming goes on with its store, if it is there, and with the same probe.

    Args:
        *callbacks: `workbench.Callback` objects, KSS, a recorder, alarms, actions, faults, penalties.
        seed: Of what faults and penalties draw.

    Raises:
        OptionError: If something is no callback. When training begins, if one needs the loop of `workbench.train`.
    """
    from transformers.trainer_callback import ExportableState, TrainerCallback

    gathered = gather(callbacks, seed=seed)

    class WorkbenchCallback(TrainerCallback, ExportableState):
        """Callbacks of the workbench at work in one Trainer."""

        def __init__(self) -> None:
            self.attachment = Attachment(gathered)
            self.passes: _PassHooks | None = None
            weakref.finalize(self, self.attachment.end).atexit = False

        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
        ) -> None:
            model, optimizer = others["model"], others["optimizer"]
            name = type(self).__name__
            by_name: Any = state.stateful_callbacks  # transformers annotates a list; in a Trainer it is a dictionary
            saved = by_name.setdefault(name, {})
            if isinstance(saved, list):
                raise OptionError(
                    "A Trainer takes one callback of the workbench, not several; pass all to one wb.trainer_callback()."
                )
            resumed = _resumed(by_name, saved) if state.global_step else None
            self.attachment.begin(model, optimizer, step=state.global_step, state=resumed)
            if self.attachment.overrides("change_batch", "around_pass", "auxiliary_loss"):
                self.passes = _PassHooks(self.attachment, model, args.gradient_accumulation_steps)

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
            self.detach()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": self.attachment.state()}}

        def detach(self) -> None:
            """Take the callbacks off the model, where training ended by an error."""
            if self.passes is not None:
                self.passes.remove()
                self.passes = None
            self.attachment.end()

    return WorkbenchCallback()


def lightning_callback(*callbacks: Any, seed: int = 0) -> LightningCallback:
    """One callback for a Lightning ``Trainer`` by which any callbacks act: ``Trainer(callbacks=[it])``.

    They are attached when training begins and detached at its end, by an error too. What they have to log
    (``kss_strength``, ``kss_penalty``, ...) is logged each step. The loss is what goes backward, the mean over
    accumulated batches. Their states go with the checkpoints. One optimizer alone, which Lightning steps; a recorder
    alone goes with a module that steps its optimizer itself.

    Args:
        *callbacks: `workbench.Callback` objects, KSS, a recorder, alarms, actions, faults, penalties.
        seed: Of what faults and penalties draw.

    Raises:
        MissingPackageError: If Lightning is not installed.
        OptionError: If something is no callback. When training begins, if one needs the loop of `workbench.train`.
    """
    base: Any = _lightning().Callback
    gathered = gather(callbacks, seed=seed)

    class WorkbenchCallback(base):
        """Callbacks of the workbench at work in one Trainer."""

        def __init__(self) -> None:
            self.attachment = Attachment(gathered)
            self.loaded: dict[str, Any] | None = None
            self.losses: list[Tensor] = []
            self.numbers: dict[str, float] = {}
            self.step = 0
            self.restore: Callable[[], None] | None = None

        @property
        def state_key(self) -> str:
            return "WorkbenchCallback"

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            n_optimizers = len(trainer.optimizers)
            needs_steps = any(callback.name != "guard" for callback in gathered)
            if n_optimizers != 1 or (needs_steps and not pl_module.automatic_optimization):
                raise OptionError(
                    f"{type(pl_module).__name__} has {n_optimizers} optimizers or steps them itself, and this callback "
                    "takes one that Lightning steps; attach by kss.attach(model, optimizer) and "
                    "recorder.attach(model, optimizer)."
                )
            loaded, self.loaded = self.loaded, None
            self.step = trainer.global_step
            self.attachment.begin(pl_module, trainer.optimizers[0], step=self.step, state=loaded)
            if self.attachment.overrides("change_batch", "around_pass", "auxiliary_loss"):
                self.restore = _wrap_training_step(pl_module, self.attachment)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: Any) -> None:
            self.attachment.begin_step(trainer.global_step)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
            n_shares = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.losses.append(loss.detach().double() * n_shares / scale)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            losses, self.losses = self.losses, []
            self.numbers = {"loss": float(sum(losses) / len(losses))} if losses else {}
            self.attachment.before_update(trainer.global_step, self.numbers)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: Any) -> None:
            if trainer.global_step > self.step:
                self.attachment.updated(trainer.global_step - 1)
                self.step = trainer.global_step
                trainer.should_stop |= self.attachment.end_step(self.numbers)
            if numbers := self.attachment.to_log():
                pl_module.log_dict(numbers, on_step=True, on_epoch=False)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.detach()

        def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
            self.detach(is_broken=True)

        def teardown(self, trainer: Any, pl_module: Any, stage: Any) -> None:
            self.detach()

        def state_dict(self) -> dict[str, Any]:
            return self.attachment.state()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

        def detach(self, *, is_broken: bool = False) -> None:
            """Take the callbacks off the model."""
            if self.restore is not None:
                self.restore()
                self.restore = None
            self.attachment.end(is_broken=is_broken)

    return WorkbenchCallback()


def _wrap_training_step(module: Any, attachment: Attachment) -> Callable[[], None]:
    """Let callbacks act around the training step of a LightningModule; what it returns takes that back."""
    inner = module.training_step
    passes = ExitStack()

    def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        passes.close()  # of the batch before: its backward pass is over
        batch = attachment.change_batch(batch)
        passes.enter_context(attachment.around_pass())
        output = inner(batch, *args, **kwargs)
        if isinstance(output, Mapping):
            return {**output, "loss": attachment.with_auxiliary(output["loss"])}
        return output if output is None else attachment.with_auxiliary(output)

    def restore() -> None:
        passes.close()
        del module.training_step

    module.training_step = training_step
    return restore


def _resumed(saved_by_all: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The states in a Trainer's checkpoint, those of earlier versions included."""
    states = dict(saved.get("attributes", {}).get("saved", {}))
    for name, callback in _FIRST_NAMES.items():
        first = saved_by_all.get(name)
        if (
            isinstance(first, Mapping)
            and callback not in states
            and (state := first.get("attributes", {}).get("saved"))
        ):
            states[callback] = (
                {"options": state["options"], "state": state["shaper"]}
                if callback == "kss"
                else {"options": {}, "state": {**_NEW_GUARD, "recorder": state}}
            )
    return states


_NEW_GUARD = {"rate_factor": 1.0, "n_skipped": 0, "n_answered": 0, "unsound": []}


def _lightning() -> ModuleType:
    """The Lightning that the caller works with: it goes by two names."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.split(".")[0]):
                raise
    raise MissingPackageError("wb.lightning_callback() needs Lightning; install it with: pip install lightning")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(dict(values), default=str))


def _as_json(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a Trainer's checkpoint takes it, which is JSON; tensors make it one text."""
    try:
        return json.loads(json.dumps(state))
    except TypeError:
        file = io.BytesIO()
        torch.save(state, file)
        return {"torch": base64.b64encode(file.getvalue()).decode()}


def _of_json(state: Mapping[str, Any]) -> dict[str, Any]:
    if state.keys() != {"torch"}:
        return dict(state)
    return torch.load(io.BytesIO(base64.b64decode(state["torch"])), weights_only=True)
