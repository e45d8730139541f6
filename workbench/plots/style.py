"""The style of all figures: colours for white and for JupyterLab's dark theme, and the two drawing backends."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, require_lab

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

BACKENDS = ("bokeh", "matplotlib")

#: Shallow to deep. Found by a numerical search: a contrast of at least 3 on white and on #111111, and the
#: largest smallest step for normal, protan, deutan and tritan vision (``tests/plots/test_style.py`` measures both).
DEPTH_RAMP = ("#6244fb", "#996ef7", "#ba78d9", "#b05d95", "#a43e55", "#bb3233", "#ea2e0f")

#: One colour per model, always with the marker and dash of the same number, so that colour is never the only cue.
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
}
MODEL_DASHES = ("solid", "dashed", "dotted", "dashdot", "solid", "dashed")

#: Text, axes and grid: the grey with equal contrast (4.3) on white and on #111111.
NEUTRAL = "#7a7a7a"
#: Text and axes of matplotlib figures, which have a white ground of their own in any theme.
INK = "#333333"

#: Marks of measurements that found a fault.
BROKEN = MODEL_COLORS[6]

#: holoviews has one current backend, and its figures for matplotlib set parameters that all of a process share.
_drawing = threading.RLock()

TITLE_SIZE = 11
LABEL_SIZE = 10
TICK_SIZE = 9


def depth_colors(n_layers: int) -> list[str]:
    """One colour per layer, shallow to deep, as ``#rrggbb``; evenly spaced on the ramp."""
    anchors = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in DEPTH_RAMP])
    place = np.linspace(0, len(anchors) - 1, max(n_layers, 1))
    channels = [np.interp(place, np.arange(len(anchors)), channel) for channel in anchors.T]
    return ["#{:02x}{:02x}{:02x}".format(*np.rint(rgb).astype(int)) for rgb in np.transpose(channels)]


