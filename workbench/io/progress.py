"""Progress bars, and the number of available cores."""

from __future__ import annotations

import os
from typing import Any


def progress_bar(is_on: bool, *, total: int | None, label: str, unit: str) -> Any:
    """A tqdm bar that leaves no trace when done; silent if off, and then tqdm need not be installed."""
    if not is_on:
        return _NoBar()
    from tqdm import tqdm

    return tqdm(total=total, desc=label, unit=unit, leave=False)


class _NoBar:
    """The part of a bar's interface that is used here, without a bar; like a bar that is off it counts nothing."""

    n = 0

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def update(self, n: int = 1) -> None: ...


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
