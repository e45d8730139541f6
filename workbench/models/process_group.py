"""Properties of the process group that trains one model."""

from __future__ import annotations

import torch
from torch import distributed


def is_shared() -> bool:
    """Return whether there are several ranks."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def message_device() -> torch.device:
    """Return the device for messages between ranks: the CPU if the backend supports it, so no step waits for a GPU."""
    can_use_host = "cpu" in distributed.get_backend_config()
    return torch.device("cpu") if can_use_host else torch.device("cuda", torch.cuda.current_device())
