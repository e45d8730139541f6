"""Progress bars, and the number of available cores."""

from __future__ import annotations

import os
from typing import Any


def progress_bar(is_on: bool, *, total: int | None, label: str, unit: str) -> Any:
    """A tqdm bar that leaves no trace when done; silent if off."""
    from tqdm import tqdm

    return tqdm(total=total, desc=label, unit=unit, disable=not is_on, leave=False)


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