def model_style(index: int) -> dict[str, str]:
    """Colour, marker and dash with one number; combinations repeat only after many models."""
    return {
        "color": MODEL_COLORS[index % len(MODEL_COLORS)],
        "marker": MODEL_MARKERS[index % len(MODEL_MARKERS)],
        "dash": MODEL_DASHES[(index + index // len(MODEL_MARKERS)) % len(MODEL_DASHES)],
    }


def model_places(names: Iterable[str], places: Mapping[str, int] | None = None) -> list[int]:
    """The style number of each model, for `model_style`.

    Args:
        names: Names of the models that are drawn.
        places: Style numbers by name, perhaps also of other models; None: in the order given.

    Raises:
        OptionError: If a model has no style number, or one is not an integer from 0.
    """
    names = list(names)
    if places is None:
        return list(range(len(names)))
    for name in names:
        if name not in places:
            raise OptionError(f"The places lack the model '{name}'; they are for {', '.join(map(str, places))}.")
        place = places[name]
        if isinstance(place, bool) or not isinstance(place, int | np.integer) or place < 0:
            raise OptionError(f"The place of '{name}' is {place!r}, expected a whole number from 0.")
    return [int(places[name]) for name in names]


@contextmanager
def drawing(backend: str) -> Iterator[Any]:
    """Load holoviews with one backend and leave its global choice of backend as it was; one thread at a time.

    Args:
        backend: ``"bokeh"`` or ``"matplotlib"``.

    Yields:
        The holoviews module, able to take options for that backend.

    Raises:
        OptionError: If there is no such backend.
        MissingPackageError: If its packages are not installed.
    """
    if backend not in BACKENDS:
        raise OptionError(f"The backend is '{backend}', expected one of {', '.join(BACKENDS)}.")
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
            # Options of one backend are looked up through the tree of the current one.
            hv.Store.current_backend = backend
            yield hv
        finally:
            hv.Store.current_backend = current


def laid_out(hv: Any, panels: Sequence[Any], backend: str, *, n_columns: int = 1, **of_matplotlib: Any) -> Any:
    """The panels as one holoviews Layout.

    Args:
        hv: Module from `drawing`.
        panels: Panels in reading order.
        backend: Backend of the panels.
        n_columns: Panels per row.
        of_matplotlib: Options of a matplotlib layout.
    """
    layout = hv.Layout(list(panels)).cols(n_columns)
    if backend == "matplotlib":
        return layout.opts(sublabel_format="", backend=backend, **of_matplotlib)
    return layout.opts(shared_axes=True, merge_tools=True, toolbar="above", backend=backend)


def dress_bokeh(plot: Any, element: Any) -> None:
    """A holoviews hook: transparent background, neutral text and grid, no frame on top and right."""
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
    """A holoviews hook: one small line, named ``note_above`` or ``note_below``, next to a bokeh figure.

    On the ``left`` it is the bold name of a row of figures.
    """

    def hook(plot: Any, element: Any) -> None:
        from bokeh.models import Title

        name = f"note_{place}"
        if plot.state.select({"name": name}):
            return
        look = {"text_font_size": "9pt", "text_font_style": "normal"}
        if place == "left":
            look = {"text_font_size": f"{TITLE_SIZE}pt", "text_font_style": "bold", "align": "center"}
        note = Title(text=text, name=name, text_color=NEUTRAL, **look)
        plot.state.add_layout(note, place)
        if place == "above":  # later titles are drawn further out: put ours below the figure's own
            plot.state.above = [note, *(item for item in plot.state.above if item is not note)]

    return hook


def bare_bokeh(has_axis: tuple[bool, bool]) -> Any:
    """A holoviews hook: no numbers and no name along the x axis, the y axis or both; after `dress_bokeh`.

    The left border is at least as wide for every panel, otherwise bokeh cuts off frames that it stacks.
    """

    def hook(plot: Any, element: Any) -> None:
        for has, axes in zip(has_axis, (plot.state.xaxis, plot.state.yaxis), strict=True):
            for axis in () if has else axes:
                axis.axis_label = None
                axis.major_label_text_font_size = "0pt"
        plot.state.min_border_left = 62 if has_axis[1] else 30

    return hook


def dress_matplotlib(plot: Any, element: Any) -> None:
    """A holoviews hook: thin axes on two sides, pale grid, dark text on white."""
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
    """A holoviews hook that writes a title, one small line under it, and a key below the frame, at this height."""

    def hook(plot: Any, element: Any) -> None:
        axis = plot.handles["axis"]
        axis.set_title("", loc="center")
        axis.set_title(title, loc="left", fontsize=TITLE_SIZE, fontweight="bold", color=INK, pad=18 if note else 7)
        small = {"transform": axis.transAxes, "fontsize": TICK_SIZE - 1, "color": INK}
        # In points, not in shares of the height, which on a tall panel would reach into the title.
        axis.annotate(
            note, (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", ha="left", va="bottom",
            fontsize=TICK_SIZE - 1, color=INK,
        )  # fmt: skip
        axis.text(0, key_at, key, ha="left", va="top", **small)

    return hook


def row_matplotlib(name: str) -> Any:
    """A holoviews hook that writes the name of a row of panels to the left of its first one."""

    def hook(plot: Any, element: Any) -> None:
        axis = plot.handles["axis"]
        look = {"fontsize": TITLE_SIZE, "fontweight": "bold", "color": INK, "rotation": 90}
        axis.text(-0.36, 0.5, name, transform=axis.transAxes, ha="right", va="center", **look)

    return hook


def log_ticks_bokeh(plot: Any, element: Any) -> None:
    """A holoviews hook for a logarithmic y axis: plain numbers, and 1-2-5 steps where it spans less than a hundred."""
    from bokeh.models import BasicTickFormatter, LogTicker

    lowest, highest = plot.state.y_range.start, plot.state.y_range.end
    for axis in plot.state.yaxis:
        axis.ticker = LogTicker(mantissas=[1, 2, 5] if highest < 100 * lowest else [1], num_minor_ticks=0)
        axis.formatter = BasicTickFormatter(power_limit_high=6, power_limit_low=-4)


def log_ticks_matplotlib(ratio: float) -> Any:
    """A holoviews hook for a logarithmic y axis: plain numbers, and a frame ``ratio`` times as wide as high."""

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        axis = plot.handles["axis"]
        axis.set_aspect("auto")
        axis.set_box_aspect(1 / ratio)
        lowest, highest = axis.get_ylim()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 100 * lowest else (1,)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())

    return hook


def legend_matplotlib(labels: Mapping[str, int], *, has_markers: bool = True) -> Any:
    """A holoviews hook that writes a legend of all models to the right of a panel; label -> style number."""

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.lines import Line2D

        handles = []
        for label, place in labels.items():
            look = model_style(place)
            line: dict[str, Any] = {"color": look["color"], "linestyle": look["dash"], "label": label}
            if has_markers:
                line |= {"marker": MATPLOTLIB_MARKERS[look["marker"]], "markersize": 5}
            handles.append(Line2D([], [], **line))
        plot.handles["axis"].legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(1.02, 1.0),
            frameon=False,
            fontsize=TICK_SIZE,
            labelcolor=INK,
            handlelength=3.2,
        )

    return hook
