"""Will it learn well at this rate? Choose a model and a plan, see the risk, and find the rate by a pilot."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench import plots
from workbench.errors import OptionError
from workbench.rates.find_rate import FoundRates
from workbench.risk.risk import Risk, over_rates, predict
from workbench.risk.shipped_model import shipped
from workbench.widgets.figure import Figure, show
from workbench.widgets.risk.curve import KEY, CurvePanel
from workbench.widgets.risk.measurement import Measured, measure, run_pilot
from workbench.widgets.risk.model_choice import ModelChoice
from workbench.widgets.risk.plan_controls import PlanControls
from workbench.widgets.risk.risk_words import MUTED, cards, warning
from workbench.widgets.worker import MeasuringWidget

if TYPE_CHECKING:
    import xarray as xr

    from workbench.risk.edge_model import EdgeModel

_BANNER, _STALE = "workbench-risk-banner", "workbench-risk-stale"
_CSS = f"""
.{_BANNER} {{ border: 2px solid #d55e00; border-left-width: 10px; background: rgba(213, 94, 0, 0.13); }}
.{_STALE} {{ opacity: 0.45; }}
"""
_SMALLEST_BUDGET, _LARGEST_BUDGET = 200, 100_000


class RiskExplorer(MeasuringWidget):
    """The risk that a planned training does not learn well, with controls of model, task and plan, and a pilot.

    A model is measured once, in the background, by a forward pass and its spectra. From then on the sliders act at
    once, as the plan enters as numbers. A small model of the zoo is measured whenever its controls change; a checkpoint
    or module when you press Measure. A pilot (`workbench.find_rate`) trains copies for a few hundred updates and
    narrows the risk; it holds until another setting than the learning rate changes.

    Outside of what was measured a banner states the reason and no figure is given. The kernel stays free; where a
    cell needs the result, ``await explorer.finished()``.

    Args:
        model: A configuration of ``wb.zoo``, which the controls then change; a path or hub name of a checkpoint; an
            opened one; any module; or None: a small Pre-LN transformer.
        task: A task, or any data that ``wb.train`` takes; or the name of one of the choices. None: associative recall;
            random tokens for a model that is not of the zoo.
        risk: Model of the risk; None: the one that ships with the workbench.

    Attributes:
        setup: The controls of model and task, by name.
        plan: The controls of the plan, by name, such as ``explorer.plan.learning_rate.value = 0.03``.
        budget: The control of the updates of a pilot.

    Raises:
        OptionError: If the model or the task is none of these.
    """

    def __init__(self, model: Any = None, task: Any = None, risk: EdgeModel | None = None) -> None:
        super().__init__()
        self.setup = ModelChoice(model, task)
        self.plan = PlanControls()
        self._model = shipped() if risk is None else risk
        self._measured: Measured | None = None
        self._risk: Risk | None = None
        self._pilot: tuple[dict[str, Any], FoundRates] | None = None
        self._losses_of: FoundRates | None = None
        self._is_adapting = False
        self._curve = CurvePanel()
        self._canvas = Figure(self._curve.figure, lock=self.turn)
        self._make_parts()
        for control in self.setup.controls:
            self.watch(control, lambda _: self._change_model())
        for control in self.plan.controls:
            self.watch(control, lambda _: self._draw())
        self.on_click(self._button, lambda _: self.measure())
        self.on_click(self._start, lambda _: self.run_pilot())
        self.on_click(self._stop, lambda _: self.stop())
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

    def measure(self) -> None:
        """Measure the model that the controls describe, in the background; what is under way is dropped.

        Raises:
            OptionError: If the controls ask for something impossible.
        """
        with self.turn:
            self._worker.drop()
            self._mark_stale("")
            choice, settings = self.setup.choice(), self.plan.settings()
            self._worker.submit(lambda check: measure(choice, settings, self._model, check))
            self._mark_stale(f'<progress aria-label="measuring"></progress> measuring {html.escape(choice.name)} …')
            self._stop.layout.display = None

    def run_pilot(self) -> None:
        """Run a pilot of the measured model and the plan, in the background; what is under way is dropped.

        Raises:
            OptionError: If nothing has been measured yet.
        """
        with self.turn:
            if self._measured is None or self._worker.is_busy:
                raise OptionError("The model has not been measured yet; wait for it, or press Measure.")
            choice, settings, budget = self._measured.choice, self.plan.settings(), self.budget.value
            self._progress.max, self._progress.value = budget, 0

            def job(check: Any) -> Any:
                def tell(n_updates: int) -> None:
                    check()
                    if n_updates % 10 == 0:
                        self._progress.value = n_updates

                return run_pilot(choice, settings, budget, tell)

            self._worker.submit(job)
            self._stop.layout.display = self._progress.layout.display = None

    def figure(self, kind: str = "curve", backend: str = "bokeh") -> Any:
        """The present view as a separate figure, to keep or to write with ``workbench.plots.save()``.

        Args:
            kind: ``"curve"`` or ``"pilot"``.
            backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

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
        if self.case is None or self._risk is None:
            raise OptionError("Nothing has been measured yet; wait for it, or call measure().")
        return plots.risk_curve(self._over_rates(self.case), learning_rate=self._risk.learning_rate, backend=backend)

    def close(self) -> None:
        """Remove the widget and everything that belongs to it; what is still being measured is dropped."""
        super().close()
        if hasattr(self, "_canvas"):
            self._canvas.document.clear()

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
        self._progress = ipywidgets.IntProgress(layout={"width": "200px", "display": "none"})
        self._stop = ipywidgets.Button(
            description="Stop", tooltip="End what is under way", layout={"width": "70px", "display": "none"}
        )
        self._status = ipywidgets.HTML()
        self._cards, self._banner_words, self._found = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._banner = ipywidgets.VBox(
            [self._banner_words],
            layout={"padding": "8px 14px", "margin": "6px 2px", "display": "none", "overflow": "visible"},
        )
        self._banner.add_class(_BANNER)
        self._losses = ipywidgets.VBox()
        key = ipywidgets.HTML(f'<div style="{MUTED}">{KEY}</div>')
        row = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"}
        setup = ipywidgets.HBox([*self.setup.shown, self._button, self._status], layout=row)
        updates = ipywidgets.Label("updates")
        pilot = ipywidgets.HBox([self.budget, updates, self._start, self._progress, self._stop], layout=row)
        parts = [self._cards, self._banner, self._canvas, key, self._found, self._losses]
        self._shown = ipywidgets.VBox(parts, layout={"display": "none"})
        look = ipywidgets.HTML(f"<style>{_CSS}</style>", layout={"display": "none"})
        self.fill([look, setup, self.plan.box, pilot, self._shown])

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
        self._mark_stale("press Measure to measure this model")

    def _take(self, found: Any, error: Exception | None) -> None:
        """Show the risk of the model that was measured, or what the pilot found; or raise why there is nothing."""
        self._stop.layout.display = self._progress.layout.display = "none"
        if error is not None:
            self._status.value = ""
            raise error
        if isinstance(found, Measured):
            self._measured, self._pilot = found, None
        else:
            self._pilot = found
        self._status.value = ""
        self._shown.remove_class(_STALE)
        self._draw()

    def _say_stopped(self) -> None:
        """Show that what was under way was stopped."""
        self._stop.layout.display = self._progress.layout.display = "none"
        if self._status.value:
            self._mark_stale("stopped; press Measure to measure this model")

    def _over_rates(self, case: xr.Dataset) -> xr.Dataset:
        return over_rates(case, self._curve.rates, pilot=self._answer, model=self._model)

    @property
    def _answer(self) -> FoundRates | None:
        """The pilot, if it has an answer."""
        return None if self.pilot is None or self.pilot.reason else self.pilot

    def _draw(self) -> None:
        """Show the planned training."""
        if (case := self.case) is None:
            return
        self._risk = predict(case, pilot=self._answer, model=self._model)
        self._cards.value = "" if self._risk.reason else cards(self._risk, case, self._answer)
        self._banner_words.value = warning(self._risk, self.pilot)
        self._banner.layout.display = None if self._risk.reason else "none"
        words = "" if self.pilot is None else html.escape(str(self.pilot))
        self._found.value = (
            f'<div style="white-space:normal;line-height:1.5;margin:4px 2px">{words}</div>' if words else ""
        )
        self._draw_losses()
        with self._canvas.batch():
            self._curve.write(self._over_rates(case), self._risk)
        self._shown.layout.display = None

    def _draw_losses(self) -> None:
        """Show the losses of the pilot; nothing without one."""
        pilot = self.pilot
        if pilot is None or not pilot.rounds:
            for child in self._losses.children:
                child.close()
            self._losses.children = ()
            self._losses_of = None
        elif self._losses_of is not pilot:
            self._losses.children = (show(plots.pilot_losses(pilot.data)),)
            self._losses_of = pilot

    def _mark_stale(self, words: str) -> None:
        """Say why what is shown is not what the controls describe."""
        self._status.value = f'<div role="status" style="{MUTED}">{words}</div>' if words else ""
        self._shown.add_class(_STALE)
        self._stop.layout.display = self._progress.layout.display = "none"
