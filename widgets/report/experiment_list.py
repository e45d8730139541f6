"""The experiments that a diagnosis proposes, with a button that runs one, and their outcomes."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.errors import OptionError
from workbench.formatting import clause, percent
from workbench.reports.quantity import Numbers
from workbench.widgets.base import known
from workbench.widgets.report.choice_table import ChoiceTable, cell, row
from workbench.widgets.tables import HEAD

if TYPE_CHECKING:
    import xarray as xr

    from workbench.widgets.base import WorkbenchWidget

_MISSING = "To run an experiment here, open the diagnosis as AssessmentReport(tree, model=..., task=...)."


class ExperimentsView:
    """A table of experiments, a description of the chosen one, and a button that runs it.

    Attributes:
        table: One row per experiment, in the proposed order; its ``value`` is the index of the chosen one in the tree.
        words: Text about the change, the expected outcomes and the outcome.
        button: Runs the chosen experiment.
        box: The widget.
    """

    def __init__(self, owner: WorkbenchWidget, run: Callable[[int], None], *, can_run: bool) -> None:
        self._numbers: Numbers | None = None
        self.is_visible = False
        self.table = ChoiceTable(label="experiments", empty="The diagnosis proposes no experiment.")
        self.table.columns = ["experiment", "tests the cause", "steps", "fraction of the run", "outcome"]
        self.words = ipywidgets.HTML()
        self.button = ipywidgets.Button(
            description="Run", button_style="primary", layout={"width": "104px"}, disabled=not can_run,
            tooltip="Replay part of the run twice: unchanged, and with this change" if can_run else _MISSING,
        )  # fmt: skip
        self._can_run = can_run
        self.box = ipywidgets.VBox([self.table, self.words, self.button])
        owner._watch(self.table, lambda _: self._say())
        owner._on_click(self.button, lambda _: run(self.chosen))

    @property
    def chosen(self) -> int:
        """Index of the chosen experiment in the tree.

        Raises:
            OptionError: If there is none.
        """
        if not self.table.value:
            raise OptionError("No experiment is chosen; choose a row of the table.")
        return int(self.table.value)

    def tell(self, tree: xr.DataTree) -> None:
        """Show the experiments of another diagnosis, or of the same one after an experiment."""
        numbers = self._numbers = Numbers(tree)
        data = self._data()
        titles = dict(zip(numbers.names("causes", "cause"), numbers.texts("causes", "title"), strict=True))
        places = [] if data is None else sorted(range(data.sizes["experiment"]), key=data["order"].values.__getitem__)
        self.table.fill(row(str(place), self._cells(place, titles)) for place in places)
        self._say()

    def draw(self) -> None:
        """Do nothing; the view has no figure."""

    def _data(self) -> xr.Dataset | None:
        numbers = known(self._numbers)
        if not numbers.has("experiments"):
            return None
        data = numbers.node("experiments")
        return data if data.sizes.get("experiment", 0) else None

    def _cells(self, place: int, titles: Mapping[str, str]) -> list[dict[str, Any]]:
        def text(name: str) -> str:
            return known(self._numbers).value("experiments", name, experiment=place).text

        cause = text("cause")
        cost = percent(float(known(self._data())["cost"].values[place]))
        return [
            cell(text("title")), cell(titles.get(cause, cause)), cell(text("n_steps"), is_number=True),
            cell(cost, is_number=True), cell(self._answer(place)),
        ]  # fmt: skip

    def _outcome(self, place: int) -> str:
        if "outcome" not in known(self._data()):
            return ""
        return known(self._numbers).text("experiments", "outcome", experiment=place)

    def _answer(self, place: int) -> str:
        """Return what the outcome is evidence for; empty without an outcome."""
        if not self._outcome(place):
            return ""
        return "for the cause" if bool(known(self._data())["supports"].values[place]) else "against the cause"

    def _say(self) -> None:
        """Update the text about the chosen row."""
        self.button.layout.display = None if self.table.value else "none"
        if not self.table.value:
            self.words.value = ""
            return
        place = self.chosen
        of = {
            name: known(self._numbers).value("experiments", name, experiment=place).text
            for name in ("title", "from_step", "n_steps", "expected_if_right", "expected_if_wrong")
        }
        lines = [f"Replays {of['n_steps']} steps from step {of['from_step']}, with and without this change."]
        right, wrong = clause(of["expected_if_right"]), clause(of["expected_if_wrong"])
        lines.append(f"Expected if it is the cause: {right}; otherwise: {wrong}.")
        if outcome := self._outcome(place):
            lines.append(f"Outcome: {clause(outcome)}. This is evidence {self._answer(place)}.")
        if not self._can_run:
            lines.append(_MISSING)
        title = of["title"][:1].upper() + of["title"][1:]
        style = "white-space:normal;line-height:1.5;color:var(--jp-content-font-color1,#222);margin:6px 2px"
        body = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        self.words.value = (
            f'<div aria-live="polite" style="{style}"><div style="{HEAD}">{html.escape(title)}</div>{body}</div>'
        )
