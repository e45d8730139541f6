"""A table of which one row is chosen, by mouse or keyboard; in JupyterLab's colours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from workbench.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class ChoiceTable(anywidget.AnyWidget):
    """Rows under column heads; a click, or Enter on the name of a row, chooses it.

    Attributes:
        columns: Heads, the first of them that of the rows' names.
        rows: Of each row its ``id`` and ``cells``: dicts of ``text`` and, where there is one, ``state``; a cell with
            ``is_number`` is aligned to the right.
        value: The id of the chosen row; empty: none.
    """

    _esm = Path(__file__).with_name("choice_table.js")
    _css = Path(__file__).with_name("choice_table.css")
    label = traitlets.Unicode().tag(sync=True)
    empty = traitlets.Unicode("nothing here").tag(sync=True)
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    rows = traitlets.List(traitlets.Dict()).tag(sync=True)
    value = traitlets.Unicode().tag(sync=True)

    def fill(self, rows: Iterable[dict[str, Any]]) -> None:
        """Show other rows; the chosen one stays if it is among them, else the first is chosen."""
        rows = list(rows)
        names = [row["id"] for row in rows]
        with self.hold_sync():
            self.rows = rows
            if self.value not in names:
                self.value = names[0] if names else ""

    def texts(self) -> list[list[str]]:
        """The heads and the rows as texts."""
        return [list(self.columns), *([cell["text"] for cell in row["cells"]] for row in self.rows)]

    def choose(self, name: str) -> None:
        """Choose a row.

        Raises:
            OptionError: If it is not shown.
        """
        names = [row["id"] for row in self.rows]
        if name not in names:
            raise OptionError(f"There is no row '{name}' in the {self.label}; choose from {', '.join(names)}.")
        self.value = name


def cell(text: str, *, state: str = "", is_number: bool = False) -> dict[str, Any]:
    """One cell of a row."""
    return {"text": text, "state": state, "is_number": is_number}


def row(name: str, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row."""
    return {"id": name, "cells": list(cells)}
