"""Close what nobody closed before the interpreter ends, while threads still work."""

from __future__ import annotations

import atexit
import importlib
import sys
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.background_writer import BackgroundWriter

#: To wait for a disk that hangs.
_SECONDS = 30.0

_open_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()
_exit = {"is_over": False}


def close_at_exit(writer: BackgroundWriter) -> None:
    """Close a writer at the interpreter's end, unless it is closed or gone by then."""
    _open_writers.add(writer)


def is_exiting() -> bool:
    """Whether threads have stopped, or are about to."""
    return _exit["is_over"] or sys.is_finalizing()


def _close_all() -> None:
    for writer in list(_open_writers):
        writer.close_within(_SECONDS)
    _exit["is_over"] = True


# Zarr works in the threads of concurrent.futures, which stop taking work before `atexit` functions are called. What is
# registered here after them is called before them. The first block that is written may import dask and with it the
# processes, which cannot register their own end any more once the interpreter's has begun. Registered with the import:
# whoever trains and stops at the end registers later, and so is called before its writers are closed.
for _kind in ("thread", "process"):
    importlib.import_module(f"concurrent.futures.{_kind}")
getattr(threading, "_register_atexit", atexit.register)(_close_all)
