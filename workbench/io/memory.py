"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

import torch

#: Limits of a container, and what it uses: cgroups of version 2 and 1.
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


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
