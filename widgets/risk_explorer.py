"""Will it learn well at this rate? Choose a model and a plan, see the risk, and find the rate by a pilot."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench import plots
from workbench.errors import OptionError
from workbench.io.atomic import replacing
from workbench.io.store import export_netcdf
from workbench.plots.figure_files import picture_of
from workbench.rates.find_rate import FoundRates
from workbench.risk.risk import Risk, over_rates, predict
from workbench.risk.shipped_model import shipped
from workbench.schema.statuses import CriterionState
from workbench.widgets import headline
from workbench.widgets.base import known
from workbench.widgets.export import ExportBar
from workbench.widgets.figure import Figure
from workbench.widgets.risk import plan_controls, risk_words
from workbench.widgets.risk.curve import KEY, CurvePanel
from workbench.widgets.risk.measurement import Measured, measure, run_pilot
from workbench.widgets.risk.model_choice import ModelChoice
from workbench.widgets.risk.plan_controls import PlanControls
from workbench.widgets.risk.risk_page import page
from workbench.widgets.stage import FigureStage
from workbench.widgets.text_picture import text_picture
from workbench.widgets.theme import enlarge_text
from workbench.widgets.worker import MeasuringWidget

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import xarray as xr

    from workbench.risk.edge_model import EdgeModel
    from workbench.widgets.risk.risk_words import RiskAnswer

_STALE = "workbench-risk-stale"
_CSS = f"""
{headline.CSS}{risk_words.CSS}{plan_controls.CSS}
.{_STALE} .workbench-figure {{ opacity: 0.4; }}
.{_STALE} .workbench-risk > div {{ border-style: dashed; }}
.{_STALE} .workbench-risk .figure {{ color: var(--jp-ui-font-color2, #616161); font-weight: 400; }}
"""
_NOTHING = "Nothing has been measured yet;"
_SMALLEST_BUDGET, _LARGEST_BUDGET = 200, 100_000
_KINDS = {
    ".png": ("PNG", "The answer, its figures and the curve as a picture"),
    ".svg": ("SVG", "The curve as vectors, for print"),
    ".html": ("HTML", "A page with the answer and a curve that stays interactive, without a kernel and a network"),
    ".nc": ("netCDF", "What was measured, and the risk over the learning rate; a group for each"),
}


class RiskExplorer(MeasuringWidget):
    """The risk that a planned training does not learn well, with controls of model, task and plan, and a pilot.

    A model is measured once, in the background, by a forward pass and its spectra. From then on the sliders act at
    once, as the plan enters as numbers. A small model of the zoo is measured whenever its controls change; a checkpoint
    or module when you press Measure. A pilot (`workbench.find_rate`) trains copies for a few hundred updates and
    narrows the risk; it holds until another setting than the learning rate changes.

    Outside of what was measured the reason is stated and no figure is given. The kernel stays free; where a cell needs
    the result, ``await explorer.finished()``.

    Args:
        model: A configuration of ``wb.zoo``, which the controls then change; a path or hub name of a checkpoint; an
            opened one; any module; or None: a small Pre-LN transformer.
        task: A task, or any data that ``wb.train`` takes; or the name of one of the choices. None: associative recall;
            random tokens for a model that is not of the zoo.
        risk: Model of the risk; None: the one that ships with the workbench.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        setup: The controls of model and task, by name.
        plan: The controls of the plan, by name, such as ``explorer.plan.learning_rate.value = 0.03``.
        budget: The control of the updates of a pilot.
        export_bar: The buttons and fields for files.

    Raises:
        OptionError: If the model or the task is none of these, or there is no such theme.
    """

    kinds = _KINDS

    def __init__(
        self, model: Any = None, task: Any = None, risk: EdgeModel | None = None, *, theme: str = "page"
    ) -> None:
        super().__init__(theme=theme)
        self.setup = ModelChoice(model, task)
        self.plan = PlanControls()
        self._model = shipped() if risk is None else risk
        self._measured: Measured | None = None
        self._risk: Risk | None = None
        self._over: xr.Dataset | None = None
        self._pilot: tuple[dict[str, Any], FoundRates] | None = None
        self._losses_of: FoundRates | None = None
        self._is_adapting = self._is_stale = False
        self._curve = CurvePanel()
        enlarge_text(self._curve.figure, theme)
        self._canvas = Figure(self._curve.figure, lock=self.turn)
        self._make_parts()
        for control in self.setup.controls:
            self.watch(control, lambda _: self._change_model())
        for control in self.plan.controls:
            self.watch(control, lambda _: self._draw())
        self.on_click(self._button, lambda _: self.measure())
        self.on_click(self._start, lambda _: self.run_pilot())
        with self.attempt():
            self._change_model()

    @property
    def case(self) -> xr.Dataset | None:
        """The planned training as it is shown, dim ``run`` of 1; None before the first measurement."""
        return None if self._measured is None else self._measured.planned(self.plan.settings())

    @property
    def risk(self) -> Risk | None:
        """Its risk, as from `workbench.risk.predict`; None before the first measurement."""
        return self._risk

    @property
    def pilot(self) -> FoundRates | None:
        """The pilot of the plan that is shown; None: there is none."""
        if self._pilot is None:
            return None
        plan, found = self._pilot
        return found if all(self.plan.settings()[name] == value for name, value in plan.items()) else None

    @property
    def summary(self) -> str:
        """Whether the planned training will learn well, in one sentence."""
        return self._answer.sentence

    def measure(self) -> None:
        """Measure the model that the controls describe, in the background; what is under way is dropped.

        Raises:
            OptionError: If the controls ask for something impossible.
        """
        with self.turn:
            self._worker.drop()
            self._mark_stale()
            choice, settings = self.setup.choice(), self.plan.settings()
            self._begin(f"measuring {choice.name}", lambda check, _: measure(choice, settings, self._model, check))
            self._say_answer()

    def run_pilot(self) -> None:
        """Run a pilot of the measured model and the plan, in the background; what is under way is dropped.

        Raises:
            OptionError: If nothing has been measured yet.
        """
        with self.turn:
            if self._measured is None or self._worker.is_busy:
                raise OptionError("The model has not been measured yet; wait for it, or press Measure.")
            choice, settings, budget = self._measured.choice, self.plan.settings(), self.budget.value

            def job(check: Callable[[], None], tell: Callable[[str], None]) -> Any:
                return run_pilot(choice, settings, budget, lambda words: tell(f"training copies: {words}"))

            self._begin("pilot", job, {"training copies": 1})

    def figure(self, backend: str = "bokeh", *, kind: str = "curve") -> Any:
        """The present view as a separate figure, to keep or to write with ``workbench.plots.save()``.

        Args:
            backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.
            kind: ``"curve"`` or ``"pilot"``.

        Raises:
            OptionError: If there is no such figure, or nothing has been measured.
            SchemaError: If the risk is not known.
        """
        if kind not in ("curve", "pilot"):
            raise OptionError(f"There is no figure '{kind}', expected 'curve' or 'pilot'.")
        if kind == "pilot":
            if self.pilot is None:
                raise OptionError("There is no pilot of this plan; call run_pilot().")
            return plots.pilot_losses(self.pilot.data, backend=backend)
        if self._over is None or self._risk is None:
            raise OptionError(f"{_NOTHING} wait for it, or call measure().")
        return plots.risk_curve(self._over, learning_rate=self._risk.learning_rate, backend=backend)

    def picture(self) -> bytes:
        """The answer, the figures and the curve, as PNG."""
        if self._risk is None:
            return text_picture(self._answer.sentence)
        cards = self._cards_of(self._risk)
        table = [
            [card.name for card in cards],
            [card.figure for card in cards],
            ["; ".join(card.lines) for card in cards],
        ]
        found = [] if self.pilot is None else [str(self.pilot)]
        curve = None if self._risk.reason else picture_of(self.figure("matplotlib"))
        return text_picture(self._answer.sentence, [self._title, self._answer.more, *found], table, curve)

    def page(self) -> str:
        """The answer, the figures and the curve, as one HTML page that stays interactive, without a network."""
        risk = known(self._risk, f"{_NOTHING} wait for it.")
        return page(self._title, self._answer, self._cards_of(risk), None if risk.reason else self.figure())

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Endings of files that cannot be written of what is shown, and why."""
        if self._risk is None:
            return dict.fromkeys((".svg", ".html", ".nc"), f"{_NOTHING} wait for it, or press Measure.")
        return {".svg": f"There is no curve, as the risk is unknown. {self._risk.reason}"} if self._risk.reason else {}

    def close(self) -> None:
        """Remove the widget and everything that belongs to it; what is still being measured is dropped."""
        super().close()
        if hasattr(self, "_canvas"):
            self._canvas.document.clear()

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        if ending == ".nc":
            return export_netcdf({"case": known(self.case), "risk": known(self._over)}, path, overwrite=overwrite)
        if ending == ".png":
            content = self.picture()
            with replacing(path) as partial:
                partial.write_bytes(content)
            return path
        return super()._write(path, ending, overwrite=overwrite)

    def _make_parts(self) -> None:
        self._button = ipywidgets.Button(
            description="Measure",
            layout={"width": "104px"},
            tooltip="Look at the model as training would begin with it",
        )
        self.budget = ipywidgets.BoundedIntText(
            1000, min=_SMALLEST_BUDGET, max=_LARGEST_BUDGET, step=100, description="pilot of at most",
            style={"description_width": "initial"}, layout={"width": "200px"}, tooltip="Updates over all rates",
        )  # fmt: skip
        self._start = ipywidgets.Button(
            description="Run a pilot", button_style="primary", layout={"width": "120px"},
            tooltip="Train copies at several rates for a few updates each",
        )  # fmt: skip
        self._words, self._cards, self._found = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._cards.layout = {"flex": "1 1 430px", "min_width": "0", "width": "auto"}
        key = ipywidgets.HTML(f'<div class="workbench-risk-key">{KEY}</div>')
        curve = ipywidgets.VBox(
            [self._canvas, key], layout={"flex": "3 1 700px", "min_width": "0", "overflow": "hidden"}
        )
        row = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"}
        setup = ipywidgets.HBox([*self.setup.shown, self._button], layout=row)
        updates = ipywidgets.Label("updates")
        # As high as with a progress, so that nothing below moves when one comes and goes.
        self._doing.layout.flex, self._doing.layout.min_height = "1 1 600px", "36px"
        pilot = ipywidgets.HBox([self.budget, updates, self._start, self._doing], layout=row)
        risk = ipywidgets.HBox([self._cards, curve], layout=row | {"align_items": "flex-start"})
        self._losses = FigureStage(self.theme)
        self._shown = ipywidgets.VBox([risk, self._found, self._losses], layout={"display": "none"})
        self.export_bar = ExportBar(self, self.kinds)
        self.export_bar.suggest("exports/risk")
        look = ipywidgets.HTML(f"<style>{_CSS}</style>", layout={"display": "none"})
        self.fill([look, self._words, setup, self.plan.box, pilot, self._shown, self.export_bar])

    def _change_model(self) -> None:
        """The controls describe another model or task."""
        if self._is_adapting:
            return
        self._is_adapting = True
        try:
            self.setup.adapt()
        finally:
            self._is_adapting = False
        self._pilot = None
        if self.setup.is_automatic:
            self.measure()
            return
        self._worker.drop()
        self._end("")
        self._mark_stale()
        self._say_answer()

    def _take(self, found: Any) -> None:
        """Show the risk of the model that was measured, or what the pilot found."""
        if isinstance(found, Measured):
            self._measured, self._pilot = found, None
        else:
            self._pilot = found
        self._is_stale = False
        self._shown.remove_class(_STALE)
        self._draw()

    def _show_end(self) -> None:
        self._say_answer()

    @property
    def _title(self) -> str:
        """What is to be trained, in a few words."""
        choice = known(self._measured).choice
        task = choice.task if isinstance(choice.task, str) else choice.task.describe()["task"]
        return f"{choice.name} on {task}, {self.plan.n_steps.value:,} updates with {self.plan.optimizer.value}"

    @property
    def _answer(self) -> RiskAnswer:
        """Whether the planned training will learn well; while another model is measured, that of the model before."""
        if self._risk is None or self._over is None:
            words = (
                "Measuring the model …"
                if self._progress is not None
                else "Press Measure to learn the risk of this model."
            )
            return risk_words.RiskAnswer(CriterionState.NOT_MEASURED, words, "")
        return risk_words.answer(self._risk, self._over, self.pilot)

    @property
    def _answer_of_pilot(self) -> FoundRates | None:
        """The pilot, if it has an answer."""
        return None if self.pilot is None or self.pilot.reason else self.pilot

    def _cards_of(self, risk: Risk) -> list[risk_words.Card]:
        return risk_words.cards(risk, known(self.case), self._answer_of_pilot)

    def _draw(self) -> None:
        """Show the planned training."""
        if (case := self.case) is None:
            return
        self._risk = predict(case, pilot=self._answer_of_pilot, model=self._model)
        self._over = over_rates(case, self._curve.rates, pilot=self._answer_of_pilot, model=self._model)
        self._cards.value = risk_words.as_html(self._cards_of(self._risk))
        words = "" if self.pilot is None else html.escape(str(self.pilot))
        self._found.value = f'<div class="workbench-risk-found">{words}</div>' if words else ""
        self._draw_losses()
        with self._canvas.batch():
            self._curve.write(self._over, self._risk)
        self._shown.layout.display = None
        self._say_answer()

    def _say_answer(self) -> None:
        """Show the answer above everything, and which files can be written of it."""
        answer = self._answer
        more = [answer.more]
        if self._risk is not None and self._is_stale:
            more = [
                f"This is the answer for the model before. {'' if self._progress else 'Press Measure for this one.'}"
            ]
        self._words.value = headline.headline(answer.state, answer.sentence, more)
        self.export_bar.offer(self.refused_kinds)
        self.settle()

    def _draw_losses(self) -> None:
        """Show the losses of the pilot; nothing without one."""
        pilot = self.pilot if self.pilot is not None and self.pilot.rounds else None
        if pilot is self._losses_of:
            return
        self._losses_of = pilot
        self._losses.draw(None if pilot is None else plots.pilot_losses(pilot.data))

    def _mark_stale(self) -> None:
        """What is shown is not what the controls describe."""
        self._is_stale = True
        self._shown.add_class(_STALE)
