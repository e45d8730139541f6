"""The score of a finished case with its parts and evidence, and the scores of programs at the same level."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.formatting import short
from workbench.widgets.tables import CELL, HEAD, NAME, TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

_WRAPPED = "padding:2px 12px 2px 0;text-align:left;white-space:normal"
#: Number of characters up to which texts of a column are not wrapped.
_SHORT = 32


class ScoreView(ipywidgets.VBox):
    """Tables of a score; empty until a case is finished."""

    def __init__(self) -> None:
        half = {"flex": "1 1 420px", "min_width": "0", "width": "auto"}
        self._score, self._board = ipywidgets.HTML(layout=half), ipywidgets.HTML(layout=half)
        self._evidence = ipywidgets.HTML()
        row = ipywidgets.HBox([self._score, self._board], layout={"flex_flow": "row wrap", "grid_gap": "4px 24px"})
        self.tables = (self._score, self._board, self._evidence)
        super().__init__([row, self._evidence], layout={"display": "none"})

    def clear(self) -> None:
        """Show nothing."""
        self.layout.display = "none"
        for part in self.tables:
            part.value = ""

    def show(self, tables: Mapping[str, pd.DataFrame]) -> None:
        """Show tables by title: the parts of the score, the board, and the evidence."""
        for part, (title, table) in zip(self.tables, tables.items(), strict=True):
            part.value = f'<div style="{HEAD}">{html.escape(title)}</div>{scrolling(title, table_html(table))}'
        self.layout.display = None


def scrolling(label: str, table: str, style: str = "") -> str:
    """Return HTML of a table that scrolls, also by keyboard, if it is larger than its place."""
    box = f'tabindex="0" role="region" aria-label="{html.escape(label)}" style="overflow:auto;{style}"'
    return f"<div {box}>{table}</div>"


def texts_of(table: pd.DataFrame) -> list[list[str]]:
    """Return the column heads and the rows of a table as text, without its index."""
    rows = [[_text(value) for value in row] for row in table.itertuples(index=False)]
    return [[str(name).replace("_", " ") for name in table.columns], *rows]


def table_html(table: pd.DataFrame) -> str:
    """Return an HTML table in which numbers align to the right and long texts wrap."""
    head, *rows = texts_of(table)
    longest = [max(map(len, column)) for column in zip(*rows, strict=True)] or [0] * len(head)
    styles = [
        (CELL if table[name].dtype.kind in "iuf" else NAME if n <= _SHORT else _WRAPPED) + ";vertical-align:top"
        for name, n in zip(table.columns, longest, strict=True)
    ]
    cells = "".join(
        f'<th scope="col" style="{style};font-weight:600;white-space:normal">{html.escape(name)}</th>'
        for name, style in zip(head, styles, strict=True)
    )
    body = "".join(_row(row, styles) for row in rows)
    return f'<table style="{TABLE}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'


def _row(texts: Sequence[str], styles: Sequence[str]) -> str:
    cells = "".join(f'<td style="{style}">{html.escape(text)}</td>' for text, style in zip(texts, styles, strict=True))
    return f"<tr>{cells}</tr>"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else short(value)
    return str(value)
