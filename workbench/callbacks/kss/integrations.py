"""KSS inside the trainers of Hugging Face and Lightning, as callbacks; neither is imported before it is asked for."""

from __future__ import annotations

import importlib
import json
import math
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.errors import MissingPackageError, StoreError, ThresholdError, WorkbenchError
from workbench.training.configuration import first_difference

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from lightning.pytorch import Callback
    from torch import nn
    from transformers import TrainerCallback

    from workbench.callbacks.kss.control import KSS
    from workbench.callbacks.kss.shaper import Shaper
    from workbench.callbacks.kss.shaping import Shaping


class Attachment:
    """One KSS that a trainer attaches and detaches again and again, with its state in that trainer's checkpoints."""

    def __init__(self, kss: KSS) -> None:
        self.kss = kss
        self.shaper: Shaper | None = None
        self._state: dict[str, Any] = {}
        self._measured: Shaping | None = None

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """Attach; go on from a checkpoint's state where there is one.

        Raises:
            StoreError: If the checkpoint was made with other options.
        """
        self.end()
        if state:
            options = _plain(self.kss.describe())
            if (difference := first_difference(state["options"], options)) is not None:
                name, before, now = difference
                raise StoreError(
                    f"The checkpoint was made with KSS options {name} = {before}, this run says {now}; resume with the "
                    "same options, or start anew."
                )
        self._measured = None
        shaper = self.kss.attach(model, optimizer)
        try:
            if state:
                shaper.load_state_dict(state["shaper"])
        except WorkbenchError:
            shaper.detach()
            raise
        shaper.step = step
        self.shaper = shaper

    def end(self) -> None:
        """Detach; the state stays, for a checkpoint at the very end."""
        if self.shaper is not None:
            self._state = self.state()
            self.shaper.detach()
            self.shaper = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON takes it."""
        if self.shaper is None:
            return self._state
        return {"options": _plain(self.kss.describe()), "shaper": self.shaper.state_dict()}

    def numbers(self) -> dict[str, float]:
        """The controls of the last step, and what was measured last: trainers log some steps, KSS looks at others."""
        if self.shaper is None or self.shaper.last is None:
            return {}
        if self.shaper.last.layers:
            self._measured = self.shaper.last
        latest = self.shaper.last.monitors()
        measured = {} if self._measured is None else self._measured.monitors()
        controls = {name: latest[name] for name in ("kss_enabled", "kss_strength", "kss_interval", "kss_gamma")}
        return {name: float(value) for name, value in (measured | controls).items() if not math.isnan(value)}


def trainer_callback(kss: KSS) -> TrainerCallback:
    """A callback by which KSS acts inside a Hugging Face ``Trainer``.

    It attaches KSS when training begins and detaches it at its end. An error in training ends it without a word to
    callbacks: KSS then stays attached until the next ``train()``, ``callback.detach()``, or the end of the callback
    itself. Its numbers (``kss_strength``, ``kss_penalty``, ...) go into the training logs, which means into
    ``trainer.state.log_history`` and to the callbacks after it: to see them in TensorBoard and the like, set
    ``report_to="none"`` and pass its callback after this one. Its state goes with the checkpoints; resuming takes up
    the controls as they were.

    Args:
        kss: Its controls may be turned while the training goes on.
    """
    from transformers.trainer_callback import ExportableState, TrainerCallback

    class KSSCallback(TrainerCallback, ExportableState):
        """KSS at work in one Trainer."""

        def __init__(self) -> None:
            self.attachment = Attachment(kss)
            self.numbers: dict[str, float] = {}
            weakref.finalize(self, self.attachment.end).atexit = False

        def on_train_begin(self, args, state, control, *, model, optimizer, **others):  # noqa: ANN001, ANN003, ANN202
            name = type(self).__name__
            saved = state.stateful_callbacks.setdefault(name, {})
            if isinstance(saved, list):
                raise ThresholdError("A Trainer takes one KSS callback, not several; remove the others.")
            resumed = saved.get("attributes", {}).get("saved") if state.global_step else None
            self.attachment.begin(model, optimizer, step=state.global_step, state=resumed)

        def on_pre_optimizer_step(self, args, state, control, **others):  # noqa: ANN001, ANN003, ANN202
            self.attachment.shaper.begin_step(state.global_step)

        def on_step_end(self, args, state, control, **others):  # noqa: ANN001, ANN003, ANN202
            self.numbers = self.attachment.numbers()

        def on_log(self, args, state, control, logs=None, **others):  # noqa: ANN001, ANN003, ANN202
            if self.attachment.shaper is not None and "loss" in (logs or {}):
                logs.update(self.numbers)
                state.log_history[-1].update(self.numbers)

        def on_train_end(self, args, state, control, **others):  # noqa: ANN001, ANN003, ANN202
            self.detach()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": self.attachment.state()}}

        def detach(self) -> None:
            """Take KSS off the model, where training ended by an error."""
            self.attachment.end()

    return KSSCallback()


def lightning_callback(kss: KSS) -> Callback:
    """A callback by which KSS acts inside a Lightning ``Trainer``.

    It attaches KSS when training begins and detaches it at its end, by an error too; logs its numbers
    (``kss_strength``, ``kss_penalty``, ...); and keeps its state in the checkpoints. Automatic optimization with one
    optimizer alone.

    Args:
        kss: Its controls may be turned while the training goes on.

    Raises:
        MissingPackageError: If Lightning is not installed.
    """
    lightning = _lightning()

    class KSSCallback(lightning.Callback):
        """KSS at work in one Trainer."""

        def __init__(self) -> None:
            self.attachment = Attachment(kss)
            self.loaded: dict[str, Any] | None = None

        @property
        def state_key(self) -> str:
            return "KSSCallback"

        def on_train_start(self, trainer, pl_module):  # noqa: ANN001, ANN202
            n_optimizers = len(trainer.optimizers)
            if n_optimizers != 1 or not pl_module.automatic_optimization:
                raise ThresholdError(
                    f"{type(pl_module).__name__} has {n_optimizers} optimizers or steps them itself, and this callback "
                    "takes one that Lightning steps; attach KSS by kss.attach(model, optimizer)."
                )
            loaded, self.loaded = self.loaded, None
            self.attachment.begin(pl_module, trainer.optimizers[0], step=trainer.global_step, state=loaded)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):  # noqa: ANN001, ANN202
            if numbers := self.attachment.numbers():
                pl_module.log_dict(numbers, on_step=True, on_epoch=False)

        def on_train_end(self, trainer, pl_module):  # noqa: ANN001, ANN202
            self.attachment.end()

        def on_exception(self, trainer, pl_module, exception):  # noqa: ANN001, ANN202
            self.attachment.end()

        def teardown(self, trainer, pl_module, stage):  # noqa: ANN001, ANN202
            self.attachment.end()

        def state_dict(self) -> dict[str, Any]:
            return self.attachment.state()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    return KSSCallback()


def _lightning() -> ModuleType:
    """The Lightning that the caller works with: it goes by two names."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.split(".")[0]):
                raise
    raise MissingPackageError("kss.lightning_callback() needs Lightning; install it with: pip install lightning")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(values))
