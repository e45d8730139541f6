"""Lines, dots, bars and texts of one panel, described once and drawn by either backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.formatting import percent
from workbench.plots import style

#: Width of a letter of the notes, which may extend beyond the frame below the legend.
_PIXELS_A_LETTER = 5.4
_TICK_FORMATS: dict[str, Callable[[float], str]] = {"plain": "{:g}".format, "percent": percent}


class Primitives:
    """Builder of one panel; panels whose axes have equal names are linked."""

    def __init__(self, hv: Any, backend: str, x: Any, y: Any) -> None:
        self.hv, self.backend = hv, backend
        self.is_bokeh = backend == "bokeh"
        self.x, self.y = hv.Dimension(x), hv.Dimension(y)
        self.parts: list[Any] = []
        self._legend: list[dict[str, Any]] = []

    @property
    def ink(self) -> str:
        """Color of texts and reference lines."""
        return style.NEUTRAL if self.is_bokeh else style.INK

    def line(
        self,
        x: Any,
        y: Any,
        *,
        color: str,
        dash: str = "solid",
        width: float = 1.6,
        label: str = "",
        tips: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Draw a line through points; NaN interrupts it."""
        curve = self.hv.Curve((np.asarray(x, float), np.asarray(y, float)), self.x, self.y, label=label)
        self.add(curve, **self._stroke(color, width, dash), **self._hover(tips))
        if label:
            self._legend.append({"label": label, "color": color, "dash": dash, "width": width})

    def rule(self, at: float, *, dash: str = "solid") -> None:
        """Draw a horizontal gray line through the whole frame."""
        self.add(self.hv.HLine(at), **self._stroke(style.NEUTRAL, 1, dash))

    def band(self, x: Any, low: Any, high: Any, *, color: str, alpha: float = 0.18) -> None:
        """Fill the area between two lines, except where either is NaN."""
        x, low, high = (np.asarray(column, float) for column in (x, low, high))
        for piece in stretches(np.isfinite(low) & np.isfinite(high)):
            columns = (x[piece], low[piece], high[piece])
            # Axes of equal dimensions are linked, so that the edges have the name of this panel's axis.
            edges = [self.hv.Dimension(edge, label=f"{edge} {self.y.label}") for edge in ("low", "high")]
            area = self.hv.Area(columns, self.x, edges)
            self.add(area, **self._fill(color, alpha))

    def bars(
        self,
        x0: Any,
        y0: Any,
        x1: Any,
        y1: Any,
        *,
        color: str | Sequence[str] | np.ndarray,
        width: float = 1.6,
        dash: str = "solid",
        alpha: float = 1.0,
    ) -> None:
        """Draw straight segments, such as intervals, in one color or one each; those with a NaN are omitted."""
        ends = np.array(np.broadcast_arrays(*(np.atleast_1d(np.asarray(v, float)) for v in (x0, y0, x1, y1))))
        is_known = np.isfinite(ends).all(0)
        if not is_known.any():
            return
        corners = [self.x, self.y, self.hv.Dimension(f"{self.x} to"), self.hv.Dimension(f"{self.y} to")]
        data = {str(corner): end[is_known] for corner, end in zip(corners, ends, strict=True)}
        paint, columns = self._painted(color, is_known)
        segments = self.hv.Segments(data | columns, corners, list(columns))
        self.add(segments, **self._stroke(paint, width, dash), alpha=alpha)

    def boxes(
        self,
        x0: Any,
        y0: Any,
        x1: Any,
        y1: Any,
        *,
        colors: str | Sequence[str] | np.ndarray,
        alpha: float = 1.0,
        columns: Mapping[str, Any] | None = None,
        tips: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Draw filled boxes without a border, with columns for tooltips."""
        corners = [self.x, self.y, self.hv.Dimension(f"{self.x} to"), self.hv.Dimension(f"{self.y} to")]
        ends = np.broadcast_arrays(*(np.atleast_1d(np.asarray(v, float)) for v in (x0, y0, x1, y1)))
        columns = dict(columns or {})
        if isinstance(colors, str):
            fill = self._fill(colors, alpha)
        else:
            columns["fill"] = np.asarray(colors)
            fill = self._fill(self.hv.dim("fill"), alpha)
            if self.is_bokeh:  # without a line, adjacent boxes have a thin gap
                fill |= {"line_color": self.hv.dim("fill"), "line_alpha": alpha}
        data = dict(zip([str(corner) for corner in corners], ends, strict=True)) | columns
        self.add(self.hv.Rectangles(data, corners, list(columns)), **fill, **self._hover(tips))

    def dots(
        self,
        x: Any,
        y: Any,
        *,
        color: str | Sequence[str] | np.ndarray,
        edge: str | None = None,
        marker: str = "circle",
        size: float = 8,
        alpha: float = 1.0,
        is_hollow: bool | np.ndarray = False,
        columns: Mapping[str, Any] | None = None,
        tips: Sequence[tuple[str, str]] = (),
        label: str = "",
    ) -> None:
        """Draw markers, with columns for tooltips.

        ``color``, and whether they are hollow, may differ by marker; an edge of None has the same color. The marker is
        a name in `style.MODEL_MARKERS`, its size in pixels; without ``tips``, lines from ``columns``, there is no
        tooltip.
        """
        columns = dict(columns or {})
        if isinstance(is_hollow, np.ndarray):
            if self.is_bokeh:
                columns["fill"] = np.where(is_hollow, 0.0, 1.0)
            else:  # matplotlib draws either kind by itself
                for chosen in (~is_hollow, is_hollow):
                    part: dict[str, Any] = {"color": color, "edge": edge, "marker": marker, "size": size}
                    at = np.asarray(x, float)[chosen], np.asarray(y, float)[chosen]
                    part |= {"alpha": alpha, "is_hollow": chosen is is_hollow}
                    self.dots(*at, **part, label="" if chosen is is_hollow else label)
                return
        paint, painted = self._painted(color)
        data = {str(self.x): np.asarray(x, float), str(self.y): np.asarray(y, float)} | columns | painted
        points = self.hv.Points(data, [self.x, self.y], [*columns, *painted], label=label)
        rim = edge or paint
        if self.is_bokeh:
            size *= 1.35 if marker == "diamond" else 1.0  # the diamonds of bokeh are narrow
            styling = {"fill_color": paint, "line_color": rim, "marker": marker, "size": size, "line_width": 1.5}
            fill = self.hv.dim("fill") if isinstance(is_hollow, np.ndarray) else 0.0 if is_hollow else alpha
            styling |= {"fill_alpha": fill, "line_alpha": alpha}
        else:
            styling = {"marker": style.MATPLOTLIB_MARKERS[marker], "s": (0.62 * size) ** 2, "linewidth": 1.1}
            styling |= {"facecolors": "none" if is_hollow else paint, "edgecolors": rim, "alpha": alpha}
        self.add(points, **styling, **self._hover(tips))
        if label:
            self._legend.append({"label": label, "color": color, "marker": marker, "edge": rim, "hollow": is_hollow})

    def paths(
        self,
        lines: Sequence[np.ndarray],
        *,
        color: str,
        width: float = 1.0,
        dash: str = "solid",
        alpha: float = 1.0,
        name: str = "",
    ) -> None:
        """Draw several lines, each of shape (point, 2), as one element that widgets find by its name."""
        paths = self.hv.Path(lines, [self.x, self.y], label=name)
        self.add(paths, **self._stroke(color, width, dash), alpha=alpha)

    def area(self, outline: Mapping[str, np.ndarray], *, color: str, alpha: float, name: str = "") -> None:
        """Fill the area within the closed line through the columns ``x`` and ``y``."""
        self.add(self.hv.Polygons([outline], [self.x, self.y], label=name), **self._fill(color, alpha))

    def words(
        self,
        x: Any,
        y: Any,
        text: str | Sequence[str] | np.ndarray,
        *,
        color: str | None = None,
        align: str = "left",
        valign: str = "center",
        size: float = style.TICK_SIZE - 0.5,
        is_bold: bool = False,
        name: str = "",
    ) -> None:
        """Write a text whose ``align`` and ``valign`` edge is at a point, or several of the same kind at once."""
        texts = np.atleast_1d(np.asarray(text, dtype=object))
        if not len(texts) and not name:
            return
        x, y, _ = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float), texts)
        words = self.hv.Labels({str(self.x): x, str(self.y): y, "text": texts}, [self.x, self.y], "text", label=name)
        color = color or self.ink
        if self.is_bokeh:
            styling = {"text_align": align, "text_baseline": "middle" if valign == "center" else valign}
            styling |= {"text_color": color, "text_font_size": f"{size}pt"}
            self.add(words, **styling, text_font_style="bold" if is_bold else "normal")
        else:
            styling = {"horizontalalignment": align, "verticalalignment": valign, "color": color}
            self.add(words, **styling, size=size, hooks=[weight_matplotlib("bold")] if is_bold else [])

    def panel(
        self,
        *,
        title: str,
        note: str | Sequence[str] = (),
        view: tuple[tuple[float, float], tuple[float, float]],
        size: tuple[int, int],
        names: tuple[str, str],
        ticks: tuple[Any, Any] = (None, None),
        formats: tuple[str, str] = ("plain", "plain"),
        is_log: tuple[bool, bool] = (False, False),
        legend: bool = False,
        grid: bool = True,
        bare: tuple[bool, bool] = (False, False),
        bounds: tuple[float, float] | None = None,
        at: tuple[int, int] | None = (0, 0),
        hooks: Sequence[Callable[..., None]] = (),
        plane: PlaneFrame | None = None,
    ) -> Any:
        """Return everything drawn so far as a holoviews Overlay with options for this backend only.

        Args:
            title: Title above the frame.
            note: The small lines under the title, or phrases for them, wrapped at the width of the frame.
            view: Ranges of the axes: x, then y, as in the pairs below.
            size: Size of the frame in pixels of bokeh.
            names: Labels of the axes.
            ticks: Positions, or pairs of position and text; None lets the backend choose.
            formats: Format of the numbers, ``"plain"`` or ``"percent"``.
            is_log: Whether the axis is logarithmic.
            legend: Whether there is a legend to the right.
            grid: Whether grid lines are drawn.
            bare: Whether the axis has neither label nor numbers.
            bounds: Ends of the horizontal axis line; None selects the full frame.
            at: Left and lower edge of the frame on a matplotlib figure, in the same pixels; None leaves it to
                holoviews. bokeh ignores it.
            hooks: Further holoviews hooks for bokeh.
            plane: Frame of a panel whose axes have the same scale, in place of ``grid``, ``bounds`` and ``at``.
        """
        note = note if isinstance(note, str) else flowed(note, n_characters=size[0] // _PIXELS_A_LETTER)
        ticks = tuple(_worded(at, form) for at, form in zip(ticks, formats, strict=True))
        styling: dict[str, Any] = {"xlim": view[0], "ylim": view[1], "xlabel": names[0], "ylabel": names[1]}
        styling |= {"logx": is_log[0], "logy": is_log[1], "backend": self.backend}
        styling |= {key: at for key, at in zip(("xticks", "yticks"), ticks, strict=True) if at is not None}
        overlay = self.hv.Overlay(self.parts)
        if plane is not None:
            return overlay.opts(**styling, **plane.options(self.is_bokeh, title, note, size, bare), show_legend=False)
        if self.is_bokeh:
            of_frame = [style.bare_bokeh((not bare[0], not bare[1])), axes_bokeh(formats, is_log)]
            hooks = [style.dress_bokeh, *of_frame, *hooks]
            hooks += [frame_bokeh(grid, bounds)] + ([style.note_bokeh(note)] if note else [])
            styling |= {"title": title, "frame_width": size[0], "frame_height": size[1], "show_grid": grid}
            styling |= {"show_legend": legend, "default_tools": [], "active_tools": [], "hooks": hooks}
            styling |= {"legend_position": "right"} if legend else {}
            return overlay.opts(tools=["pan", "xwheel_zoom", "box_zoom", "reset", "save"], **styling)
        hooks = [style.dress_matplotlib, head_matplotlib(title, note), axes_matplotlib(ticks, formats)]
        hooks += [frame_matplotlib(grid, bounds, at, size), bare_matplotlib(bare)]
        hooks += [legend_matplotlib(self._legend)] if legend else []
        styling |= {"title": "", "show_legend": False, "aspect": size[0] / size[1]}
        return overlay.opts(hooks=hooks, **styling)

    def add(self, element: Any, **options: Any) -> None:
        """Draw a holoviews element with options of this backend."""
        self.parts.append(element.opts(**options, backend=self.backend))

    def _painted(self, color: Any, chosen: Any = slice(None)) -> tuple[Any, dict[str, np.ndarray]]:
        """Return a color as an option and, if each mark has its own, the column that it reads."""
        if isinstance(color, str):
            return color, {}
        return self.hv.dim("color"), {"color": np.asarray(color, dtype=object)[chosen]}

    def _stroke(self, color: Any, width: float, dash: str) -> dict[str, Any]:
        if self.is_bokeh:
            return {"color": color, "line_width": width, "line_dash": dash}
        return {"color": color, "linewidth": 0.8 * width, "linestyle": dash}

    def _fill(self, color: Any, alpha: float) -> dict[str, Any]:
        if self.is_bokeh:
            return {"fill_color": color, "fill_alpha": alpha, "line_alpha": 0.0}
        return {"facecolor": color, "alpha": alpha, "linewidth": 0}

    def _hover(self, tips: Sequence[tuple[str, str]]) -> dict[str, Any]:
        return {"tools": ["hover"], "hover_tooltips": list(tips)} if self.is_bokeh and tips else {}


@dataclass(frozen=True)
class PlaneFrame:
    """Frame of a panel whose axes have the same scale; holoviews places it in the figure.

    ``key`` are lines below it, ``key_at`` frames high, ``row`` bold text left of it. ``has_border`` leaves space for
    the numbers of an axis, also where there are none; ``inches`` is the width on a matplotlib figure.
    """

    key: str = ""
    key_at: float = -0.17
    row: str = ""
    has_axes: bool = False
    has_border: bool = True
    inches: float = 4.0
    hooks: Sequence[Callable[..., None]] = ()

    def options(
        self, is_bokeh: bool, title: str, note: str, size: tuple[int, int], bare: tuple[bool, bool]
    ) -> dict[str, Any]:
        """Return options of the overlay."""
        if is_bokeh:
            hooks = [style.dress_bokeh, self._frame_bokeh, style.note_bokeh(note)]
            hooks += [style.note_bokeh(self.key, place="below")] if self.key else []
            hooks += [style.bare_bokeh((not bare[0], not bare[1]))] if self.has_border else []
            hooks += [style.note_bokeh(self.row, place="left")] if self.row else []
            options = {"title": title, "frame_width": size[0], "frame_height": size[1], "default_tools": []}
            return options | {"show_grid": True, "hooks": [*hooks, *self.hooks]}
        hooks = [style.dress_matplotlib, self._frame_matplotlib, bare_matplotlib(bare)]
        hooks += [style.title_matplotlib(title, note=note, key=self.key, key_at=self.key_at)]
        hooks += [style.row_matplotlib(self.row)] if self.row else []
        options = {"title": "", "aspect": size[0] / size[1], "fig_inches": self.inches}
        return options | {"hooks": [*hooks, *self.hooks]}

    def _frame_bokeh(self, plot: Any, element: Any) -> None:
        plot.state.tags = [*plot.state.tags, "fixed aspect"]
        for part in (*plot.state.axis, *plot.state.grid):
            part.visible = self.has_axes

    def _frame_matplotlib(self, plot: Any, element: Any) -> None:
        if not self.has_axes:
            plot.handles["axis"].set_axis_off()


def stretches(is_in: np.ndarray) -> list[slice]:
    """Return runs of consecutive True values as slices."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(is_in, int), [0]])))
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def flowed(phrases: Sequence[str], *, n_characters: float) -> str:
    """Join phrases with spaces, with a line break before each phrase that would not fit."""
    lines: list[str] = []
    for phrase in filter(None, phrases):
        longer = f"{lines[-1]}   {phrase}" if lines else phrase
        if lines and len(longer) <= n_characters:
            lines[-1] = longer
        else:
            lines.append(phrase)
    return "\n".join(lines)


def padded(lowest: float, highest: float, *, is_logarithmic: bool = False, margin: float = 0.06) -> tuple[float, float]:
    """Return the range with a relative margin, so that no line coincides with the frame."""
    if is_logarithmic:
        factor = (highest / lowest) ** margin
        return lowest / factor, highest * factor
    space = margin * (highest - lowest) or 0.5 * abs(highest) or 0.5
    return lowest - space, highest + space


def decades(low: float, high: float, *, n_most: int = 7) -> list[float]:
    """Return ticks of a logarithmic axis: 1, 2 and 5 of each decade, or fewer if these exceed ``n_most``."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for mantissas, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 4), ((1,), 8), ((1,), 64)):
        ticks = [float(f"{m}e{power}") for power in powers if power % every == 0 for m in mantissas]
        ticks = [at for at in ticks if low * (1 - 1e-9) <= at <= high * (1 + 1e-9)]
        if len(ticks) <= n_most:
            break
    return ticks


def _worded(places: Any, form: str) -> Any:
    """Return ticks as pairs of position and text."""
    if places is None or (len(places) and isinstance(places[0], tuple)):
        return places
    return [(float(at), _TICK_FORMATS[form](at)) for at in places]


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
    grid: bool, bounds: tuple[float, float] | None, at: tuple[int, int] | None, size: tuple[int, int]
) -> Callable[..., None]:
    """Return a holoviews hook: the grid, the horizontal axis, and the position of the frame, even outside."""

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.transforms import Bbox

        frame = plot.handles["axis"]
        if not grid:
            frame.grid(visible=False)
        if bounds is not None:
            frame.spines["bottom"].set_bounds(*bounds)
        frame.set_aspect("auto")
        frame.set_box_aspect(size[1] / size[0] if at is None else None)
        if at is None:
            return
        inches = Bbox.from_bounds(*(side / PIXELS_AN_INCH for side in (*at, *size)))
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
        pad = 9 + 11.5 * (note.count("\n") + 1 if note else 0)  # some symbols in the notes are taller than letters
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
