"""Communication of KSS between processes that train one model (DDP)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from workbench.callbacks.kss.control import ControlValues
from workbench.models.wrapping import message_device

#: Codes of named choices of layers in the message. For layers given by number, the message holds how many there are.
_CODES = {"half": -1, "all": -2}


def control_of_first_rank(control: ControlValues) -> ControlValues:
    """Return the controls of rank 0 on every rank.

    This takes one message of five numbers, and another one if layers are given by number.
    """
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
        sent = control.layers if distributed.get_rank() == 0 else [0] * int(code)
        numbers = torch.tensor(sent, device=message.device)
        distributed.broadcast(numbers, src=0)
        layers = tuple(numbers.tolist())
    return ControlValues(bool(enabled), strength, int(interval), gamma, layers)


def summed(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients summed over all ranks, in one message."""
    dense = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    message = torch.cat([gradient.flatten() for gradient in dense])
    distributed.all_reduce(message)
    parts = message.split([gradient.numel() for gradient in dense])
    return [part.view_as(gradient) for part, gradient in zip(parts, dense, strict=True)]
