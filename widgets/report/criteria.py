"""The criteria of an assessment, filtered by failure mode and state, with the evidence of the chosen one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets
import numpy as np

from workbench.reports.quantity import Numbers, Quantity
from workbench.schema.statuses import WORST_FIRST, CriterionState
from workbench.widgets.base import known
from workbench.widgets.report.choice_table import ChoiceTable, cell, row
from workbench.widgets.report.evidence import Evidence
from workbench.widgets.tags import Tags

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr

    from workbench.widgets.base import WorkbenchWidget

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
