"""The view "eigenvalues": a map for each run, on common axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.plots import eigenvalue_map
from workbench.plots.mode_columns import WIDEST_DEFAULT_LIMIT, View, key, view_of
from workbench.plots.spectra_inputs import select_layers
from workbench.widgets.base import known
from workbench.widgets.comparison.scene import ComparisonView, Scene, labelled, muted
from workbench.widgets.eigenvalue_panels import VIEW_TIPS, VIEWS, EigenvaluePanels, grid_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager


class EigenvalueView(ComparisonView):
    """Eigenvalue maps in a grid with common axes."""

    tip = "Eigenvalues in the complex plane, a panel for each model"

    def __init__(self, lock: AbstractContextManager) -> None:
        super().__init__(lock)
        self.zoom = ipywidgets.ToggleButtons(
            options=list(VIEWS),
            tooltips=VIEW_TIPS,
            style={"button_width": "96px"},
        )
        self.key = ipywidgets.HTML(layout={"margin": "2px 2px 2px 12px"})
        self._zoom_row = labelled("zoom", self.zoom, self.key)
        self.controls = [self.zoom]
        self.panels: EigenvaluePanels | None = None
        self._built_for: Any = None
        self._arranged: tuple[str, ...] = ()

    def draw(self, scene: Scene) -> None:
        """Write the modes at this step into the panels; they are built for all runs, once."""
        depths = {name: run.n_layers for name, run in scene.runs.items()}
        panels = self.panels
        if panels is None or depths != self._built_for:
            self.withdraw()
            panels = self.panels = EigenvaluePanels({name: run.near(scene.step) for name, run in scene.runs.items()})
            self._built_for, self._arranged = depths, ()
        if scene.shown != self._arranged:
            self.withdraw()
            panels.arrange(scene.shown)
            self.put(self._zoom_row, root=panels.root)
            self._arranged = scene.shown
        data = {name: scene.layers_of(name) for name in scene.shown}
        columns = {name: panels.columns(name, spectra) for name, spectra in data.items()}
        view = self._view(columns)
        with self.batch():
            for name, spectra in data.items():
                remark = scene.runs[name].remark(scene.step)
                panels.write(name, spectra, columns[name], view, remark=remark, has_key=False)
            panels.set_view(view)
        keys = dict.fromkeys(key(spectra).replace("\n", "&emsp;") for spectra in data.values())
        self.key.value = muted("&emsp;".join(keys))

    def figure(self, scene: Scene, backend: str) -> Any:
        """The same panels as a figure of `workbench.plots.eigenvalue_map`."""
        spectra, panels = scene.titled(), known(self.panels, "Nothing is drawn yet; show the view first.")
        columns = {
            name: panels.columns(name, select_layers(data, scene.layer_range)) for name, data in scene.spectra().items()
        }
        view = self._view(columns)
        return eigenvalue_map(
            spectra,
            layers=scene.layer_range,
            limit=view.limit,
            center=view.center,
            columns=grid_of(len(spectra))[0],
            backend=backend,
        )

    def _view(self, columns: Mapping[str, Any]) -> View:
        """The view for these modes; round, so that the axes do not tremble from step to step."""
        center, limit = VIEWS[self.zoom.value]
        if center == 0 and limit is None:
            return View(center, WIDEST_DEFAULT_LIMIT)
        return View(center, round_up(view_of(columns, limit, center).limit))


def round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 5 and 7 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 1.5, 2, 3, 5, 7, 10) if factor * power >= value * (1 - 1e-9))
