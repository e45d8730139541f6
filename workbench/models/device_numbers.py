"""Small results of a device, read together: each transfer makes the host wait for all that the device has to do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


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
