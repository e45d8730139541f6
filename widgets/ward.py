"""Practice cases: examine a run with a hidden cause under a budget, name cause and change, and see the score."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import xarray as xr

from workbench import course, plots
from workbench.diagnosis.causes import CAUSES
from workbench.errors import OptionError
from workbench.formatting import listed, short
from workbench.option_kinds import NonNegativeInt
from workbench.plots.figure_files import picture_of
from workbench.schema.statuses import CriterionState
from workbench.widgets.figure import FigureStage
from workbench.widgets.report.views import ChoiceTable, cell, row
from workbench.widgets.tables import HEAD, HEADLINE_CSS, figure_page, headline
from workbench.widgets.text_picture import text_picture
from workbench.widgets.ward_parts import (
    PATIENT,
    AnswerTable,
    RecordView,
    ScoreView,
    losses_of,
    texts_of,
    value_table,
    values_of,
)
from workbench.widgets.workbench_parts.room import CodeBox
from workbench.widgets.worker import MeasuringWidget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from workbench.course import Patient, Score


_CSS = Path(__file__).with_name("ward.css").read_text(encoding="utf-8")
_TEXT = "white-space:normal;line-height:1.5;color:var(--jp-content-font-color1,#222)"
_KINDS = {
    ".png": ("PNG", "The case as a picture: complaint, measurements, figure and score"),
    ".svg": ("SVG", "The figure as vector graphics, for print"),
    ".html": ("HTML", "A page with the case and an interactive figure, without a kernel and without a network"),
    ".nc": ("netCDF", "Everything that was measured; open it with wb.open_run()"),
}
#: Level -> its name in the list.
_LEVELS = {
    1: "1: clear failures",
    2: "2: moderate failures",
    3: "3: failures and healthy runs",
    4: "4: mild failures and healthy runs",
    5: "5: also two causes, and no replay",
}
_LARGEST_SEED = 2**31 - 1
#: Least points of a score that counts as good, and as fair.
_GOOD, _FAIR = 80, 40
_HINT = "Choose a measurement in the table and press Measure; its figure appears here."


class Ward(MeasuringWidget):
    """A practice case to play: a training run with a hidden cause, and a budget of measurements.

    Read the complaint, take measurements, mark the cause or causes and the change that would have prevented the
    failure, try the change by a replay if the budget allows it, and finish. Only then the score with its parts, the
    true causes and the evidence are shown, next to the scores of programs at this level. Nothing may be wrong with a
    run. All cases are those of `workbench.course.patient`; the lines of Python below the case do the same.

    A case that was left can be opened again and is in the same state.

    Args:
        seed: Number of the case.
        level: Difficulty, from 1 to 5.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        measurements: The table of measurements; its ``value`` is the chosen one.
        answer: The table of causes and changes, with the marked ``causes`` and the chosen ``cure``.
        record: The figure of the chosen measurement.
        python: The lines of Python that do the same.

    Raises:
        OptionError: If there is no such case, level or theme.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> ward = widgets.Ward(3, level=2)
        >>> ward.measure("loss")
        >>> ward.finish(["nothing"])
        >>> ward.wait()
        >>> ward.patient.score is None
        False
        >>> ward.close()

    See Also:
        `workbench.course.patient`: The same case without a user interface.
        `workbench.course.play`: Scores a program on many cases.
    """

    kinds = _KINDS

    def __init__(self, seed: NonNegativeInt = 0, *, level: int = 1, theme: str = "page") -> None:
        super().__init__(theme=theme)
        self._cases: dict[tuple[int, int], OpenCase] = {}
        self._is_adapting = False
        self._board: pd.DataFrame | None = None
        self._case = self._opened(seed, level)
        self._make_parts()
        for control in (self._level, self._seed):
            self._watch(control, lambda _: self._change_case())
        for button in (self._next, self._next_below):
            self._on_click(button, lambda _: self.next_case())
        self._watch(self.measurements, lambda _: self._show_measurement())
        self._on_click(self._measure, lambda _: self.measure(self.measurements.value))
        for name in ("causes", "cure"):
            self._watch(self.answer, lambda _: self._note_answer(), names=name)
        self._on_click(self._try, lambda _: self.try_cure(self.answer.cure))
        self._on_click(self._finish, lambda _: self.finish(self.answer.causes, self.answer.cure or None))
        self._show_case()

    @property
    def patient(self) -> Patient:
        """The patient of the displayed case."""
        return self._case.patient

    def open_case(self, seed: NonNegativeInt, *, level: int | None = None) -> None:
        """Show a case; one that was opened before is in the state in which it was left.

        Args:
            seed: Number of the case.
            level: Difficulty, from 1 to 5; None for the current one.

        Raises:
            OptionError: If there is no such case.
        """
        with self.turn:
            case = self._opened(seed, self.patient.level if level is None else level)
            self.stop()
            self._case = case
            self._show_case()

    def next_case(self) -> None:
        """Show the case with the next number at the same level."""
        self.open_case(self.patient.seed + 1)

    def measure(self, name: str) -> None:
        """Take a measurement, which reduces the budget once, and show its figure.

        Raises:
            OptionError: If there is no such measurement, it costs more than remains, or the case is finished.
        """
        with self.turn:
            self._check_idle()
            self._case.measure(name)
            self._fill_measurements()
            if self.measurements.value == name:
                self._show_measurement()
            else:
                self.measurements.value = name  # shows it
            self._show_budget()

    def try_cure(self, cause: str) -> None:
        """Replay the run with the change against a cause in the background, which reduces the budget.

        Args:
            cause: The cause, one of ``patient.cures``.

        Raises:
            OptionError: If no change is chosen, another replay is running, it costs more than remains, or the case is
                finished.
        """
        with self.turn:
            self._check_idle()
            if not cause:
                raise OptionError("No change is chosen; choose one in the column 'change'.")
            case = self._case

            def job(check: Callable[[], None], tell: Callable[[str], None]) -> Callable[[], None]:
                replay = case.patient.try_cure(cause, progress=lambda words: tell(f"replay: {words}"))
                return lambda: self._take_replay(case, cause, replay)

            self._begin("Replay with the change", job, {"replay": 1})

    def finish(self, causes: Sequence[str], cure: str | None = None) -> None:
        """End the case with an answer, and show the score.

        This happens in the background, because a change that was not tried is replayed to score it, which takes a few
        seconds and costs nothing.

        Args:
            causes: The causes, or ``["nothing"]`` if nothing is wrong.
            cure: The cause whose change is chosen; None for no change.

        Raises:
            OptionError: If no cause is given, or a replay is running.
        """
        with self.turn:
            self._check_idle()
            if not causes:
                raise OptionError("No cause is marked; mark at least one, or 'nothing wrong'.")
            case, named = self._case, list(causes)

            def job(check: Callable[[], None], tell: Callable[[str], None]) -> Callable[[], None]:
                case.finish(named, cure, lambda words: tell(f"replay: {words}"))
                self._read_board()  # here, because it takes a while
                return self._show_case

            self._begin("Score", job, {"replay": 1})

    @property
    def summary(self) -> str:
        """The state of the case in one sentence."""
        case, patient = self._case, self.patient
        if (score := patient.score) is not None:
            return f"{case.title}: {_result(score)}"
        taken = listed(case.measured) if case.measured else "nothing"
        budget = f"{short(patient.remaining)} of {short(patient.budget)}"
        return f"{case.title}: measured {taken}; budget left: {budget}."

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the figure of the chosen measurement.

        Raises:
            OptionError: If no figure is shown.
        """
        if self.record.timeline is None:
            sentence = "No figure is shown; take a measurement with steps, such as the loss."
            raise OptionError(sentence)
        return self.record.timeline.figure(backend)

    def picture(self) -> bytes:
        """Return complaint, measurements, figure and score as PNG."""
        values = values_of(self._case.measured[self.record.name]) if self.record.name else []
        lines = [self.patient.complaint, *(f"{name}: {value}" for name, value in values)]
        score, costs = self.patient.score, self.patient.measurements
        table = costs[["cost", "description"]] if score is None else score.parts
        image = None if self.record.timeline is None else picture_of(self.figure("matplotlib"))
        return text_picture(self.summary, lines, texts_of(table.reset_index()), image)

    def page(self) -> str:
        """Return the case as one HTML page with an interactive figure that needs no network."""
        parts = (self._complaint, self._budget, self._replay_words, self._verdict, *self.score.tables)
        words = "".join(part.value for part in parts)
        values = value_table(self._case.measured[self.record.name]) if self.record.name else ""
        code = f"<pre>{html.escape(self._case.python)}</pre>"
        figure = None if self.record.timeline is None else self.figure()
        return figure_page(f"<h1>{html.escape(self.summary)}</h1>{words}{code}{values}", figure)

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Suffixes of files that cannot be written at present -> reason."""
        refused = {}
        if self.record.timeline is None:
            refused[".svg"] = "No figure is shown; take a measurement with steps first."
        if not self.patient.record.children:
            refused[".nc"] = "Nothing has been measured yet but settings; take another measurement first."
        return refused

    def close(self) -> None:
        """Remove the widget and all its parts; a running replay is dropped."""
        if hasattr(self, "record"):
            self.record.close()
        super().close()

    def _shown_runs(self) -> Mapping[str, xr.DataTree]:
        return {PATIENT: self.patient.record}

    def _content(self, ending: str) -> bytes | None:
        return self.picture() if ending == ".png" else super()._content(ending)

    def _make_parts(self) -> None:
        wide = {"description_width": "initial"}
        self._level = ipywidgets.Dropdown(
            options=[(name, level) for level, name in _LEVELS.items()], description="Level", style=wide,
            layout={"width": "280px", "max_width": "98%"}, tooltip="Difficulty: 1 is the easiest",
        )  # fmt: skip
        self._seed = ipywidgets.BoundedIntText(
            0, min=0, max=_LARGEST_SEED, description="Case", style=wide, layout={"width": "130px"},
        )  # fmt: skip
        self._next, self._next_below = (
            ipywidgets.Button(description="Next case", tooltip="Open the case with the next number") for _ in range(2)
        )
        self._complaint, self._budget = ipywidgets.HTML(), ipywidgets.HTML()
        self._budget.add_class("workbench-ward-budget")
        self.measurements = ChoiceTable(label="measurements")
        self.measurements.columns = ["measurement", "cost", "state"]
        self._about = ipywidgets.HTML()
        self._measure = ipywidgets.Button(
            button_style="primary", layout={"width": "auto", "min_width": "160px", "align_self": "flex-start"}
        )
        self.record = RecordView(self.theme)
        self.answer = AnswerTable()
        self._try = ipywidgets.Button(layout={"width": "auto", "min_width": "160px"})
        self._finish = ipywidgets.Button(
            description="Finish", button_style="primary", layout={"width": "120px"},
            tooltip="End the case with this answer and show the score",
        )  # fmt: skip
        self._try.tooltip = "Replay the run with the chosen change, to see whether it helps"
        self._replay_words, self._replay = ipywidgets.HTML(), FigureStage(self.theme)
        self._verdict, self.score = ipywidgets.HTML(), ScoreView()
        self.python = CodeBox()
        line = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"}
        choice = ipywidgets.HBox([self._level, self._seed, self._next], layout=line)
        left = ipywidgets.VBox(
            [self.measurements, self._about, self._measure], layout={"flex": "1 1 260px", "min_width": "0"}
        )
        right = ipywidgets.VBox([self.record], layout={"flex": "3 1 540px", "min_width": "0"})
        examine = ipywidgets.HBox([left, right], layout=line | {"align_items": "flex-start", "grid_gap": "8px 24px"})
        decide = ipywidgets.HBox([self._try, self._finish, self._doing], layout=line)
        self._after = ipywidgets.HBox([self._next_below], layout=line | {"display": "none"})
        look = ipywidgets.HTML(f"<style>{HEADLINE_CSS}{_CSS}</style>", layout={"display": "none"})
        self._fill([
            look, choice, self._complaint, self._budget,
            _heading("1. Examine the run"), examine,
            _heading("2. Mark the cause or causes, and the change that would have prevented the failure"),
            self.answer, decide, self._verdict, self.score, self._after, self._replay_words, self._replay,
            self.python,
        ], suggested="")  # fmt: skip
        self.add_class("workbench-ward")

    def _opened(self, seed: int, level: int) -> OpenCase:
        """Return a case, which is made when it is opened for the first time."""
        if (seed, level) not in self._cases:
            self._cases[seed, level] = OpenCase(course.patient(seed, level=level))
        return self._cases[seed, level]

    def _check_idle(self) -> None:
        """Raise an exception while a replay is running."""
        if self.is_measuring:
            raise OptionError("A replay is running; wait until it ends, or press Stop.")

    def _change_case(self) -> None:
        """Open the case of the controls; if there is none, the controls show the current one again."""
        if self._is_adapting:
            return
        try:
            self.open_case(self._seed.value, level=self._level.value)
        finally:
            self._adapt_controls()

    def _adapt_controls(self) -> None:
        self._is_adapting = True
        try:
            self._level.value, self._seed.value = self.patient.level, self.patient.seed
        finally:
            self._is_adapting = False

    def _show_case(self) -> None:
        """Show everything about the current case."""
        case, patient = self._case, self.patient
        self._adapt_controls()
        title, complaint = html.escape(case.title), html.escape(patient.complaint)
        self._complaint.value = f'<div style="{HEAD}">{title}</div><div style="{_TEXT}">{complaint}</div>'
        self._is_adapting = True
        try:
            self.answer.fill(CAUSES, patient.cures)
            self.answer.causes, self.answer.cure = case.causes, case.cure
            self.answer.is_locked = patient.score is not None
        finally:
            self._is_adapting = False
        self._try.description = f"Try the change ({short(patient.cure_cost)})"
        n_cases = course.n_patients(patient.level)
        self._seed.tooltip = f"Cases 0 to {n_cases - 1}; a larger number repeats one of them"
        self.record.clear(_HINT)
        self._fill_measurements()
        self._show_measurement()
        self._show_replay()
        self._show_score()
        self._show_budget()

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Return cost, description and ``is_taken`` of each measurement by name."""
        return {str(name): dict(facts) for name, facts in self.patient.measurements.iterrows()}

    def _fill_measurements(self) -> None:
        def state(facts: Mapping[str, Any]) -> str:
            if facts["is_taken"]:
                return "measured"
            return "" if facts["cost"] <= self.patient.remaining else "too expensive"

        self.measurements.fill(
            row(name, [cell(name), cell(short(facts["cost"]), is_number=True), cell(state(facts))])
            for name, facts in self._facts().items()
        )

    def _show_measurement(self) -> None:
        """Show the chosen measurement: its figure if it was taken, otherwise what it costs."""
        name, case, patient = self.measurements.value, self._case, self.patient
        facts = self._facts()[name]
        description, cost = str(facts["description"]), short(facts["cost"])
        self._about.value = f'<div aria-live="polite" style="{_TEXT};margin:4px 2px">{html.escape(description)}</div>'
        self._measure.description = f"Measured: {name}" if name in case.measured else f"Measure {name} ({cost})"
        self._measure.layout.display = None if patient.score is None else "none"
        if name in case.measured:
            self.record.show(name, case.measured[name], patient.record)
        self._settle()

    def _note_answer(self) -> None:
        """Keep the marked causes and the chosen change with the case."""
        if not self._is_adapting and self.patient.score is None:
            self._case.causes, self._case.cure = list(self.answer.causes), self.answer.cure
            self._settle()

    def _show_replay(self) -> None:
        """Show the loss of the run and of its latest replay."""
        if not self._case.replays:
            self._replay_words.value = ""
            self._replay.draw(None)
            return
        cause, replay = list(self._case.replays.items())[-1]
        sentence = html.escape(str(replay.attrs.get("sentence", "")))
        self._replay_words.value = (
            f'<div role="status" style="{_TEXT}"><div style="{HEAD}">{html.escape(self.patient.cures[cause])}</div>'
            f"{sentence}</div>"
        )
        self._replay.draw(plots.traces(losses_of(replay), variables=["loss"]))

    def _show_score(self) -> None:
        """Show the score, or hide its place until the case is finished."""
        score = self.patient.score
        is_open = score is None
        for button in (self._try, self._finish):
            button.layout.display = None if is_open else "none"
        self._after.layout.display = "none" if is_open else None
        if score is None:
            self._verdict.value = ""
            self.score.clear()
            return
        self._verdict.value = headline(_state(score.points), _result(score))
        titles = {name: cause.title for name, cause in CAUSES.items()}
        evidence = score.evidence.assign(cause=score.evidence["cause"].replace(titles))
        board = f"Level {self.patient.level}: you and other players"
        self.score.show({"Your score": score.parts.reset_index(), board: self._scores(), "Evidence": evidence})

    def _show_budget(self) -> None:
        patient = self.patient
        remaining, budget = short(patient.remaining), short(patient.budget)
        self._budget.value = (
            f'<div role="status" style="{_TEXT}"><meter aria-label="remaining budget" min="0" max="{patient.budget:g}" '
            f'value="{patient.remaining:g}"></meter> Budget: <b>{remaining}</b> of {budget} left</div>'
        )
        self.python.value = self._case.python
        self.export_bar.suggest(f"exports/case_{patient.level}_{patient.seed}")
        self._settle()

    def _read_board(self) -> pd.DataFrame:
        """Return the recorded scores of all players, which are read once."""
        if self._board is None:
            self._board = course.board()
        return self._board

    def _scores(self) -> pd.DataFrame:
        """Return the scores of all players at this level, and the mean of the finished cases in the first row."""
        import pandas as pd

        level = self.patient.level
        done = [case.patient for case in self._cases.values() if case.patient.level == level]
        own = [
            (one.score.points, one.score.are_causes_right, one.score.does_cure_work, one.spent / one.budget)
            for one in done
            if one.score is not None
        ]
        names = ["points", "causes_right", "cures_work", "spent"]
        board = self._read_board().loc[level].reset_index()[["player", "n", *names]]
        mine = pd.DataFrame([["you", len(own), *pd.DataFrame(own).mean()]], columns=board.columns)
        table = pd.concat([mine, board]).round({"points": 0})
        table[names[1:]] = (100 * table[names[1:]].astype(float)).round()
        return table.rename(columns={"n": "cases"} | {name: f"{name}, %" for name in names[1:]})

    def _take(self, found: Callable[[], None]) -> None:
        """Show the result of a replay, or the score."""
        found()

    def _take_replay(self, case: OpenCase, cause: str, replay: xr.Dataset) -> None:
        case.note_replay(cause, replay)
        self._show_replay()

    def _show_end(self) -> None:
        """Show what remains of the budget after a replay."""
        self._fill_measurements()
        self._show_measurement()
        self._show_budget()


