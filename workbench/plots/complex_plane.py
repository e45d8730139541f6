"""One panel of the complex plane: unit circle, near-unit band and modes colored by depth, for both backends.

The figures, the live canvas and the timeline share its geometry; see `workbench.plots.plane_view`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plots import style
from workbench.plots.plane_view import DENSE, band_outline, density, ring

if TYPE_CHECKING:
    import xarray as xr

    from workbench.plots.plane_view import PlaneView

_TOOLS = ("box_select", "lasso_select", "pan", "box_zoom", "wheel_zoom", "tap", "reset", "save", "hover")
_TOOLTIPS = """<div style="font-size:12px;line-height:1.45">layer @layer, mode @mode<br>
&lambda; = @real{0.0000} @imag{+0.0000}i<br>|&lambda;| = @modulus{0.0000}<br>residual @residual{0.000}</div>"""


@dataclass(frozen=True)
class PlaneStyle:
    """What one panel shows in addition to its modes."""

    title: str
    note: str
    key: str
    view: PlaneView
    scale: Scale
    has_scale: bool
    side: int = 240
    inches: float = 3.4
    row: str = ""
    has_axis: tuple[bool, bool] = (True, True)
    word: str = ""


@dataclass(frozen=True)
class Scale:
    """Color scale of depth: one step per layer of the deepest model, numbered only if all models are equally deep."""

    n_layers: int
    is_shared: bool

    @property
    def colors(self) -> list[str]:
        """One color per layer of the deepest model."""
        return style.depth_colors(self.n_layers)

    @property
    def limits(self) -> tuple[float, float]:
        """Depth at both ends of the color bar, such that each layer has a band of equal width."""
        half = 0.5 / max(self.n_layers - 1, 1)
        return -half, 1 + half

    @property
    def ticks(self) -> dict[float, str]:
        """Depth -> label of the color bar at that depth."""
        if not self.is_shared:
            return {0.0: "first layer", 1.0: "last layer"}
        numbers = range(0, self.n_layers, max(1, -(-self.n_layers // 8)))
        return {i / max(self.n_layers - 1, 1): f"layer {i}" if i == 0 else str(i) for i in numbers}

    def paint(self, depth: np.ndarray) -> np.ndarray:
        """Return the color of each mode, shape (mode,)."""
        step = np.rint(depth * (self.n_layers - 1)).astype(int)
        return np.array(self.colors, dtype=object)[step]


#: Faint lines of the background: the axes and the circle of radius 0.5.
_FAINT = [np.array([[-9.0, 0.0], [9.0, 0.0]]), np.array([[0.0, -9.0], [0.0, 9.0]]), ring(0.5)]


@dataclass(frozen=True)
class Ground:
    """Background of the modes, as holoviews elements without options."""

    axes: list[Any]
    band: Any
    faint: Any
    rings: Any
    circle: Any
    density: Any
    labels: Any

    @classmethod
    def of(cls, hv: Any, spectra: xr.Dataset, columns: dict[str, np.ndarray], styling: PlaneStyle) -> Ground:
        """Create the background of a panel."""
        axes = [hv.Dimension("x", label="Re λ"), hv.Dimension("y", label="Im λ")]
        labels, view = styling.view.labels(), styling.view
        return cls(
            axes=axes,
            band=hv.Polygons([band_outline(spectra)], axes, label="near-unit band"),
            faint=hv.Path(_FAINT, axes, label="axes"),
            rings=hv.Path(view.rings(), axes, label="powers of ten"),
            circle=hv.Curve(ring(1.0), *axes, label="unit circle"),
            density=hv.RGB(
                density_image(columns, view, styling.scale.n_layers)[::-1],  # the first row of an RGB is the highest
                bounds=(view.real[0], view.imag[0], view.real[1], view.imag[1]),
                kdims=axes,
                vdims=[hv.Dimension(channel, range=(0, 255)) for channel in "RGBA"],
                label="density",
            ),
            labels=hv.Labels((labels["x"], labels["y"], labels["text"]), axes, "text", label="names"),
        )


def density_image(columns: dict[str, np.ndarray], view: PlaneView, n_layers: int) -> np.ndarray:
    """Return the image of the density, shape (row, column, 4); transparent where each mode is drawn."""
    if len(columns["x"]) <= DENSE:
        return np.zeros((2, 2, 4), np.uint8)
    return density(columns, view, n_layers)


def panel_bokeh(hv: Any, spectra: xr.Dataset, columns: dict[str, np.ndarray], styling: PlaneStyle) -> Any:
    """Return one panel for bokeh; ``columns`` are those of `mode_columns.mode_columns`."""
    ground = Ground.of(hv, spectra, columns, styling)
    n_modes = len(columns["x"])
    modes = hv.Points(columns, ground.axes, [name for name in columns if name not in ("x", "y")], label="modes")
    options = {"default_tools": [], "backend": "bokeh"}
    hooks = [style.dress_bokeh, style.note_bokeh(styling.note)]
    if styling.key:
        hooks.append(style.note_bokeh(styling.key, place="below"))
    hooks.append(style.bare_bokeh(styling.has_axis))
    hooks.append(_axes_bokeh(styling.view))
    if styling.row:
        hooks.append(style.note_bokeh(styling.row, place="left"))
    if styling.has_scale:
        hooks.append(_scale_bokeh(styling.scale))
    line = {"color": style.NEUTRAL, **options}
    panel = hv.Overlay(
        [
            ground.band.opts(color=style.NEUTRAL, fill_alpha=0.2, line_alpha=0, **options),
            ground.faint.opts(line_alpha=0.3, **line),
            ground.rings.opts(line_alpha=0.45, line_dash="3 4", **line),
            ground.circle.opts(line_width=1.4, **line),
            ground.density.opts(**options),
            modes.opts(
                size=(7 if n_modes < 300 else 5.5 if n_modes < 2000 else 4) * min(1, styling.side / 240),
                tools=list(_TOOLS),
                hover_tooltips=_TOOLTIPS,
                hooks=[_markers_bokeh(styling.scale)],
                **options,
            ),
            ground.labels.opts(text_color=style.NEUTRAL, text_font_size=f"{style.TICK_SIZE}pt", **options),
        ]
    )
    if styling.word:
        panel = panel * hv.Text(
            styling.view.real[0] + styling.view.half, 0, styling.word, fontsize=style.TICK_SIZE
        ).opts(text_color=style.NEUTRAL, **options)
    view = {"xlim": styling.view.real, "ylim": styling.view.imag, "show_legend": False}
    frame = {"frame_width": styling.side, "frame_height": styling.side, "show_grid": True}
    return panel.opts(**view, **frame, title=styling.title, hooks=hooks, backend="bokeh")


def _axes_bokeh(view: PlaneView) -> Any:
    """Return a holoviews hook: numbers along the axes only where they are true to scale, and fixed proportions."""

    def hook(plot: Any, element: Any) -> None:
        plot.state.tags = [*plot.state.tags, "fixed aspect"]
        for part in (*plot.state.axis, *plot.state.grid):
            part.visible = view.is_near

    return hook


def _markers_bokeh(scale: Scale) -> Any:
    """Return a holoviews hook: color, fill and marker follow the columns.

    holoviews turns a column of equal values into a constant, so that data which a widget writes into the source later
    would have no effect.
    """

    def hook(plot: Any, element: Any) -> None:
        from bokeh.models import LinearColorMapper
        from bokeh.transform import transform

        renderer = plot.handles["glyph_renderer"]
        lowest, highest = scale.limits
        painted = transform("depth", LinearColorMapper(palette=scale.colors, low=lowest, high=highest))
        for glyph in (renderer.glyph, renderer.selection_glyph, renderer.nonselection_glyph):
            glyph.update(fill_color=painted, line_color=painted, line_width=1.1, marker="marker", fill_alpha="fill")
            glyph.line_alpha = "edge"
        renderer.selection_glyph.line_alpha = 1.0
        renderer.nonselection_glyph.update(line_alpha=0.15, fill_alpha=0.1)
        renderer.muted_glyph = renderer.hover_glyph = None

    return hook


def panel_matplotlib(hv: Any, spectra: xr.Dataset, columns: dict[str, np.ndarray], styling: PlaneStyle) -> Any:
    """Return one panel for matplotlib; ``columns`` are those of `mode_columns.mode_columns`."""
    ground = Ground.of(hv, spectra, columns, styling)
    table = columns | {"paint": styling.scale.paint(columns["depth"])}
    others = [name for name in table if name not in ("x", "y")]
    crossed, hollow, drawn = columns["marker"] != "circle", columns["fill"] == 0, columns["edge"] > 0
    paint = hv.dim("paint")
    kinds = {
        "unreliable": (hollow & ~crossed & drawn, {"marker": "o", "color": "none", "edgecolors": paint}),
        "reliable": (~hollow & ~crossed & drawn, {"marker": "o", "color": paint, "edgecolors": "none"}),
        "uninformative": (crossed & drawn, {"marker": "X", "color": paint, "edgecolors": "none"}),
    }
    options = {"backend": "matplotlib"}
    line = {"color": style.NEUTRAL, **options}
    elements = [
        ground.band.opts(facecolor=style.NEUTRAL, alpha=0.2, edgecolor="none", **options),
        ground.faint.opts(linewidth=0.8, alpha=0.35, **line),
        ground.rings.opts(linewidth=0.8, alpha=0.5, linestyle=(0, (3, 4)), **line),
        ground.circle.opts(linewidth=1.2, **line),
        ground.density.opts(interpolation="nearest", **options),
    ]
    for label, (chosen, marker) in kinds.items():
        points = hv.Points({name: column[chosen] for name, column in table.items()}, ground.axes, others, label=label)
        elements.append(points.opts(s=16 if styling.inches > 3 else 11, linewidth=0.9, **marker, **options))
    elements.append(ground.labels.opts(size=style.TICK_SIZE - 1, **(line | {"color": style.INK})))
    if styling.word:
        word = hv.Text(styling.view.real[0] + styling.view.half, 0, styling.word, fontsize=style.TICK_SIZE)
        elements.append(word.opts(color=style.INK, backend="matplotlib"))
    hooks = [
        style.dress_matplotlib,
        _frame_matplotlib(styling.view),
        style.title_matplotlib(
            styling.title, note=styling.note, key=styling.key, key_at=-0.17 if styling.view.is_near else -0.02
        ),
    ]
    if styling.row:
        hooks.append(style.row_matplotlib(styling.row))
    if styling.has_scale:
        hooks.append(_scale_matplotlib(styling.scale))
    view = {"xlim": styling.view.real, "ylim": styling.view.imag, "show_legend": False}
    if styling.view.is_near:
        view |= {name: "bare" for name, has in zip(("xaxis", "yaxis"), styling.has_axis, strict=True) if not has}
    else:
        view |= {"xaxis": None, "yaxis": None}
    frame = {"aspect": 1, "fig_inches": styling.inches}
    return hv.Overlay(elements).opts(**view, **frame, title="", hooks=hooks, backend="matplotlib")


def _frame_matplotlib(view: PlaneView) -> Any:
    """Return a holoviews hook: grid and frame only where the numbers along the axes are true to scale."""

    def hook(plot: Any, element: Any) -> None:
        axis = plot.handles["axis"]
        axis.grid(visible=view.is_near)
        if not view.is_near:
            axis.spines[:].set_visible(False)

    return hook


def _scale_bokeh(scale: Scale) -> Any:
    """Return a holoviews hook: a color bar of depth on the right."""

    def hook(plot: Any, element: Any) -> None:
        from bokeh.models import ColorBar, FixedTicker, LinearColorMapper

        if plot.state.select({"name": "depth"}):
            return
        lowest, highest = scale.limits
        bar = ColorBar(
            name="depth",
            color_mapper=LinearColorMapper(palette=scale.colors, low=lowest, high=highest),
            ticker=FixedTicker(ticks=list(scale.ticks)),
            major_label_overrides=scale.ticks,
            width=12,
            background_fill_alpha=0,
            bar_line_color=None,
            major_tick_line_color=None,
            major_label_text_color=style.NEUTRAL,
            major_label_text_font_size=f"{style.TICK_SIZE}pt",
        )
        plot.state.add_layout(bar, "right")

    return hook


def _scale_matplotlib(scale: Scale) -> Any:
    """Return a holoviews hook: a color bar of depth on the right."""

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize

        axis = plot.handles["axis"]
        painted = ScalarMappable(Normalize(*scale.limits), ListedColormap(scale.colors))
        bar = axis.figure.colorbar(painted, cax=axis.inset_axes([1.05, 0.0, 0.035, 1.0]), ticks=list(scale.ticks))
        bar.set_ticklabels(list(scale.ticks.values()))
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, colors=style.INK, labelsize=style.TICK_SIZE)

    return hook
