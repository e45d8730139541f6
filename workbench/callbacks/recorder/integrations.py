"""The recorder inside the trainers of Hugging Face and Lightning, as callbacks; neither is imported beforehand."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from workbench.callbacks.kss.integrations import _lightning
from workbench.errors import MissingPackageError, ThresholdError

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Callback
    from torch import nn
    from transformers import TrainerCallback

    from workbench.callbacks.recorder.attached import AttachedRecorder
    from workbench.callbacks.recorder.recorder import Recorder


class Attachment:
    """One recorder that a trainer attaches and detaches again and again."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.attached: AttachedRecorder | None = None
        self._state: dict[str, Any] = {}

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """Attach; go on from a checkpoint's state where there is one."""
        self.end()
        if state:
            self.recorder.load_state_dict(state)
        self.attached = self.recorder.attach(model, optimizer, step=step)

    def end(self, *, is_broken: bool = False) -> None:
        """Detach; the state stays, for a checkpoint at the very end."""
        if self.attached is not None:
            self._state = self.state()
            self.attached.detach(is_broken=is_broken)
            self.attached = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON takes it."""
        return self._state if self.attached is None else self.recorder.state_dict()

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Numbers that the trainer knows, of the update just made."""
        if self.attached is None:
            return
        found = {name: numbers[name] for name in ("loss", "grad_norm") if isinstance(numbers.get(name), Real)}
        if not math.isfinite(self.attached.pending.get("loss", 0.0)):
            found.pop("loss", None)  # a Trainer may put another number in the place of a loss that is not finite
        self.attached.log(**found)


def trainer_callback(recorder: Recorder) -> TrainerCallback:
    """A callback by which the recorder watches a Hugging Face ``Trainer``.

    It attaches the recorder when training begins and detaches it at its end; steps are the Trainer's. Loss and gradient
    norm are those of the Trainer's logs where it logs every step, and else what the recorder sees itself: the losses in
    the model's outputs, and the norm of the gradients after clipping. Its state goes with the checkpoints: resuming
    goes on with the store, if it is there, and with the same probe.

    An error in training ends it without a word to callbacks: the recorder then stays attached until the next
    ``train()``, ``callback.detach()``, or the end of the callback itself.

    Args:
        recorder: Not attached.
    """
    from transformers.trainer_callback import ExportableState, TrainerCallback

    class RecorderCallback(TrainerCallback, ExportableState):
        """The recorder at work in one Trainer."""

        def __init__(self) -> None:
            self.attachment = Attachment(recorder)
            weakref.finalize(self, self.attachment.end).atexit = False

        def on_train_begin(self, args, state, control, *, model, optimizer, **others):  # noqa: ANN001, ANN003, ANN202
            saved = state.stateful_callbacks.setdefault(type(self).__name__, {})
            if isinstance(saved, list):
                raise ThresholdError("A Trainer takes one recorder callback, not several; remove the others.")
            resumed = saved.get("attributes", {}).get("saved") if state.global_step else None
            self.attachment.begin(model, optimizer, step=state.global_step, state=resumed)

        def on_log(self, args, state, control, logs=None, **others):  # noqa: ANN001, ANN003, ANN202
            if args.logging_steps == 1:  # otherwise the loss is the mean of several steps
                self.attachment.log(logs or {})

        def on_train_end(self, args, state, control, **others):  # noqa: ANN001, ANN003, ANN202
            self.detach()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": self.attachment.state()}}

        def detach(self) -> None:
            """Take the recorder off the model, where training ended by an error."""
            self.attachment.end()

    return RecorderCallback()


def lightning_callback(recorder: Recorder) -> Callback:
    """A callback by which the recorder watches a Lightning ``Trainer``.

    It attaches the recorder when training begins and detaches it at its end, by an error too; steps are Lightning's.
    The loss is what goes backward, the mean over accumulated batches. Its state goes with the checkpoints: resuming
    goes on with the store, if it is there, and with the same probe. One optimizer alone.

    Args:
        recorder: Not attached.

    Raises:
        MissingPackageError: If Lightning is not installed.
    """
    try:
        lightning = _lightning()
    except MissingPackageError:
        sentence = "recorder.lightning_callback() needs Lightning; install it with: pip install lightning"
        raise MissingPackageError(sentence) from None

    class RecorderCallback(lightning.Callback):
        """The recorder at work in one Trainer."""

        def __init__(self) -> None:
            self.attachment = Attachment(recorder)
            self.loaded: dict[str, Any] | None = None
            self.losses: list[Any] = []

        @property
        def state_key(self) -> str:
            return "RecorderCallback"

        def on_train_start(self, trainer, pl_module):  # noqa: ANN001, ANN202
            if len(trainer.optimizers) != 1:
                raise ThresholdError(
                    f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers, this callback takes one; "
                    "attach a recorder to each by recorder.attach(model, optimizer)."
                )
            loaded, self.loaded = self.loaded, None
            self.attachment.begin(pl_module, trainer.optimizers[0], step=trainer.global_step, state=loaded)

        def on_before_backward(self, trainer, pl_module, loss):  # noqa: ANN001, ANN202
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
            n_shares = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.losses.append(loss.detach().double() * n_shares / scale)

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):  # noqa: ANN001, ANN202
            losses, self.losses = self.losses, []
            if self.attachment.attached is not None and losses:
                self.attachment.attached.log(loss=sum(losses) / len(losses))

        def on_train_end(self, trainer, pl_module):  # noqa: ANN001, ANN202
            self.attachment.end()

        def on_exception(self, trainer, pl_module, exception):  # noqa: ANN001, ANN202
            self.attachment.end(is_broken=True)

        def teardown(self, trainer, pl_module, stage):  # noqa: ANN001, ANN202
            self.attachment.end()

        def state_dict(self) -> dict[str, Any]:
            return self.attachment.state()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    return RecorderCallback()
