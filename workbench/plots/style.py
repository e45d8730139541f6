"""Style of all figures: colors for white and for the dark theme of JupyterLab, and the two drawing backends."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, require_lab, require_listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from PIL.ImageFont import FreeTypeFont

BACKENDS = ("bokeh", "matplotlib")

#: Shallow to deep. Found by a numerical search: a contrast of at least 3 on white and on #111111, and the largest
#: minimum step for normal, protan, deutan and tritan vision (``tests/plots/test_style.py`` measures both).
DEPTH_RAMP = ("#6244fb", "#996ef7", "#ba78d9", "#b05d95", "#a43e55", "#bb3233", "#ea2e0f")

#: One color per model, always with the marker and dash of the same number, so that color is never the only cue.
MODEL_COLORS = ("#1f77d4", "#d55e00", "#0f8f66", "#b25ac8", "#8f7a00", "#7f7f7f", "#e00b4b", "#7656f5")
MODEL_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "star")
#: The same markers for matplotlib.
MATPLOTLIB_MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "inverted_triangle": "v",
    "star": "*",
    "x": "X",
}
MODEL_DASHES = ("solid", "dashed", "dotted", "dashdot", "solid", "dashed")

#: Text, axes and grid: the gray with equal contrast (4.3) on white and on #111111.
NEUTRAL = "#7a7a7a"
#: Text and axes of matplotlib figures, whose background is white in any theme.
INK = "#333333"

#: Color of marks of measurements that found a fault.
BROKEN = MODEL_COLORS[6]

#: holoviews has one current backend, and its matplotlib figures set parameters of the entire process.
_drawing = threading.RLock()

TITLE_SIZE = 11
LABEL_SIZE = 10
TICK_SIZE = 9


def depth_colors(n_layers: int) -> list[str]:
    """Return one color per layer, shallow to deep, as ``#rrggbb``; evenly spaced on the ramp."""
    anchors = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in DEPTH_RAMP])
    place = np.linspace(0, len(anchors) - 1, max(n_layers, 1))
    channels = [np.interp(place, np.arange(len(anchors)), channel) for channel in anchors.T]
    return ["#{:02x}{:02x}{:02x}".format(*np.rint(rgb).astype(int)) for rgb in np.transpose(channels)]


