"""The effect of one update on the loss of fixed examples, beside what their gradient predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from workbench.errors import OptionError
from workbench.models.device_numbers import in_pieces, read_numbers
from workbench.models.probing import undisturbed
from workbench.models.wrapping import unwrap

if TYPE_CHECKING:
    from workbench.models.subject import Subject


class UpdateEffect(NamedTuple):
    """The change of a loss by an update.

    Attributes:
        change: Loss now minus loss with the parameters before, in nats for a cross entropy.
        predicted: Inner product of the gradient before with the change of the parameters, in the same unit.

    Example:
        >>> import workbench as wb
        >>> wb.probes.UpdateEffect(change=-0.5, predicted=-1.0).change
        -0.5
    """

    change: float
    predicted: float


def update_effect(
    model: Subject | nn.Module, loss_of: Callable[[nn.Module], Tensor], before: Mapping[str, Tensor]
) -> UpdateEffect:
    """Compare the change of a loss since some earlier parameters with its linear prediction from their gradient.

    For a step d and a loss with gradient g and Hessian H, ``predicted`` is g d and ``change`` is g d + d H d / 2 to
    second order. In the direction of descent their ratio is 1 for a small step, 1/2 for the step that lowers the loss
    most along d, 0 for one twice as long, and negative beyond, where the update raises the loss of the very examples
    that asked for it. Where ``predicted`` is positive, the update does not follow the gradient of these examples: a
    momentum of other batches, noise, or gradients that are not theirs.

    Cost: two forward passes and one backward pass over the examples, in eval mode. Rounding: both losses carry about
    one unit in the last place of the loss, so that a change below 1e-6 of the loss says nothing in float32. Parameters,
    their ``.grad``, modes, hooks and random states are left as they were.

    Args:
        model: Model after the update.
        loss_of: Function from the model to its loss on fixed examples, a 0-dim tensor; called twice.
        before: Parameters before the update by their names in the model; those that are missing did not change.

    Returns:
        Both changes; NaN if a loss or a gradient is not finite.

    Raises:
        OptionError: If a name or shape is not the model's, or the loss is no 0-dim tensor with a graph.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> before = {"weight": torch.ones(1, 1)}
        >>> _ = model.load_state_dict({"weight": torch.zeros(1, 1)})
        >>> effect = wb.probes.update_effect(model, lambda model: model(torch.ones(1, 1)).square().sum(), before)
        >>> effect  # the loss w^2 fell from 1 to 0, its gradient 2 promised twice as much
        UpdateEffect(change=-1.0, predicted=-2.0)
    """
    model = unwrap(model)
    now = {name: weight.detach() for name, weight in model.named_parameters()}
    for name, weight in before.items():
        if name not in now or now[name].shape != weight.shape:
            raise OptionError(
                f"before holds {name} of shape {tuple(weight.shape)}, which is no parameter of the model; pass copies "
                "of model.named_parameters() by their names."
            )
    holder = _Loss(model, loss_of)
    with undisturbed(model), torch.enable_grad():
        earlier = {f"model.{name}": weight.detach().clone().requires_grad_() for name, weight in before.items()}
        first = functional_call(holder, earlier)
        if not isinstance(first, Tensor) or first.ndim or not first.requires_grad:
            raise OptionError("loss_of returned no 0-dim tensor with a graph; return the loss of model(inputs).")
        gradients = torch.autograd.grad(first, list(earlier.values()), allow_unused=True) if earlier else ()
        with torch.no_grad():
            last = loss_of(model)
            parts = [
                (slope.double() * (new.double() - old.double())).sum()
                for name, gradient in zip(before, gradients, strict=True)
                if gradient is not None
                for slope, new, old in in_pieces(gradient, now[name], before[name])
            ]
            predicted = torch.stack(parts).sum() if parts else torch.zeros(())
            change = last.double() - first.detach().double()
    return UpdateEffect(*read_numbers([change, predicted]))


class _Loss(nn.Module):
    """A loss as a module that holds its model, so that it can be computed with other parameters."""

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self._loss_of = model, loss_of

    def forward(self) -> Tensor:
        return self._loss_of(self.model)
