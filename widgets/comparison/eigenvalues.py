"""The view "eigenvalues": an eigenvalue map for each run, on shared axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.plots import eigenvalue_map
from workbench.plots.plane_view import ZOOMS, view_of
from workbench.widgets.base import known
from workbench.widgets.comparison.scene import ComparisonView, Scene, labeled
from workbench.widgets.eigenvalue_panels import ZOOM_TIPS, EigenvaluePanels, grid_of, key_in_words
from workbench.widgets.saved_page import SavedView
from workbench.widgets.tables import muted

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bokeh.models import ColumnDataSource


class EigenvalueView(ComparisonView):
    """Eigenvalue maps in a grid with shared axes."""

    tip = "Eigenvalues in the complex plane, one panel per model"

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        super().__init__(lock, theme)
        self.zoom = ipywidgets.ToggleButtons(
            options=list(ZOOMS),
            tooltips=ZOOM_TIPS,
            style={"button_width": "96px"},
        )
        self.key = ipywidgets.HTML(layout={"margin": "2px 2px 2px 12px"})
        self._zoom_row = labeled("zoom", self.zoom, self.key)
        self.controls = [self.zoom]
        self.panels: EigenvaluePanels | None = None
        self._built_for: Any = None
        self._arranged: tuple[str, ...] = ()

    def draw(self, scene: Scene) -> None:
        """Update the modes in the panels, which are built once for all runs."""
        depths = {name: run.n_layers for name, run in scene.runs.items()}
        panels = self.panels
        if panels is None or depths != self._built_for:
            self.withdraw()
            near = {name: run.near(scene.step) for name, run in scene.runs.items()}
            panels = self.panels = EigenvaluePanels(near, theme=self.theme)
            self._built_for, self._arranged = depths, ()
        if scene.shown != self._arranged:
            self.withdraw()
            panels.arrange(scene.shown)
            self.put(self._zoom_row, root=panels.root)
            self._arranged = scene.shown
        data = {name: scene.layers_of(name) for name in scene.shown}
        columns = {name: panels.columns(name, spectra) for name, spectra in data.items()}
        view = view_of(columns, self.zoom.value)
        with self.batch():
            for name, spectra in data.items():
                remark = scene.runs[name].remark(scene.step)
                panels.write(name, spectra, columns[name], view, remark=remark)
            panels.set_view(view)
        self.key.value = muted(key_in_words(data.values()))

    def saved(self) -> SavedView:
        """Return a view with one panel per model."""
        panels = known(self.panels)
        models = {name: [panel] for name, panel in panels.figures.items()}
        return SavedView("eigenvalues", panels.root, models, planes=list(panels.figures.values()), above=self.key.value)

    def layered(self) -> list[ColumnDataSource]:
        """Return the modes of each panel."""
        return [] if self.panels is None else list(self.panels.sources.values())

    def figure(self, scene: Scene, backend: str) -> Any:
        """Return the panels as a figure of `workbench.plots.eigenvalue_map`."""
        spectra = scene.titled()
        return eigenvalue_map(
            spectra,
            layers=scene.layer_range,
            zoom=self.zoom.value,
            columns=grid_of(len(spectra))[0],
            backend=backend,
        )
