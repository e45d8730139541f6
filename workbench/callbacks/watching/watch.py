"""Everything that watches a run, in one line around any loop."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.callbacks.adapters import lightning_callback, trainer_callback
from workbench.callbacks.alarms import Alarm, Alarms, Calibration
from workbench.callbacks.recorder import Recorder
from workbench.callbacks.recorder.options import CADENCE
from workbench.callbacks.recorder.ranks import is_first, of_first_rank
from workbench.callbacks.watching.run_status import RunStatus
from workbench.callbacks.watching.status_display import StatusDisplay
from workbench.errors import OptionError
from workbench.models.wrapping import bare

if TYPE_CHECKING:
    import os

    from workbench.callbacks.observation import Observation
    from workbench.callbacks.recorder.attached import AttachedRecorder

#: Module with a Trainer -> library.
_TRAINERS = {"transformers": "transformers", "lightning.pytorch": "lightning", "pytorch_lightning": "lightning"}


def watch(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    store: str | os.PathLike[str] | None = None,
    every: Mapping[str, int | None] | int | None = CADENCE,
    false_alarms: float = 1.0,
    calibration: Calibration | None = None,
    on_alarm: Callable[[Alarm], None] | None = None,
    shows: bool = True,
) -> Watch:
    """Watch a run: recorder, probes, alarms and the comparison of settings, with one line before any loop.

    The training is unchanged to the bit. In a notebook a small view is shown and kept up to date under the cell; in a
    terminal one line; into a log file only the alarms are written. The record is a store that `workbench.open_run`,
    `workbench.widgets.Timeline` and `workbench.diagnose` read.

    Where several processes train one model, each of them calls it. Rank 0 alone writes the store and shows something;
    alarms are raised on all ranks, at the same step, so that an ``on_alarm`` that ends the training ends it everywhere.
    Of weights that are split over ranks the arithmetic is not checked; the gradients are where FSDP2 splits them by
    rows, and elsewhere the reduction probe tests a sum over ranks.

    Args:
        model: The module that the loop calls, which may be compiled or wrapped by DDP, FSDP2 or accelerate; or a
            Trainer of Hugging Face or Lightning, before it trains.
        optimizer: Optimizer of the model; None for a Trainer, which makes its own.
        store: Path of the store; None: a new one under ``runs/``, named after the model and the time.
        every: Steps between two measurements, by part, as of `workbench.Recorder`.
        false_alarms: False alarms per 100,000 healthy steps, as of `workbench.Alarms`.
        calibration: Made of your own healthy runs, as of `workbench.Alarms`.
        on_alarm: Function called with each alarm as it is raised; its exceptions reach the training loop.
        shows: Whether to show anything.

    Returns:
        The watch; leaving its context, ``close()`` or the end of a Trainer's training ends it.

    Raises:
        OptionError: If there is no optimizer, or it moves no parameter of the model.
        StoreError: If the store is taken.

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
        ...         watched.log(loss=loss)  # only where the model does not return its loss
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> watched.status.step, watched.alarms.raised
        (19, [])
    """
    trainer = _trainer_kind(model)
    module = model.model if trainer == "transformers" else model
    if trainer is None and not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "optimizer"):
        raise OptionError(
            f"wb.watch got a {type(model).__name__} and a {type(optimizer).__name__}, expected a model and its "
            "optimizer, or a Trainer alone; pass both, or the Trainer before it trains."
        )
    path = Path("runs", of_first_rank(_name_of(module))) if store is None else Path(store)
    watched = Watch(
        path,
        every=every,
        alarms=Alarms(false_alarms=false_alarms, calibration=calibration, on_alarm=on_alarm),
        shows=shows,
    )
    if trainer == "transformers":
        model.add_callback(trainer_callback(watched.recorder))
    elif trainer == "lightning":
        model.callbacks.append(lightning_callback(watched.recorder))
    else:
        watched.attach(model, optimizer)
    return watched


class Watch:
    """A run that is watched; made by `watch`.

    Attributes:
        recorder: The recorder.
        alarms: The alarms, of which ``raised`` are those so far.
        status: What is known of the run now.
        path: Path of the store.
    """

    def __init__(
        self, path: Path, *, every: Mapping[str, int | None] | int | None, alarms: Alarms, shows: bool
    ) -> None:
        self.path, self.alarms = path, alarms
        self.recorder: Recorder = _ToldRecorder(path, every=every, alarms=alarms, ended=self._end)
        self.status = RunStatus(path)
        self._attached: AttachedRecorder | None = None
        self._display = StatusDisplay(self.status) if shows and is_first() else None
        self.recorder.observe(self._hear)
        self._n_told = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.close(is_broken=kind is not None)

    def log(self, **numbers: Any) -> None:
        """Numbers of the present update, such as ``loss``; see `workbench.Recorder.log`."""
        self.recorder.log(**numbers)

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """Watch the loop that trains a model from here on."""
        self._attached = self.recorder.attach(model, optimizer)

    def close(self, *, is_broken: bool = False) -> None:
        """Stop watching: hooks are removed and the store is complete. A Trainer does that at its end."""
        if self._attached is not None:
            self._attached.detach(is_broken=is_broken)
            self._attached = None

    def _end(self) -> None:
        """Show the last state; called when the recorder has ended."""
        self.status.is_over = True
        if self._display is not None:
            self._display.close()

    def _repr_html_(self) -> str:
        return self.status.as_html()

    def __repr__(self) -> str:
        return self.status.as_text()

    def _hear(self, observation: Observation) -> None:
        fresh = self.alarms.raised[self._n_told :]
        self._n_told = len(self.alarms.raised)
        cause = self.alarms.attribute() if fresh else None
        self.status.update(observation, fresh, cause, self.alarms.scores)
        if not is_first():  # a Trainer may have made the ranks after this was made
            self._display = None
        if self._display is not None:
            self._display.update(fresh)


class _ToldRecorder(Recorder):
    """A recorder that tells when it has ended."""

    def __init__(self, *args: Any, ended: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._ended = ended

    def detached(self, step: int) -> None:
        """Remember the step, and tell."""
        super().detached(step)
        self._ended()


def _trainer_kind(model: Any) -> str | None:
    """The library of a Trainer; None: it is none."""
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