def _heading(text: str) -> ipywidgets.HTML:
    return ipywidgets.HTML(f'<div style="{HEAD};margin-top:8px">{html.escape(text)}</div>')


def _result(score: Score) -> str:
    """Return the points and the true causes in words."""
    return f"{score.points:.0f} of 100 points. True answer: {listed(CAUSES[name].title for name in score.causes)}."


def _state(points: float) -> str:
    """Return the state whose color a score has."""
    if points >= _GOOD:
        return CriterionState.HEALTHY
    return CriterionState.AT_RISK if points >= _FAIR else CriterionState.FAILING


@dataclass
class OpenCase:
    """A case that is being played."""

    patient: Patient
    measured: dict[str, xr.Dataset] = field(default_factory=dict)
    replays: dict[str, xr.Dataset] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    cure: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Level and number of the case."""
        return f"Level {self.patient.level}, case {self.patient.seed}"

    @property
    def python(self) -> str:
        """The lines of Python that do the same."""
        patient = f"patient = wb.course.patient({self.patient.seed}, level={self.patient.level})"
        return "\n".join(["import workbench as wb", "", patient, "print(patient.complaint)", *self.lines])

    def measure(self, name: str) -> None:
        """Measure a quantity once."""
        if name not in self.measured:
            self.measured[name] = self.patient.measure(name)
            self.lines.append(f'patient.measure("{name}")')

    def note_replay(self, cause: str, replay: xr.Dataset) -> None:
        """Keep a replay that was made."""
        if cause not in self.replays:
            self.lines.append(f'patient.try_cure("{cause}")')
        self.replays[cause] = replay

    def finish(self, causes: Sequence[str], cure: str | None, progress: Callable[[str], None]) -> None:
        """End the case with an answer, unless it has ended."""
        if self.patient.score is None:
            self.patient.finish(causes, cure, progress=progress)
            self.causes, self.cure = list(causes), cure or ""
            answer = ", ".join(map(repr, [list(causes), *filter(None, [cure])])).replace("'", '"')
            self.lines += [f"score = patient.finish({answer})", "print(score.sentence)", "score.parts"]
