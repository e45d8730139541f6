"""Parts of `Ward`: the table of the answer, the figures of the record, and the score."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets
import traitlets
import xarray as xr

from workbench.formatting import short
from workbench.plots.curve_figures import DEFAULT_MEASURES
from workbench.studies import signals as sig
from workbench.widgets.figure import Stage
from workbench.widgets.tables import CELL, HEAD, MUTED, NAME, TABLE
from workbench.widgets.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd


#: Cause of a run without a fault, which has no change.
NOTHING = "nothing"


class AnswerTable(anywidget.AnyWidget):
    """A checkbox for each cause and a radio button for each change; "Nothing wrong" excludes everything else."""

    _esm = Path(__file__).with_name("answer_table.js")
    _css = Path(__file__).with_name("answer_table.css")
    rows = traitlets.List(traitlets.Dict()).tag(sync=True)
    causes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    cure = traitlets.Unicode().tag(sync=True)
    is_locked = traitlets.Bool(False).tag(sync=True)

    def fill(self, causes: Mapping[str, Any], cures: Mapping[str, str]) -> None:
        """Show another set of causes and changes, with none chosen."""
        names = [*(name for name in causes if name in cures), NOTHING]
        with self.hold_sync():
            self.causes, self.cure, self.is_locked = [], "", False
            self.rows = [
                {
                    "cause": name,
                    "title": causes[name].title,
                    "meaning": causes[name].meaning,
                    "change": cures.get(name, "no change"),
                }
                for name in names
            ]

    @traitlets.observe("causes")
    def _exclude(self, change: Any) -> None:
        """Keep "nothing wrong" apart from the causes: the one that was marked last remains."""
        before, now = list(change["old"] or ()), list(change["new"])
        if NOTHING not in now:
            return
        if NOTHING not in before:
            self.cure = ""
            if len(now) > 1:
                self.causes = [NOTHING]
        elif len(now) > 1:
            self.causes = [name for name in now if name != NOTHING]

    @traitlets.observe("cure")
    def _contradict(self, change: Any) -> None:
        """Remove "nothing wrong" when a change is chosen."""
        if change["new"] and NOTHING in self.causes:
            self.causes = []


#: Name of the run in figures.
PATIENT = "patient"


class RecordView(ipywidgets.VBox):
    """The figure of one measurement, by name: a timeline of its signals, or a table of settings without a timeline."""

    def __init__(self, theme: str) -> None:
        self._theme = theme
        self._title, self._stage = ipywidgets.HTML(), Stage()
        self._table = ipywidgets.HTML(layout={"display": "none"})
        self.name = ""
        self.timeline: Timeline | None = None
        super().__init__([self._title, self._table, self._stage])

    def clear(self, sentence: str) -> None:
        """Show a sentence instead of a figure."""
        self.name = ""
        self._title.value = f'<div style="{MUTED}">{html.escape(sentence)}</div>'
        self._drop_timeline()
        self._say_values("")

    def show(self, name: str, measured: xr.Dataset, record: xr.DataTree) -> None:
        """Show a measurement."""
        self.name = name
        nothing = "" if any(measured.sizes.values()) else "The measurement is empty: the model has no such part."
        self._title.value = (
            f'<div style="{HEAD}">{html.escape(name)}</div><div style="{MUTED}">{html.escape(nothing)}</div>'
        )
        self._say_values(value_table(measured))
        signals = signals_of(measured, record)
        if not signals:
            self._drop_timeline()
            return
        before, view = self.timeline, None if self.timeline is None else self.timeline.view
        self.timeline = Timeline({PATIENT: record}, signals=signals, theme=self._theme)
        self.timeline.export_bar.layout.display = "none"  # the widget around it has one
        self.timeline.view = view
        if "layer" in measured.dims or "layer" in measured.coords:  # its layers, and for spectra its eigenvalues
            self.timeline.select(int(measured["step"][-1]), signal=signals[0])
        self._stage.put(self.timeline, replaces=before)

    def close(self) -> None:
        """Remove the view."""
        self._drop_timeline()
        super().close()

    def _drop_timeline(self) -> None:
        if self.timeline is not None:
            self.timeline.close()
        self._stage.clear()
        self.timeline = None

    def _say_values(self, table: str) -> None:
        self._table.value = table
        self._table.layout.display = None if table else "none"


def signals_of(measured: xr.Dataset, record: xr.DataTree) -> list[str]:
    """Return the names of the signals of a measurement, of spectra the main ones; empty if it has no steps."""
    if not measured.sizes.get("step"):
        return []
    found = [name for name, entry in sig.catalogue(record).items() if entry.variable in measured.data_vars]
    return [name for name in found if name in DEFAULT_MEASURES] or found


def losses_of(replay: xr.Dataset) -> dict[str, xr.DataTree]:
    """Return the loss of the run and of its replay with a change as two runs by name."""
    lines = {"the run": replay["loss"], "replay with the change": replay["cured_loss"]}
    return {
        name: xr.DataTree.from_dict({"/monitors": line.dropna("step").to_dataset(name="loss")})
        for name, line in lines.items()
    }


def values_of(measured: xr.Dataset) -> list[tuple[str, str]]:
    """Return name and value of each setting; empty if the measurement has no settings."""
    if "setting" not in measured.dims:
        return []
    return list(zip(measured["setting"].values.tolist(), measured["value"].values.tolist(), strict=True))


def value_table(measured: xr.Dataset) -> str:
    """Return an HTML table of `values_of`, which scrolls; empty if there are none."""
    rows = "".join(
        f'<tr><th scope="row" style="{NAME};font-weight:400">{html.escape(name)}</th>'
        f'<td style="{NAME}">{html.escape(value)}</td></tr>'
        for name, value in values_of(measured)
    )
    return scrolling("settings", f'<table style="{TABLE}">{rows}</table>', "max-height:440px") if rows else ""


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
