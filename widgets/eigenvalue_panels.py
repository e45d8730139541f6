"""Eigenvalue maps that are built once and updated in place, for SpectrumExplorer and ArchitectureComparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from bokeh.models import Axis, ColorBar, ColumnDataSource

from workbench.plots import eigenvalue_map
from workbench.plots.complex_plane import density_image
from workbench.plots.figure_files import bokeh_plot
from workbench.plots.plane_view import band_outline, depth_of, headline, key, mode_columns, silent_layers
from workbench.plots.style import note_bokeh, shortened
from workbench.widgets.base import THEMES, enlarge_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bokeh.models import Title
    from bokeh.plotting import figure

    from workbench.plots.plane_view import PlaneView

#: In pixels; a narrower panel has its texts in two lines and a shortened name.
_NARROW = 240
#: In pixels; a smaller panel has fewer ticks.
_SMALL = 180
ZOOM_TIPS = [
    "All modes: linear scale around the unit circle, logarithmic scale beyond",
    "The square around 1, on a linear scale",
]


class EigenvaluePanels:
    """One panel per model on shared axes in one layout (``root``); data, texts and ranges are updated in place."""

    def __init__(self, spectra: Mapping[str, xr.Dataset], *, theme: str = "page") -> None:
        self._theme = theme
        self._depths = {name: depth_of(data) for name, data in spectra.items()}
        plot = bokeh_plot(eigenvalue_map(spectra))
        panels = plot.traverse(lambda panel: panel, [lambda part: type(part).__name__ == "OverlayPlot"])
        self.root = plot.state
        self.view: PlaneView | None = None
        self.figures: dict[str, figure] = {}
        self.sources: dict[str, ColumnDataSource] = {}
        self._ground: dict[str, dict[str, ColumnDataSource]] = {}
        self._notes: dict[tuple[str, str], Title] = {}
        for name, panel in zip(spectra, panels, strict=True):
            parts = {label: part.handles["source"] for (_, label), part in panel.subplots.items()}
            self.figures[name], self.sources[name] = panel.state, parts["Modes"]
            self._ground[name] = parts
            for place in ("above", "below"):  # an empty note may be filled later
                note_bokeh("", place=place)(panel, None)
                self._notes[name, place] = panel.state.select_one({"name": f"note_{place}"})
        (self._depth_bar,) = self.root.select({"type": ColorBar})
        enlarge_text(self.root, theme)
        self.arrange(list(spectra))

    def columns(self, name: str, spectra: xr.Dataset, *, reliable_only: bool = False) -> dict[str, np.ndarray]:
        """Return the columns to draw for some or all layers of a model."""
        return mode_columns(spectra, n_layers=self._depths[name], reliable_only=reliable_only)

    def write(
        self, name: str, spectra: xr.Dataset, columns: dict[str, np.ndarray], view: PlaneView, *, remark: str = ""
    ) -> None:
        """Update the modes and texts of one panel."""
        self.sources[name].data = columns
        ground, band = self._ground[name], band_outline(spectra)
        ground["Near_hyphen_minus_unit_band"].data = {"xs": [[[band["x"]]]], "ys": [[[band["y"]]]]}
        image = density_image(columns, view, max(self._depths.values()))
        ground["Density"].data = {
            "image": [np.ascontiguousarray(image).view(np.uint32)[..., 0]],
            "x": [view.real[0]],
            "y": [view.imag[0]],
            "dw": [2 * view.half],
            "dh": [2 * view.half],
        }
        width = self.figures[name].frame_width / THEMES[self._theme]
        is_narrow = width < _NARROW
        title = f"{name} · {remark}" if remark and not is_narrow else name
        self.figures[name].title.text = shortened(title, width)
        if spectra.sizes["layer"] and not len(columns["real"]):
            above = "no modes"
        else:
            words = {"template": "M {:.2f}   ρ {:.3g}"} if is_narrow else {}
            is_empty = remark and not spectra.sizes["layer"]
            above = "nothing to show yet" if is_empty else headline(spectra, columns, view, **words)
        if is_narrow:  # the second line is always present, so that the panels do not move
            first, outside = above.rsplit("   ", 1) if above.endswith("outside") else (above, "")
            above = f"{first}\n{', '.join(filter(None, [remark, outside])) or ' '}"
        self._notes[name, "above"].text = above
        self._notes[name, "below"].text = silent_layers(spectra)

    def set_view(self, view: PlaneView) -> None:
        """Set the range of the shared axes if the view has changed; otherwise the user's zoom is kept."""
        if view == self.view:
            return
        self.view = view
        rings, labels = view.rings(), view.labels()
        for name, panel in self.figures.items():
            self._ground[name]["Powers_of_ten"].data = {"xs": [r[:, 0] for r in rings], "ys": [r[:, 1] for r in rings]}
            self._ground[name]["Names"].data = labels
            for part in (*panel.axis, *panel.grid):
                part.visible = view.is_near
        panel = next(iter(self.figures.values()))
        for axis, (start, end) in ((panel.x_range, view.real), (panel.y_range, view.imag)):
            axis.update(start=start, end=end, reset_start=start, reset_end=end)

    def arrange(self, names: Sequence[str]) -> None:
        """Show only these panels, in rows of about equal length."""
        n_columns, side = grid_of(len(names), self._theme)
        for panel in self.figures.values():
            panel.right = [item for item in panel.right if item is not self._depth_bar]
        children = []
        for index, name in enumerate(names):
            panel, row, column = self.figures[name], index // n_columns, index % n_columns
            is_small = side < _SMALL
            panel.update(frame_width=side, frame_height=side)
            panel.min_border_left = 14 if is_small else 26
            for axis in panel.select({"type": Axis}):
                axis.ticker.desired_num_ticks = 3 if is_small else 6
            children.append((panel, row, column))
        last = self.figures[names[min(n_columns, len(names)) - 1]]
        last.right = [*last.right, self._depth_bar]
        self.root.children = children


def grid_of(n_panels: int, theme: str = "page") -> tuple[int, int]:
    """Return the number of panels per row and the side of a panel in pixels before scaling to the page width."""
    if n_panels in (1, 2, 4) or theme != "page":
        return min(n_panels, 2), {1: 420, 2: 300}.get(n_panels, 260)
    return (3, 204) if n_panels <= 6 else (4, 150)


def key_in_words(spectra: Iterable[xr.Dataset]) -> str:
    """Return the meaning of markers, shading and numbers as one line of HTML."""
    keys = dict.fromkeys(key(data).replace("\n", " &ensp; ") for data in spectra)
    return " &ensp; ".join([*keys, "M: mean over layers, ρ: largest"])
