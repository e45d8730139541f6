"""The report of an assessment, a diagnosis or a comparison of designs: read it, look into it, save it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.errors import OptionError
from workbench.reports.make_report import alone
from workbench.widgets.base import known
from workbench.widgets.export import ExportBar
from workbench.widgets.report.criteria import CriteriaView
from workbench.widgets.report.experiment_list import ExperimentsView, WatchedTask
from workbench.widgets.report.measuring import MeasuringProgress, said
from workbench.widgets.report.page import ReportPage
from workbench.widgets.report.saving import KINDS, as_file_name, save_tree
from workbench.widgets.report.side_by_side import SideBySide
from workbench.widgets.worker import MeasuringWidget

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import xarray as xr

#: Kind of tree -> name of the view in addition to the report.
_SECOND_VIEW = {"assessment": "criteria", "diagnosis": "experiments", "comparison": "side by side"}


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

    Attributes:
        page: The report's text.
        criteria: For an assessment: filters, table and figures.
        side_by_side: For a comparison: two designs and their criteria.
        experiments: For a diagnosis: the deciding experiments.
        save_bar: The buttons and fields for files.

    Raises:
        OptionError: If not exactly one of tree and subject is given.
        SchemaError: If the tree is none of these, or lacks a number of its report.
    """

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
    ) -> None:
        super().__init__()
        if (tree is None) == (subject is None):
            what = "neither a tree nor a subject" if tree is None else "both a tree and a subject"
            raise OptionError(f"AssessmentReport() has {what}; pass one: AssessmentReport(wb.assess(...)) or subject=.")
        if subject is None and plan is not None:
            raise OptionError("A plan goes with subject=; the plan of a tree is the one that it was made with.")
        self._tree: xr.DataTree | None = None
        self._subject, self._plan, self._task, self._seed = subject, plan, task, seed
        self._model, self._replay = model, dict(replay or {})
        self._progress: MeasuringProgress | None = None
        self.page = ReportPage(lock=self.turn)
        self.criteria = CriteriaView(self, self.show_row)
        self.side_by_side = SideBySide(self, self.show_row)
        can_run = model is not None and task is not None
        self.experiments = ExperimentsView(self, self.run_experiment, can_run=can_run)
        self.save_bar = ExportBar(
            self, lambda kind, path, overwrite: self.save(kind, path, overwrite=overwrite), kinds=KINDS
        )
        self._make_parts()
        self._views = {
            "report": self.page,
            "criteria": self.criteria.box,
            "side by side": self.side_by_side.box,
            "experiments": self.experiments.box,
        }
        self.watch(self._view, lambda _: self._show_view())
        self.on_click(self._button, lambda _: self.measure())
        self.on_click(self._stop, lambda _: self.stop())
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

        def job(check: Callable[[], None], tell: Callable[[str], None]) -> xr.DataTree:
            from workbench.assessment.assess import assess

            def on_part(part: str) -> None:
                check()
                tell(part)

            return assess(subject, task, plan=plan, seed=seed, progress=on_part)

        self._begin("assessment", job)

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

            def watch(n_batches: int) -> None:
                check()
                if n_batches == 0:
                    tell("the two replays")

            return run_experiment(tree, experiment, model=model, task=WatchedTask(task, watch), **replay)

        self._begin("experiment", job)

    def show_row(self, anchor: str) -> None:
        """Show the report, with a row of its V3 in view and marked.

        Args:
            anchor: Anchor of the row, as `workbench.reports.quantity.Quantity` has it.
        """
        self.view = "report"
        self.page.lead_to(anchor)

    def save(self, kind: str, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
        """Write the report, or the tree that it is of.

        Args:
            kind: ``"html"``, ``"markdown"``, ``"notebook"`` or ``"netcdf"``.
            path: Path of the file, the ending may be left out; None takes that of the text field. Its folder is made.
            overwrite: Whether to replace an existing file.

        Returns:
            The path of the file.

        Raises:
            OptionError: If there is no such kind, or nothing has been measured.
            StoreError: If the file is there, or the disk is full.
        """
        with self.turn:
            if self._tree is None:
                raise OptionError("Nothing has been measured yet; wait for it, or call measure().")
            return save_tree(self._tree, kind, self.save_bar.path.value if path is None else path, overwrite=overwrite)

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
        self._stop = ipywidgets.Button(
            description="Stop", tooltip="End what goes on", layout={"width": "70px", "display": "none"}
        )
        self._status = ipywidgets.HTML(layout={"flex": "1 1 260px", "min_width": "0"})
        self._view = ipywidgets.ToggleButtons(
            options=["report"], style={"button_width": "106px"}, layout={"display": "none"}
        )
        self._body = ipywidgets.VBox(layout={"display": "none", "overflow": "hidden"})
        self.save_bar.layout.display = "none"
        line = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"}
        self._doing = ipywidgets.HBox([self._stop, self._button, self._status], layout=line | {"display": "none"})
        self.fill([self._doing, self._view, self._body, self.save_bar])

    def _begin(self, title: str, job: Callable[[Callable[[], None], Callable[[str], None]], xr.DataTree]) -> None:
        with self.turn:
            self._worker.drop()
            progress = self._progress = MeasuringProgress(title, lambda words: self._say_progress(progress, words))
            self._say_progress(progress, progress.html())
            self._stop.layout.display, self._button.layout.display = None, "none"
            self.experiments.button.disabled = True
            self._worker.submit(lambda check: job(check, progress.tell))

    def _say_progress(self, progress: MeasuringProgress, words: str) -> None:
        """Report the progress of a job; that of a dropped one is ignored."""
        with self.turn:
            if progress is self._progress:
                self._status.value, self._doing.layout.display = words, None

    def _end(self, sentence: str) -> None:
        """Called when no job is running any more."""
        self._progress = None
        self._status.value = said(sentence)
        self._stop.layout.display = "none"
        self._button.layout.display = None if self._subject is not None and self._tree is None else "none"
        can_run = self._model is not None and self._task is not None
        self.experiments.button.disabled = not can_run
        is_empty = not sentence and self._button.layout.display == "none"
        self._doing.layout.display = "none" if is_empty else None

    def _take(self, found: xr.DataTree | None, error: Exception | None) -> None:
        """Show what was measured, or raise why it was not."""
        try:
            if error is not None:
                raise error
            self._show_tree(known(found))
        finally:
            self._end("")

    def _say_stopped(self) -> None:
        """Show where it was stopped; the subject can be measured again."""
        progress = self._progress
        at = f" at {progress.current}" if progress is not None and progress.current else ""
        self._end(f"Stopped{at}; nothing of it is kept.")

    def _show_tree(self, tree: xr.DataTree) -> None:
        """Show another tree in all views."""
        tree = alone(tree)
        self.page.tell(tree)  # first, as it refuses a tree of another kind
        kind = str(tree.attrs["kind"])
        self._parts()[_SECOND_VIEW[kind]].tell(tree)
        self._tree = tree
        options = ("report", _SECOND_VIEW[kind])
        if tuple(self._view.options) != options:  # which would go back to the first
            self._view.options = options
        self.save_bar.suggest(f"reports/{as_file_name(known(self.page.document).subject)}")
        for part in (self._view, self._body, self.save_bar):
            part.layout.display = None
        self._show_view()

    def _show_view(self) -> None:
        """Put the chosen view on the page, and draw it if it was not."""
        body = self._views[self._view.value]
        if tuple(self._body.children) != (body,):
            self._body.children = [body]
        for name, part in self._parts().items():
            part.is_visible = name == self._view.value
            part.draw()

    def _parts(self) -> dict[str, Any]:
        return {"criteria": self.criteria, "side by side": self.side_by_side, "experiments": self.experiments}
