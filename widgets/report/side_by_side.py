"""Two designs of a comparison side by side: summary, criteria, and the evidence of a criterion."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.reports.quantity import Numbers, Quantity
from workbench.schema.statuses import CriterionState
from workbench.widgets.base import known
from workbench.widgets.report.choice_table import ChoiceTable, cell, row
from workbench.widgets.report.criteria import ranking, value_of
from workbench.widgets.report.evidence import Evidence
from workbench.widgets.tables import NAME, TABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr

    from workbench.widgets.base import WorkbenchWidget


class SideBySide:
    """Two designs side by side.

    Attributes:
        first, second: Controls that choose the designs.
        only_different: Whether to hide criteria that have the same state in both designs.
        table: One row per criterion; its ``value`` is the id of the chosen one.
        evidence: Evidence of the chosen criterion in each design.
        box: The widget.
    """

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
            rows.append(row(name, _cells(pair)))
        heads = [head for name in self._names for head in (f"state of {name}", name)]
        self.table.columns = ["criterion", *heads, "healthy band"]
        self.table.fill(rows)
        self.draw()


def _state(quantity: Quantity | None) -> str:
    return CriterionState.NOT_MEASURED if quantity is None else quantity.state


def _cells(pair: list[Quantity | None]) -> list[dict[str, Any]]:
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
        cells = "".join(f'<td style="{NAME}{weight}">{html.escape(text)}</td>' for text in texts)
        body += f'<tr><th scope="row" style="{NAME};font-weight:400">{html.escape(both[0].meaning)}</th>{cells}</tr>'
    heads = "".join(f'<th scope="col" style="{NAME};font-weight:600">{html.escape(name)}</th>' for name in names)
    return f'<table style="{TABLE};font-size:13px;margin:6px 2px"><tr><td></td>{heads}</tr>{body}</table>'
