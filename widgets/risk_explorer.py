"""Will this run diverge? Choose a model and a plan, and see the risk before training starts."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench import plots
from workbench.errors import OptionError
from workbench.risk.neighbours import Neighbours
from workbench.schema.sweeps import require
from workbench.widgets.base import known
from workbench.widgets.figure import Figure
from workbench.widgets.risk.curve import CurvePanel, head
from workbench.widgets.risk.driver_bars import driver_bars
from workbench.widgets.risk.forecast import Forecast, forecast
from workbench.widgets.risk.measurement import Efforts, Measured, is_trial_asked, measure, update_of
from workbench.widgets.risk.model_choice import ModelChoice
from workbench.widgets.risk.nearest_table import NEEDS, nearest_table
from workbench.widgets.risk.plan_controls import PlanControls
from workbench.widgets.risk.risk_verdict import cards, warning
from workbench.widgets.worker import MeasuringWidget

if TYPE_CHECKING:
    import xarray as xr

    from workbench.risk.risk_model import RiskModel

#: Name in the list -> set of features of a shipped risk model, the quickest first.
_LOOKS = {
    "forward passes": "forward", "a gradient too": "gradient", "ten trial updates too": "pilot",
}  # fmt: skip
_FIRST_LOOK = "pilot"
_BANNER, _STALE = "workbench-risk-banner", "workbench-risk-stale"
_CSS = f"""
.{_BANNER} {{ border: 2px solid #d55e00; border-left-width: 10px; background: rgba(213, 94, 0, 0.13); }}
.{_STALE} {{ opacity: 0.45; }}
"""


class RiskExplorer(MeasuringWidget):
    """The risk of divergence of a planned run, with controls of model, task and plan.

    A model is measured once, in the background: spectra, one forward pass and, where the risk model needs them,
    gradients and trial updates of a copy. From then on the sliders act at once, as the plan enters as numbers. A
    small model of the zoo is measured whenever its controls change; a checkpoint or module when you press Measure.

    Where the case is outside of the applicability of the risk model, as a model of another size than the recorded ones
    always is, a banner states this and no figure is given. The kernel stays free; where a cell needs the result,
    ``await explorer.finished()``.

    Args:
        model: A configuration of ``wb.zoo``, which the controls then change; a path or hub name of a checkpoint; an
            opened one; any module; or None: a small Pre-LN transformer.
        task: A task, or any data that ``wb.train`` takes; or the name of one of the choices. None: associative recall;
            random tokens for a model that is not of the zoo.
        risk: The risk model; or the features of a risk model that ships with the workbench, as `wb.risk.shipped` takes
            them. None: the best of these, "pilot"; a control then changes it.
        sweep: Recorded runs to compare with; None: the ones that ship with the workbench.

    Attributes:
        setup: The controls of model and task, by name.
        plan: The controls of the plan, by name, such as ``explorer.plan.learning_rate.value = 0.03``.
        look: The control of the measurements, which decides the shipped risk model.
        risk: The risk model.

    Raises:
        OptionError: If the model, the task or the risk model is none of these.
        SchemaError: If the sweep is none.
    """

    def __init__(
        self, model: Any = None, task: Any = None, risk: RiskModel | str | None = None, sweep: xr.Dataset | None = None
    ) -> None:
        super().__init__()
        if isinstance(risk, str) and risk not in _LOOKS.values():
            raise OptionError(f"risk is '{risk}', expected a risk model or one of {', '.join(_LOOKS.values())}.")
        self.setup = ModelChoice(model, task)
        self.plan = PlanControls()
        first = risk if isinstance(risk, str) else _FIRST_LOOK
        self.look = ipywidgets.Dropdown(
            options=tuple(_LOOKS.items()), value=first, description="look at", style={"description_width": "initial"},
            tooltip="The more, the better the prediction, and the longer a measurement takes",
            layout={"width": "225px"},
        )  # fmt: skip
        self.risk: RiskModel = _shipped_model(first) if risk is None or isinstance(risk, str) else risk
        self.look.layout.display = None if risk is None or isinstance(risk, str) else "none"
        self._sweep = _shipped_sweep() if sweep is None else sweep
        require(self._sweep, NEEDS)
        self._neighbours = Neighbours(self.risk, self._sweep)
        self._measured: Measured | None = None
        self._forecast: Forecast | None = None
        self._asked: dict[str, Any] = {}
        self._submitted: list[Any] = []
        self._is_adapting = False
        self._curve = CurvePanel()
        self._canvas = Figure(self._curve.figure, lock=self.turn)
        self._make_parts()
        for control in self.setup.controls:
            self.watch(control, lambda _: self._change_model())
        for control in self.plan.controls:
            self.watch(control, lambda _: self._change_plan())
        self.watch(self.look, lambda _: self._change_look())
        self.on_click(self._button, lambda _: self.measure())
        self.on_click(self._stop, lambda _: self.stop())
        with self.attempt():
            self._change_model()

    @property
    def case(self) -> xr.Dataset | None:
        """The planned run as it is shown, dim ``run`` of 1; None before the first measurement.

        What needs gradients is NaN where the risk model does not ask for it.
        """
        return None if self._forecast is None else self._forecast.case

    @property
    def prediction(self) -> xr.Dataset | None:
        """The prediction for `case`, as from `RiskModel.predict`; None before the first measurement."""
        return None if self._forecast is None else self._forecast.prediction

    @property
    def nearest(self) -> xr.Dataset | None:
        """The recorded runs of the cells that are most like `case`, with ``distance``; None as in `case`."""
        return None if self._forecast is None else self._forecast.nearest

    def measure(self) -> None:
        """Measure the model that the controls describe, in the background; a running measurement is dropped.

        Raises:
            OptionError: If the controls ask for something impossible.
        """
        with self.turn:
            self._worker.drop()
            self._mark_stale("")
            choice, settings, efforts = self.setup.choice(), self.plan.settings(), Efforts.of(self.risk)
            self._submitted = update_of(settings)
            self._worker.submit(lambda check: measure(choice, settings, efforts, check))
            self._mark_stale(f'<progress aria-label="measuring"></progress> measuring {html.escape(choice.name)} …')
            self._stop.layout.display = None

    def figure(self, kind: str = "curve", backend: str = "bokeh") -> Any:
        """The present view as a separate figure, to keep or to write with ``workbench.plots.save()``.

        Args:
            kind: ``"curve"`` or ``"drivers"``.
            backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

        Raises:
            OptionError: If there is no such figure, nothing has been measured, or nothing is known of what drives
                the risk of such a model.
        """
        if self._forecast is None:
            raise OptionError("Nothing has been measured yet; wait for it, or call measure().")
        if kind == "curve":
            name = str(self._forecast.case["architecture"].values[0])
            curve = self._forecast.curve.assign_coords(architecture=[name])
            runs = self._forecast.nearest.assign_coords(architecture=("run", [name] * known(self.nearest).sizes["run"]))
            return plots.risk_curve(curve, runs=runs, backend=backend)
        if kind == "drivers":
            if not self._forecast.is_familiar:
                raise OptionError(
                    "The case is unlike the recorded runs, so nothing is known of what drives its risk; choose another "
                    "model or plan."
                )
            return plots.drivers(self._forecast.drivers, backend=backend)
        raise OptionError(f"There is no figure '{kind}', expected 'curve' or 'drivers'.")

    def close(self) -> None:
        """Remove the widget and everything that belongs to it; what is still being measured is dropped."""
        super().close()
        if hasattr(self, "_canvas"):
            self._canvas.document.clear()

    def _make_parts(self) -> None:
        self._button = ipywidgets.Button(
            description="Measure", button_style="primary", layout={"width": "104px"},
            tooltip="Look at the model as training would begin with it",
        )  # fmt: skip
        self._stop = ipywidgets.Button(
            description="Stop", tooltip="End the measurement", layout={"width": "70px", "display": "none"}
        )
        self._status = ipywidgets.HTML()
        self._cards = ipywidgets.HTML()
        self._banner_words = ipywidgets.HTML()
        self._banner = ipywidgets.VBox(
            [self._banner_words],
            layout={"padding": "8px 14px", "margin": "6px 2px", "display": "none", "overflow": "visible"},
        )
        self._banner.add_class(_BANNER)
        self._head, self._bars, self._table = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        curve = ipywidgets.VBox([self._head, self._canvas], layout={"flex": "1 1 360px", "min_width": "300px"})
        self._bars.layout = {"flex": "1 1 320px", "min_width": "280px"}
        figures = ipywidgets.HBox([curve, self._bars], layout={"flex_flow": "row wrap", "grid_gap": "4px 20px"})
        row = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"}
        setup = ipywidgets.HBox([*self.setup.shown, self.look, self._button, self._stop, self._status], layout=row)
        self._shown = ipywidgets.VBox([self._cards, self._banner, figures, self._table], layout={"display": "none"})
        look = ipywidgets.HTML(f"<style>{_CSS}</style>", layout={"display": "none"})
        self.fill([look, setup, self.plan.box, self._shown])

    def _change_model(self) -> None:
        """The controls describe another model or task."""
        if self._is_adapting:
            return
        self._is_adapting = True
        try:
            self.setup.adapt()
        finally:
            self._is_adapting = False
        self._measure_or_ask()

    def _change_look(self) -> None:
        """Another of the shipped risk models is to judge."""
        self.risk = _shipped_model(self.look.value)
        self._neighbours = Neighbours(self.risk, self._sweep)
        self._asked = {}
        if self._measured is None or self._worker.is_busy or not self._measured.suits(self.risk, self.plan.settings()):
            self._measure_or_ask()
        else:
            self._draw()

    def _change_plan(self) -> None:
        """The plan is another one: nothing is measured again, unless what trial updates find counts."""
        if self._measured is None and not self._worker.is_busy:
            return
        if is_trial_asked(self.risk) and update_of(self.plan.settings()) != self._submitted:
            self._measure_or_ask()
        else:
            self._draw()

    def _measure_or_ask(self) -> None:
        """Look at a small model at once; at another one when the button is pressed."""
        if self.setup.is_automatic:
            self.measure()
            return
        self._worker.drop()
        self._mark_stale("press Measure to measure this model")

    def _take(self, found: Measured | None, error: Exception | None) -> None:
        """Show the risk of the model that was measured, or raise why it was not."""
        if error is not None:
            self._mark_stale("")
            raise error
        self._measured, self._asked = found, {}
        self._status.value = ""
        self._stop.layout.display = "none"
        self._shown.remove_class(_STALE)
        self._draw()

    def _say_stopped(self) -> None:
        """Show that the figures are those of the model before."""
        self._mark_stale("stopped; press Measure to measure this model")

    def _draw(self) -> None:
        """Show the planned run."""
        settings = self.plan.settings()
        if self._measured is None or not self._measured.suits(self.risk, settings):
            return  # what suits is being measured, or waits for the button
        asked = {**settings, "learning_rate": None}
        found = forecast(
            self.risk, self._neighbours, self._measured.planned(settings),
            before=self._forecast if asked == self._asked else None,
        )  # fmt: skip
        self._forecast, self._asked = found, asked
        self._cards.value = cards(found)
        words = warning(found)
        self._banner_words.value = words
        self._banner.layout.display = None if words else "none"
        self._head.value = head(found)
        with self._canvas.batch():
            self._curve.write(found)
        self._bars.value = driver_bars(found)
        self._table.value = nearest_table(found.nearest, found.rate)
        self._shown.layout.display = None

    def _mark_stale(self, status: str) -> None:
        """Say what goes on; the figures are no longer of what the controls describe."""
        style = "color:var(--jp-ui-font-color2,#616161);line-height:28px"
        self._status.value = f'<div role="status" style="{style}">{status}</div>' if status else ""
        self._shown.add_class(_STALE)
        self._stop.layout.display = "none"


def _shipped_model(features: str) -> RiskModel:
    from workbench.risk import shipped

    return shipped(features)


def _shipped_sweep() -> xr.Dataset:
    from workbench.studies.samples import divergence_sweep

    return divergence_sweep()
