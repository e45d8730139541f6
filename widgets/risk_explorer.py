"""Explore the risk of a planned training: choose a model and a plan, see the risk, and run a pilot."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import ipywidgets
import numpy as np
import xarray as xr
from bokeh.models import BoxAnnotation, ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d, Span
from bokeh.plotting import figure

from workbench import plots
from workbench.errors import OptionError
from workbench.io.store import export_netcdf
from workbench.option_checks import checked
from workbench.option_kinds import one_of
from workbench.plots import style
from workbench.plots.figure_files import picture_of
from workbench.rates.find_rate import FoundRates
from workbench.risk.edge_model import EdgeModel, shipped
from workbench.risk.risk import Risk, over_rates, predict
from workbench.schema.statuses import CriterionState
from workbench.widgets.base import enlarge_text, known
from workbench.widgets.figure import Figure, FigureStage
from workbench.widgets.risk import words
from workbench.widgets.risk.controls import Measured, ModelChoice, PlanControls, measure, run_pilot
from workbench.widgets.risk.words import RiskAnswer, page
from workbench.widgets.tables import HEADLINE_CSS, headline
from workbench.widgets.text_picture import text_picture
from workbench.widgets.worker import MeasuringWidget

_STALE = "workbench-risk-stale"
_NOTHING = "Nothing has been measured yet;"
_SMALLEST_BUDGET, _LARGEST_BUDGET = 200, 100_000
_KINDS = {
    ".png": ("PNG", "The result, its metrics and the curve as a picture"),
    ".svg": ("SVG", "The curve as vector graphics, for print"),
    ".html": ("HTML", "A page with the result and an interactive curve, without a kernel and without a network"),
    ".nc": ("netCDF", "The measured case, and the risk over the learning rate, one group each"),
}


class RiskExplorer(MeasuringWidget):
    """The risk that a planned training does not learn well, with controls of model, task and plan, and a pilot.

    A model is measured once in the background, by a forward pass and its spectra. Changes of the plan then take effect
    immediately. A small model of the zoo is measured whenever its controls change, a checkpoint or module when you
    press Measure. A pilot (`workbench.find_rate`) trains copies for a few hundred updates and makes the estimate more
    certain. It stays valid until a setting other than the learning rate changes.

    If the training is outside the range of the recorded runs, the reason is shown instead of a risk. The kernel stays
    responsive; in a cell that needs the result, use ``await explorer.finished()``.

    Args:
        model: A configuration of ``wb.zoo``, which the controls can change; a path or hub name of a checkpoint; an
            opened checkpoint; or any module. None for a small Pre-LN transformer.
        task: A task, any data that ``wb.train`` accepts, or the name of one of the choices. None for associative
            recall, or for random tokens if the model is not from the zoo.
        risk: Risk model; None for the one included in the workbench.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        setup: The controls of model and task, by name.
        plan: The controls of the plan, by name, such as ``explorer.plan.learning_rate.value = 0.03``.
        budget: The control of the maximum number of updates of a pilot.

    Raises:
        OptionError: If the model or the task has another type or name, or there is no such theme.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> model = wb.zoo.transformer(norm="pre_ln", d_model=16, n_layers=2, n_heads=2, vocab_size=64)
        >>> explorer = widgets.RiskExplorer(model)
        >>> explorer.plan.learning_rate.value = 0.03
        >>> explorer.summary
        'Press Measure to estimate the risk of this model.'
        >>> explorer.close()

    See Also:
        `workbench.risk.predict`: Returns the risk as numbers.
        `workbench.find_rate`: Runs a pilot.
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
            self._watch(control, lambda _: self._change_model())
        for control in self.plan.controls:
            self._watch(control, lambda _: self._draw())
        self._on_click(self._button, lambda _: self.measure())
        self._on_click(self._start, lambda _: self.run_pilot())
        with self._attempt():
            self._change_model()

    @property
    def case(self) -> xr.Dataset | None:
        """The displayed planned training, with dim ``run`` of size 1; None before the first measurement."""
        return None if self._measured is None else self._measured.planned(self.plan.settings())

    @property
    def risk(self) -> Risk | None:
        """The risk of the planned training, from `workbench.risk.predict`; None before the first measurement."""
        return self._risk

    @property
    def pilot(self) -> FoundRates | None:
        """The pilot of the displayed plan; None if there is none."""
        if self._pilot is None:
            return None
        plan, found = self._pilot
        return found if all(self.plan.settings()[name] == value for name, value in plan.items()) else None

    @property
    def summary(self) -> str:
        """The predicted outcome of the planned training in one sentence."""
        return self._answer.sentence

    def measure(self) -> None:
        """Measure the model of the controls in the background; a running measurement is dropped.

        Raises:
            OptionError: If the values of the controls are invalid.
        """
        with self.turn:
            self._drop()
            self._mark_stale()
            choice, settings = self.setup.choice(), self.plan.settings()
            self._begin(f"Measuring {choice.name}", lambda check, _: measure(choice, settings, self._model, check))
            self._say_answer()

    def run_pilot(self) -> None:
        """Run a pilot of the measured model and the plan in the background; a running pilot is dropped.

        Raises:
            OptionError: If nothing has been measured yet.
        """
        with self.turn:
            if self._measured is None or self.is_measuring:
                raise OptionError("The model has not been measured yet; wait for the measurement, or press Measure.")
            choice, settings, budget = self._measured.choice, self.plan.settings(), self.budget.value

            def job(check: Callable[[], None], tell: Callable[[str], None]) -> Any:
                return run_pilot(choice, settings, budget, lambda words: tell(f"training copies: {words}"))

            self._begin("Pilot", job, {"training copies": 1})
            self._start.disabled = True

    @checked
    def figure(self, backend: str = "bokeh", *, kind: Annotated[str, one_of(("curve", "pilot"))] = "curve") -> Any:
        """Return the curve or the pilot as a separate figure, for example for ``workbench.plots.save()``.

        Args:
            backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.
            kind: ``"curve"`` or ``"pilot"``.

        Raises:
            OptionError: If there is no such figure, or nothing has been measured.
            SchemaError: If the risk is unknown.
        """
        if kind == "pilot":
            if self.pilot is None:
                raise OptionError("There is no pilot of this plan; call run_pilot().")
            return plots.pilot_losses(self.pilot.data, backend=backend)
        if self._over is None or self._risk is None:
            raise OptionError(f"{_NOTHING} wait for the measurement, or call measure().")
        return plots.risk_curve(self._over, learning_rate=self._risk.learning_rate, backend=backend)

    def picture(self) -> bytes:
        """Return the result, its metrics and the curve as PNG."""
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
        """Return the result, its metrics and the interactive curve as one HTML page that needs no network."""
        risk = known(self._risk, f"{_NOTHING} wait for the measurement.", name="model")
        return page(self._title, self._answer, self._cards_of(risk), None if risk.reason else self.figure())

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Suffixes of files that cannot be written at present -> reason."""
        if self._risk is None:
            return dict.fromkeys((".svg", ".html", ".nc"), f"{_NOTHING} wait for the measurement, or press Measure.")
        reason = f"There is no curve, because the risk is unknown. {self._risk.reason}"
        return {".svg": reason} if self._risk.reason else {}

    def close(self) -> None:
        """Remove the widget and all its parts; a running measurement is dropped."""
        super().close()
        if hasattr(self, "_canvas"):
            self._canvas.document.clear()

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        if ending == ".nc":
            return export_netcdf({"case": known(self.case), "risk": known(self._over)}, path, overwrite=overwrite)
        return super()._write(path, ending, overwrite=overwrite)

    def _content(self, ending: str) -> bytes | None:
        return self.picture() if ending == ".png" else super()._content(ending)

    def _make_parts(self) -> None:
        self._button = ipywidgets.Button(
            description="Measure", layout={"width": "104px"}, tooltip="Measure the model before training"
        )
        self.budget = ipywidgets.BoundedIntText(
            1000, min=_SMALLEST_BUDGET, max=_LARGEST_BUDGET, step=100, description="Pilot, at most",
            style={"description_width": "initial"}, layout={"width": "200px"}, tooltip="Updates in total",
        )  # fmt: skip
        self._start = ipywidgets.Button(
            description="Run pilot", button_style="primary", layout={"width": "120px"},
            tooltip="Train copies of the model at several learning rates for a few updates each",
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
        # The height includes a progress bar, so that nothing below moves when it appears or disappears.
        self._doing.layout.flex, self._doing.layout.min_height = "1 1 600px", "36px"
        pilot = ipywidgets.HBox([self.budget, updates, self._start, self._doing], layout=row)
        risk = ipywidgets.HBox([self._cards, curve], layout=row | {"align_items": "flex-start"})
        self._losses = FigureStage(self.theme)
        self._shown = ipywidgets.VBox([risk, self._found, self._losses], layout={"display": "none"})
        look = ipywidgets.HTML(f"<style>{HEADLINE_CSS}{words.CSS}</style>", layout={"display": "none"})
        self._fill([look, self._words, setup, self.plan.box, pilot, self._shown], suggested="exports/risk")

    def _change_model(self) -> None:
        """Adapt to a change of the model or task controls."""
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
        self._drop()
        self._end("")
        self._mark_stale()
        self._say_answer()

    def _take(self, found: Any) -> None:
        """Show the risk of the measured model, or the result of a pilot."""
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
        """Model, task, number of updates and optimizer of the planned training."""
        choice = known(self._measured).choice
        task = choice.task if isinstance(choice.task, str) else choice.task.describe()["task"]
        return f"{choice.name} on {task}, {self.plan.n_steps.value:,} updates with {self.plan.optimizer.value}"

    @property
    def _answer(self) -> RiskAnswer:
        """The predicted outcome; while another model is being measured, that of the previous model."""
        if self._risk is None or self._over is None:
            sentence = (
                "Measuring the model …"
                if self._progress is not None
                else "Press Measure to estimate the risk of this model."
            )
            return words.RiskAnswer(CriterionState.NOT_MEASURED, sentence, "")
        return words.answer(self._risk, self._over, self.pilot)

    @property
    def _answer_of_pilot(self) -> FoundRates | None:
        """The pilot if it has a result, else None."""
        return None if self.pilot is None or self.pilot.reason else self.pilot

    def _cards_of(self, risk: Risk) -> list[words.Card]:
        return words.cards(risk, known(self.case), self._answer_of_pilot)

    def _draw(self) -> None:
        """Show the risk of the planned training."""
        if (case := self.case) is None:
            return
        self._risk = predict(case, pilot=self._answer_of_pilot, model=self._model)
        self._over = over_rates(case, self._curve.rates, pilot=self._answer_of_pilot, model=self._model)
        self._cards.value = words.as_html(self._cards_of(self._risk))
        found = "" if self.pilot is None else html.escape(str(self.pilot))
        self._found.value = f'<div class="workbench-risk-found">{found}</div>' if found else ""
        self._draw_losses()
        with self._canvas.batch():
            self._curve.write(self._over, self._risk)
        self._shown.layout.display = None
        self._say_answer()

    def _say_answer(self) -> None:
        """Update the headline and the buttons for files."""
        answer = self._answer
        more = [answer.more]
        if self._risk is not None and self._is_stale:
            remedy = "" if self._progress else "Press Measure to update it."
            more = [f"This is the result of the previous model. {remedy}"]
        self._words.value = headline(answer.state, answer.sentence, more)
        # A click would be lost while something is measured.
        self._start.disabled = self._measured is None or self._progress is not None
        self._settle()

    def _draw_losses(self) -> None:
        """Show the losses of the pilot, or nothing if there is none."""
        pilot = self.pilot if self.pilot is not None and self.pilot.rounds else None
        if pilot is self._losses_of:
            return
        self._losses_of = pilot
        self._losses.draw(None if pilot is None else plots.pilot_losses(pilot.data))

    def _mark_stale(self) -> None:
        """Mark the displayed result as out of date."""
        self._is_stale = True
        self._shown.add_class(_STALE)


#: Width and height of the frame in pixels, before it is scaled to the page width.
_SIZE = (640, 240)
_FAILURE, _USEFUL = style.MODEL_COLORS[0], style.MODEL_COLORS[2]
_CURVES = ("failure", "failure_low", "failure_high", "explosion")
#: Legend below the figure.
KEY = (
    "blue: risk of not learning well · dashed: risk of an explosion · green: useful learning rates, up to the useful "
    "edge (line) · bar: its 80 % interval · dot: planned learning rate"
)


class CurvePanel:
    """The risk over the learning rate, the useful learning rates, and the planned learning rate."""

    def __init__(self) -> None:
        self.figure = plot = figure(
            frame_width=_SIZE[0], frame_height=_SIZE[1], active_drag=None, active_scroll=None, toolbar_location="above",
            tools="pan,xwheel_zoom,box_zoom,reset,save", x_axis_type="log", x_range=Range1d(1e-5, 10.0),
            y_range=Range1d(0.0, 1.0), x_axis_label="learning rate", y_axis_label="probability",
        )  # fmt: skip
        style.dress_bokeh(SimpleNamespace(state=plot), None)
        self.curve = ColumnDataSource({name: [] for name in ("rate", *_CURVES)})
        self.now = ColumnDataSource({"rate": [], "failure": []})
        self.interval = ColumnDataSource({"low": [], "high": [], "height": []})
        self.band = BoxAnnotation(fill_color=_USEFUL, fill_alpha=0.22, bottom=0, top=1, visible=False)
        self.edge = Span(dimension="height", line_color=_USEFUL, line_width=2, visible=False)
        for item in (self.band, self.edge):
            plot.add_layout(item)
        plot.varea("rate", "failure_low", "failure_high", source=self.curve, fill_color=_FAILURE, fill_alpha=0.18)
        line = plot.line("rate", "failure", source=self.curve, color=_FAILURE, width=2.4)
        plot.line("rate", "explosion", source=self.curve, color=style.DIVERGED, line_width=2, line_dash="dashed")
        plot.segment("low", "height", "high", "height", source=self.interval, color=_USEFUL, line_width=5)
        plot.scatter("rate", "failure", source=self.now, size=14, color=_FAILURE, line_color="white", line_width=1.5)
        tips = [
            ("learning rate", "@rate{0.[000000]}"), ("risk of not learning well", "@failure{0 %}"),
            ("risk of an explosion", "@explosion{0 %}"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline", point_policy="follow_mouse"))
        (axis,) = plot.yaxis
        axis.ticker, axis.formatter = FixedTicker(ticks=[0, 0.25, 0.5, 0.75, 1]), NumeralTickFormatter(format="0 %")
        (axis,) = plot.xaxis
        decades = [10.0**power for power in range(-5, 2)]
        axis.ticker = FixedTicker(ticks=decades)
        axis.major_label_overrides = {decade: f"{decade:g}" for decade in decades}

    @property
    def rates(self) -> np.ndarray:
        """The learning rates of the curve."""
        return np.geomspace(self.figure.x_range.start, self.figure.x_range.end, 81)

    def write(self, curve: xr.Dataset, risk: Risk) -> None:
        """Update the curve and the planned rate; nothing is drawn if the risk is unknown."""
        is_known = not risk.reason
        self.band.visible = self.edge.visible = is_known
        rows: dict[str, Any] = {name: curve[name].values if is_known else [] for name in _CURVES}
        self.curve.data = {"rate": curve["learning_rate"].values if is_known else [], **rows}
        edge = risk.useful_edge
        self.now.data = {"rate": [risk.learning_rate] * is_known, "failure": [risk.failure.value] * is_known}
        self.interval.data = {
            "low": [edge.low] * is_known, "high": [edge.high] * is_known, "height": [0.02] * is_known,
        }  # fmt: skip
        if is_known:
            self.band.left, self.band.right, self.edge.location = risk.slow_edge.value, edge.value, edge.value
