"""A table with one selectable row, by mouse or keyboard, in JupyterLab's colors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.errors import require_listed


class ChoiceTable(anywidget.AnyWidget):
    """A table in which a click on a row, or Enter on its name, chooses it; ``value`` is its id, empty for none."""

    _esm = Path(__file__).with_name("choice_table.js")
    _css = Path(__file__).with_name("choice_table.css")
    label = traitlets.Unicode().tag(sync=True)
    empty = traitlets.Unicode("No rows").tag(sync=True)
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    rows = traitlets.List(traitlets.Dict()).tag(sync=True)
    value = traitlets.Unicode().tag(sync=True)

    def fill(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replace the rows; the chosen row stays if it is among them, otherwise the first is chosen."""
        rows = list(rows)
        names = [row["id"] for row in rows]
        with self.hold_sync():
            self.rows = rows
            if self.value not in names:
                self.value = names[0] if names else ""

    def texts(self) -> list[list[str]]:
        """Return the column heads and the rows as text."""
        return [list(self.columns), *([cell["text"] for cell in row["cells"]] for row in self.rows)]

    def choose(self, name: str) -> None:
        """Choose a row."""
        names = [row["id"] for row in self.rows]
        require_listed(self.label, [name], names)
        self.value = name


def cell(text: str, *, state: str = "", is_number: bool = False) -> dict[str, Any]:
    """Return a cell of a row."""
    return {"text": text, "state": state, "is_number": is_number}


def row(name: str, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row."""
    return {"id": name, "cells": list(cells)}
