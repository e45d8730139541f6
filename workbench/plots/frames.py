"""Axes, frames, titles and legends of the panels of `workbench.plots.primitives`, as holoviews hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plots import style

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Number of pixels of a bokeh frame that correspond to one inch of a matplotlib figure.
PIXELS_AN_INCH = 100


def axes_bokeh(formats: tuple[str, str], is_log: tuple[bool, bool]) -> Callable[..., None]:
    """Return a holoviews hook: percent or plain numbers where bokeh chooses the ticks."""

    def hook(plot: Any, element: Any) -> None:
        from bokeh.models import BasicTickFormatter, FixedTicker, NumeralTickFormatter

        for axes, form, is_logarithmic in zip((plot.state.xaxis, plot.state.yaxis), formats, is_log, strict=True):
            for axis in axes:
                if isinstance(axis.ticker, FixedTicker):
                    continue
                if form == "percent":
                    axis.formatter = NumeralTickFormatter(format="0%")
                elif is_logarithmic:
                    axis.formatter = BasicTickFormatter(power_limit_high=6, power_limit_low=-6)

    return hook


def frame_bokeh(grid: bool, bounds: tuple[float, float] | None) -> Callable[..., None]:
    """Return a holoviews hook: the grid, the length of the horizontal axis, and the legend at the top of the frame."""

    def hook(plot: Any, element: Any) -> None:
        figure = plot.state
        figure.min_border_right = 24  # without it, the last number is moved to the left of its tick
        for rules in figure.grid:
            rules.visible = grid
        for axis in figure.xaxis:
            axis.bounds = bounds or "auto"
        for legend in figure.legend:
            legend.location = "top_left"

    return hook


def axes_matplotlib(ticks: tuple[Any, Any], formats: tuple[str, str]) -> Callable[..., None]:
    """Return a holoviews hook: percent or plain numbers, and no minor ticks if the ticks are given."""

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter, StrMethodFormatter

        frame = plot.handles["axis"]
        for axis, at, form in zip((frame.xaxis, frame.yaxis), ticks, formats, strict=True):
            axis.set_minor_formatter(NullFormatter())
            if at is not None:
                axis.set_minor_locator(NullLocator())
            elif form == "percent":
                axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            else:
                axis.set_major_formatter(StrMethodFormatter("{x:g}"))

    return hook


def frame_matplotlib(
    grid: bool, bounds: tuple[float, float] | None, box: tuple[int, int, int, int]
) -> Callable[..., None]:
    """Return a holoviews hook: the grid, the length of the horizontal axis, and the position of the frame.

    The position may be outside of the figure, which is cropped to its content when it is rendered.
    """

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.transforms import Bbox

        frame = plot.handles["axis"]
        if not grid:
            frame.grid(visible=False)
        if bounds is not None:
            frame.spines["bottom"].set_bounds(*bounds)
        frame.set_aspect("auto")
        frame.set_box_aspect(None)
        inches = Bbox.from_bounds(*(side / PIXELS_AN_INCH for side in box))
        # Evaluated when the figure is drawn, because holoviews changes the size of the figure after the hooks.
        frame.set_axes_locator(
            lambda axes, renderer: inches.transformed(axes.figure.dpi_scale_trans + axes.figure.transFigure.inverted())
        )

    return hook


def bare_matplotlib(bare: tuple[bool, bool]) -> Callable[..., None]:
    """Return a holoviews hook: no label and no numbers along the x axis, the y axis or both."""

    def hook(plot: Any, element: Any) -> None:
        frame = plot.handles["axis"]
        for axis, is_bare, word in zip((frame.xaxis, frame.yaxis), bare, ("bottom", "left"), strict=True):
            if is_bare:
                axis.label.set_text("")
                frame.tick_params(**{f"label{word}": False})

    return hook


def head_matplotlib(title: str, note: str) -> Callable[..., None]:
    """Return a holoviews hook: a title and, between it and the frame, the lines of the note in small type."""

    def hook(plot: Any, element: Any) -> None:
        style.title_matplotlib(title, note=note)(plot, element)
        pad = 8 + 13 * (note.count("\n") + 1 if note else 0)  # some symbols in the notes are taller than letters
        styling = {"fontsize": style.TITLE_SIZE, "fontweight": "bold", "color": style.INK}
        plot.handles["axis"].set_title(title, loc="left", pad=pad, **styling)

    return hook


def weight_matplotlib(weight: str) -> Callable[..., None]:
    """Return a holoviews hook: the font weight of text."""

    def hook(plot: Any, element: Any) -> None:
        for artist in np.ravel(plot.handles.get("artist", [])):
            artist.set_fontweight(weight)

    return hook


def legend_matplotlib(entries: Sequence[Mapping[str, Any]]) -> Callable[..., None]:
    """Return a holoviews hook: a legend to the right of the frame; entries with the same label are merged."""

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.lines import Line2D

        styles: dict[str, dict[str, Any]] = {}
        for entry in entries:
            styling = styles.setdefault(entry["label"], {"linestyle": "none", "color": entry["color"]})
            if "dash" in entry:
                styling |= {"linestyle": entry["dash"], "linewidth": 0.8 * entry["width"]}
            else:
                styling |= {"marker": style.MATPLOTLIB_MARKERS[entry["marker"]], "markersize": 6}
                styling |= {"markeredgecolor": entry["edge"]}
                styling |= {"markerfacecolor": "none" if entry["hollow"] else entry["color"]}
        handles = [Line2D([], [], label=label, **styling) for label, styling in styles.items()]
        place = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "frameon": False}
        plot.handles["axis"].legend(
            handles=handles, fontsize=style.TICK_SIZE, labelcolor=style.INK, handlelength=2.8, **place
        )

    return hook
