"""The data that a view of ArchitectureComparison shows, and the interface of a view."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np

from workbench.errors import OptionError
from workbench.plots.figure_files import picture_of
from workbench.plots.figure_inputs import select_layers
from workbench.widgets.base import close_tree
from workbench.widgets.figure import Figure
from workbench.widgets.stage import Stage
from workbench.widgets.theme import enlarge_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    import xarray as xr
    from bokeh.models import ColumnDataSource, LayoutDOM

    from workbench.widgets.comparison.recorded_run import RecordedRun
    from workbench.widgets.saved_page import SavedView


@dataclass(frozen=True)
class Scene:
    """The data that a view shows.

    Attributes:
        runs: All runs by name.
        shown: Names of the displayed runs, at least one.
        step: The displayed step.
        layers: First and last displayed layer.
        published: Names of runs as in `workbench.compare`.
        highlight: The highlighted layer; None if there is none.
    """

    runs: Mapping[str, RecordedRun]
    shown: tuple[str, ...]
    step: int
    layers: tuple[int, int]
    published: Mapping[str, str] | bool = True
    highlight: int | None = None

    @property
    def layer_range(self) -> range:
        """The displayed layers."""
        return range(self.layers[0], self.layers[1] + 1)

    @property
    def places(self) -> dict[str, int]:
        """The index of the style of every run; a run keeps its style when others are hidden."""
        return {name: place for place, name in enumerate(self.runs)}

    @property
    def is_every_layer(self) -> bool:
        """Whether all layers are displayed."""
        return self.layers[0] == 0 and self.layers[1] >= max(run.n_layers for run in self.runs.values()) - 1

    def published_of(self, names: Iterable[str]) -> Mapping[str, str] | bool:
        """Return `published` restricted to some of the runs."""
        if isinstance(self.published, bool):
            return self.published
        return {name: self.published[name] for name in names if name in self.published}

    def spectra(self) -> dict[str, xr.Dataset]:
        """Return the spectra of the displayed runs with all layers, without runs that have none yet."""
        found = {name: self.runs[name].at(self.step) for name in self.shown}
        return {name: data for name, data in found.items() if data is not None}

    def layers_of(self, name: str) -> xr.Dataset:
        """Return the spectra of one run in the displayed layers, with no layers if nothing has been recorded yet."""
        run = self.runs[name]
        spectra = run.at(self.step)
        return run.near(self.step).isel(layer=[]) if spectra is None else select_layers(spectra, self.layer_range)

    def titled(self) -> dict[str, xr.Dataset]:
        """Return the spectra by title instead of name, for a separate figure."""
        spectra = {self.runs[name].title(self.step): data for name, data in self.spectra().items()}
        if not spectra:
            raise OptionError(
                f"None of the models shown has spectra at or before step {self.step}; choose a later step."
            )
        return spectra


class ComparisonView:
    """Base class of the views: a box with controls and a figure.

    Attributes:
        box: The widget.
        controls: Controls whose changes require a redraw.
        choose_layer: Called with the layer of a point selected on the page, or with None.
        refused_kinds: Suffixes of files that cannot be written of this view -> reason.
    """

    tip = ""
    refused_kinds: Mapping[str, str] = {}

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        self.lock, self.theme = lock, theme
        self.stage = Stage()
        self.box = ipywidgets.VBox([self.stage])
        self.controls: list[ipywidgets.Widget] = []
        self.canvas: Figure | None = None
        self.choose_layer: Callable[[int | None], None] = lambda layer: None
        self._followed: list[ColumnDataSource] = []
        self._is_marking = False

    def draw(self, scene: Scene) -> None:
        """Draw the scene."""
        raise NotImplementedError

    def figure(self, scene: Scene, backend: str) -> Any:
        """Return the view as a separate figure."""
        raise NotImplementedError

    def picture(self, scene: Scene) -> bytes:
        """Return the view as PNG, for the saved notebook."""
        return picture_of(self.figure(scene, "matplotlib"))

    def saved(self) -> SavedView:
        """Return the view for a page without a kernel, with the parts of each model and signal."""
        raise NotImplementedError

    def layered(self) -> list[ColumnDataSource]:
        """Return the displayed columns in which each point belongs to a layer."""
        return []

    def highlight(self, layer: int | None) -> None:
        """Highlight the points of a layer and dim all others; None highlights nothing."""
        self._is_marking = True
        try:
            with self.batch():
                for source in self.layered():
                    if source not in self._followed:
                        self._followed.append(source)
                        source.selected.on_change("indices", partial(self._read_selection, source))
                    chosen = [] if layer is None else np.flatnonzero(np.asarray(source.data["layer"]) == layer).tolist()
                    if chosen != source.selected.indices:
                        source.selected.indices = chosen
        finally:
            self._is_marking = False

    def _read_selection(self, source: ColumnDataSource, attr: str, old: list[int], new: list[int]) -> None:
        """Highlight the layer of points that were selected on the page in all views."""
        if not self._is_marking:
            added = [i for i in new if i not in old] or new
            self.choose_layer(int(source.data["layer"][added[0]]) if added else None)

    def close(self) -> None:
        """Remove the view from the page and the kernel."""
        close_tree(self.box)
        for control in self.controls:
            control.close()
        if self.canvas is not None:
            self.canvas.close()
            self.canvas.document.clear()

    def put(self, *above: ipywidgets.Widget, root: LayoutDOM) -> None:
        """Show a new figure below these controls once it is drawn; the old one stays until then."""
        old = self.canvas
        if old is not None:
            old.withdraw()
        self.canvas = Figure(root, lock=self.lock)
        enlarge_text(root, self.theme)
        self.stage.put(self.canvas, self.canvas, replaces=old)
        if tuple(self.box.children) != (*above, self.stage):
            self.box.children = [*above, self.stage]

    def batch(self) -> AbstractContextManager:
        """Return a context that sends all changes to the page together."""
        return nullcontext() if self.canvas is None else self.canvas.batch()

    def withdraw(self) -> None:
        """Detach the figure before its parts are rearranged, which the page cannot follow; its drawing stays."""
        if self.canvas is not None:
            self.canvas.withdraw()


def labeled(label: str, *controls: ipywidgets.Widget) -> ipywidgets.HBox:
    """Return a row of a label and controls, aligned with the sliders."""
    style = "width:64px;text-align:right;line-height:28px;color:var(--jp-ui-font-color1)"
    name = ipywidgets.HTML(f'<div style="{style}">{label}</div>', layout={"margin": "2px 4px 2px 2px"})
    return ipywidgets.HBox([name, *controls], layout={"align_items": "center", "flex_flow": "row wrap"})
