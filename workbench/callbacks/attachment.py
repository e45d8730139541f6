"""Code shared by the adapters: callbacks that a trainer attaches and detaches, with their states in its checkpoints."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.errors import OptionError, StoreError
from workbench.models.wrapping import innermost
from workbench.training.callback import Callback, TrainingRun
from workbench.training.callback_group import CallbackGroup
from workbench.training.configuration import first_difference

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from workbench.schema.events import Event


class Attachment:
    """Callbacks that a trainer attaches and detaches again and again, with their states in that trainer's checkpoints.

    Args:
        callbacks: Callbacks in the order in which they act.

    Attributes:
        at_end: Functions called once when the callbacks are detached; they remove the adapter's own hooks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = CallbackGroup(callbacks)
        self.at_end: list[Callable[[], None]] = []
        self.run: TrainingRun | None = None
        self._handles: list[RemovableHandle] = []
        self._peaks: list[Any] = []
        self._rate = math.nan
        self._state: dict[str, Any] = {}
        self._open_step: int | None = None
        self._begun_step: int | None = None

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """Attach; continue from a checkpoint's state if there is one.

        Raises:
            OptionError: If a callback cannot act here.
            StoreError: If the checkpoint was made with other options.
        """
        self.end(is_broken=True)  # a training that an error ended said nothing
        run = TrainingRun(model, optimizer, self._take_event, step=step)
        self.callbacks.setup(run)
        self.run = run
        try:
            for callback in self.callbacks:
                self._load(callback, (state or {}).get(callback.name))
            inner = innermost(optimizer)
            # Around the callbacks' own changes of the rate: set before their hooks, undone after them.
            self._handles.append(inner.register_step_pre_hook(torch.compiler.disable(self._cut_rates)))
            self.callbacks.begin(run)
            self._handles.append(inner.register_step_post_hook(torch.compiler.disable(self._restore_rates)))
        except BaseException:
            self._state = {}
            self._let_go(is_broken=True)
            raise

    def end(self, *, is_broken: bool = False) -> None:
        """Detach; the states stay, for a checkpoint at the very end."""
        if self.run is None:
            return
        try:
            if not is_broken:
                self.end_step({})
            self._state = self.state()
        finally:
            self._let_go(is_broken=is_broken)

    def _let_go(self, *, is_broken: bool) -> None:
        run, self.run = self.run, None
        self._open_step = self._begun_step = None
        if run is not None:
            self._restore_rates(innermost(run.optimizer), (), {})  # where an error ended the update
        with ExitStack() as stack:
            if run is not None:
                stack.callback(self.callbacks.end, run, is_broken=is_broken)
            for handle in self._handles:
                stack.callback(handle.remove)
            for function in self.at_end:
                stack.callback(function)
        self._handles.clear()
        self.at_end.clear()

    def begin_step(self, step: int) -> None:
        """Called before each batch; only the first of a step counts where gradients are accumulated."""
        if self._open_step is not None and step > self._open_step:
            self.end_step({})
        if self.run is not None and step != self._begun_step:
            self._begun_step = step
            for callback in self.callbacks:
                callback.begin_step(step)

    def before_update(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Called when the gradients are computed."""
        if self.run is not None:
            for callback in self.callbacks:
                callback.before_update(step, numbers)

    def updated(self, step: int) -> None:
        """Called after the update of a step; its numbers may still follow."""
        self._open_step = step

    def end_step(self, numbers: Mapping[str, Any]) -> bool:
        """Called with the numbers of the last update.

        Returns:
            Whether the run is to stop.
        """
        step, self._open_step = self._open_step, None
        if self.run is None or step is None:
            return False
        known = {name: float(value) for name, value in numbers.items() if isinstance(value, Real)}
        self.callbacks.end_step(step, known | {"learning_rate": self._rate})
        for callback in self.callbacks:
            callback.after_step(step + 1)
        return bool(self.run.stop_reason)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as values for JSON."""
        if self.run is None:
            return self._state
        states = {c.name: {"options": _plain(c.describe()), "state": _as_json(c.state_dict())} for c in self.callbacks}
        return {name: state for name, state in states.items() if any(state.values())}

    def to_log(self) -> dict[str, float]:
        """The numbers for the trainer's own logs."""
        found: dict[str, float] = {}
        for callback in self.callbacks if self.run is not None else ():
            found |= callback.to_log()
        return found

    def overrides(self, *names: str) -> bool:
        """Whether any callback overrides one of these methods."""
        return any(getattr(type(c), name) is not getattr(Callback, name) for c in self.callbacks for name in names)

    def change_batch(self, batch: Any) -> Any:
        """A batch as changed by the callbacks: a mapping with ``labels``, or inputs and targets.

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
        inputs, targets = self.callbacks.change_batch(inputs, targets)
        return {**inputs, "labels": targets} if isinstance(batch, Mapping) else type(batch)((inputs, targets))

    def with_auxiliary(self, loss: Tensor, share: float = 1.0) -> Tensor:
        """A loss with the terms that callbacks add; ``share`` of them, where gradients of several batches add up."""
        terms = self.callbacks.auxiliary_loss(loss, None)
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
        if saved["state"]:
            callback.load_state_dict(_of_json(saved["state"]))

    def _take_event(self, event: Event) -> None:
        for callback in self.callbacks:
            callback.take_event(event)

    def _cut_rates(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        factor = self.callbacks.rate_factor()
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        if factor != 1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        self._rate = max(float(group["lr"]) for group in optimizer.param_groups)

    def _restore_rates(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        for group, peak in zip(optimizer.param_groups, self._peaks, strict=bool(self._peaks)):
            group["lr"] = peak
        self._peaks = []


def first_states(by_name: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """States that callbacks of the first version, one for KSS and one for the recorder, left in a checkpoint.

    Args:
        by_name: State of each callback, by its name.
    """
    states: dict[str, dict[str, Any]] = {}
    if kss := by_name.get("KSSCallback"):
        states["kss"] = {"options": kss["options"], "state": kss["shaper"]}
    if recorder := by_name.get("RecorderCallback"):
        nothing_answered = {"rate_factor": 1.0, "n_skipped": 0, "n_answered": 0, "unsound": []}
        states["guard"] = {"options": {}, "state": {**nothing_answered, "recorder": recorder}}
    return states


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(dict(values), default=str))


def _as_json(state: dict[str, Any]) -> dict[str, Any]:
    """A state for a Trainer's checkpoint, which is JSON; a state that JSON would change becomes one text."""
    try:
        if json.loads(json.dumps(state)) == state:
            return state
    except (TypeError, ValueError, RuntimeError):  # tensors, or what compares by elements
        pass
    file = io.BytesIO()
    torch.save(state, file)
    return {"torch": base64.b64encode(file.getvalue()).decode()}


def _of_json(state: Mapping[str, Any]) -> dict[str, Any]:
    if state.keys() != {"torch"}:
        return dict(state)
    return torch.load(io.BytesIO(base64.b64decode(state["torch"])), weights_only=True)
