"""The eigenvalues of every layer in the complex plane, one panel a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import ThresholdError
from workbench.plots import style
from workbench.plots.inputs import named_spectra, select_layers
from workbench.spectral.measures import remeasure, summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import xarray as xr

#: The default view never goes beyond this, so that the unit circle stays large beside a model of spectral radius 11.
WIDEST_DEFAULT_LIMIT = 1.5
NARROWEST_LIMIT = 1.2

_TOOLS = ("box_select", "lasso_select", "pan", "box_zoom", "wheel_zoom", "tap", "reset", "save", "hover")
_TOOLTIPS = """<div style="font-size:12px;line-height:1.45">layer @layer, mode @mode<br>
&lambda; = @real{0.0000} @imag{+0.0000}i<br>|&lambda;| = @modulus{0.0000}<br>residual @residual{0.000}</div>"""


def eigenvalue_map(
    spectra: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    layers: Iterable[int] | None = None,
    reliable_only: bool = False,
    limit: float | str | None = None,
    center: float = 0.0,
    columns: int = 3,
    backend: str = "bokeh",
) -> Any:
    """Draw the eigenvalues of each layer in the complex plane, one panel a model, all on the same linked axes.

    The unit circle is drawn and the near-unit band shaded. Colour is depth. Modes whose residual is too large are
    hollow; modes of a layer whose update is too small to say anything are crosses.

    Args:
        spectra: One spectra dataset, or several by name; dims ``layer`` and ``mode``.
        layers: Layer numbers to show, for example ``range(4)``; None shows all.
        reliable_only: Leave out the modes whose residual is too large, from the picture and from the masses.
        limit: Half the width of the view, unit 1. None fits all modes but shows at most 1.5, so that the unit circle
            stays large; ``"all"`` shows every mode. Each panel says how many modes lie outside.
        center: Middle of the view on the real axis. Modes of deep models crowd around 1: with 1.0 and no limit, the
            view holds two thirds of them.
        columns: Panels in a row.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only; show it with ``widgets.show()`` or write it with
        ``workbench.plots.save()``.

    Raises:
        SchemaError: If a dataset is no spectra dataset, or runs over steps or runs.
        ThresholdError: If the backend, the limit or all layers do not exist.
    """
    layers = None if layers is None else list(layers)
    models, depths = {}, {}
    for name, data in named_spectra(spectra).items():
        measured = remeasure(data, reliable_only=True) if reliable_only else data
        models[name] = select_layers(measured, layers)
        depths[name] = data.sizes["layer"]
    if not any(data.sizes["layer"] for data in models.values()):
        raise ThresholdError(f"None of the layers {list(layers)} exists; choose from 0 to {max(depths.values()) - 1}.")
    modes = {
        name: mode_columns(data, n_layers=depths[name], reliable_only=reliable_only) for name, data in models.items()
    }
    view = view_of(modes, limit, center)
    scale = _Scale(max(depths.values()), is_shared=len(set(depths.values())) == 1)
    first_key = key(next(iter(models.values())))
    with style.drawing(backend) as hv:
        panels = []
        for index, (name, data) in enumerate(models.items()):
            is_known = index > 0 and key(data) == first_key
            look = _Look(
                title=name,
                note=headline(data, modes[name], view),
                key="\n".join(filter(None, ["" if is_known else key(data), silent_layers(data)])),
                view=view,
                scale=scale,
                has_scale=index == min(columns, len(models)) - 1,
                n_panels=len(models),
            )
            panel = _panel_bokeh if backend == "bokeh" else _panel_matplotlib
            panels.append(panel(hv, data, modes[name], look))
        layout = hv.Layout(panels).cols(columns)
        if backend == "matplotlib":
            return layout.opts(sublabel_format="", tight=True, hspace=0.3, vspace=0.5, backend=backend)
        return layout.opts(shared_axes=True, merge_tools=True, toolbar="above", backend=backend)


def mode_columns(
    spectra: xr.Dataset, *, n_layers: int | None = None, reliable_only: bool = False
) -> dict[str, np.ndarray]:
    """The modes of one spectra dataset as columns of equal length, one row a mode, ready to draw.

    Args:
        spectra: Dims ``layer`` and ``mode``; modes whose eigenvalue is NaN do not exist and are dropped.
        n_layers: Layers of the whole model, if the dataset holds only some of them.
        reliable_only: Drop also the modes that are not reliable.

    Returns:
        ``real``, ``imag``, ``modulus``, ``residual`` (float32), ``layer``, ``mode`` (int), ``depth`` (0 the model's
        first layer, 1 its last), ``fill`` (opacity of the marker's inside: 0 where the mode is not reliable) and
        ``marker`` (a bokeh name).
    """
    eigenvalue = spectra["eigenvalue"].transpose("layer", "mode").values
    reliable = spectra["is_reliable"].transpose("layer", "mode").values
    row, mode = np.nonzero(np.isfinite(eigenvalue) & (reliable | (not reliable_only)))
    # Hollow markers first and deep layers last, so that what can be trusted lies on top.
    order = np.lexsort((row, reliable[row, mode]))
    row, mode = row[order], mode[order]
    chosen = eigenvalue[row, mode]
    layer = spectra["layer"].values[row].astype(np.int32)
    informative = spectra["is_informative"].values[row]
    return {
        "real": chosen.real.astype(np.float32),
        "imag": chosen.imag.astype(np.float32),
        "layer": layer,
        "depth": (layer / max((n_layers or spectra.sizes["layer"]) - 1, 1)).astype(np.float32),
        "mode": mode.astype(np.int32),
        "modulus": np.abs(chosen).astype(np.float32),
        "residual": spectra["residual"].transpose("layer", "mode").values[row, mode].astype(np.float32),
        "fill": np.where(reliable[row, mode], 0.8, 0.0).astype(np.float32),
        "marker": np.where(informative, "circle", "x").astype(object),
    }


@dataclass(frozen=True)
class View:
    """The square that all panels show: its middle on the real axis, and half its width."""

    center: float
    limit: float

    @property
    def real(self) -> tuple[float, float]:
        """Range of Re lambda."""
        return self.center - self.limit, self.center + self.limit

    @property
    def imag(self) -> tuple[float, float]:
        """Range of Im lambda."""
        return -self.limit, self.limit

    def reach(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Half-width that would just hold each mode, shape (mode,)."""
        return np.maximum(np.abs(columns["real"] - self.center), np.abs(columns["imag"]))


def view_of(
    modes: Mapping[str, Mapping[str, np.ndarray]], limit: float | str | None = None, center: float = 0.0
) -> View:
    """The view that all panels share; see `eigenvalue_map`.

    Raises:
        ThresholdError: If the limit is neither None, ``"all"`` nor a positive number, or the centre is not finite.
    """
    if not np.isfinite(center):
        raise ThresholdError(f"The center is {center!r}, expected a finite number.")
    reach = np.concatenate([View(center, 0.0).reach(columns) for columns in modes.values()] or [np.zeros(0)])
    largest = 1.08 * float(reach.max(initial=0))
    if limit is None and center != 0:
        most = float(np.quantile(reach, 2 / 3)) if len(reach) else WIDEST_DEFAULT_LIMIT
        return View(center, float(np.clip(most, 0.05, WIDEST_DEFAULT_LIMIT)))
    if limit is None:
        return View(center, min(max(largest, NARROWEST_LIMIT), WIDEST_DEFAULT_LIMIT))
    if limit == "all":
        return View(center, max(largest, NARROWEST_LIMIT))
    if isinstance(limit, str) or not (np.isfinite(limit) and limit > 0):
        raise ThresholdError(f"The limit is {limit!r}, expected a positive number, 'all' or None.")
    return View(center, float(limit))


def headline(spectra: xr.Dataset, columns: Mapping[str, np.ndarray], view: View) -> str:
    """One line above a panel: mean near-unit mass, largest spectral radius, and the modes outside the view."""
    if not spectra.sizes["layer"]:
        return "no layer in this range"
    summary = summarize(spectra[["near_unit_mass", "spectral_radius"]])
    mass = float(summary["near_unit_mass"].sel(statistic="mean"))
    radius = float(summary["spectral_radius"].sel(statistic="max"))
    line = f"mean M {mass:.2f}   max ρ {radius:.3g}"
    n_outside = int(np.count_nonzero(view.reach(columns) > view.limit))
    if n_outside:
        line += f"   {n_outside} outside"
    return line


def key(spectra: xr.Dataset) -> str:
    """Two lines below a panel: what filled and hollow markers and the shading mean."""
    lower, upper, residual = (
        spectra.attrs[name] for name in ("near_unit_lower", "near_unit_upper", "reliable_residual")
    )
    return f"● residual ≤ {residual:.3g}   ○ larger\n▒ {lower:.3g} ≤ |λ| ≤ {upper:.3g} near unit"


def silent_layers(spectra: xr.Dataset) -> str:
    """One line that names the layers whose update is too small to say anything; empty if there are none."""
    silent = spectra["layer"].values[~spectra["is_informative"].values]
    if not len(silent):
        return ""
    shown = ", ".join(map(str, silent[:4])) + ("…" if len(silent) > 4 else "")
    return f"× update too small to say anything: layer {shown}"


def band_outline(spectra: xr.Dataset) -> dict[str, np.ndarray]:
    """The near-unit band as one closed ring, ``real`` and ``imag``: outer circle, then the inner one backwards."""
    angle = np.linspace(0, 2 * np.pi, 129)
    outer = spectra.attrs["near_unit_upper"] * np.exp(1j * angle)
    inner = spectra.attrs["near_unit_lower"] * np.exp(-1j * angle)
    ring = np.concatenate([outer, inner])
    return {"real": ring.real, "imag": ring.imag}


def _ground(hv: Any, spectra: xr.Dataset) -> tuple[list[Any], Any, Any]:
    """Axes, near-unit band and unit circle."""
    axes = [hv.Dimension("real", label="Re λ"), hv.Dimension("imag", label="Im λ")]
    angle = np.linspace(0, 2 * np.pi, 181)
    band = hv.Polygons([band_outline(spectra)], axes, label="near-unit band")
    circle = hv.Curve((np.cos(angle), np.sin(angle)), *axes, label="unit circle")
    return axes, band, circle


def _panel_bokeh(hv: Any, spectra: xr.Dataset, columns: dict[str, np.ndarray], look: _Look) -> Any:
    axes, band, circle = _ground(hv, spectra)
    n_modes = len(columns["real"])
    modes = hv.Points(columns, axes, [name for name in columns if name not in ("real", "imag")], label="modes")
    options = {"default_tools": [], "backend": "bokeh"}
    hooks = [style.dress_bokeh, style.note_bokeh(look.note)]
    if look.key:
        hooks.append(style.note_bokeh(look.key, place="below"))
    if look.has_scale:
        hooks.append(_scale_bokeh(look.scale))
    side = {1: 420, 2: 300}.get(look.n_panels, 240)
    panel = hv.Overlay(
        [
            band.opts(color=style.NEUTRAL, fill_alpha=0.2, line_alpha=0, **options),
            circle.opts(color=style.NEUTRAL, line_width=1.2, **options),
            modes.opts(
                size=7 if n_modes < 300 else 5.5 if n_modes < 2000 else 4,
                tools=list(_TOOLS),
                hover_tooltips=_TOOLTIPS,
                hooks=[_markers_bokeh(look.scale)],
                **options,
            ),
        ]
    )
    view = {"xlim": look.view.real, "ylim": look.view.imag, "show_legend": False}
    frame = {"frame_width": side, "frame_height": side, "show_grid": True}
    return panel.opts(**view, **frame, title=look.title, hooks=hooks, backend="bokeh")


def _markers_bokeh(scale: _Scale) -> Any:
    """A holoviews hook: colour, filling and marker follow the columns.

    holoviews would turn a column whose values are all the same into a constant, and a widget that writes other data
    into the source later would see no effect.
    """

    def hook(plot: Any, element: Any) -> None:
        from bokeh.models import LinearColorMapper
        from bokeh.transform import transform

        renderer = plot.handles["glyph_renderer"]
        lowest, highest = scale.limits
        painted = transform("depth", LinearColorMapper(palette=scale.colors, low=lowest, high=highest))
        for glyph in (renderer.glyph, renderer.selection_glyph, renderer.nonselection_glyph):
            glyph.update(fill_color=painted, line_color=painted, line_width=1.1, marker="marker", fill_alpha="fill")
        renderer.nonselection_glyph.update(line_alpha=0.15, fill_alpha=0.1)
        renderer.muted_glyph = renderer.hover_glyph = None

    return hook


def _panel_matplotlib(hv: Any, spectra: xr.Dataset, columns: dict[str, np.ndarray], look: _Look) -> Any:
    axes, band, circle = _ground(hv, spectra)
    table = columns | {"paint": look.scale.paint(columns["depth"])}
    others = [name for name in table if name not in ("real", "imag")]
    crossed, hollow = columns["marker"] != "circle", columns["fill"] == 0
    paint = hv.dim("paint")
    kinds = {
        "unreliable": (hollow & ~crossed, {"marker": "o", "color": "none", "edgecolors": paint}),
        "reliable": (~hollow & ~crossed, {"marker": "o", "color": paint, "edgecolors": "none"}),
        "uninformative": (crossed, {"marker": "X", "color": paint, "edgecolors": "none"}),
    }
    elements = [
        band.opts(facecolor=style.NEUTRAL, alpha=0.2, edgecolor="none", backend="matplotlib"),
        circle.opts(color=style.NEUTRAL, linewidth=1.0, backend="matplotlib"),
    ]
    for label, (chosen, marker) in kinds.items():
        points = hv.Points({name: column[chosen] for name, column in table.items()}, axes, others, label=label)
        elements.append(points.opts(s=16, linewidth=0.9, **marker, backend="matplotlib"))
    hooks = [style.dress_matplotlib, style.title_matplotlib(look.title, note=look.note, key=look.key)]
    if look.has_scale:
        hooks.append(_scale_matplotlib(look.scale))
    view = {"xlim": look.view.real, "ylim": look.view.imag, "show_legend": False}
    frame = {"aspect": 1, "fig_inches": 3.4}
    return hv.Overlay(elements).opts(**view, **frame, title="", hooks=hooks, backend="matplotlib")


@dataclass(frozen=True)
class _Look:
    """What one panel shows beside its modes."""

    title: str
    note: str
    key: str
    view: View
    scale: _Scale
    has_scale: bool
    n_panels: int


@dataclass(frozen=True)
class _Scale:
    """Depth as colour: one step a layer of the deepest model; numbered only if all models are equally deep."""

    n_layers: int
    is_shared: bool

    @property
    def colors(self) -> list[str]:
        return style.depth_colors(self.n_layers)

    @property
    def limits(self) -> tuple[float, float]:
        half = 0.5 / max(self.n_layers - 1, 1)
        return -half, 1 + half

    @property
    def ticks(self) -> dict[float, str]:
        if not self.is_shared:
            return {0.0: "first layer", 1.0: "last"}
        numbers = range(0, self.n_layers, max(1, -(-self.n_layers // 8)))
        return {i / max(self.n_layers - 1, 1): f"layer {i}" if i == 0 else str(i) for i in numbers}

    def paint(self, depth: np.ndarray) -> np.ndarray:
        step = np.rint(depth * (self.n_layers - 1)).astype(int)
        return np.array(self.colors, dtype=object)[step]


def _scale_bokeh(scale: _Scale) -> Any:
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


def _scale_matplotlib(scale: _Scale) -> Any:
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
