"""The report of an assessment, a diagnosis or a comparison of designs: read it, look into it, save it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.errors import OptionError
from workbench.formatting import capitalized, counted
from workbench.io.atomic import replacing
from workbench.io.store import export_netcdf
from workbench.plots.figure_files import for_backend, picture_of
from workbench.reports.html import html
from workbench.reports.make_report import alone, report
from workbench.schema.statuses import CriterionState
from workbench.widgets.base import known
from workbench.widgets.export import ExportBar
from workbench.widgets.headline import CSS, headline
from workbench.widgets.report.criteria import CriteriaView
from workbench.widgets.report.experiment_list import ExperimentsView
from workbench.widgets.report.page import ReportPage
from workbench.widgets.report.side_by_side import SideBySide
from workbench.widgets.text_picture import text_picture
from workbench.widgets.worker import MeasuringWidget

if TYPE_CHECKING:
    from pathlib import Path

    import xarray as xr

    from workbench.reports.document import Fact

#: Kind of tree -> name of the view in addition to the report.
_SECOND_VIEW = {"assessment": "criteria", "diagnosis": "experiments", "comparison": "side by side"}
_KINDS = {
    ".html": ("HTML", "One page that needs no network and no other file"),
    ".md": ("Markdown", "Text, with its pictures in a folder next to it"),
    ".ipynb": ("notebook", "The same text, with cells that draw the pictures again from the data next to it"),
    ".nc": ("netCDF", "Everything that was measured; wb.open_run() opens it"),
    ".png": ("PNG", "The answer and the chosen view as a picture"),
}
#: Rows of a table in the picture.
_N_ROWS = 20


class AssessmentReport(MeasuringWidget):
    """An interactive report: click a number to see its source in the data, filter, inspect, and save.

    Pass a tree, or a subject to be measured in the background. The kernel stays free meanwhile; where a cell needs
    the result, ``await report.finished()``.

    Args:
        tree: Tree from ``wb.assess``, ``wb.diagnose`` or ``wb.compare_designs``.
        subject: Subject to assess instead: a module, an opened checkpoint, or any source that ``wb.design`` takes.
        plan: Plan of training, hardware and target, as ``wb.assess`` takes it; with ``subject``.
        task: The task that the subject will be trained on; or, with a diagnosis, the task of its run.
        seed: Seed of fresh parameters and of data; with ``subject``.
        model: Model of the diagnosed run; with it and its task, experiments can be run here.
        replay: Further arguments of ``wb.run_experiment``, such as ``run``, ``checkpoints`` and ``faults``.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        text: The report's text.
        criteria: For an assessment: filters, table and figures.
        side_by_side: For a comparison: two designs and their criteria.
        experiments: For a diagnosis: the deciding experiments.
        export_bar: The buttons and fields for files.

    Raises:
        OptionError: If not exactly one of tree and subject is given, or there is no such theme.
        SchemaError: If the tree is none of these, or lacks a number of its report.
    """

    kinds = _KINDS

    def __init__(
        self,
        tree: xr.DataTree | None = None,
        *,
        subject: Any = None,
        plan: Any = None,
        task: Any = None,
        seed: int = 0,
        model: Any = None,
        replay: Mapping[str, Any] | None = None,
        theme: str = "page",
    ) -> None:
        super().__init__(theme=theme)
        if (tree is None) == (subject is None):
            what = "neither a tree nor a subject" if tree is None else "both a tree and a subject"
            raise OptionError(f"AssessmentReport() has {what}; pass one: AssessmentReport(wb.assess(...)) or subject=.")
        if subject is None and plan is not None:
            raise OptionError("A plan goes with subject=; the plan of a tree is the one that it was made with.")
        self._tree: xr.DataTree | None = None
        self._subject, self._plan, self._task, self._seed = subject, plan, task, seed
        self._model, self._replay = model, dict(replay or {})
        self.text = ReportPage(lock=self.turn)
        self.criteria = CriteriaView(self, self.show_row)
        self.side_by_side = SideBySide(self, self.show_row)
        can_run = model is not None and task is not None
        self.experiments = ExperimentsView(self, self.run_experiment, can_run=can_run)
        self.export_bar = ExportBar(self, self.kinds)
        self._make_parts()
        self._views = {
            "report": self.text,
            "criteria": self.criteria.box,
            "side by side": self.side_by_side.box,
            "experiments": self.experiments.box,
        }
        self.watch(self._view, lambda _: self._show_view())
        self.on_click(self._button, lambda _: self.measure())
        for part in (self.criteria.table, self.side_by_side.table, self.experiments.table):
            self.watch(part, lambda _: self.settle(), names="rows")
            self.watch(part, lambda _: self.settle())
        if tree is not None:
            self._show_tree(tree)
        else:
            with self.attempt():
                self.measure()

    @property
    def tree(self) -> xr.DataTree | None:
        """The displayed tree; None before the first measurement has ended."""
        return self._tree

    @property
    def view(self) -> str:
        """What is visible: "report", or what goes with the tree's kind: "criteria", "side by side" or "experiments"."""
        return self._view.value

    @view.setter
    def view(self, name: str) -> None:
        if name not in self._view.options:
            raise OptionError(f"There is no view '{name}'; choose from {', '.join(self._view.options)}.")
        self._view.value = name

    def measure(self) -> None:
        """Assess the subject in the background; a running job is dropped.

        Raises:
            OptionError: If there is no subject.
        """
        if self._subject is None:
            raise OptionError("There is nothing to measure: this report was made of a tree; pass subject= for another.")
        subject, task, plan, seed = self._subject, self._task, self._plan, self._seed

        from workbench.assessment.assess import PARTS, assess

        def job(check: Callable[[], None], tell: Callable[[str], None]) -> xr.DataTree:
            return assess(subject, task, plan=plan, seed=seed, progress=tell)

        self._start("assessment", job, PARTS)

    def run_experiment(self, experiment: int | str) -> None:
        """Run an experiment of the diagnosis in the background; the outcome appears in `tree` and on the page.

        Args:
            experiment: Place in the tree's ``experiments``, or the cause that it is about.

        Raises:
            OptionError: If it is no diagnosis, or model or task was not given.
        """
        if self._tree is None or self._tree.attrs.get("kind") != "diagnosis":
            raise OptionError("Only a diagnosis has experiments; pass a tree from wb.diagnose().")
        if self._model is None or self._task is None:
            raise OptionError("An experiment needs the run's model and task; pass model= and task= with the tree.")
        tree, model, task, replay = self._tree, self._model, self._task, self._replay

        def job(check: Callable[[], None], tell: Callable[[str], None]) -> xr.DataTree:
            from workbench.diagnosis.experiment_runs import run_experiment

            def on_step(words: str) -> None:
                tell(f"two replays: {words}")

            return run_experiment(tree, experiment, model=model, task=task, progress=on_step, **replay)

        self._start("experiment", job, {"two replays": 1})

    def show_row(self, anchor: str) -> None:
        """Show the report, with a row of its V3 in view and marked.

        Args:
            anchor: Anchor of the row, as `workbench.reports.quantity.Quantity` has it.
        """
        self.view = "report"
        self.text.lead_to(anchor)

    @property
    def summary(self) -> str:
        """The verdict, in one sentence."""
        if self.text.document is None:
            return "Measuring …" if self._progress is not None else "Nothing has been measured yet."
        return self.text.document.summary

    def figure(self, backend: str = "bokeh") -> Any:
        """The figure of the chosen criterion as a figure of its own.

        Raises:
            OptionError: If none is shown.
        """
        drawn = self.criteria.evidence.figure if self.view == "criteria" else None
        return for_backend(known(drawn, "No figure is shown; choose a criterion in the view 'criteria'."), backend)

    def picture(self) -> bytes:
        """The answer and the chosen view, as PNG."""
        if self.text.document is None:
            return text_picture(self.summary)
        document, part = self.text.document, self._parts().get(self.view)
        if part is None:
            actions = [f"{number}. {action.text}" for number, action in enumerate(document.actions, 1)]
            facts = [[fact.label, _with_units(fact), fact.remark] for fact in document.facts]
            return text_picture(
                self.summary, ["What to do:", *actions], [["number", "value", ""], *facts] if facts else None
            )
        columns, *rows = part.table.texts()
        more = len(rows) - _N_ROWS
        rest = [f"{counted(more, 'more row')} below these."] if more > 0 else []
        image = picture_of(self.figure()) if self.view == "criteria" and self.criteria.evidence.figure else None
        return text_picture(self.summary, [*self._answer_lines(), *rest], [columns, *rows[:_N_ROWS]], image)

    def page(self) -> str:
        """The report as one HTML page, without a network."""
        return html(known(self.text.document, "Nothing has been measured yet; wait for it."), known(self._tree))

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Endings of files that cannot be written yet, and why."""
        if self._tree is not None:
            return {}
        words = "Nothing has been measured yet; wait for it, or call measure()."
        return dict.fromkeys((ending for ending in self.kinds if ending != ".png"), words)

    def close(self) -> None:
        """Remove the widget and everything in it, visible or not; a running job is dropped."""
        for view in getattr(self, "_views", {}).values():
            if view not in self._body.children:
                self._body.children = (*self._body.children, view)
        super().close()

    def _make_parts(self) -> None:
        self._button = ipywidgets.Button(
            description="Measure", button_style="primary", layout={"width": "104px", "display": "none"},
            tooltip="Assess the subject",
        )  # fmt: skip
        self._view = ipywidgets.ToggleButtons(
            options=["report"], style={"button_width": "106px"}, layout={"display": "none"}
        )
        self._body = ipywidgets.VBox(layout={"display": "none", "overflow": "hidden"})
        self._words = ipywidgets.HTML()
        look = ipywidgets.HTML(f"<style>{CSS}</style>", layout={"display": "none"})
        line = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"}
        self._line = ipywidgets.HBox([self._button, self._doing], layout=line | {"display": "none"})
        self.fill([look, self._words, self._line, self._view, self._body, self.export_bar])
        self._say_answer()

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        if ending == ".png":
            content = self.picture()
            with replacing(path) as partial:
                partial.write_bytes(content)
            return path
        write = export_netcdf if ending == ".nc" else report
        return write(known(self._tree), path, overwrite=overwrite)

    def _start(
        self,
        title: str,
        job: Callable[[Callable[[], None], Callable[[str], None]], xr.DataTree],
        shares: Mapping[str, float],
    ) -> None:
        """Begin a job, and show how far it is."""
        with self.turn:
            self._begin(title, job, shares)
            self._button.layout.display, self._line.layout.display = "none", None
            self.experiments.button.disabled = True
            self._say_answer()

    def _take(self, found: xr.DataTree) -> None:
        """Show what was measured."""
        self._show_tree(found)

    def _show_end(self) -> None:
        """A subject that was not measured can be measured again, and experiments can be run."""
        can_measure = self._subject is not None and self._tree is None
        self._button.layout.display = None if can_measure else "none"
        self._line.layout.display = None if can_measure or self._status.value else "none"
        self.experiments.button.disabled = self._model is None or self._task is None
        self._say_answer()

    def _answer_lines(self) -> list[str]:
        """At which rate it trains, and what to do first."""
        document = known(self.text.document)
        is_assessment = known(self._tree).attrs["kind"] == "assessment"
        rates = [f"{capitalized(fact.label)}: {_with_units(fact)} ({fact.remark})." for fact in document.facts]
        actions = [f"What to do: {one.text}" for one in document.actions if one.text not in self.summary]
        return [*rates[: int(is_assessment)], *actions[:1]]

    def _say_answer(self) -> None:
        """Show the answer above everything, and which files can be written of it."""
        document = self.text.document
        if document is None:
            self._words.value = headline(CriterionState.NOT_MEASURED, self.summary)
        else:
            self._words.value = headline(
                document.state or CriterionState.NOT_MEASURED, self.summary, self._answer_lines()
            )
        self.export_bar.offer(self.refused_kinds)
        self.settle()

    def _show_tree(self, tree: xr.DataTree) -> None:
        """Show another tree in all views."""
        tree = alone(tree)
        self.text.tell(tree)  # first, as it refuses a tree of another kind
        kind = str(tree.attrs["kind"])
        self._parts()[_SECOND_VIEW[kind]].tell(tree)
        self._tree = tree
        options = ("report", _SECOND_VIEW[kind])
        if tuple(self._view.options) != options:  # which would go back to the first
            self._view.options = options
        self.export_bar.suggest(f"reports/{_as_file_name(known(self.text.document).subject)}")
        for part in (self._view, self._body):
            part.layout.display = None
        self._show_view()
        self._say_answer()

    def _show_view(self) -> None:
        """Show the chosen view, and draw it if it was not; the others stay as they are, out of sight."""
        body = self._views[self._view.value]
        body.layout.display = None
        if body not in self._body.children:
            self._body.children = (*self._body.children, body)
        for other in self._body.children:
            if other is not body:
                other.layout.display = "none"
        for name, part in self._parts().items():
            part.is_visible = name == self._view.value
            part.draw()
        self.settle()

    def _parts(self) -> dict[str, Any]:
        return {"criteria": self.criteria, "side by side": self.side_by_side, "experiments": self.experiments}


def _with_units(fact: Fact) -> str:
    """The value of a fact, with its unit."""
    return " ".join(filter(None, [fact.quantity.text, fact.quantity.units]))


def _as_file_name(subject: str) -> str:
    """A subject as the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", subject).strip("._") or "report"
