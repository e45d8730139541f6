"""Efficient reduction and transfer of tensors: few transfers that the host waits for, no large copies on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

#: Number of entries that fit into the cache of a processor, together with a few float64 copies of them.
_PIECE = 2**17


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat pieces of tensors of one shape where that is faster, for sums that need copies of their terms.

    On a CPU, allocating megabytes takes longer than the sums themselves. Tensors that are small, not contiguous, or not
    on the CPU are yielded unchanged.
    """
    first = tensors[0]
    are_contiguous = all(type(each) in (Tensor, nn.Parameter) and each.is_contiguous() for each in tensors)
    if first.numel() <= _PIECE or first.device.type != "cpu" or not are_contiguous:
        yield tensors
        return
    yield from zip(*(each.detach().view(-1).split(_PIECE) for each in tensors), strict=True)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; a copy from the host is asynchronous."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def read_arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Return the values of small tensors on the host as float64 arrays of their shapes, with one transfer per device.

    Dtypes must be real; no value of a dtype used in training is rounded.
    """
    found: list[np.ndarray] = [np.zeros(0)] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if type(tensor) in (Tensor, nn.Parameter):
            places.setdefault(tensor.device, []).append(i)
        else:  # a tensor subclass, such as one split over ranks, has its own way to be read
            found[i] = np.array(tensor.detach().tolist(), dtype=np.float64)
    for device, here in places.items():
        # On a device without float64 there are no values that float32 would round.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        message = torch.cat([tensors[i].detach().to(dtype).flatten() for i in here]).cpu().double().numpy()
        ends = np.cumsum([tensors[i].numel() for i in here])
        for i, part in zip(here, np.split(message, ends[:-1]), strict=True):
            found[i] = part.reshape(tuple(tensors[i].shape))
    return found


def read_numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors with one element each, not rounded, with one transfer per device."""
    return [array.item() for array in read_arrays(tensors)]
