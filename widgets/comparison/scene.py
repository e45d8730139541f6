"""The data that a view of ArchitectureComparison shows: recorded runs at one step; and the interface of a view."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
import xarray as xr

from workbench.errors import OptionError, SchemaError
from workbench.io.store import at_step, divergence_step, named_runs, open_run, spectra_of
from workbench.plots.figure_files import picture_of
from workbench.plots.figure_inputs import select_layers
from workbench.plots.plane_view import depth_of
from workbench.widgets.base import close_tree, enlarge_text
from workbench.widgets.figure import Figure, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from bokeh.models import ColumnDataSource, LayoutDOM

    from workbench.widgets.saved_page import SavedView


@dataclass(frozen=True)
class Scene:
    """The runs that a view shows at one step, in a range of layers; ``highlight`` is a layer or None."""

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
            raise OptionError(f"No model shown has spectra at or before step {self.step}; choose a later step.")
        return spectra


class ComparisonView:
    """Base class of the views: a box with controls, whose changes require a redraw, and a figure."""

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


#: Runs up to this size are read into memory completely, larger ones step by step.
_BYTES_IN_MEMORY = 256e6


class RecordedRun:
    """A run with access to its spectra by step.

    ``diverged_at`` is the step of the first divergence, ``ended_at`` that at which it finished or was stopped (None if
    neither or unknown), ``steps`` those of the spectra (int64, 0 for spectra without steps), ``extent`` the first and
    last step of any data.
    """

    def __init__(self, name: str, data: xr.DataTree | xr.Dataset | str | os.PathLike[str]) -> None:
        self.name = name
        if isinstance(data, str | os.PathLike):
            data = open_run(data)
        self.tree = named_runs({name: data})[name]
        self.spectra = spectra_of(self.tree)
        at_step(self.spectra, "last", name=name)
        if self.spectra.nbytes <= _BYTES_IN_MEMORY:
            self.spectra.load()
        self.steps = _steps(name, self.spectra)
        self.n_layers = depth_of(self.spectra)
        monitors = self.part("monitors")
        steps = self.steps if monitors is None else np.concatenate([self.steps, monitors["step"].values])
        self.extent = int(steps.min()), int(steps.max())
        self._recent: dict[int, xr.Dataset] = {}
        self.diverged_at = divergence_step(self.tree)
        self.ended_at = _end(self.part("events"))

    def at(self, step: int) -> xr.Dataset | None:
        """Return the latest spectra recorded at or before a step; None if there are none."""
        place = int(np.searchsorted(self.steps, step, side="right")) - 1
        return None if place < 0 else self._recorded(place)

    def near(self, step: int) -> xr.Dataset:
        """Return the latest spectra recorded at or before a step, or the first ones if there are none."""
        found = self.at(step)
        return self._recorded(0) if found is None else found

    def remark(self, step: int) -> str:
        """Return a remark on the spectra shown at a step; empty if they were recorded at this step."""
        if self.at(step) is None:
            return f"recorded from step {self.steps[0]}"
        if self.diverged_at is not None and step >= self.diverged_at:
            return f"diverged at step {self.diverged_at}"
        if self.ended_at is not None and step > self.ended_at:
            return f"ended at step {self.ended_at}"
        shown = int(self.steps[self.steps <= step][-1])
        if shown == step:
            return ""
        return f"recorded to step {shown}" if shown == self.steps[-1] else f"step {shown}"

    def title(self, step: int) -> str:
        """Return the name, followed by the remark if there is one."""
        remark = self.remark(step)
        return f"{self.name} · {remark}" if remark else self.name

    def part(self, name: str) -> xr.Dataset | None:
        """Return a part such as the monitors or events; None if there is none."""
        return self.tree[name].to_dataset() if name in self.tree.children else None

    def _recorded(self, place: int) -> xr.Dataset:
        if "step" not in self.spectra.dims:
            return self.spectra
        if place not in self._recent:
            while len(self._recent) >= 4:
                self._recent.pop(next(iter(self._recent)))
            self._recent[place] = self.spectra.isel(step=place).load()
        return self._recent[place]


def _end(events: xr.Dataset | None) -> int | None:
    if events is None:
        return None
    kinds = events["kind"].values.astype(str)
    ends = np.flatnonzero(np.isin(kinds, ("finished", "stopped")) & ~(np.cumsum((kinds == "resumed")[::-1])[::-1] > 0))
    return int(events["step"].values[ends[-1]]) if len(ends) else None


def _steps(name: str, spectra: xr.Dataset) -> np.ndarray:
    if "step" not in spectra.dims:
        return np.zeros(1, np.int64)
    steps = spectra["step"].values if "step" in spectra.coords else np.zeros(0)
    if not len(steps) or (np.diff(steps) <= 0).any():
        raise SchemaError(f"Run '{name}' needs a coordinate 'step' with at least one step and increasing values.")
    return steps.astype(np.int64)
