"""One panel of the complex plane: unit circle, near-unit band and modes colored by depth.

The figures, the live canvas and the timeline share its geometry; see `workbench.plots.plane_view`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from workbench.plots import style
from workbench.plots.plane_view import DENSE, band_outline, density, ring
from workbench.plots.primitives import PlaneFrame, Primitives

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


def density_image(columns: dict[str, np.ndarray], view: PlaneView, n_layers: int) -> np.ndarray:
    """Return the image of the density, shape (row, column, 4); transparent where each mode is drawn."""
    if len(columns["x"]) <= DENSE:
        return np.zeros((2, 2, 4), np.uint8)
    return density(columns, view, n_layers)


def plane_panel(hv: Any, backend: str, spectra: xr.Dataset, columns: dict[str, np.ndarray], styling: PlaneStyle) -> Any:
    """Return one panel; ``columns`` are those of `plane_view.mode_columns`."""
    view, scale, is_bokeh = styling.view, styling.scale, backend == "bokeh"
    draw = Primitives(hv, backend, hv.Dimension("x", label="Re λ"), hv.Dimension("y", label="Im λ"))
    draw.area(band_outline(spectra), color=style.NEUTRAL, alpha=0.2, name="near-unit band")
    draw.paths(_FAINT, color=style.NEUTRAL, alpha=0.3, name="axes")
    draw.paths(view.rings(), color=style.NEUTRAL, dash="dashed", alpha=0.45, name="powers of ten")
    draw.line(*ring(1.0).T, color=style.NEUTRAL, width=1.4, label="unit circle")
    density = hv.RGB(
        density_image(columns, view, scale.n_layers)[::-1],  # the first row of an RGB is the highest
        bounds=(view.real[0], view.imag[0], view.real[1], view.imag[1]),
        kdims=[draw.x, draw.y],
        vdims=[hv.Dimension(channel, range=(0, 255)) for channel in "RGBA"],
        label="density",
    )
    draw.add(density, **cast("dict[str, Any]", {"default_tools": []} if is_bokeh else {"interpolation": "nearest"}))
    size, n_modes = min(1, styling.side / 240), len(columns["x"])
    if is_bokeh:
        modes = hv.Points(
            columns, [draw.x, draw.y], [name for name in columns if name not in ("x", "y")], label="modes"
        )
        size *= 7 if n_modes < 300 else 5.5 if n_modes < 2000 else 4
        look = {"default_tools": [], "tools": list(_TOOLS), "hover_tooltips": _TOOLTIPS}
        draw.add(modes, size=size, hooks=[_markers_bokeh(scale)], **look)
    else:
        paint, is_crossed = scale.paint(columns["depth"]), columns["marker"] != "circle"
        is_hollow, is_drawn = columns["fill"] == 0, columns["edge"] > 0
        kinds = {"unreliable": is_hollow & ~is_crossed, "reliable": ~is_hollow & ~is_crossed}
        for label, chosen in (kinds | {"uninformative": is_crossed}).items():
            here = chosen & is_drawn
            mark: dict[str, Any] = {
                "marker": "x" if label == "uninformative" else "circle",
                "is_hollow": label == "unreliable",
            }
            at = columns["x"][here], columns["y"][here]
            draw.dots(*at, color=paint[here], size=5.5 if styling.inches > 3 else 4.5, label=label, **mark)
    labels = view.labels()
    draw.words(labels["x"], labels["y"], labels["text"], align="center", name="names")
    if styling.word:
        draw.words(view.real[0] + view.half, 0, styling.word, align="center", size=style.TICK_SIZE)
    frame = PlaneFrame(
        key=styling.key,
        key_at=-0.17 if view.is_near else -0.02,
        row=styling.row,
        has_axes=view.is_near,
        inches=styling.inches,
        hooks=[_scale_bokeh(scale) if is_bokeh else _scale_matplotlib(scale)] if styling.has_scale else [],
    )
    has_x, has_y = styling.has_axis
    return draw.panel(
        title=styling.title,
        note=styling.note,
        view=(view.real, view.imag),
        size=(styling.side, styling.side),
        names=(draw.x.label, draw.y.label),
        bare=(not has_x, not has_y),
        plane=frame,
    )


def _markers_bokeh(scale: Scale) -> Any:
    """Return a holoviews hook: color, fill and marker follow columns even where all values are equal."""

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
