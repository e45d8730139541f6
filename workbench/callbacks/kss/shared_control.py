"""Settings of KSS shared by several processes that train one model (DDP)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from workbench.callbacks.kss.control import ControlValues
from workbench.models.process_group import message_device

#: Code of a named choice of layers in the message; layers given by number are sent as their count.
_CODES = {"half": -1, "all": -2}


def control_of_first_rank(control: ControlValues) -> ControlValues:
    """The controls of rank 0, on every rank; one message of five numbers, another if layers are given by number."""
    code = _CODES[control.layers] if isinstance(control.layers, str) else len(control.layers)
    message = torch.tensor(
        [control.enabled, control.strength, control.interval, control.gamma, code],
        dtype=torch.float64,
        device=message_device(),
    )
    distributed.broadcast(message, src=0)
    enabled, strength, interval, gamma, code = message.tolist()
    layers: str | tuple[int, ...] | None = next((name for name, number in _CODES.items() if number == code), None)
    if layers is None:
        own = control.layers if distributed.get_rank() == 0 else [0] * int(code)
        numbers = torch.tensor(own, device=message.device)
        distributed.broadcast(numbers, src=0)
        layers = tuple(numbers.tolist())
    return ControlValues(bool(enabled), strength, int(interval), gamma, layers)


def summed(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients summed over all ranks, in one message."""
    dense = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    message = torch.cat([gradient.flatten() for gradient in dense])
    distributed.all_reduce(message)
    parts = message.split([gradient.numel() for gradient in dense])
    return [part.view_as(gradient) for part, gradient in zip(parts, dense, strict=True)]
