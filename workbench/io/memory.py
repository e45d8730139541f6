"""How much memory there is, and giving back what is not needed any more."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

#: Limits of a container, and what it uses: cgroups of version 2 and 1.
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
#: Size from which it is worth while to give freed blocks back, in bytes.
_LARGE = 2**23


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that this process can still take on a device, in a container as outside of one.

    Args:
        device: Device; of others than the CPU and CUDA the host's memory counts.
    """
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, usage in _LIMITS:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):  # no container, or no limit ("max")
            continue
    return max(free, 0)


def give_back(n_bytes: int = _LARGE) -> None:
    """Give freed memory back to the system, if much of it was freed.

    The allocator of Linux keeps blocks of up to 32 MB for the thread that freed them. Of matrices of that size, which
    several threads take and free in turn, it would hold twice as much as is in use.

    Args:
        n_bytes: Size of the blocks that were freed; of small ones nothing is given back, which takes milliseconds.
    """
    if n_bytes >= _LARGE:
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
