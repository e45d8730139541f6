"""Measure free memory, and return freed memory to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

#: Memory limit and usage of a container: cgroups of version 2 and 1.
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
#: Smallest size of freed blocks that are returned to the system, in bytes.
_LARGE = 2**23


def free_memory(device: torch.device | str = "cpu") -> int:
    """Return the memory available to this process on a device, in bytes, within the limits of a container."""
    if torch.device(device).type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch keeps freed memory
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, usage in _LIMITS:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):  # not in a container, or without a limit ("max")
            continue
    return max(free, 0)


def require_memory(n_bytes: int) -> None:
    """Raise MemoryError if an array that a file describes cannot be in memory; its allocation may seem to succeed."""
    if n_bytes > _LARGE and n_bytes > free_memory():
        raise MemoryError(f"it would take {n_bytes} bytes of memory, more than there are")


def give_back(n_bytes: int = _LARGE) -> None:
    """Return freed memory to the system, if many bytes were freed.

    The allocator of Linux keeps blocks of up to 32 MB for the thread that freed them, which can double the memory in
    use.
    """
    if n_bytes >= _LARGE:
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
