"""Check of losses that are differentiated."""

from __future__ import annotations

from torch import Tensor

from workbench.errors import OptionError


def require_graph(loss: object) -> Tensor:
    """Return a loss if it is a 0-dim tensor with a graph.

    Args:
        loss: The result of a user's ``loss_of(model)``.

    Raises:
        OptionError: If it is not.
    """
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        remedy = "return the loss of model(inputs), computed with gradients enabled"
        raise OptionError.of("loss_of(model)", loss, "a 0-dim tensor with a graph", remedy=remedy)
    return loss
