"""The lock of a store that is being written: one writer at a time, and a sign of life for readers."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from filelock import FileLock, Timeout

from workbench.errors import StoreError

#: File in the store that its writer holds locked; the system releases it when the process ends, however it ends.
_FILE = ".writer"
#: Seconds to wait for a reader that looks whether there is a writer.
_PATIENCE = 0.5


def owner() -> str:
    """Return a description of this process, which a store keeps for the message to a second writer."""
    return f"process {os.getpid()} on {platform.node()}"


def take_lock(store: Path) -> FileLock:
    """Lock a store for writing, until the lock is released or this process ends.

    Raises:
        StoreError: If it is being written already.
    """
    lock = FileLock(store / _FILE, thread_local=False)
    try:
        lock.acquire(timeout=_PATIENCE, poll_interval=0.05)
    except Timeout:
        try:
            writer = str(json.loads((store / "zarr.json").read_text())["attributes"]["writer"])
        except (OSError, ValueError, KeyError):
            writer = "another process"
        writer = "an unclosed recorder of this process" if writer == owner() else writer
        raise StoreError(
            f"The run at {store} is being written by {writer}; close it first, or choose another path.",
            name="path",
            value=store,
            expected="a run that is not being written",
        ) from None
    return lock


def has_writer(store: Path) -> bool | None:
    """Return whether a store is being written; None if that cannot be determined, as in a store of an older version."""
    try:
        import fcntl

        with (store / _FILE).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except (ImportError, OSError):
        return None
