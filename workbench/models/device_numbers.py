"""How tensors are reduced to small results and read: transfers make the host wait, large copies are slow on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

#: Entries that a processor keeps in its cache, with a few copies of them in float64.
_PIECE = 2**17


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Go through tensors of one shape in pieces, where that is quicker: for sums that need copies of what they add up.

    New memory of megabytes costs a processor more than the sums themselves.

    Args:
        tensors: Of the same shape.

    Returns:
        Flat pieces of all of them; the tensors as they are on other devices than the CPU, where they are small, and
        where their memory is not in order.
    """
    first = tensors[0]
    is_plain = all(type(each) in (Tensor, nn.Parameter) and each.is_contiguous() for each in tensors)
    if first.numel() <= _PIECE or first.device.type != "cpu" or not is_plain:
        yield tensors
        return
    yield from zip(*(each.detach().view(-1).split(_PIECE) for each in tensors), strict=True)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; where it comes from the host, the host does not wait for what the device has to do."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def read_arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The values of small tensors on the host, by one transfer for each device that they are on.

    Args:
        tensors: Of any shapes and real dtypes; no gradient is kept.

    Returns:
        One array a tensor, in its shape, float64: no value of a dtype that training uses is rounded.
    """
    found: list[np.ndarray] = [np.zeros(0)] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if type(tensor) in (Tensor, nn.Parameter):
            places.setdefault(tensor.device, []).append(i)
        else:  # a tensor split over ranks knows itself how it is read
            found[i] = np.array(tensor.detach().tolist(), dtype=np.float64)
    for device, here in places.items():
        # A device without float64 has no values that float32 would round.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        message = torch.cat([tensors[i].detach().to(dtype).flatten() for i in here]).cpu().double().numpy()
        ends = np.cumsum([tensors[i].numel() for i in here])
        for i, part in zip(here, np.split(message, ends[:-1]), strict=True):
            found[i] = part.reshape(tuple(tensors[i].shape))
    return found


def read_numbers(tensors: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one number each, by one transfer for each device that they are on.

    Args:
        tensors: Of one number each, of any real dtypes; no gradient is kept.

    Returns:
        One number a tensor, not rounded.
    """
    return [array.item() for array in read_arrays(tensors)]
