"""An interactive report of an assessment, a diagnosis or a comparison of designs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets
import xarray as xr

from workbench.errors import OptionError, require_listed
from workbench.formatting import capitalized, clause, counted, percent
from workbench.io.store import export_netcdf
from workbench.option_kinds import Seed
from workbench.plots.figure_files import for_backend, picture_of
from workbench.reports.document import Fact, Numbers
from workbench.reports.formats import html
from workbench.reports.make_report import detached, report
from workbench.schema.statuses import CriterionState
from workbench.widgets.base import WorkbenchWidget, known
from workbench.widgets.report.views import ChoiceTable, CriteriaView, ReportPage, SideBySide, cell, row
from workbench.widgets.tables import HEAD, HEADLINE_CSS, headline
from workbench.widgets.text_picture import text_picture
from workbench.widgets.worker import MeasuringWidget

#: Kind of tree -> name of the second view.
_SECOND_VIEW = {"assessment": "criteria", "diagnosis": "experiments", "comparison": "side by side"}
_KINDS = {
    ".html": ("HTML", "The report as a single page that needs no network"),
    ".md": ("Markdown", "The report as Markdown, with its figures in a folder next to it"),
    ".ipynb": ("Notebook", "The report as a notebook whose cells redraw the figures from a data file next to it"),
    ".nc": ("netCDF", "All measured data; open it with wb.open_run()"),
    ".png": ("PNG", "The result and the chosen view as a picture"),
}
#: Maximum number of rows of a table in the picture.
_N_ROWS = 20


class AssessmentReport(MeasuringWidget):
    """An interactive report in which each number links to its source in the data, with filters, figures and files.

    Pass a tree, or a subject to assess in the background. The kernel stays responsive meanwhile; in a cell that needs
    the result, use ``await report.finished()``.

    Args:
        tree: Tree from ``wb.assess``, ``wb.diagnose`` or ``wb.compare_designs``.
        subject: Subject to assess instead: a module, an opened checkpoint, or any source that ``wb.design`` accepts.
        plan: Training plan, hardware and target, as ``wb.assess`` accepts it; only with ``subject``.
        task: The task to train the subject on; with a diagnosis, the task of its run.
        seed: Seed of the initial parameters and of the data; only with ``subject``.
        model: Model of the diagnosed run; with its task, it allows running experiments.
        replay: Further arguments of ``wb.run_experiment``, such as ``run``, ``checkpoints`` and ``faults``.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        text: The text of the report.
        criteria: For an assessment: filters, table and figures.
        side_by_side: For a comparison: two designs and their criteria.
        experiments: For a diagnosis: the proposed experiments.

    Raises:
        OptionError: If not exactly one of tree and subject is given, or there is no such theme.
        SchemaError: If the tree is of another kind, or lacks a number of its report.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> report = widgets.AssessmentReport(wb.samples.open("assessments")["gpt2"])
        >>> report.summary.split(".")[0]
        'gpt2 may proceed'
        >>> report.view = "criteria"
        >>> report.close()

    See Also:
        `workbench.assess`: Returns the tree of an assessment.
        `workbench.report`: Writes the same report to a file.
    """

    kinds = _KINDS

    def __init__(
        self,
        tree: xr.DataTree | None = None,
        *,
        subject: Any = None,
        plan: Any = None,
        task: Any = None,
        seed: Seed = 0,
        model: Any = None,
        replay: Mapping[str, Any] | None = None,
        theme: str = "page",
    ) -> None:
        super().__init__(theme=theme)
        if (tree is None) == (subject is None):
            what = "neither tree nor subject" if tree is None else "both tree and subject"
            raise OptionError(f"AssessmentReport received {what}; pass exactly one of them.")
        if subject is None and plan is not None:
            raise OptionError("A plan requires subject=; a tree already contains the plan of its assessment.")
        self._tree: xr.DataTree | None = None
        self._subject, self._plan, self._task, self._seed = subject, plan, task, seed
        self._model, self._replay = model, dict(replay or {})
        self.text = ReportPage(lock=self.turn)
        self.criteria = CriteriaView(self, self._show_row)
        self.side_by_side = SideBySide(self, self._show_row)
        can_run = model is not None and task is not None
        self.experiments = ExperimentsView(self, self.run_experiment, can_run=can_run)
        self._make_parts()
        self._views = {
            "report": self.text,
            "criteria": self.criteria.box,
            "side by side": self.side_by_side.box,
            "experiments": self.experiments.box,
        }
        self._watch(self._view, lambda _: self._show_view())
        self._on_click(self._button, lambda _: self.measure())
        for part in (self.criteria.table, self.side_by_side.table, self.experiments.table):
            self._watch(part, lambda _: self._settle(), names="rows")
            self._watch(part, lambda _: self._settle())
        if tree is not None:
            self._show_tree(tree)
        else:
            with self._attempt():
                self.measure()

    @property
    def tree(self) -> xr.DataTree | None:
        """The displayed tree; None until the first measurement has ended."""
        return self._tree

    @property
    def view(self) -> str:
        """The visible view: "report", or by kind of tree "criteria", "side by side" or "experiments"; can be set."""
        return self._view.value

    @view.setter
    def view(self, name: str) -> None:
        require_listed("view", [name], self._view.options)
        self._view.value = name

    def measure(self) -> None:
        """Assess the subject in the background; a running measurement is dropped.

        Raises:
            OptionError: If there is no subject.
        """
        if self._subject is None:
            raise OptionError("Nothing can be measured, as this report shows a given tree; create one with subject=.")
        subject, task, plan, seed = self._subject, self._task, self._plan, self._seed

        from workbench.assessment.assess import PARTS, assess

        def job(check: Callable[[], None], tell: Callable[[str], None]) -> xr.DataTree:
            return assess(subject, task, plan=plan, seed=seed, progress=tell)

        self._start("assessment", job, PARTS)

    def run_experiment(self, experiment: int | str) -> None:
        """Run an experiment of the diagnosis in the background; the outcome is added to `tree` and to the page.

        Args:
            experiment: Index in the tree's ``experiments``, or the cause that it tests.

        Raises:
            OptionError: If the tree is not a diagnosis, or the model or the task was not given.
        """
        kind = None if self._tree is None else self._tree.attrs.get("kind")
        if kind != "diagnosis":
            raise OptionError("Only a diagnosis has experiments; pass a tree from wb.diagnose().")
        if self._model is None or self._task is None:
            raise OptionError("An experiment needs the model and the task of the run; pass model= and task= too.")
        tree, model, task, replay = known(self._tree), self._model, self._task, self._replay

        def job(check: Callable[[], None], tell: Callable[[str], None]) -> xr.DataTree:
            from workbench.diagnosis.experiment_runs import run_experiment

            def on_step(words: str) -> None:
                tell(f"two replays: {words}")

            return run_experiment(tree, experiment, model=model, task=task, progress=on_step, **replay)

        self._start("experiment", job, {"two replays": 1})

    def _show_row(self, anchor: str) -> None:
        """Show the report, scroll to a row of its data tables, and mark the row."""
        self.view = "report"
        self.text.lead_to(anchor)

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        if self.text.document is None:
            return "Measuring …" if self._progress is not None else "Nothing has been measured yet."
        return self.text.document.summary

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the figure of the chosen criterion.

        Raises:
            OptionError: If no figure is shown.
        """
        drawn = self.criteria.evidence.figure if self.view == "criteria" else None
        sentence = "No figure is shown; choose a criterion in the view 'criteria'."
        return for_backend(known(drawn, sentence, name="figure"), backend)

    def picture(self) -> bytes:
        """Return the result and the chosen view as PNG."""
        if self.text.document is None:
            return text_picture(self.summary)
        document, part = self.text.document, self._parts().get(self.view)
        if part is None:
            actions = [f"{number}. {action.text}" for number, action in enumerate(document.actions, 1)]
            facts = [[fact.label, _with_units(fact), fact.remark] for fact in document.facts]
            return text_picture(
                self.summary, ["Recommended actions:", *actions], [["quantity", "value", ""], *facts] if facts else None
            )
        columns, *rows = part.table.texts()
        more = len(rows) - _N_ROWS
        rest = [f"{counted(more, 'more row')} not shown."] if more > 0 else []
        image = picture_of(self.figure()) if self.view == "criteria" and self.criteria.evidence.figure else None
        return text_picture(self.summary, [*self._answer_lines(), *rest], [columns, *rows[:_N_ROWS]], image)

    def page(self) -> str:
        """Return the report as a single HTML page that needs no network."""
        sentence = "Nothing has been measured yet; wait for the measurement."
        return html(known(self.text.document, sentence, name="tree"), known(self._tree))

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Suffixes of files that cannot be written yet -> reason."""
        if self._tree is not None:
            return {}
        words = "Nothing has been measured yet; wait for the measurement, or call measure()."
        return dict.fromkeys((ending for ending in self.kinds if ending != ".png"), words)

    def close(self) -> None:
        """Remove the widget and all its parts, visible or hidden; a running measurement is dropped."""
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
        look = ipywidgets.HTML(f"<style>{HEADLINE_CSS}</style>", layout={"display": "none"})
        line = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"}
        self._line = ipywidgets.HBox([self._button, self._doing], layout=line | {"display": "none"})
        self._fill([look, self._words, self._line, self._view, self._body], suggested="")
        self._say_answer()

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        if ending == ".png":
            return super()._write(path, ending, overwrite=overwrite)
        write = export_netcdf if ending == ".nc" else report
        return write(known(self._tree), path, overwrite=overwrite)

    def _content(self, ending: str) -> bytes:
        return self.picture()

    def _start(
        self,
        title: str,
        job: Callable[[Callable[[], None], Callable[[str], None]], xr.DataTree],
        shares: Mapping[str, float],
    ) -> None:
        """Start a job and show its progress."""
        with self.turn:
            self._begin(title, job, shares)
            self._button.layout.display, self._line.layout.display = "none", None
            self.experiments.button.disabled = True
            self._say_answer()

    def _take(self, found: xr.DataTree) -> None:
        """Show the measured tree."""
        self._show_tree(found)

    def _show_end(self) -> None:
        """Enable the buttons for measuring a subject that has no result yet, and for running experiments."""
        can_measure = self._subject is not None and self._tree is None
        self._button.layout.display = None if can_measure else "none"
        self._line.layout.display = None if can_measure or self._status.value else "none"
        self.experiments.button.disabled = self._model is None or self._task is None
        self._say_answer()

    def _answer_lines(self) -> list[str]:
        """Return the learning rate of an assessment, and the first recommended action."""
        document = known(self.text.document)
        is_assessment = known(self._tree).attrs["kind"] == "assessment"
        rates = [f"{capitalized(fact.label)}: {_with_units(fact)} ({fact.remark})." for fact in document.facts]
        actions = [f"Recommended action: {one.text}" for one in document.actions if one.text not in self.summary]
        return [*rates[: int(is_assessment)], *actions[:1]]

    def _say_answer(self) -> None:
        """Update the headline and the buttons for files."""
        document = self.text.document
        if document is None:
            self._words.value = headline(CriterionState.NOT_MEASURED, self.summary)
        else:
            self._words.value = headline(
                document.state or CriterionState.NOT_MEASURED, self.summary, self._answer_lines()
            )
        self._settle()

    def _show_tree(self, tree: xr.DataTree) -> None:
        """Show another tree in all views."""
        tree = detached(tree)
        self.text.tell(tree)  # first, because it raises an exception for trees of another kind
        kind = str(tree.attrs["kind"])
        self._parts()[_SECOND_VIEW[kind]].tell(tree)
        self._tree = tree
        options = ("report", _SECOND_VIEW[kind])
        if tuple(self._view.options) != options:  # setting the options selects the first one
            self._view.options = options
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", known(self.text.document).subject).strip("._") or "report"
        self.export_bar.suggest(f"reports/{name}")
        for part in (self._view, self._body):
            part.layout.display = None
        self._show_view()
        self._say_answer()

    def _show_view(self) -> None:
        """Show the chosen view, drawing it if necessary, and hide the others."""
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
        self._settle()

    def _parts(self) -> dict[str, Any]:
        return {"criteria": self.criteria, "side by side": self.side_by_side, "experiments": self.experiments}


def _with_units(fact: Fact) -> str:
    """Return the value of a fact with its unit."""
    return " ".join(filter(None, [fact.quantity.text, fact.quantity.units]))


_MISSING = "To run an experiment here, open the diagnosis as AssessmentReport(tree, model=..., task=...)."


class ExperimentsView:
    """A table of experiments, a description of the chosen one, and a button that runs it."""

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
        """Index of the chosen experiment in the tree."""
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
        body = "".join(f"<div>{escape(line)}</div>" for line in lines)
        self.words.value = (
            f'<div aria-live="polite" style="{style}"><div style="{HEAD}">{escape(title)}</div>{body}</div>'
        )
