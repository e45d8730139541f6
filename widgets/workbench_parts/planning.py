"""What each visible view shows of the ticked sources, and the computations that it waits for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.errors import WorkbenchError
from workbench.plots.figure_files import for_backend, save
from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.stage import FigureStage
from workbench.widgets.workbench_parts.calls import LibraryCall, Missing, Results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workbench.widgets.workbench_parts.sources import Source
    from workbench.widgets.workbench_parts.views import View


class ViewPlan(NamedTuple):
    """What a view will show.

    Attributes:
        call: The call that makes its widget; None if nothing fits or it waits.
        remark: What to tick, which sources do not fit, or why; empty if there is nothing to say.
        waits: Whether results are missing.
    """

    call: LibraryCall | None
    remark: str
    waits: bool


def plan_of(view: View, ticked: Sequence[Source], results: Results, theme: str) -> ViewPlan:
    """Return what a view shows of the ticked sources."""
    entries: dict[str, Any] = {}
    remarks, waits = [], False
    for source in view.chosen(ticked):
        try:
            entry = view.entry(source, results.known)
            if entry is None:
                remarks.append(f"{source.name} is left out, because it does not fit this view.")
            elif not results.has(entry):
                waits = True
            else:
                results.known(entry)
                entries[source.name] = entry
        except Missing:
            waits = True
        except WorkbenchError as error:
            remarks.append(str(error))
        except Exception as error:  # noqa: BLE001  (a bug, or a damaged file: the other sources are shown)
            remarks.append(f"{source.name} is left out ({type(error).__name__}: {error}).")
    if waits:
        return ViewPlan(None, "", True)
    if not entries:
        return ViewPlan(None, " ".join([*remarks, view.wanted]), False)
    call = view.call(entries, ticked)
    if theme != "page":
        call = LibraryCall(call.function, call.args, (*call.options, ("theme", theme)), variable=call.variable)
    return ViewPlan(call, " ".join(remarks), False)


def compute(view: View, ticked: Sequence[Source], results: Results, tell: Callable[[str], None]) -> None:
    """Compute what a view needs of the ticked sources; failures are kept in the results."""
    for source in view.chosen(ticked):
        while True:
            try:
                entry = view.entry(source, results.known)
            except Missing as missing:
                results.compute(missing.node, tell)
                continue
            except Exception:  # noqa: BLE001  (shown in the view, see `plan_of`)
                break
            if entry is not None:
                results.compute(entry, tell)
            break


def made_widget(call: LibraryCall, results: Results) -> Any:
    """Return a new widget from the call of a plan, whose parts have been computed."""
    for part in call.parts:
        results.compute(part, lambda words: None)
    if call.function == "show":
        figure, *theme = (results.known(part) for part in call.parts)
        return FigureView(figure, **({"theme": theme[0]} if theme else {}))
    return call.run([results.known(part) for part in call.parts], lambda words: None)


class FigureView(WorkbenchWidget):
    """A figure, as `workbench.widgets.show` displays it."""

    def __init__(self, figure: Any, *, theme: str = "page") -> None:
        super().__init__(theme=theme)
        self._figure = figure
        stage = FigureStage(theme)
        stage.draw(figure)
        self._fill([stage])

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the figure."""
        return for_backend(self._figure, backend)

    def page(self) -> str:
        """Return the figure as a page that needs no kernel."""
        with tempfile.TemporaryDirectory() as folder:
            return save(self.figure(), Path(folder) / "page.html").read_text(encoding="utf-8")
