"""The lock of a store that is being written: one writer at a time, and a sign of life for readers."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

from workbench.errors import StoreError

#: Number of attempts to lock a store, and the wait between them in seconds: a reader may be looking for a writer.
_N_ATTEMPTS, _WAIT = 5, 0.05


def owner() -> str:
    """Return a description of this process, which a store keeps for the message to a second writer."""
    return f"process {os.getpid()} on {platform.node()}"


class RunLock:
    """Lock of a store for writing. The system releases it when the process ends, however it ends.

    The folder itself is locked, so that no file is added to the store. Where the system cannot lock folders, as on
    Windows and on some network drives, there is no lock.
    """

    def __init__(self, store: Path) -> None:
        self._process = os.getpid()
        self._folder: int | None = None
        for attempt in range(_N_ATTEMPTS):
            time.sleep(_WAIT if attempt else 0)
            try:
                self._folder = _locked(store, is_shared=False)
            except BlockingIOError:
                continue
            return
        try:
            writer = str(json.loads((store / "zarr.json").read_text())["attributes"]["writer"])
        except (OSError, ValueError, KeyError):
            writer = "another process"
        writer = "an unclosed recorder of this process" if writer == owner() else writer
        raise StoreError(f"The run at {store} is being written by {writer}; close it first, or choose another path.")

    def __del__(self) -> None:
        try:  # noqa: SIM105  contextlib may be gone at interpreter exit, where the system releases the lock
            self.release()
        except Exception:  # noqa: BLE001
            pass

    def release(self) -> None:
        """Release the lock; a forked child releases nothing."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if os.getpid() == self._process:
            import fcntl

            fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)


def has_writer(store: Path) -> bool | None:
    """Return whether a store is being written; None if that cannot be determined."""
    try:
        folder = _locked(store, is_shared=True)
    except BlockingIOError:
        return True
    if folder is None:
        return None
    os.close(folder)
    return False


def _locked(store: Path, *, is_shared: bool) -> int | None:
    """Return a descriptor of a folder that is locked; None if folders cannot be locked."""
    try:
        import fcntl

        folder = os.open(store, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(folder, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(folder)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return folder
