"""Compare architectures over training: eigenvalues, layers, losses and numbers of several runs at one common step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np

from workbench.errors import OptionError, SchemaError, StoreError
from workbench.io.atomic import check_free
from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.comparison.eigenvalues import EigenvalueView
from workbench.widgets.comparison.layers import LayerView
from workbench.widgets.comparison.radar import RadarView
from workbench.widgets.comparison.recorded_run import RecordedRun
from workbench.widgets.comparison.scene import Scene, labelled
from workbench.widgets.comparison.table import TableView
from workbench.widgets.comparison.training import TrainingView
from workbench.widgets.export import ExportBar, export_path, export_runs, make_folder
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

    Attributes:
        runs: Every run by name, as `workbench.widgets.comparison.recorded_run.RecordedRun`.
        views: The views by name, each with its own controls and, once it was visible, its figure.
        export_bar: The buttons and fields for files.

    Raises:
        SchemaError: If there is no run, or one has no spectra.
        StoreError: If there is no run at a path.
        OptionError: If there is no such view.
    """

    def __init__(
        self, runs: Mapping[str, Run], *, view: str = "eigenvalues", published: Mapping[str, str] | bool = True
    ) -> None:
        super().__init__()
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
        self.views: dict[str, ComparisonView] = {name: kind(self.turn) for name, kind in _VIEWS.items()}
        if view not in self.views:
            raise OptionError(f"There is no view '{view}'; choose from {', '.join(self.views)}.")
        self._is_writing = False
        self._make_controls(view)
        self.export_bar = ExportBar(self, lambda kind, path, overwrite: self.export(kind, path, overwrite=overwrite))
        self._body = ipywidgets.VBox()
        self.fill([self._controls, self._body, self.export_bar])
        for control in (self._models, self._layers, self._view):
            self.watch(control, lambda _: self._draw())
        self.watch(self._slider, lambda change: setattr(self._play, "value", change["new"]))
        self.watch(self._slider, lambda _: self._draw())  # last: the next success would clear what it has to say
        self.watch(self._play, lambda change: setattr(self._slider, "value", change["new"]))
        self.watch(self._speed, lambda change: setattr(self._play, "interval", change["new"]))
        for each in self.views.values():
            self.at_close(each.close)
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
        return Scene(self.runs, tuple(self._models.value), self.step, self.layers, self.published)

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
        if "png" in view.refused_kinds:
            raise OptionError(view.refused_kinds["png"])
        return view.figure(self.scene, backend)

    def export(self, kind: str, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
        """Write the present view or the data of the models shown.

        Args:
            kind: ``"png"``, ``"svg"`` or ``"html"`` for the view; ``"netcdf"`` for everything recorded of the models
                shown, in one file with a group for each.
            path: Path of the file, the ending may be left out; None takes that of the text field. Its folder is made.
            overwrite: Whether to replace an existing file.

        Returns:
            The path of the file.

        Raises:
            OptionError: If there is no such kind.
            StoreError: If the file is there, the view cannot be written so, or the disk is full.
        """
        with self.turn:
            path = export_path(kind, self.export_bar.path.value if path is None else path)
            view, scene = self.views[self.view], self.scene
            if kind in view.refused_kinds:
                raise StoreError(view.refused_kinds[kind])
            check_free(path, overwrite=overwrite)
            if kind == "netcdf":
                make_folder(path)
                return export_runs({name: self.runs[name].tree for name in scene.shown}, path, overwrite=overwrite)
            return view.save(scene, kind, path, overwrite=overwrite)

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
        self._view = ipywidgets.ToggleButtons(
            options=list(self.views),
            value=view,
            tooltips=[each.tip for each in self.views.values()],
            style={"button_width": "106px", **label},
        )
        row = {"align_items": "center", "flex_flow": "row wrap", "grid_gap": "4px 12px"}
        self._step_row = ipywidgets.HBox([self._slider, self._readout, self._play, self._speed], layout=row)
        self._controls = ipywidgets.VBox([self._models, self._step_row, self._layers, labelled("view", self._view)])
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
        if tuple(self._body.children) != (view.box,):
            self._body.children = [view.box]
        view.draw(scene)
