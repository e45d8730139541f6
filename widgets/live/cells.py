"""Notebook cells of widgets: a new widget replaces those of the same cell and those with the same folder."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Replaceable(Protocol):
    """A widget whose training another widget can end."""

    def _retire(self, reason: str) -> None:
        """End the training and show the reason."""


@dataclass(frozen=True)
class _Origin:
    """Where a widget was created.

    Attributes:
        cell: Identifier of the notebook cell; None outside of a notebook.
        execution: Identifier of the execution of the cell.
        folder: Folder for the records.
    """

    cell: str | None
    execution: str | None
    folder: Path


_created: list[tuple[weakref.ref[Any], _Origin]] = []


def succeed(widget: Replaceable, folder: Path) -> None:
    """End the training of widgets that a new one replaces.

    A cell that is run again replaces its widgets of the previous execution; several widgets of one execution coexist.
    Two widgets never write into the same folder.
    """
    origin = _Origin(*_present_cell(), folder.absolute())
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


def forget(widget: Replaceable) -> None:
    """Remove a closed widget from the list of widgets."""
    _created[:] = [(reference, origin) for reference, origin in _created if reference() not in (None, widget)]


def page_thread() -> str | None:
    """Return the kernel thread that receives messages of the current page; None for the thread of the cells."""
    return _present_request().get("header", {}).get("subshell_id")


def _present_cell() -> tuple[str | None, str | None]:
    """Return the identifiers of the running cell and its execution from the notebook's front end; None in a script."""
    request = _present_request()
    return request.get("metadata", {}).get("cellId"), request.get("header", {}).get("msg_id")


def _present_request() -> dict[str, Any]:
    """Return the front end's message that the current context answers; empty in a script."""
    if "IPython" not in sys.modules:
        return {}
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return kernel.get_parent("shell") if kernel is not None and hasattr(kernel, "get_parent") else {}