def model_style(index: int) -> dict[str, str]:
    """Return color, marker and dash of a style number; combinations repeat only after many models."""
    return {
        "color": MODEL_COLORS[index % len(MODEL_COLORS)],
        "marker": MODEL_MARKERS[index % len(MODEL_MARKERS)],
        "dash": MODEL_DASHES[(index + index // len(MODEL_MARKERS)) % len(MODEL_DASHES)],
    }


def model_places(names: Iterable[str], places: Mapping[str, int] | None = None) -> list[int]:
    """Return the style number of each drawn model, from those given by name or in order, for `model_style`."""
    names = list(names)
    if places is None:
        return list(range(len(names)))
    for name in names:
        if name not in places:
            raise OptionError(
                f"places has no number for '{name}', only for {', '.join(map(str, places)) or 'none'}; add one."
            )
    return [int(places[name]) for name in names]


@contextmanager
def drawing(backend: str) -> Iterator[Any]:
    """Load holoviews with one backend, and restore its global backend afterwards; one thread at a time."""
    require_listed("backend", [backend], BACKENDS)
    require_lab("Figures", "holoviews", backend)
    import holoviews as hv
    import pandas  # noqa: F401  (holoviews imports it lazily, which fails when two threads draw first)

    with _drawing:
        current = hv.Store.current_backend
        try:
            if backend == "bokeh":
                import holoviews.plotting.bokeh
            else:
                import holoviews.plotting.mpl
            # holoviews looks up the options of any backend through the tree of the current one.
            hv.Store.current_backend = backend
            yield hv
        finally:
            hv.Store.current_backend = current


def laid_out(hv: Any, panels: Sequence[Any], backend: str, *, n_columns: int = 1, **of_matplotlib: Any) -> Any:
    """Return the panels as one holoviews Layout."""
    layout = hv.Layout(list(panels)).cols(n_columns)
    if backend == "matplotlib":
        return layout.opts(sublabel_format="", backend=backend, **of_matplotlib)
    return layout.opts(shared_axes=True, merge_tools=True, toolbar="above", backend=backend)


def dress_bokeh(plot: Any, element: Any) -> None:
    """Style a bokeh figure, as a holoviews hook: transparent background, gray text and grid, no outline."""
    figure = plot.state
    figure.background_fill_alpha = 0
    figure.border_fill_alpha = 0
    figure.outline_line_color = None
    for axis in figure.axis:
        axis.axis_label_text_color = axis.major_label_text_color = NEUTRAL
        axis.axis_line_color = axis.major_tick_line_color = NEUTRAL
        axis.minor_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = f"{LABEL_SIZE}pt"
        axis.major_label_text_font_size = f"{TICK_SIZE}pt"
    for grid in figure.grid:
        grid.grid_line_color = NEUTRAL
        grid.grid_line_alpha = 0.22
    for legend in figure.legend:
        legend.background_fill_alpha = 0
        legend.border_line_alpha = 0
        legend.label_text_color = NEUTRAL
        legend.label_text_font_size = f"{TICK_SIZE}pt"
        legend.glyph_width = 34
    figure.title.text_color = NEUTRAL
    figure.title.text_font_size = f"{TITLE_SIZE}pt"
    figure.sizing_mode = None
    figure.toolbar.logo = None
    figure.toolbar.autohide = True


def note_bokeh(text: str, *, place: str = "above") -> Any:
    """Return a holoviews hook: a small line above or below a bokeh figure, or the bold row's name ``left`` of it."""

    def hook(plot: Any, element: Any) -> None:
        from bokeh.models import Title

        name = f"note_{place}"
        if plot.state.select({"name": name}):
            return
        styling = {"text_font_size": "9pt", "text_font_style": "normal"}
        if place == "left":
            styling = {"text_font_size": f"{TITLE_SIZE}pt", "text_font_style": "bold", "align": "center"}
        note = Title(text=text, name=name, text_color=NEUTRAL, **styling)
        plot.state.add_layout(note, place)
        if place == "above":  # the last title is outermost: move ours below that of the figure
            plot.state.above = [note, *(item for item in plot.state.above if item is not note)]

    return hook


def bare_bokeh(has_axis: tuple[bool, bool]) -> Any:
    """Return a holoviews hook: no numbers and no label along x, y or both; call it after `dress_bokeh`."""

    def hook(plot: Any, element: Any) -> None:
        for has, axes in zip(has_axis, (plot.state.xaxis, plot.state.yaxis), strict=True):
            for axis in () if has else axes:
                axis.axis_label = None
                axis.major_label_text_font_size = "0pt"
        plot.state.min_border_left = 62 if has_axis[1] else 30

    return hook


def dress_matplotlib(plot: Any, element: Any) -> None:
    """Style a matplotlib axis, as a holoviews hook: two thin spines, a pale grid, dark text."""
    axis = plot.handles["axis"]
    axis.set_axisbelow(True)
    axis.grid(visible=True, color=NEUTRAL, alpha=0.22, linewidth=0.6)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axis.tick_params(colors=INK, labelsize=TICK_SIZE)
    axis.xaxis.label.set(color=INK, fontsize=LABEL_SIZE)
    axis.yaxis.label.set(color=INK, fontsize=LABEL_SIZE)


def title_matplotlib(title: str, *, note: str = "", key: str = "", key_at: float = -0.17) -> Any:
    """Return a holoviews hook that writes a title, a small line under it, and a key below the frame at a height."""

    def hook(plot: Any, element: Any) -> None:
        axis = plot.handles["axis"]
        axis.set_title("", loc="center")
        axis.set_title(title, loc="left", fontsize=TITLE_SIZE, fontweight="bold", color=INK, pad=18 if note else 7)
        small = {"transform": axis.transAxes, "fontsize": TICK_SIZE - 1, "color": INK}
        # In points: a fraction of the height would reach into the title of a tall panel.
        axis.annotate(
            note, (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", ha="left", va="bottom",
            fontsize=TICK_SIZE - 1, color=INK,
        )  # fmt: skip
        axis.text(0, key_at, key, ha="left", va="top", **small)

    return hook


def row_matplotlib(name: str) -> Any:
    """Return a holoviews hook that writes the name of a row of panels to the left of its first panel."""

    def hook(plot: Any, element: Any) -> None:
        axis = plot.handles["axis"]
        styling = {"fontsize": TITLE_SIZE, "fontweight": "bold", "color": INK, "rotation": 90}
        axis.text(-0.36, 0.5, name, transform=axis.transAxes, ha="right", va="center", **styling)

    return hook


def log_ticks_bokeh(plot: Any, element: Any) -> None:
    """Set the ticks of a logarithmic y axis, as a holoviews hook: plain numbers, 1-2-5 steps below two decades."""
    from bokeh.models import BasicTickFormatter, LogTicker

    lowest, highest = plot.state.y_range.start, plot.state.y_range.end
    for axis in plot.state.yaxis:
        axis.ticker = LogTicker(mantissas=[1, 2, 5] if highest < 100 * lowest else [1], num_minor_ticks=0)
        axis.formatter = BasicTickFormatter(power_limit_high=6, power_limit_low=-4)


#: Blue and vermilion: distinguishable with any color vision, and with enough contrast on white and on #111111.
CONVERGED, DIVERGED = MODEL_COLORS[0], MODEL_COLORS[1]
#: Color around marks on colored cells.
MARK_GROUND = "#ffffff"


@cache
def shortened(name: str, width: float) -> str:
    """Return a name shortened to a width in pixels; both ends are kept, because they distinguish runs."""
    font, title = _title_font(), name
    n_kept = len(name)
    while font.getlength(title) > width and n_kept > 2:
        n_kept -= 1
        title = f"{name[: (n_kept + 1) // 2].rstrip()}…{name[-(n_kept // 2) :].lstrip()}"
    return title


@cache
def _title_font() -> FreeTypeFont:
    """Return a font as wide as any that a page uses for titles; it is part of matplotlib."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    pixels = TITLE_SIZE * 96 / 72
    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans-Bold.ttf"), pixels)
