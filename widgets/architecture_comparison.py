"""Compare architectures over training: eigenvalues, layer measures, losses and metrics of several runs at one step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
import xarray as xr

from workbench.errors import OptionError, SchemaError, require_listed
from workbench.formatting import listed
from workbench.widgets.base import KINDS, WorkbenchWidget
from workbench.widgets.comparison.panels import EigenvalueView, LayerView, TrainingView
from workbench.widgets.comparison.scene import RecordedRun, Scene, labeled
from workbench.widgets.comparison.table import RadarView, TableView
from workbench.widgets.figure import Stage
from workbench.widgets.saved_page import chosen_steps, saved_page
from workbench.widgets.tables import Tags, model_tags

if TYPE_CHECKING:
    from workbench.widgets.comparison.scene import ComparisonView

    Run = xr.DataTree | xr.Dataset | str | os.PathLike[str]

_VIEWS = {
    "eigenvalues": EigenvalueView,
    "layers": LayerView,
    "training": TrainingView,
    "table": TableView,
    "radar": RadarView,
}
#: Value of the control where no layer is highlighted; a dropdown shows nothing for None.
_NO_LAYER = -1
#: Traces of a saved page in addition to the chosen ones.
_TRACES = ("loss", "grad_norm", "learning_rate", "near_unit_mass", "spectral_radius")
#: Label -> milliseconds between steps.
_SPEEDS = {"1 per second": 1000, "2 per second": 500, "5 per second": 200, "10 per second": 100}


class ArchitectureComparison(WorkbenchWidget):
    """Several runs side by side at one step of training, with controls of step, models and layers.

    Each run shows the latest spectra recorded at or before the step. Its title states the step if they are older, and
    whether the run has diverged or ended. Press play to advance the step. If the last step is shown, it follows new
    steps from `update`.

    Args:
        runs: Runs by name: a run, a spectra dataset (with or without the dimension ``step``), or the path of a stored
            run. Runs may have recorded different steps, and may differ in depth and width.
        view: The view to start with; see `view`.
        published: Names of the runs to compare with published figures, as in `workbench.compare`.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        runs: All runs by name, as `workbench.widgets.comparison.scene.RecordedRun`.
        views: The views by name, each with its own controls and, once it has been visible, its figure.

    Raises:
        SchemaError: If there is no run, or a run has no spectra.
        StoreError: If there is no run at a path.
        OptionError: If there is no such view.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> runs = wb.samples.recorded_runs()
        >>> widget = widgets.ArchitectureComparison({name: runs[name] for name in ("Pre-LN", "Mamba")}, view="table")
        >>> widget.step = 100
        >>> widget.summary
        'Comparison of Pre-LN and Mamba: table at step 100.'
        >>> widget.close()

    See Also:
        `workbench.compare`: Returns the comparison as a dataset.
        `workbench.widgets.Timeline`: Shows signals and alarms over steps.
    """

    kinds = KINDS

    def __init__(
        self,
        runs: Mapping[str, Run],
        *,
        view: str = "eigenvalues",
        published: Mapping[str, str] | bool = True,
        theme: str = "page",
    ) -> None:
        super().__init__(theme=theme)
        self.published = published
        if not isinstance(runs, Mapping) or not runs:
            kind = "an empty dict" if isinstance(runs, Mapping) else f"of type {type(runs).__name__}"
            raise SchemaError(f"The runs are {kind}, expected a non-empty dict of name: run.")
        self.runs = {str(name): RecordedRun(str(name), run) for name, run in runs.items()}
        unknown = [name for name in (published if isinstance(published, Mapping) else ()) if name not in self.runs]
        if unknown:
            raise SchemaError(f"published names an unknown run '{unknown[0]}'; the runs are {', '.join(self.runs)}.")
        self.views: dict[str, ComparisonView] = {name: kind(self.turn, theme) for name, kind in _VIEWS.items()}
        self._check_view(view)
        self._is_writing = False
        self._make_controls(view)
        self._body = Stage()
        self._fill([self._controls, self._body], suggested="")
        for control in (self._models, self._layers, self._view, self._highlight):
            self._watch(control, lambda _: self._draw())
        self._watch(self._slider, lambda change: setattr(self._play, "value", change["new"]))
        self._watch(self._slider, lambda _: self._draw())  # last, because a later success would clear its error
        self._watch(self._play, lambda change: setattr(self._slider, "value", change["new"]))
        self._watch(self._speed, lambda change: setattr(self._play, "interval", change["new"]))
        for each in self.views.values():
            self._at_close(each.close)
            each.choose_layer = self._guarded(lambda layer: setattr(self, "highlight", layer))
            for control in each.controls:
                self._watch(control, lambda _: self._draw())
        with self._attempt():
            self._draw()

    @property
    def step(self) -> int:
        """The displayed step, one of `steps`; can be set."""
        return self._steps[min(self._slider.value, len(self._steps) - 1)]

    @step.setter
    def step(self, step: int) -> None:
        if step not in self.steps:
            place = int(np.searchsorted(self.steps, step))
            near = ", ".join(map(str, self.steps[max(0, place - 2) : place + 2]))
            raise OptionError(f"No run recorded spectra at step {step}; recorded steps nearby are {near}.")
        self._slider.value = self._steps.index(step)

    @property
    def steps(self) -> list[int]:
        """All steps with recorded spectra of any run, in increasing order."""
        return list(self._steps)

    @property
    def models(self) -> list[str]:
        """Names of the displayed runs; can be set."""
        return list(self._models.value)

    @models.setter
    def models(self, names: str | Iterable[str]) -> None:
        self._models.choose(names)

    @property
    def layer_view(self) -> LayerView:
        """The view "layers"."""
        view = self.views["layers"]
        assert isinstance(view, LayerView)
        return view

    @property
    def measures(self) -> list[str]:
        """The measures of the view "layers"; can be set."""
        return list(self.layer_view.measures.value)

    @measures.setter
    def measures(self, names: str | Iterable[str]) -> None:
        self.layer_view.measures.choose(names)

    @property
    def layers(self) -> tuple[int, int]:
        """First and last displayed layer; can be set."""
        return self._layers.value

    @layers.setter
    def layers(self, layers: tuple[int, int]) -> None:
        first, last = min(layers), max(layers)
        if not 0 <= first <= last <= self._n_layers - 1:
            raise OptionError(f"There are no layers {first} to {last}; choose from 0 to {self._n_layers - 1}.")
        self._layers.value = (first, last)

    @property
    def highlight(self) -> int | None:
        """The layer highlighted in all views, None if there is none; can be set, or chosen by a click on a mode."""
        return None if self._highlight.value == _NO_LAYER else self._highlight.value

    @highlight.setter
    def highlight(self, layer: int | None) -> None:
        if layer is not None and not 0 <= layer < self._n_layers:
            raise OptionError.of("highlight", layer, f"a layer from 0 to {self._n_layers - 1}, or None")
        self._highlight.value = _NO_LAYER if layer is None else layer

    @property
    def view(self) -> str:
        """Name of the visible view, one of `views`; can be set."""
        return self._view.value

    @view.setter
    def view(self, name: str) -> None:
        self._check_view(name)
        self._view.value = name

    def _check_view(self, name: str) -> None:
        """Raise an exception if there is no such view."""
        require_listed("view", [name], self.views)

    @property
    def scene(self) -> Scene:
        """The values of the controls.

        Raises:
            OptionError: If no model is shown.
        """
        if not self._models.value:
            raise OptionError("No model is shown; switch on at least one.")
        return Scene(self.runs, tuple(self._models.value), self.step, self.layers, self.published, self.highlight)

    def update(self, name: str, run: Run) -> None:
        """Replace a run by a newer state, or add a run.

        If the last step is shown, the widget advances to the new last step. Updating a run of the same model takes some
        milliseconds; a new model, or one of another depth, needs new panels.

        Args:
            name: Name of the run.
            run: Run as in the constructor.

        Raises:
            SchemaError: If it has no spectra; the widget is then unchanged.
            StoreError: If there is no run at the path.
        """
        name = str(name)
        recorded = RecordedRun(name, run)
        with self._attempt():
            is_at_end = self._slider.value >= len(self._steps) - 1
            had_every_layer = self.layers[1] == self._n_layers - 1
            self._is_writing = True
            try:
                if name not in self.runs:
                    self._models.options = model_tags([*self.runs, name])
                    self._models.value = [*self._models.value, name]
                self.runs = {**self.runs, name: recorded}
                self._layers.max = max(self._n_layers - 1, 1)
                self._layers.disabled = self._n_layers == 1
                if len(self._highlight.options) != self._n_layers + 1:
                    chosen = self._highlight.value
                    self._highlight.options = _layer_options(self._n_layers - 1)
                    self._highlight.value = chosen if chosen < self._n_layers else _NO_LAYER
                if had_every_layer:
                    self._layers.value = (self.layers[0], self._n_layers - 1)
                self._set_steps(None if is_at_end else self.step)
            finally:
                self._is_writing = False
            self._draw()

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the current view as a separate figure, for example for ``workbench.plots.save()``.

        Raises:
            OptionError: If the view has no figure, such as the table.
        """
        view = self.views[self.view]
        if ".png" in view.refused_kinds:
            raise OptionError(view.refused_kinds[".png"])
        return view.figure(self.scene, backend)

    @property
    def summary(self) -> str:
        """Models, view and step in one sentence."""
        return f"Comparison of {listed(self.models)}: {self.view} at step {self.step}."

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Suffixes of files that cannot be written of the current view -> reason."""
        return self.views[self.view].refused_kinds

    def picture(self) -> bytes:
        """Return the current view as PNG."""
        return self.views[self.view].picture(self.scene)

    def page(self) -> str:
        """Return one HTML page of all views with controls of step, layers, models and signals.

        It needs neither a kernel nor a network. Of more than 40 steps, 40 evenly spaced ones are kept.
        """
        trees = {name: run.tree for name, run in self.runs.items()}
        other = ArchitectureComparison(trees, view="table", published=self.published, theme=self.theme)
        try:
            return _page_of(other, self)
        finally:
            other.close()

    def _shown_runs(self) -> Mapping[str, xr.DataTree]:
        return {name: self.runs[name].tree for name in self.scene.shown}

    @property
    def _n_layers(self) -> int:
        return max(run.n_layers for run in self.runs.values())

    def _make_controls(self, view: str) -> None:
        label = {"description_width": "64px"}
        self._models = Tags(label="models", options=model_tags(list(self.runs)), value=list(self.runs))
        # The values are positions in the list of steps, which need not be evenly spaced.
        self._slider = ipywidgets.IntSlider(
            min=0, max=1, description="step", readout=False, style=label, layout={"width": "360px"}
        )
        self._readout = ipywidgets.Label(layout={"width": "64px"})
        self._play = ipywidgets.Play(min=0, max=0, value=0, show_repeat=True)
        self._speed = ipywidgets.Dropdown(
            options=_SPEEDS, value=500, layout={"width": "124px"}, tooltip="Playback speed in recorded steps per second"
        )
        self._play.interval = self._speed.value
        last = self._n_layers - 1
        self._layers = ipywidgets.IntRangeSlider(
            value=(0, last), min=0, max=max(last, 1), description="layers", disabled=last == 0, style=label
        )
        self._highlight = ipywidgets.Dropdown(
            options=_layer_options(last),
            description="highlight",
            style=label,
            layout={"width": "170px"},
            tooltip="Layer to highlight in all views; or click a mode or a marker",
        )
        self._view = ipywidgets.ToggleButtons(
            options=list(self.views),
            value=view,
            tooltips=[each.tip for each in self.views.values()],
            style={"button_width": "106px", **label},
        )
        row = {"align_items": "center", "flex_flow": "row wrap", "grid_gap": "4px 12px"}
        self._step_row = ipywidgets.HBox([self._slider, self._readout, self._play, self._speed], layout=row)
        layer_row = ipywidgets.HBox([self._layers, self._highlight], layout=row)
        self._controls = ipywidgets.VBox([self._models, self._step_row, layer_row, labeled("view", self._view)])
        self._set_steps(step="first")

    def _set_steps(self, step: int | str | None) -> None:
        """Update the steps of all runs and show one of them; None for the last."""
        self._steps = sorted({int(step) for run in self.runs.values() for step in run.steps})
        last = len(self._steps) - 1
        place = 0 if step == "first" else last if step is None else int(np.searchsorted(self._steps, step))
        self._step_row.layout.display = None if last else "none"
        self._slider.max = max(last, 1)
        self._play.max = last
        self._slider.value = min(place, last)

    def _draw(self) -> None:
        """Draw the visible view with the current values of the controls."""
        if self._is_writing:
            return
        self._readout.value = str(self.step)
        view, scene = self.views[self.view], self.scene
        self.export_bar.suggest(f"exports/{self.view}_step{scene.step}")
        view.draw(scene)
        view.highlight(scene.highlight)
        if self._body.shown is not view.box:
            self._body.put(view.box, view.canvas)
        self._settle()


def _page_of(comparison: ArchitectureComparison, like: ArchitectureComparison) -> str:
    """Return the page of a comparison by going through all its steps and views, with the choices of another one."""
    steps = chosen_steps(comparison.steps, like.step)
    comparison.measures = list(dict.fromkeys([*like.measures, *comparison.measures]))
    views = []
    for name, view in comparison.views.items():
        comparison.view = name
        if isinstance(view, TrainingView) and view.variables.names:
            chosen = like.views[name].controls[0].value
            view.variables.choose([one for one in view.variables.names if one in (*chosen, *_TRACES)])
        saved = None
        for step in steps:
            comparison.step = step
            if comparison.error:
                break
            saved = saved or view.saved()
            saved.record(view.table.value if isinstance(view, TableView) else None)
        if saved is not None and not comparison.error:
            views.append(saved)
    first = [saved for saved in views if saved.name == like.view]
    return saved_page(
        ", ".join(comparison.runs),
        [*first, *(saved for saved in views if saved not in first)],
        steps=steps,
        step=like.step,
        n_layers=comparison._n_layers,
        layers=like.layers,
    )


def _layer_options(last: int) -> list[tuple[str, int]]:
    """Return the options for the highlighted layer, including none."""
    return [("no layer", _NO_LAYER), *((f"layer {layer}", layer) for layer in range(last + 1))]
