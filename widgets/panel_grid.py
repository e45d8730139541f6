"""Helpers for panels that are updated in place: a grid with one toolbar, and ranges that fit the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.layouts import gridplot

from workbench.plots.figure_files import bokeh_plot
from workbench.plots.style import note_bokeh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.models import GridPlot, Range1d, Title
    from bokeh.plotting import figure


def own_panel(drawing: Any, x_range: Range1d, *, frame_width: int) -> tuple[Any, figure, Title]:
    """Return the single panel of a figure, for use in a grid and for updates in place."""
    plot = bokeh_plot(drawing)
    (panel,) = plot.traverse(lambda part: part, [lambda part: type(part).__name__ == "OverlayPlot"])
    plot.state.document.clear()  # the panel moves into another grid
    panel.state.update(x_range=x_range, frame_width=frame_width)
    note_bokeh("")(panel, None)
    for legend in panel.state.legend:
        legend.visible = False
    return panel, panel.state, panel.state.select_one({"name": "note_above"})


def grid(figures: Sequence[figure], *, n_columns: int) -> GridPlot:
    """Arrange panels in rows with one toolbar."""
    options = {"logo": None, "active_drag": None, "autohide": False}
    return gridplot(list(figures), ncols=n_columns, merge_tools=True, toolbar_location="above", toolbar_options=options)


def fit(axis: Range1d, values: np.ndarray, *, is_logarithmic: bool = False, padding: float = 0.08) -> None:
    """Fit a range to the finite values with some padding; without finite values it stays unchanged."""
    values = values[np.isfinite(values)]
    if is_logarithmic:
        values = np.log10(values[values > 0])
    if not len(values):
        return
    lowest, highest = values.min(), values.max()
    room = padding * (highest - lowest) or 0.05 * max(abs(highest), 1.0)
    ends = np.array([lowest - room, highest + room])
    set_range(axis, *(10.0**ends if is_logarithmic else ends).tolist())


def set_range(axis: Range1d, start: float, end: float) -> None:
    """Set a range; an unchanged range is not written again, so that the user's zoom is kept."""
    if (axis.reset_start, axis.reset_end) != (start, end):
        axis.update(start=start, end=end, reset_start=start, reset_end=end)
