"""Parts of `AssessmentReport`: its page with figures drawn once visible, criteria and evidence, two designs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import numpy as np
import traitlets
import xarray as xr

from workbench.errors import WorkbenchError, require_listed
from workbench.formatting import percent
from workbench.plots import layer_profile
from workbench.plots.finding_figures import criteria_bands
from workbench.reports import pictures
from workbench.reports.assessment_document import proxy_of
from workbench.reports.document import Block, Document, Lead, Numbers, Picture, Quantity
from workbench.reports.formats import html
from workbench.reports.make_report import document_of
from workbench.reports.pictures import image
from workbench.schema.statuses import WORST_FIRST, CriterionState
from workbench.widgets.base import WorkbenchWidget, known
from workbench.widgets.figure import FigureStage
from workbench.widgets.tables import HEAD, MUTED, NAME, TABLE, Tags

_log = logging.getLogger(__name__)
#: Placeholder line of a figure, which page.js replaces by an empty frame.
_FRAME = "picture {number} of the report"


class ReportPage(anywidget.AnyWidget):
    """The HTML page of `workbench.reports` inside a notebook, which requests text and figures when it is displayed."""

    _esm = Path(__file__).with_name("page.js")
    _css = Path(__file__).with_name("page.css")
    marked = traitlets.Unicode().tag(sync=True)

    def __init__(self, *, lock: Any = None) -> None:
        self.lock = lock or threading.RLock()
        self.tree: xr.DataTree | None = None
        self.document: Document | None = None
        self._text = ""
        super().__init__()
        self.on_msg(self._receive)

    def tell(self, tree: xr.DataTree) -> None:
        """Show the report of a tree."""
        document = document_of(tree)
        text = html(_framed(document), tree)
        with self.lock:
            self.tree, self.document, self._text = tree, document, text
            self.marked = ""
            self.send({"is_new": True})

    def lead_to(self, anchor: str) -> None:
        """Scroll to a row and mark it."""
        self.marked = ""
        self.marked = anchor

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        with self.lock:
            if self.document is None:
                return
            pictures = self.document.pictures
            if content.get("question") == "text":
                frames = [
                    {"title": p.title, "caption": p.caption, "alternative": p.alternative, "line": _line(number)}
                    for number, p in enumerate(pictures)
                ]
                self.send({"answer": content["id"], "text": self._text, "frames": frames})
            elif content.get("question") == "picture" and content["number"] < len(pictures):
                self.send(*self._drawn(pictures[content["number"]], content["id"]))

    def _drawn(self, picture: Picture, question: str) -> tuple[dict[str, Any], list[bytes]]:
        try:
            mime, content = image(picture, known(self.tree))
        except WorkbenchError as error:
            return {"answer": question, "failure": str(error)}, []
        except Exception as error:  # noqa: BLE001  (a bug: the report stays usable, and the log has the traceback)
            _log.exception("The figure '%s' could not be drawn.", picture.title)
            return {"answer": question, "failure": f"{type(error).__name__}: {error}"}, []
        return {"answer": question, "mime": mime}, [content]


def _framed(document: Document) -> Document:
    """Return the document with a placeholder line for each figure, because figures take time to draw."""
    number, sections = 0, []
    for section in document.sections:
        blocks: list[Block] = []
        for block in section.blocks:
            if isinstance(block, Picture):
                blocks.append(Lead(_line(number)))
                number += 1
            else:
                blocks.append(block)
        sections.append(replace(section, blocks=tuple(blocks)))
    return replace(document, sections=tuple(sections))


def _line(number: int) -> str:
    return _FRAME.format(number=number)


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


#: Parts that contain only summary numbers -> part whose figure shows the underlying data.
_PICTURED_BY = {"structure": "flow", "trials": "pilot"}
#: Parts whose figure has sentences next to its frame, and its minimum width in pixels.
_OF_BANDS, _WIDTH_OF_BANDS = ("criteria", "hardware"), 860


class Evidence(ipywidgets.VBox):
    """A criterion as text and as a figure; ``key`` identifies the figure, None if it must be redrawn."""

    def __init__(self, head: str = "", *, theme: str = "page") -> None:
        self.head = head
        self.key: tuple[str, str] | None = None
        self.words = ipywidgets.HTML()
        self.button = ipywidgets.Button(
            description="Show in report", tooltip="Show the row of this number in the report's tables",
            layout={"width": "auto", "align_self": "flex-start", "display": "none"},
        )  # fmt: skip
        self._place = FigureStage(theme)
        super().__init__(
            [self.words, self.button, self._place],
            layout={"flex": "1 1 760px", "min_width": "0", "max_width": "100%", "overflow": "hidden"},
        )

    @property
    def figure(self) -> Any:
        """The displayed figure; None if there is none."""
        return self._place.figure

    def clear(self) -> None:
        """Show nothing."""
        self.words.value, self.button.layout.display = "", "none"
        self.key = None
        if self.figure is not None:
            self._place.draw(None)

    def tell(self, numbers: Numbers, name: str) -> None:
        """Show a criterion."""
        quantity = numbers.criterion(name)
        data = numbers.node("criteria").sel(criterion=name)
        self.words.value = _words(quantity, data, self.head, proxy_of(numbers))
        self.button.layout.display = None
        key, draw = picture_of(numbers, name)
        if key != self.key:
            self.key = key
            self._place.draw(draw(), min_width=_WIDTH_OF_BANDS if key[0] in _OF_BANDS else 0)


def picture_of(numbers: Numbers, name: str) -> tuple[tuple[str, str], Callable[[], Any]]:
    """Return the figure of the data that support a criterion, or of the criteria of its mode if there is none."""
    criteria = numbers.node("criteria")
    one = criteria.sel(criterion=name)
    part, variable = str(one["path"].values).strip("/"), str(one["variable"].values)
    if part == "spectra" and numbers.node(part)[variable].dims == ("layer",):
        return (part, variable), lambda: layer_profile(numbers.node(part), measures=[variable])
    part = _PICTURED_BY.get(part, part)
    found = pictures.of_part(part, numbers.node(part), at=numbers.at) if part and numbers.has(part) else []
    picture = next((block for block in found if isinstance(block, Picture)), None)
    if picture:
        return (part, picture.title), lambda: picture.draw(numbers.tree, "bokeh")
    mode = str(one["failure_mode"].values)
    alike = criteria.isel(criterion=[str(its) == mode for its in criteria["failure_mode"].values])
    return ("criteria", mode), lambda: criteria_bands(alike)


def _words(quantity: Quantity, data: xr.Dataset, head: str, proxy: str) -> str:
    text = " ".join(filter(None, [quantity.text, quantity.units]))
    layer, n_runs, sure = int(data["layer"]), int(data["n_reference"]), float(data["confidence"])
    reason = str(data["reason"].values).strip()
    lines = [f"<b>{escape(quantity.state)}</b>" + (f", confidence {percent(sure)}" if sure > 0 else "")]
    if quantity.state != CriterionState.NOT_MEASURED:
        band = f"healthy: {quantity.band}" + (f", as in {n_runs} healthy runs" if n_runs else "")
        place = f" in block {layer}" if layer >= 0 else ""
        of = f", of {proxy}" if proxy else ""
        lines.insert(0, f"<b>{escape(text)}</b>{place}{of}; {escape(band)}")
    if reason and quantity.state != CriterionState.HEALTHY:
        lines.append(escape(f"{reason[0].upper()}{reason[1:].rstrip('.')}."))
    title = escape(": ".join(filter(None, [head, quantity.meaning])))
    body = "".join(f"<div>{line}</div>" for line in lines)
    where = f'<div style="{MUTED};overflow-wrap:anywhere">{escape(quantity.where)}</div>'
    style = "white-space:normal;line-height:1.5;color:var(--jp-content-font-color1,#222)"
    return f'<div aria-live="polite" style="{style}"><div style="{HEAD}">{title}</div>{body}{where}</div>'


_ALL = "all failure modes"


class CriteriaView:
    """Filters, a table, and the evidence for its chosen row."""

    def __init__(self, owner: WorkbenchWidget, lead_to: Callable[[str], None]) -> None:
        self._numbers: Numbers | None = None
        self.mode = ipywidgets.Dropdown(
            options=[(_ALL, "")], description="show", style={"description_width": "64px"}, layout={"width": "340px"}
        )
        self.states = Tags(label="states")
        self.table = ChoiceTable(label="criteria", empty="No criterion has this failure mode and state.")
        self.table.columns = ["criterion", "state", "value", "healthy band"]
        self.evidence = Evidence(theme=owner.theme)
        table = ipywidgets.VBox([self.table], layout={"flex": "1 1 430px", "min_width": "0", "max_width": "100%"})
        row_layout = {"flex_flow": "row wrap", "grid_gap": "8px 18px", "align_items": "flex-start"}
        self.box = ipywidgets.VBox([self.mode, self.states, ipywidgets.HBox([table, self.evidence], layout=row_layout)])
        owner._watch(self.mode, lambda _: self._filter())
        owner._watch(self.states, lambda _: self._filter())
        owner._watch(self.table, lambda _: self.draw())
        owner._on_click(
            self.evidence.button, lambda _: lead_to(known(self._numbers).criterion(self.table.value).anchor)
        )
        self.is_visible = False

    def tell(self, tree: xr.DataTree) -> None:
        """Show another assessment; the figure is drawn by `draw`."""
        numbers = Numbers(tree)
        found = numbers.texts("criteria", "state")
        self.evidence.key = None  # the old figure stays until the one of this assessment is drawn
        self._numbers = numbers
        titles = dict(
            zip(numbers.names("failure_modes", "failure_mode"), numbers.texts("failure_modes", "title"), strict=True)
        )
        owners = numbers.texts("criteria", "failure_mode")
        options = [(f"{title} ({owners.count(mode)})", mode) for mode, title in titles.items() if mode in owners]
        self.mode.options = [(f"{_ALL} ({len(owners)})", ""), *options]
        self.states.options = [
            {"name": state, "text": f"{state} {found.count(state)}"} for state in WORST_FIRST if state in found
        ]
        self.states.value = self.states.names
        self._filter()

    def draw(self) -> None:
        """Draw the evidence of the chosen row if the view is visible."""
        if not self.is_visible or self._numbers is None:
            return
        if self.table.value:
            self.evidence.tell(self._numbers, self.table.value)
        else:
            self.evidence.clear()

    def _filter(self) -> None:
        numbers = known(self._numbers)
        ids = numbers.names("criteria", "criterion")
        owners, states = (numbers.texts("criteria", name) for name in ("failure_mode", "state"))
        wanted = {
            name
            for name, owner, state in zip(ids, owners, states, strict=True)
            if state in self.states.value and self.mode.value in ("", owner)
        }
        ranked = sorted(ids, key=ranking(numbers))
        self.table.fill(row(name, _cells(numbers.criterion(name))) for name in ranked if name in wanted)
        self.draw()


def ranking(numbers: Numbers) -> Callable[[str], tuple[int, float]]:
    """Return a sort key for criteria: the worst state first, then the highest confidence."""
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    confidence = np.nan_to_num(numbers.node("criteria")["confidence"].values)  # NaN: not evaluated
    places = {
        name: (WORST_FIRST.index(state), -float(sure))
        for name, state, sure in zip(ids, states, confidence, strict=True)
    }
    return places.__getitem__


def value_of(quantity: Quantity) -> str:
    """Return value and unit for a cell; empty if not measured."""
    return (
        "" if quantity.state == CriterionState.NOT_MEASURED else " ".join(filter(None, [quantity.text, quantity.units]))
    )


def _cells(quantity: Quantity) -> list[dict]:
    return [
        cell(quantity.meaning),
        cell(quantity.state, state=quantity.state),
        cell(value_of(quantity), is_number=True),
        cell(quantity.band),
    ]


class SideBySide:
    """Two designs side by side: a table of criteria, and the evidence of the chosen one in each design."""

    def __init__(self, owner: WorkbenchWidget, lead_to: Callable[[str], None]) -> None:
        self._tree: xr.DataTree | None = None
        style = {"style": {"description_width": "64px"}, "layout": {"width": "260px"}}
        self.first = ipywidgets.Dropdown(description="design", **style)
        self.second = ipywidgets.Dropdown(description="versus", **style)
        self.only_different = ipywidgets.Checkbox(
            False, description="Different states only", indent=False, layout={"width": "auto"}
        )
        self._figures = ipywidgets.HTML(layout={"overflow": "auto hidden"})
        self.table = ChoiceTable(
            label="criteria of both designs", empty="All criteria have the same state in both designs."
        )
        self.evidence = (Evidence(theme=owner.theme), Evidence(theme=owner.theme))
        line = {"flex_flow": "row wrap", "grid_gap": "4px 12px", "align_items": "center"}
        self.box = ipywidgets.VBox(
            [
                ipywidgets.HBox([self.first, self.second, self.only_different], layout=line),
                self._figures,
                self.table,
                ipywidgets.HBox(self.evidence, layout=line | {"grid_gap": "8px 18px", "align_items": "flex-start"}),
            ]
        )
        for control in (self.first, self.second, self.only_different):
            owner._watch(control, lambda _: self._fill())
        owner._watch(self.table, lambda _: self.draw())

        def lead(place: int) -> None:
            lead_to(self._both[place].criterion(self.table.value).anchor)

        owner._on_click(self.evidence[0].button, lambda _: lead(0))
        owner._on_click(self.evidence[1].button, lambda _: lead(1))
        self.is_visible = self._is_telling = False

    def tell(self, tree: xr.DataTree) -> None:
        """Show another comparison; figures are drawn by `draw`."""
        self._tree = tree
        names = Numbers(tree).names("designs", "design")
        self._is_telling = True
        try:
            for control, name in ((self.first, names[0]), (self.second, names[min(1, len(names) - 1)])):
                control.options = names
                control.value = name
        finally:
            self._is_telling = False
        self._fill()

    def draw(self) -> None:
        """Draw the evidence of the chosen row if the view is visible."""
        if not self.is_visible or self._tree is None:
            return
        for evidence, numbers, name in zip(self.evidence, self._both, self._names, strict=True):
            evidence.head = name
            if self.table.value in numbers.names("criteria", "criterion"):
                evidence.tell(numbers, self.table.value)
            else:
                evidence.clear()

    @property
    def _names(self) -> tuple[str, str]:
        return self.first.value, self.second.value

    @property
    def _both(self) -> tuple[Numbers, Numbers]:
        first, second = (Numbers(known(self._tree), at=f"/{name}") for name in self._names)
        return first, second

    def _fill(self) -> None:
        if self._is_telling:
            return
        both = self._both
        for evidence in self.evidence:
            evidence.key = None  # the old figures stay until those of these designs are drawn
        self._figures.value = _figures(Numbers(known(self._tree)), self._names)
        ranks = [ranking(numbers) for numbers in both]
        found = [{name: n.criterion(name) for name in n.names("criteria", "criterion")} for n in both]
        worst = {
            name: min(rank(name) for rank, of in zip(ranks, found, strict=True) if name in of)
            for name in {**found[0], **found[1]}
        }
        rows = []
        for name in sorted(worst, key=worst.__getitem__):
            pair = [of.get(name) for of in found]
            if self.only_different.value and _state(pair[0]) == _state(pair[1]):
                continue
            rows.append(row(name, _pair_cells(pair)))
        heads = [head for name in self._names for head in (f"state of {name}", name)]
        self.table.columns = ["criterion", *heads, "healthy band"]
        self.table.fill(rows)
        self.draw()


def _state(quantity: Quantity | None) -> str:
    return CriterionState.NOT_MEASURED if quantity is None else quantity.state


def _pair_cells(pair: list[Quantity | None]) -> list[dict[str, Any]]:
    known = [quantity for quantity in pair if quantity is not None]
    cells = [cell(known[0].meaning)]
    for quantity in pair:
        cells.append(cell(_state(quantity), state=_state(quantity)))
        cells.append(cell("" if quantity is None else value_of(quantity), is_number=True))
    return [*cells, cell(", ".join(dict.fromkeys(quantity.band for quantity in known)))]


def _figures(numbers: Numbers, names: tuple[str, str]) -> str:
    """Return a table of the summary of both designs: verdict, risk, learning rate, size, compute cost."""
    data, all_names = numbers.node("designs"), numbers.names("designs", "design")
    body = ""
    for variable in (str(name) for name in data.data_vars if data[name].dims == ("design",)):
        both = [numbers.value("designs", variable, design=all_names.index(name)) for name in names]
        texts = [" ".join(filter(None, [quantity.text, quantity.units])) for quantity in both]
        weight = ";font-weight:600" if texts[0] != texts[1] else ""
        cells = "".join(f'<td style="{NAME}{weight}">{escape(text)}</td>' for text in texts)
        body += f'<tr><th scope="row" style="{NAME};font-weight:400">{escape(both[0].meaning)}</th>{cells}</tr>'
    heads = "".join(f'<th scope="col" style="{NAME};font-weight:600">{escape(name)}</th>' for name in names)
    return f'<table style="{TABLE};font-size:13px;margin:6px 2px"><tr><td></td>{heads}</tr>{body}</table>'
