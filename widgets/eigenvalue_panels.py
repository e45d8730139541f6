"""Eigenvalue maps built once and then written in place: what SpectrumExplorer and ArchitectureComparison share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from bokeh.models import Axis, ColorBar, ColumnDataSource

from workbench.plots import eigenvalue_map
from workbench.plots.figure_files import bokeh_plot
from workbench.plots.mode_columns import band_outline, headline, key, mode_columns, silent_layers
from workbench.plots.style import TITLE_SIZE, note_bokeh

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import xarray as xr
    from bokeh.models import Title
    from bokeh.plotting import figure
    from PIL.ImageFont import FreeTypeFont

    from workbench.plots.mode_columns import View

#: Name of a view -> its centre and limit, as `workbench.plots.eigenvalue_map` takes them.
VIEWS = {"unit circle": (0.0, None), "near 1": (1.0, None), "all modes": (0.0, "all")}
#: Pixels; a narrower panel has its texts in two lines, and its name shortened.
_NARROW = 240
#: Pixels; a smaller panel has fewer ticks, and less room between its numbers.
_SMALL = 180
VIEW_TIPS = ["Zoom to the unit circle", "Zoom to where most modes are", "Zoom out until every mode is visible"]


class EigenvaluePanels:
    """One panel per model on common axes; data, texts and ranges can be changed, the panels stay.

    Args:
        spectra: Spectra by name; they decide the colours of depth, so give all layers.
        limit: See `workbench.plots.eigenvalue_map`.

    Attributes:
        root: The bokeh layout of all panels.
        figures: The panels by name.
        sources: The modes drawn, by name.
        view: The view written last; None before the first.
    """

    def __init__(self, spectra: Mapping[str, xr.Dataset], *, limit: float | str | None = None) -> None:
        self._depths = {name: data.sizes["layer"] for name, data in spectra.items()}
        plot = bokeh_plot(eigenvalue_map(spectra, limit=limit))
        panels = plot.traverse(lambda panel: panel, [lambda part: type(part).__name__ == "OverlayPlot"])
        self.root = plot.state
        self.view: View | None = None
        self.figures: dict[str, figure] = {}
        self.sources: dict[str, ColumnDataSource] = {}
        self._bands: dict[str, ColumnDataSource] = {}
        self._notes: dict[tuple[str, str], Title] = {}
        for name, panel in zip(spectra, panels, strict=True):
            band, _, modes = panel.subplots.values()
            self.figures[name] = panel.state
            self._bands[name], self.sources[name] = band.handles["source"], modes.handles["source"]
            for place in ("above", "below"):  # where there is no text yet, there may be later
                note_bokeh("", place=place)(panel, None)
                self._notes[name, place] = panel.state.select_one({"name": f"note_{place}"})
        (self._depth_bar,) = self.root.select({"type": ColorBar})

    def columns(self, name: str, spectra: xr.Dataset, *, reliable_only: bool = False) -> dict[str, np.ndarray]:
        """The drawn columns of some or all layers of a model."""
        return mode_columns(spectra, n_layers=self._depths[name], reliable_only=reliable_only)

    def write(
        self,
        name: str,
        spectra: xr.Dataset,
        columns: dict[str, np.ndarray],
        view: View,
        *,
        remark: str = "",
        has_key: bool = True,
    ) -> None:
        """Write the modes and texts of one panel.

        Args:
            name: Name of the model, shortened where the panel is narrow.
            spectra: The layers shown; dims ``layer`` and ``mode``.
            columns: Result of `columns`.
            view: The view that the panel will have, to count the modes outside.
            remark: Remark after the name.
            has_key: Explain markers and shading below the panel.
        """
        self.sources[name].data = columns
        ring = band_outline(spectra)
        self._bands[name].data = {"xs": [[[ring["real"]]]], "ys": [[[ring["imag"]]]]}
        width = self.figures[name].frame_width
        is_narrow = width < _NARROW
        title = shortened(name, width) if is_narrow else f"{name} · {remark}" if remark else name
        self.figures[name].title.text = title
        if spectra.sizes["layer"] and not len(columns["real"]):
            above = "no modes"
        else:
            words = {"template": "mean M {:.2f} max ρ {:.3g}"} if width < _SMALL else {}
            is_empty = remark and not spectra.sizes["layer"]
            above = "nothing to show yet" if is_empty else headline(spectra, columns, view, **words)
        if is_narrow:  # a second line, empty or not, keeps the panels where they are
            first, outside = above.rsplit("   ", 1) if above.endswith("outside") else (above, "")
            above = f"{first}\n{', '.join(filter(None, [remark, outside])) or ' '}"
        self._notes[name, "above"].text = above
        lines = [key(spectra) if has_key else "", silent_layers(spectra)]
        self._notes[name, "below"].text = "\n".join(filter(None, lines))

    def set_view(self, view: View) -> None:
        """Move the common axes, if the view is another one than before; a zoom by hand stays until then."""
        if view == self.view:
            return
        self.view = view
        panel = next(iter(self.figures.values()))
        for axis, (start, end) in ((panel.x_range, view.real), (panel.y_range, view.imag)):
            axis.update(start=start, end=end, reset_start=start, reset_end=end)

    def arrange(self, names: Sequence[str]) -> None:
        """Show these panels alone, in rows as even as possible; inner ones without the axes they share."""
        n_columns, side = grid_of(len(names))
        for panel in self.figures.values():
            panel.right = [item for item in panel.right if item is not self._depth_bar]
        children = []
        for index, name in enumerate(names):
            panel, row, column = self.figures[name], index // n_columns, index % n_columns
            is_small = side < _SMALL
            panel.update(frame_width=side, frame_height=side)
            panel.min_border_left = 70 if column == 0 else 14 if is_small else 26
            for axis in panel.select({"type": Axis}):
                is_inner = column > 0 if axis in panel.left else index + n_columns < len(names)
                axis.visible = not is_inner
                axis.ticker.desired_num_ticks = 3 if is_small else 6
            children.append((panel, row, column))
        last = self.figures[names[min(n_columns, len(names)) - 1]]
        last.right = [*last.right, self._depth_bar]
        self.root.children = children


@cache
def shortened(name: str, width: float) -> str:
    """A name shortened to a width in pixels; its ends are kept, because they distinguish runs."""
    font, title = _title_font(), name
    n_kept = len(name)
    while font.getlength(title) > width and n_kept > 2:
        n_kept -= 1
        title = f"{name[: (n_kept + 1) // 2].rstrip()}…{name[-(n_kept // 2) :].lstrip()}"
    return title


@cache
def _title_font() -> FreeTypeFont:
    """A font as wide as any that a page takes for titles; it comes with matplotlib."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    pixels = TITLE_SIZE * 96 / 72
    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans-Bold.ttf"), pixels)


def grid_of(n_panels: int) -> tuple[int, int]:
    """Panels in a row, and the side of one in pixels, so that a notebook of usual width holds them."""
    if n_panels in (1, 2, 4):
        return min(n_panels, 2), {1: 420, 2: 300, 4: 260}[n_panels]
    return (3, 204) if n_panels <= 6 else (4, 150)
