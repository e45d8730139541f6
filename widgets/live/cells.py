"""Where a widget was made and who hears it: a new one takes the place of those of its cell and of its folder."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Replaceable(Protocol):
    """A widget whose training can be ended by another."""

    def retire(self, reason: str) -> None:
        """End the training, and say why."""


@dataclass(frozen=True)
class _Origin:
    """Where a widget was made.

    Attributes:
        cell: Identifier of the notebook's cell; None: not made in one.
        execution: Identifier of this run of the cell.
        folder: Folder in which it records.
    """

    cell: str | None
    execution: str | None
    folder: Path


_made: list[tuple[weakref.ref[Any], _Origin]] = []


def succeed(widget: Replaceable, folder: Path) -> None:
    """End the training of widgets whose place a new one takes.

    A cell that is run again replaces its own widgets of the earlier execution; several widgets of one execution stay
    beside each other. Two widgets never write into one folder.

    Args:
        widget: The new one.
        folder: Folder in which it records.
    """
    origin = _Origin(*_present_cell(), folder.absolute())
    _made[:] = [(made, other) for made, other in _made if made() is not None]
    for made, other in _made:
        old = made()
        if old is None:
            continue
        if origin.cell is not None and other.cell == origin.cell and other.execution != origin.execution:
            old.retire("its cell was run again")
        elif other.folder == origin.folder:
            old.retire("another one records into its folder")
    _made.append((weakref.ref(widget), origin))


def forget(widget: Replaceable) -> None:
    """A widget is closed: it has no place any more."""
    _made[:] = [(made, origin) for made, origin in _made if made() not in (None, widget)]


def page_thread() -> str | None:
    """The thread in which the kernel hears the page of the present context; None: the one in which cells run."""
    return _present_request().get("header", {}).get("subshell_id")


def _present_cell() -> tuple[str | None, str | None]:
    """The cell that runs now and its execution, as the notebook's front end names them; None in a script."""
    request = _present_request()
    return request.get("metadata", {}).get("cellId"), request.get("header", {}).get("msg_id")


def _present_request() -> dict[str, Any]:
    """The message of the front end that the present context answers; empty in a script."""
    if "IPython" not in sys.modules:
        return {}
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return kernel.get_parent("shell") if kernel is not None and hasattr(kernel, "get_parent") else {}
