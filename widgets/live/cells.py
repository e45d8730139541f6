"""Notebook cells of widgets: a new widget replaces those of the same cell and those with the same folder."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any, NamedTuple


class _Origin(NamedTuple):
    """Where a widget was created: its notebook cell (None in a script), the execution of the cell, and its folder."""

    cell: str | None
    execution: str | None
    folder: Path


_created: list[tuple[weakref.ref[Any], _Origin]] = []


def succeed(widget: Any, folder: Path) -> None:
    """End the training of widgets of earlier executions of this cell by ``_retire``, which shows the reason."""
    request = _present_request()
    cell, execution = request.get("metadata", {}).get("cellId"), request.get("header", {}).get("msg_id")
    origin = _Origin(cell, execution, folder.absolute())
    _created[:] = [(reference, other) for reference, other in _created if reference() is not None]
    for reference, other in _created:
        old = reference()
        if old is None:
            continue
        if origin.cell is not None and other.cell == origin.cell and other.execution != origin.execution:
            old._retire("its cell was run again")
        elif other.folder == origin.folder:
            old._retire("another widget records into the same folder")
    _created.append((weakref.ref(widget), origin))


def forget(widget: Any) -> None:
    """Remove a closed widget from the list of widgets."""
    _created[:] = [(reference, origin) for reference, origin in _created if reference() not in (None, widget)]


def page_thread() -> str | None:
    """Return the kernel thread that receives messages of the current page; None for the thread of the cells."""
    return _present_request().get("header", {}).get("subshell_id")


def _present_request() -> dict[str, Any]:
    """Return the front end's message that the current context answers; empty in a script."""
    if "IPython" not in sys.modules:
        return {}
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return kernel.get_parent("shell") if kernel is not None and hasattr(kernel, "get_parent") else {}
