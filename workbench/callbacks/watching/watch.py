"""Watching a run in any training loop: recorder, probes and alarms in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from workbench.callbacks.adapters import lightning_callback, trainer_callback
from workbench.callbacks.alarms import Alarm, Alarms, Calibration
from workbench.callbacks.recorder import Recorder
from workbench.callbacks.recorder.joint_optimizer import optimizers_in
from workbench.callbacks.recorder.options import CADENCE
from workbench.callbacks.recorder.ranks import is_first, meet, of_first_rank
from workbench.callbacks.watching.run_status import RunStatus, StatusDisplay
from workbench.models.calling import bare
from workbench.option_checks import PositiveFloat, PositiveInt, checked

if TYPE_CHECKING:
    import os

    from workbench.callbacks.observation import Observation
    from workbench.callbacks.recorder.attached import AttachedRecorder

#: Library of each module with a class ``Trainer``.
_TRAINERS = {"transformers.trainer": "transformers", "lightning.pytorch": "lightning", "pytorch_lightning": "lightning"}


@checked
def watch(
    model: Any,
    optimizer: Any = None,
    *,
    store: str | os.PathLike[str] | None = None,
    every: Mapping[str, int | None] | int | None = CADENCE,
    false_alarms: PositiveFloat = 1.0,
    calibration: Calibration | None = None,
    on_alarm: Callable[[Alarm], None] | None = None,
    plan: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
    shows: bool = True,
    resume: bool | PositiveInt = False,
    overwrite: bool = False,
) -> Watch:
    """Watch a run with recorder, probes, alarms and a comparison of settings, in any training loop.

    The training itself is bitwise identical. A notebook shows a small view below the cell, which is updated during
    training; a terminal shows one line; a log file contains only the alarms. The record is a store for
    `workbench.open_run`, `workbench.widgets.Timeline` and `workbench.diagnose`.

    If several processes train one model, each of them has to call this function; those that do not within two minutes
    are named by an error. A part that fails on one rank is left out on all. Only rank 0 writes the store and shows the
    status. Alarms are raised on all ranks at the same step, so that an ``on_alarm`` that ends the training ends it
    on all ranks. The arithmetic of parameters that are sharded over ranks is not checked. Their gradients are checked
    if FSDP2 shards them by rows; otherwise the reduction probe tests a sum over ranks.

    Args:
        model: Module that the loop calls, which may be compiled or wrapped by DDP, FSDP2 or accelerate; or a
            ``Trainer`` of Hugging Face or Lightning, before it trains.
        optimizer: Optimizer of the model, or a list, tuple or mapping of all of them; None for a ``Trainer``, which
            creates its own.
        store: Path of the store; None for a new one in ``runs/``, named after the model and the time.
        every: Steps between two measurements of each part, see `workbench.Recorder`.
        false_alarms: False alarms per 100,000 healthy steps, see `workbench.Alarms`.
        calibration: Calibration on your own healthy runs, see `workbench.Alarms`; None for the default one.
        on_alarm: Function called with each alarm when it is raised. Its exceptions reach the training loop.
        plan: Planned settings, such as ``{"learning_rate": rate_at, "batch_size": {0: 8, 500: 16}}``, which may change
            without an alarm, see `workbench.Recorder`.
        shows: Whether to show the status.
        resume: Whether to continue the run in the store, if there is one: True after its last row, or the number of
            updates in the checkpoint from which the training continues; later rows are dropped. A ``Trainer`` knows
            that number, so pass True. What the alarms and the watch know of the run is kept.
        overwrite: Whether to replace the run in the store.

    Returns:
        The watch. It ends when its context is left, when ``close()`` is called, or when a ``Trainer`` ends.

    Raises:
        OptionError: If there is no optimizer, it updates no parameter of the model, or a rank does not call this.
        StoreError: If the store exists already and is neither continued nor replaced, or is being written.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
        >>> task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> with wb.watch(model, optimizer, store="watched.zarr", shows=False) as watched:
        ...     for i in range(20):
        ...         inputs, targets = task.batch(i)
        ...         loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> watched.status.step, watched.alarms.raised
        (19, [])

    See Also:
        `workbench.Recorder`: Records a run without alarms.
        `workbench.Alarms`: Describes the alarms.
        `workbench.diagnose`: Ranks the causes of a failed run.
    """
    trainer = _trainer_kind(model)
    module = model.model if trainer == "transformers" else model
    if trainer is None:
        optimizers_in(optimizer)
    meet("wb.watch")
    path = Path("runs", of_first_rank(_name_of(module))) if store is None else Path(store)
    watched = Watch(
        path,
        every=every,
        plan=plan,
        resume=resume is not False,
        overwrite=overwrite,
        alarms=Alarms(false_alarms=false_alarms, calibration=calibration, on_alarm=on_alarm),
        shows=shows,
    )
    if trainer == "transformers":
        model.add_callback(trainer_callback(watched.recorder))
    elif trainer == "lightning":
        model.callbacks.append(lightning_callback(watched.recorder))
    else:
        watched.attach(model, optimizer, step=None if isinstance(resume, bool) else resume)
    return watched


class Watch:
    """A run that is watched; created by `watch`."""

    def __init__(self, path: Path, *, alarms: Alarms, shows: bool, **options: Any) -> None:
        self.path, self.alarms = path, alarms
        self.recorder = Recorder(path, alarms=alarms, **options)
        self.recorder._ended = self._end
        self.status = RunStatus(path)
        self._attached: AttachedRecorder | None = None
        self._display = StatusDisplay(self.status) if shows and is_first() else None
        self.recorder.observe(self._take_observation)
        self._n_alarms = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.close(is_broken=kind is not None)

    def log(self, **numbers: Any) -> None:
        """Log metrics of the current update, such as ``loss``; see `workbench.Recorder.log`."""
        self.recorder.log(**numbers)

    def attach(self, model: nn.Module, optimizer: Any, *, step: int | None = None) -> None:
        """Attach the recorder to a model and its optimizer, after some updates."""
        self._attached = self.recorder.attach(model, optimizer, step=step)

    def close(self, *, is_broken: bool = False) -> None:
        """Remove all hooks and complete the store; not needed for a ``Trainer``."""
        if self._attached is not None:
            self._attached.detach(is_broken=is_broken)
            self._attached = None

    def _end(self) -> None:
        """Show the final status; called when the recorder has ended."""
        self.status.is_over = True
        if self._display is not None:
            self._display.close()

    def _repr_html_(self) -> str:
        return self.status.as_html()

    def __repr__(self) -> str:
        return self.status.as_text()

    def _take_observation(self, observation: Observation) -> None:
        if self.status.step < 0 and (known := [a for a in self.alarms.raised if a.step < observation.step]):
            self._n_alarms = self.status.n_alarms = len(known)  # of the run that is resumed
            self.status.first_alarm = known[0]
        new_alarms = self.alarms.raised[self._n_alarms :]
        self._n_alarms = len(self.alarms.raised)
        cause = self.alarms.attribute() if new_alarms else None
        self.status.update(observation, new_alarms, cause, self.alarms.scores)
        if not is_first():  # a Trainer may set up the ranks after this object was created
            self._display = None
        if self._display is not None:
            self._display.update(new_alarms)


def _trainer_kind(model: Any) -> str | None:
    """Return the library of a ``Trainer``; None for other objects."""
    if isinstance(model, nn.Module):
        return None
    for module, name in _TRAINERS.items():
        kind = getattr(sys.modules.get(module), "Trainer", None)
        if isinstance(kind, type) and isinstance(model, kind):
            return name
    return None


def _name_of(model: Any) -> str:
    name = type(bare(model) if isinstance(model, nn.Module) else model).__name__
    return f"{re.sub('[^A-Za-z0-9]+', '_', name)}_{datetime.now().astimezone():%Y%m%d_%H%M%S_%f}.zarr"
