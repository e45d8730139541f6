"""Compare architectures over training: eigenvalues, layers, losses and numbers of several runs at one common step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import listed
from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.comparison.eigenvalues import EigenvalueView
from workbench.widgets.comparison.layers import LayerView
from workbench.widgets.comparison.radar import RadarView
from workbench.widgets.comparison.recorded_run import RecordedRun
from workbench.widgets.comparison.scene import Scene, labelled
from workbench.widgets.comparison.table import TableView
from workbench.widgets.comparison.training import TrainingView
from workbench.widgets.export import ExportBar
from workbench.widgets.files import KINDS, export_runs
from workbench.widgets.saved_page import chosen_steps, saved_page
from workbench.widgets.stage import Stage
from workbench.widgets.tags import Tags, model_tags

if TYPE_CHECKING:
    import xarray as xr

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
#: Traces of a saved page, in addition to those chosen.
_TRACES = ("loss", "grad_norm", "learning_rate", "near_unit_mass", "spectral_radius")
#: Label -> milliseconds between two steps.
_SPEEDS = {"1 per second": 1000, "2 per second": 500, "5 per second": 200, "10 per second": 100}


class ArchitectureComparison(WorkbenchWidget):
    """Several runs side by side at one step of training, with controls of step, models and layers.

    A run shows the latest spectra it recorded at or before the step, and its title states where they are older, or
    where the run has diverged or ended. Press play to advance the step. While the step is the last one, it follows new
    steps from `update`.

    Args:
        runs: Runs by name: a run, a spectra dataset alone (with or without the dimension ``step``), or the path of a
            stored run. Runs may have recorded different steps, and may differ in depth and width.
        view: The first view; see `view`.
        published: Names of the runs to compare with published figures, as in `workbench.compare`.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        runs: Every run by name, as `workbench.widgets.comparison.recorded_run.RecordedRun`.
        views: The views by name, each with its own controls and, once it was visible, its figure.
        export_bar: The buttons and fields for files.

    Raises:
        SchemaError: If there is no run, or one has no spectra.
        StoreError: If there is no run at a path.
        OptionError: If there is no such view.
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
            raise SchemaError(
                f"published names the run '{unknown[0]}', which is not there; the runs are {', '.join(self.runs)}."
            )
        self.views: dict[str, ComparisonView] = {name: kind(self.turn, theme) for name, kind in _VIEWS.items()}
        if view not in self.views:
            raise OptionError(f"There is no view '{view}'; choose from {', '.join(self.views)}.")
        self._is_writing = False
        self._make_controls(view)
        self.export_bar = ExportBar(self, self.kinds)
        self._body = Stage()
        self.fill([self._controls, self._body, self.export_bar])
        for control in (self._models, self._layers, self._view, self._highlight):
            self.watch(control, lambda _: self._draw())
        self.watch(self._slider, lambda change: setattr(self._play, "value", change["new"]))
        self.watch(self._slider, lambda _: self._draw())  # last: the next success would clear what it has to say
        self.watch(self._play, lambda change: setattr(self._slider, "value", change["new"]))
        self.watch(self._speed, lambda change: setattr(self._play, "interval", change["new"]))
        for each in self.views.values():
            self.at_close(each.close)
            each.choose_layer = self._choose_layer
            for control in each.controls:
                self.watch(control, lambda _: self._draw())
        with self.attempt():
            self._draw()

    @property
    def step(self) -> int:
        """The step that is shown, one of `steps`; set it to move there."""
        return self._steps[min(self._slider.value, len(self._steps) - 1)]

    @step.setter
    def step(self, step: int) -> None:
        if step not in self.steps:
            place = int(np.searchsorted(self.steps, step))
            near = ", ".join(map(str, self.steps[max(0, place - 2) : place + 2]))
            raise OptionError(f"No run recorded spectra at step {step}; the steps there are {near}.")
        self._slider.value = self._steps.index(step)

    @property
    def steps(self) -> list[int]:
        """The steps that any run recorded, rising."""
        return list(self._steps)

    @property
    def models(self) -> list[str]:
        """The names of the runs that are shown; set it to show others."""
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
        """The measures of the view "layers"; set it to see others."""
        return list(self.layer_view.measures.value)

    @measures.setter
    def measures(self, names: str | Iterable[str]) -> None:
        self.layer_view.measures.choose(names)

    @property
    def layers(self) -> tuple[int, int]:
        """First and last layer shown; set it to see others."""
        return self._layers.value

    @layers.setter
    def layers(self, layers: tuple[int, int]) -> None:
        first, last = min(layers), max(layers)
        if not 0 <= first <= last <= self._n_layers - 1:
            raise OptionError(
                f"There are no layers {first} to {last}; choose first and last from 0 to {self._n_layers - 1}."
            )
        self._layers.value = (first, last)

    @property
    def highlight(self) -> int | None:
        """The layer that all views highlight; None: none. Set it, or select a mode or a marker on the page."""
        return None if self._highlight.value == _NO_LAYER else self._highlight.value

    @highlight.setter
    def highlight(self, layer: int | None) -> None:
        if layer is not None and not 0 <= layer < self._n_layers:
            raise OptionError(f"There is no layer {layer}; choose one from 0 to {self._n_layers - 1}, or None.")
        self._highlight.value = _NO_LAYER if layer is None else layer

    @property
    def view(self) -> str:
        """Name of the visible view; one of `views`."""
        return self._view.value

    @view.setter
    def view(self, name: str) -> None:
        if name not in self.views:
            raise OptionError(f"There is no view '{name}'; choose from {', '.join(self.views)}.")
        self._view.value = name

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
        """Put a newer state of a run in the place of the older one, or add a run.

        The step moves on if it stands at the end. A run of the same model is drawn in place and takes some
        milliseconds; a model that is new, or of another depth, makes new panels.

        Args:
            name: Name of the run.
            run: Run as in the constructor.

        Raises:
            SchemaError: If it has no spectra; nothing has changed then.
            StoreError: If there is no run at the path.
        """
        name = str(name)
        recorded = RecordedRun(name, run)
        with self.attempt():
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
        """The present view as a figure of its own, to keep or to write with ``workbench.plots.save()``.

        Raises:
            OptionError: If the view has none, as the table.
        """
        view = self.views[self.view]
        if ".png" in view.refused_kinds:
            raise OptionError(view.refused_kinds[".png"])
        return view.figure(self.scene, backend)

    @property
    def summary(self) -> str:
        """Models, view and step, in one sentence."""
        return f"Comparison of {listed(self.models)}: {self.view} at step {self.step}."

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Endings of files that cannot be written of the view, and why."""
        return self.views[self.view].refused_kinds

    def picture(self) -> bytes:
        """The present view, as PNG."""
        return self.views[self.view].picture(self.scene)

    def page(self) -> str:
        """Every view as one HTML page: step, layers, models and signals, without a kernel and without a network.

        Of more than 40 steps, 40 are chosen at even distances.
        """
        trees = {name: run.tree for name, run in self.runs.items()}
        other = ArchitectureComparison(trees, view="table", published=self.published, theme=self.theme)
        try:
            return _page_of(other, self)
        finally:
            other.close()

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        if ending == ".nc":
            shown = {name: self.runs[name].tree for name in self.scene.shown}
            return export_runs(shown, path, overwrite=overwrite)
        return super()._write(path, ending, overwrite=overwrite)

    @property
    def _n_layers(self) -> int:
        return max(run.n_layers for run in self.runs.values())

    def _make_controls(self, view: str) -> None:
        label = {"description_width": "64px"}
        self._models = Tags(label="models", options=model_tags(list(self.runs)), value=list(self.runs))
        # Its values are places in the list of steps, which need not be evenly spaced.
        self._slider = ipywidgets.IntSlider(
            min=0, max=1, description="step", readout=False, style=label, layout={"width": "360px"}
        )
        self._readout = ipywidgets.Label(layout={"width": "64px"})
        self._play = ipywidgets.Play(min=0, max=0, value=0, show_repeat=True)
        self._speed = ipywidgets.Dropdown(
            options=_SPEEDS, value=500, layout={"width": "124px"}, tooltip="Steps of the slider while it plays"
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
            tooltip="Layer that is highlighted in every view; or click a mode or a marker",
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
        self._controls = ipywidgets.VBox([self._models, self._step_row, layer_row, labelled("view", self._view)])
        self._set_steps(step="first")

    def _set_steps(self, step: int | str | None) -> None:
        """Update the steps of all runs and go to one; None: the last."""
        self._steps = sorted({int(step) for run in self.runs.values() for step in run.steps})
        last = len(self._steps) - 1
        place = 0 if step == "first" else last if step is None else int(np.searchsorted(self._steps, step))
        self._step_row.layout.display = None if last else "none"
        self._slider.max = max(last, 1)
        self._play.max = last
        self._slider.value = min(place, last)

    def _draw(self) -> None:
        """Draw the visible view with the values of the controls."""
        if self._is_writing:
            return
        self._readout.value = str(self.step)
        view, scene = self.views[self.view], self.scene
        self.export_bar.offer(view.refused_kinds)
        self.export_bar.suggest(f"exports/{self.view}_step{scene.step}")
        view.draw(scene)
        view.highlight(scene.highlight)
        if self._body.shown is not view.box:
            self._body.put(view.box, view.canvas)
        self.settle()

    def _choose_layer(self, layer: int | None) -> None:
        """A point of a layer was selected on the page."""
        with self.attempt():
            self.highlight = layer


def _page_of(comparison: ArchitectureComparison, like: ArchitectureComparison) -> str:
    """The page of one comparison, which is moved through all steps and views, with the choices of another one."""
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
    """The layers that can be highlighted, or none."""
    return [("no layer", _NO_LAYER), *((f"layer {layer}", layer) for layer in range(last + 1))]
