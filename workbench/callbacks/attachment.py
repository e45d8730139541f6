"""Callbacks that a third-party trainer attaches and detaches; shared by the adapters."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.errors import OptionError
from workbench.models.calling import innermost
from workbench.schema.events import Event
from workbench.training.callback import Callback, CallbackGroup, TrainingRun
from workbench.training.recording import require_same


class Attachment:
    """Callbacks that a trainer attaches and detaches, any number of times; ``at_end`` removes the adapter's hooks."""

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
        """Attach the callbacks to a training."""
        self.end(is_broken=True)  # a trainer does not notify its callbacks of an error that ended the previous training
        run = TrainingRun(model, optimizer, self._take_event, step=step)
        self.callbacks.setup(run)
        self.run = run
        try:
            for callback in self.callbacks:
                self._load(callback, (state or {}).get(callback.name))
            inner = innermost(optimizer)
            # These hooks enclose those of the callbacks: the rate is set before them and restored after them.
            self._handles.append(inner.register_step_pre_hook(torch.compiler.disable(self._cut_rates)))
            self.callbacks.begin(run)
            self._handles.append(inner.register_step_post_hook(torch.compiler.disable(self._restore_rates)))
        except BaseException:
            self._state = {}
            self._release(is_broken=True)
            raise

    def end(self, *, is_broken: bool = False) -> None:
        """Detach the callbacks; their states remain available for a checkpoint after the last step."""
        if self.run is None:
            return
        try:
            if not is_broken:
                self.end_step({})
            self._state = self.state()
        finally:
            self._release(is_broken=is_broken)

    def _release(self, *, is_broken: bool) -> None:
        run, self.run = self.run, None
        self._open_step = self._begun_step = None
        if run is not None:
            self._restore_rates(innermost(run.optimizer), (), {})  # in case an error interrupted the update
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
        """Begin a step before a batch; with accumulated gradients, only the first call of a step has an effect."""
        if self._open_step is not None and step > self._open_step:
            self.end_step({})
        if self.run is not None and step != self._begun_step:
            self._begun_step = step
            for callback in self.callbacks:
                callback.begin_step(step)

    def before_update(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Pass the metrics to the callbacks; called when the gradients are computed."""
        if self.run is not None:
            for callback in self.callbacks:
                callback.before_update(step, numbers)

    def updated(self, step: int) -> None:
        """Note that the parameters were updated; `end_step` may follow later, with the metrics of the step."""
        self._open_step = step

    def end_step(self, numbers: Mapping[str, Any]) -> bool:
        """End the step of the last update, with its metrics."""
        step, self._open_step = self._open_step, None
        if self.run is None or step is None:
            return False
        known = {name: float(value) for name, value in numbers.items() if isinstance(value, Real)}
        self.callbacks.end_step(step, known | {"learning_rate": self._rate})
        for callback in self.callbacks:
            callback.after_step(step + 1)
        return bool(self.run.stop_reason)

    def state(self) -> dict[str, Any]:
        """Return the states of the callbacks for a checkpoint, as JSON-compatible values."""
        if self.run is None:
            return self._state
        states = {c.name: {"options": _plain(c.describe()), "state": _as_json(c.state_dict())} for c in self.callbacks}
        return {name: state for name, state in states.items() if any(state.values())}

    def to_log(self) -> dict[str, float]:
        """Return the metrics for the logs of the trainer."""
        found: dict[str, float] = {}
        for callback in self.callbacks if self.run is not None else ():
            found |= callback.to_log()
        return found

    def overrides(self, *names: str) -> bool:
        """Return whether any callback overrides one of these methods."""
        return any(getattr(type(c), name) is not getattr(Callback, name) for c in self.callbacks for name in names)

    def change_batch(self, batch: Any) -> Any:
        """Return a batch as changed by the callbacks."""
        if not self.overrides("change_batch"):
            return batch
        if isinstance(batch, Mapping) and "labels" in batch:
            inputs, targets = {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, targets = batch
        else:
            raise OptionError.of(
                "batch",
                batch,
                "a mapping with 'labels', or inputs and targets",
                remedy="leave out callbacks that change the batch, such as faults of the data and penalties",
            )
        inputs, targets = self.callbacks.change_batch(inputs, targets)
        return {**inputs, "labels": targets} if isinstance(batch, Mapping) else type(batch)((inputs, targets))

    def with_auxiliary(self, loss: Tensor, fraction: float = 1.0) -> Tensor:
        """Return a loss plus the terms that callbacks add."""
        terms = self.callbacks.auxiliary_loss(loss, None)
        return loss if terms is None else loss + terms * fraction

    def _load(self, callback: Callback, saved: Mapping[str, Any] | None) -> None:
        if not saved:
            return
        require_same(
            saved["options"],
            _plain(callback.describe()),
            where="The checkpoint was written with the option",
            of=f" of '{callback.name}'",
            now="this run",
            remedy="resume with the same options, or start a new run",
        )
        if state := saved["state"]:
            if state.keys() == {"torch"}:  # see `_as_json`
                state = torch.load(io.BytesIO(base64.b64decode(state["torch"])), weights_only=True)
            callback.load_state_dict(dict(state))

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


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values after a round trip through JSON."""
    return json.loads(json.dumps(dict(values), default=str))


def _as_json(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state for a checkpoint in JSON; a state that JSON would change is encoded as one string."""
    try:
        if json.loads(json.dumps(state)) == state:
            return state
    except (TypeError, ValueError, RuntimeError):  # tensors, or values that compare element by element
        pass
    file = io.BytesIO()
    torch.save(state, file)
    return {"torch": base64.b64encode(file.getvalue()).decode()}
