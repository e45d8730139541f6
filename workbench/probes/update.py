"""Effect of one update on the loss of fixed examples, compared with the prediction from their gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from workbench.errors import OptionError
from workbench.models.calling import unwrap
from workbench.models.losses import require_graph
from workbench.models.probing import undisturbed
from workbench.models.readable_weights import Measurement, complete, in_pieces
from workbench.models.subject import Subject

#: Largest number of entries of gradients that wait for a common sum.
_ON_HOST, _ON_DEVICE = 0, 1 << 22


class UpdateEffect(NamedTuple):
    """Change of a loss by an update."""

    change: float  # loss after the update minus loss before it, in nat for a cross entropy
    #: Inner product of the gradient before the update with the change of the parameters, in the same unit.
    predicted: float


def update_effect(
    model: Subject | nn.Module, loss_of: Callable[[nn.Module], Tensor], before: Mapping[str, Tensor]
) -> UpdateEffect:
    """Compare the change of a loss since earlier parameters with its linear prediction from their gradient.

    For a step d and a loss with gradient g and Hessian H, ``predicted`` is g d and ``change`` is g d + d H d / 2 to
    second order. In a descent direction their ratio is 1 for a small step, 1/2 for the step that reduces the loss most
    along d, 0 for one twice as long, and negative beyond, where the update increases the loss of the examples. If
    ``predicted`` is positive, the update does not follow the gradient of these examples, because of the momentum of
    other batches, noise, or wrong gradients.

    Cost: two forward passes and one backward pass over the examples, in eval mode. Rounding: both losses have an error
    of about one unit in the last place of the loss, so that in float32 a change below 1e-6 of the loss is not
    significant. The model, after the update, is left unchanged. ``before`` are its parameters before it by name;
    missing ones count as unchanged and are neither copied nor differentiated. Both changes are NaN if a loss or a
    gradient is not finite.
    """
    return complete(update_reading(model, loss_of, before))


def update_reading(
    model: Subject | nn.Module, loss_of: Callable[[nn.Module], Tensor], before: Mapping[str, Tensor]
) -> Measurement[UpdateEffect]:
    """Measure what `update_effect` returns; the host does not wait."""
    change, predicted = yield _changes(unwrap(model), loss_of, before)
    return UpdateEffect(change.item(), predicted.item())


def _changes(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], before: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the change of the loss and its prediction on their device."""
    now = {name: weight.detach() for name, weight in model.named_parameters()}
    for name, weight in before.items():
        if name not in now or now[name].shape != weight.shape:
            raise OptionError(
                f"before contains {name} of shape {tuple(weight.shape)}, which is not a parameter of the model; pass "
                "copies of model.named_parameters() by their names."
            )
    holder = _Loss(model, loss_of)
    parts: list[Tensor] = []
    waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def add() -> None:
        """Add the products of the gradients that wait with the changes of their parameters."""
        columns = zip(*waiting, strict=True)
        joined = waiting[0] if len(waiting) == 1 else [torch.cat([x.flatten() for x in column]) for column in columns]
        for slope, new, old in in_pieces(*joined):
            parts.append(((new.double() - old) * slope).sum())
        waiting.clear()

    def take(name: str, weight: Tensor) -> None:
        """Use gradients once they are complete, and release them: all of them would need a copy of the model."""
        assert weight.grad is not None
        triple, weight.grad = (weight.grad, now[name], before[name]), None
        if waiting and any(x.dtype != y.dtype or x.device != y.device for x, y in zip(waiting[0], triple, strict=True)):
            add()
        waiting.append(triple)
        if sum(gradient.numel() for gradient, _, _ in waiting) > (
            _ON_HOST if weight.device.type == "cpu" else _ON_DEVICE
        ):
            add()

    with undisturbed(model), torch.enable_grad():
        earlier = {f"model.{name}": weight.detach().requires_grad_() for name, weight in before.items()}
        first = require_graph(functional_call(holder, earlier))
        for name, weight in zip(before, earlier.values(), strict=True):
            weight.register_post_accumulate_grad_hook(partial(take, name))
        if earlier:
            torch.autograd.backward(first, inputs=list(earlier.values()))
        with torch.no_grad():
            if waiting:
                add()
            last = loss_of(model)
            predicted = torch.stack(parts).sum() if parts else torch.zeros(())
            return last.double() - first.detach().double(), predicted


class _Loss(nn.Module):
    """A loss as a module that contains its model, so that it can be computed with other parameters."""

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self._loss_of = model, loss_of

    def forward(self) -> Tensor:
        return self._loss_of(self.model)
