"""Faults in a custom training loop, injected by hooks on the model and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.callbacks.attachment import Attachment
from workbench.callbacks.faults.conditions import CorruptedData, SmallBatch
from workbench.callbacks.faults.injection import Injection
from workbench.errors import OptionError
from workbench.models.wrapping import acting_on_gradients, innermost

if TYPE_CHECKING:
    from workbench.callbacks.faults.fault import Fault


class AttachedFault:
    """A fault attached to a model and an optimizer; created by `Fault.attach`.

    Leaving its context, or calling `detach`, removes it. Each update is a step. A step begins with the first forward
    pass with gradients after the previous update. Gradients and learning rate are changed right before the update,
    ahead of all other hooks on the optimizer, so that a recorder sees what the optimizer receives. Faults of the data
    change the inputs of the model in training mode.

    Args:
        fault: The fault.
        model: Module that the loop calls; it may be wrapped by DDP or FSDP2.
        optimizer: Optimizer of its parameters; it may be wrapped too.
        step: Number of updates so far.
        seed: Seed of the random draws of the fault.

    Attributes:
        fault: The fault.
        step: Number of updates so far.
    """

    def __init__(
        self, fault: Fault, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int = 0, seed: int = 0
    ) -> None:
        self.fault, self.step = fault, step
        self._attachment = Attachment([Injection([fault], seed=seed)])
        self._passes, self._is_in_pass, self._has_begun = ExitStack(), False, False
        self._changes_inputs = isinstance(fault, SmallBatch | CorruptedData)
        self._attachment.begin(model, optimizer, step=step)
        inner = innermost(optimizer)
        self._handles = [
            # Ahead of the hook of a recorder, which notes the modes in which a pass runs.
            model.register_forward_pre_hook(torch.compiler.disable(self._enter), with_kwargs=True, prepend=True),
            inner.register_step_pre_hook(torch.compiler.disable(self._before_update)),
            inner.register_step_post_hook(torch.compiler.disable(self._after_update)),
        ]
        # The hooks that change the gradients and then the rate are moved ahead of those registered earlier.
        hooks: Any = inner._optimizer_step_pre_hooks
        for hook in [list(hooks)[-2], list(hooks)[-1]]:
            hooks.move_to_end(hook, last=False)

    def __enter__(self) -> AttachedFault:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.detach(is_broken=kind is not None)

    def detach(self, *, is_broken: bool = False) -> None:
        """Remove all hooks; apart from the training so far, model and optimizer are as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave_pass()
        self._attachment.end(is_broken=is_broken)

    def change_batch(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """Return a batch as changed by the fault, for faults of the data where the model does not receive the labels.

        It has to be called with each batch before the forward pass, which then leaves the inputs unchanged.

        Raises:
            OptionError: If the batch contains nothing that the fault could change.
        """
        self._begin()
        self._changes_inputs = False
        return self._attachment.callbacks.change_batch(inputs, targets)

    def _begin(self) -> None:
        """Read the switch, once for each update."""
        if not self._has_begun:
            self._has_begun = True
            self._attachment.begin_step(self.step)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        # Within the backward pass, gradient checkpointing runs the model again.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return None
        self._begin()
        if not self._is_in_pass:
            self._is_in_pass = True
            self._passes.enter_context(self._attachment.callbacks.around_pass())
        if not self._changes_inputs or not module.training:  # the examples of a recorder's probe are not changed
            return None
        if isinstance(kwargs.get("labels"), Tensor):
            return args, self._attachment.change_batch(kwargs)
        if args and isinstance(args[0], Mapping) and isinstance(args[0].get("labels"), Tensor):
            return (self._attachment.change_batch(args[0]), *args[1:]), kwargs
        if isinstance(self.fault, CorruptedData) and self.fault.what == "tokens":
            no_labels = torch.empty(0)
            if args:
                return (self._attachment.callbacks.change_batch(args[0], no_labels)[0], *args[1:]), kwargs
            return args, self._attachment.callbacks.change_batch(kwargs, no_labels)[0]
        raise OptionError(
            f"{self.fault.name} changes labels, which this model does not receive; pass each batch through "
            "change_batch(inputs, targets) of the object that attach() returned."
        )

    def _leave_pass(self) -> None:
        self._is_in_pass = False
        self._passes.close()

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        def act(loss: Any) -> None:
            self._leave_pass()
            self._attachment.before_update(self.step, {})

        self._begin()
        return acting_on_gradients(optimizer, args, kwargs, act)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._leave_pass()
        self._attachment.updated(self.step)
        self.step += 1
        self._has_begun = False
