"""The data of the views of ArchitectureComparison, and the interface of a view."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench import plots
from workbench.errors import OptionError
from workbench.plots.spectra_inputs import select_layers
from workbench.widgets.base import close_tree
from workbench.widgets.export import make_folder
from workbench.widgets.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    import xarray as xr
    from bokeh.models import LayoutDOM

    from workbench.widgets.comparison.recorded_run import RecordedRun


@dataclass(frozen=True)
class Scene:
    """The data that a view shows.

    Attributes:
        runs: Every run there is, by name.
        shown: The names of those that are shown, at least one.
        step: Step of the slider.
        layers: First and last layer shown.
        published: Names of runs as in `workbench.compare`.
    """

    runs: Mapping[str, RecordedRun]
    shown: tuple[str, ...]
    step: int
    layers: tuple[int, int]
    published: Mapping[str, str] | bool = True

    @property
    def layer_range(self) -> range:
        """The layer numbers shown."""
        return range(self.layers[0], self.layers[1] + 1)

    @property
    def places(self) -> dict[str, int]:
        """The style number of every run: a run keeps its style while others are hidden."""
        return {name: place for place, name in enumerate(self.runs)}

    @property
    def is_every_layer(self) -> bool:
        """Whether no layer is left out."""
        return self.layers[0] == 0 and self.layers[1] >= max(run.n_layers for run in self.runs.values()) - 1

    def published_of(self, names: Iterable[str]) -> Mapping[str, str] | bool:
        """`published`, for some of the runs."""
        if isinstance(self.published, bool):
            return self.published
        return {name: self.published[name] for name in names if name in self.published}

    def spectra(self) -> dict[str, xr.Dataset]:
        """The spectra of the runs shown, all layers; without the runs that have none yet."""
        found = {name: self.runs[name].at(self.step) for name in self.shown}
        return {name: data for name, data in found.items() if data is not None}

    def layers_of(self, name: str) -> xr.Dataset:
        """The spectra of one run in the layers shown; without a layer where nothing is recorded yet."""
        run = self.runs[name]
        spectra = run.at(self.step)
        return run.near(self.step).isel(layer=[]) if spectra is None else select_layers(spectra, self.layer_range)

    def titled(self) -> dict[str, xr.Dataset]:
        """The spectra by title instead of name, for a figure that stands alone.

        Raises:
            OptionError: If no run shown has any yet.
        """
        spectra = {self.runs[name].title(self.step): data for name, data in self.spectra().items()}
        if not spectra:
            raise OptionError(f"None of the models shown has spectra at or before step {self.step}; move the step.")
        return spectra


class ComparisonView:
    """One view: its own controls and a figure, in a box.

    Args:
        lock: Held while the figure changes.

    Attributes:
        box: Widget to show.
        controls: Whose changes ask for a new drawing.
        refused_kinds: Kinds of files that this view has none of, and why.
    """

    tip = ""
    refused_kinds: Mapping[str, str] = {}

    def __init__(self, lock: AbstractContextManager) -> None:
        self.lock = lock
        self.box = ipywidgets.VBox([ipywidgets.HTML(muted("Drawing …"))])
        self.controls: list[ipywidgets.Widget] = []
        self.canvas: Figure | None = None

    def draw(self, scene: Scene) -> None:
        """Draw the scene."""
        raise NotImplementedError

    def figure(self, scene: Scene, backend: str) -> Any:
        """The same as a figure of its own."""
        raise NotImplementedError

    def save(self, scene: Scene, kind: str, path: Path, *, overwrite: bool) -> Path:
        """Write the same into a file; see `workbench.widgets.export.KINDS`."""
        figure = self.figure(scene, "bokeh" if kind == "html" else "matplotlib")
        make_folder(path)
        return plots.save(figure, path, overwrite=overwrite)

    def close(self) -> None:
        """Remove the view from the page and the kernel."""
        close_tree(self.box)
        for control in self.controls:
            control.close()
        self.withdraw()

    def put(self, *above: ipywidgets.Widget, root: LayoutDOM) -> None:
        """Show a new figure below these controls."""
        self.withdraw()
        self.canvas = Figure(root, lock=self.lock)
        self.box.children = [*above, self.canvas]

    def batch(self) -> AbstractContextManager:
        """Changes that the page gets together; nothing to gather before there is a figure."""
        return nullcontext() if self.canvas is None else self.canvas.batch()

    def withdraw(self) -> None:
        """Remove the figure from the page, so that its parts can be rearranged, which the page cannot follow."""
        if self.canvas is not None:
            self.canvas.close()
            self.canvas.document.clear()


def muted(sentence: str) -> str:
    """A line of explanation as HTML."""
    return f'<div style="color:var(--jp-ui-font-color2);line-height:1.5">{sentence}</div>'


def labelled(label: str, *controls: ipywidgets.Widget) -> ipywidgets.HBox:
    """Controls in a row after their name, in line with the sliders."""
    style = "width:64px;text-align:right;line-height:28px;color:var(--jp-ui-font-color1)"
    name = ipywidgets.HTML(f'<div style="{style}">{label}</div>', layout={"margin": "2px 4px 2px 2px"})
    return ipywidgets.HBox([name, *controls], layout={"align_items": "center", "flex_flow": "row wrap"})
