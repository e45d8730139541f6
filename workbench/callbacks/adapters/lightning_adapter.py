"""Callbacks of the workbench in a Lightning ``Trainer``."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from workbench.callbacks.attachment import Attachment
from workbench.callbacks.gathering import AnyCallback, gather
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.callbacks.recorder.updates import total_gradient_norm
from workbench.errors import MissingPackageError, OptionError
from workbench.models.calling import innermost

if TYPE_CHECKING:
    from types import ModuleType

    from lightning.pytorch import Callback as LightningCallback


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
