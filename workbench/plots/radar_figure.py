"""Radar charts of architectures: one axis per measure, our values solid, published values dashed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.option_checks import NonNegativeInt, PositiveInt
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.radar_axes import RadarAxis, RadarChart, Texts, axes_of, labeled_points, outline
from workbench.studies.comparison import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import xarray as xr

_RINGS = (0.25, 0.5, 0.75, 1.0)
#: View of a chart: half its width, its bottom and its top, where the rim has radius 1.
_WIDTH, _LOW, _HIGH = 1.95, -1.5, 1.5
#: Height of a chart on the screen, in pixels.
_HEIGHT = 285


@redrawable
def radar(
    comparison: xr.Dataset,
    *,
    measures: Sequence[str] | None = None,
    columns: PositiveInt = 3,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw a comparison as radar charts (after RKSP Fig. 6): one axis per measure, increasing outwards.

    Fractions range from 0 at the center to 1 at the rim. Measures without an upper bound have a logarithmic range of
    round numbers that covers all architectures and is stated in the figure. Published values are dashed with hollow
    markers, and in parentheses. A value that is unknown or infinite leaves a gap and is written as "–" or "∞".

    Args:
        comparison: Dataset from `workbench.compare`.
        measures: At least three variables with dims ``architecture`` and ``source``; None selects the expansive and the
            near-unit mass, the spectral radius, the nonlinearity ratio and the eigenvector condition.
        columns: Charts per row.
        places: Style number (color, marker, dash) of each architecture, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only.

    Raises:
        SchemaError: If the dataset is not a comparison, or lacks a measure.
        OptionError: If the backend does not exist, an architecture has no style number, or there are fewer than three
            measures.

    Example:
        >>> import workbench as wb
        >>> comparison = wb.samples.open("initialization/norms").mean("seed").isel(architecture=[0, 1])
        >>> figure = wb.plots.radar(comparison)
        >>> len(figure)  # charts
        2

    See Also:
        `workbench.compare`: Creates the comparison.
        `workbench.plots.comparison_table`: Returns the same values as a table.
    """
    axes = axes_of(comparison, measures)
    names = comparison["architecture"].values.tolist()
    charts = [
        RadarChart.of(comparison, axes, name, place)
        for name, place in zip(names, style.model_places(names, places), strict=True)
    ]
    with style.drawing(backend) as hv:
        draw = _draw_bokeh if backend == "bokeh" else _draw_matplotlib
        corner = (len(charts) - 1) // columns * columns
        panels = [
            draw(hv, axes, chart, Texts.of(axes, chart, has_key=index == corner)) for index, chart in enumerate(charts)
        ]
        layout = hv.Layout(panels).cols(columns)
        if backend == "matplotlib":
            return layout.opts(sublabel_format="", tight=True, hspace=0.1, vspace=-0.1, fig_size=100, backend=backend)
        return layout.opts(shared_axes=False, merge_tools=True, toolbar=None, backend=backend)


def _elements(hv: Any, axes: list[RadarAxis], chart: RadarChart) -> Iterator[tuple[str, Any]]:
    """Yield what is drawn from bottom to top: kind, and element without style."""
    dims = [hv.Dimension("x"), hv.Dimension("y")]
    rings = [np.array([axis.point(ring) for axis in [*axes, axes[0]]]) for ring in _RINGS]
    spokes = [np.array([(0.0, 0.0), axis.point(1.0)]) for axis in axes]
    yield "grid", hv.Path(rings + spokes, dims)
    outlines = {source: outline(axes, chart.values[source]) for source in SOURCES}
    if np.isfinite(outlines["ours"]["x"]).all():
        yield "fill", hv.Polygons([{key: outlines["ours"][key] for key in ("x", "y")}], dims, label=chart.name)
    for source, columns in outlines.items():
        yield f"{source} line", hv.Curve((columns["x"], columns["y"]), *dims, label=chart.name)
    for source, columns in outlines.items():
        table = labeled_points(axes, columns, who=f"{chart.name}, {source}")
        yield f"{source} points", hv.Points(table, dims, ["value", "measure", "who"], label=chart.name)


def _labels(hv: Any, axes: list[RadarAxis], texts: Texts) -> Iterator[tuple[Any, str, str]]:
    """Yield the texts at the ends of the axes with their horizontal and vertical alignment."""
    for axis, text in zip(axes, texts.at_axes, strict=True):
        x, y = axis.point(1.11)
        side = "center" if abs(x) < 0.1 else "left" if x > 0 else "right"
        level = "bottom" if y > 0.9 else "top" if y < -0.6 else "middle"
        if level == "top" and side != "center":
            x *= 0.8
        yield hv.Labels(([x], [y], [text]), ["x", "y"], "text"), side, level


def _draw_bokeh(hv: Any, axes: list[RadarAxis], chart: RadarChart, texts: Texts) -> Any:
    parts = []
    own = style.model_style(chart.place)
    marker = own["marker"]
    for kind, element in _elements(hv, axes, chart):
        options: dict[str, Any] = {"backend": "bokeh", "default_tools": []}
        color = own["color"] if kind == "fill" or kind.startswith("ours") else style.NEUTRAL
        hover = {"tools": ["hover"], "hover_tooltips": [("", "@who"), ("@measure", "@value")]}
        options |= {
            "grid": {"color": color, "alpha": 0.35, "line_width": 0.8},
            "fill": {"color": color, "fill_alpha": 0.16, "line_alpha": 0},
            "ours line": {"color": color, "line_width": 2},
            "published line": {"color": color, "line_width": 1.6, "line_dash": "dashed"},
            "ours points": {"color": color, "marker": marker, "size": 7, **hover},
            "published points": {"color": color, "marker": marker, "size": 8, "fill_alpha": 0, **hover},
        }[kind]
        parts.append(element.opts(**options))
    for element, side, level in _labels(hv, axes, texts):
        styling = {"text_color": style.NEUTRAL, "text_font_size": f"{style.TICK_SIZE}pt"}
        parts.append(element.opts(text_align=side, text_baseline=level, **styling, backend="bokeh"))
    hooks = [style.dress_bokeh, _no_grid_bokeh, style.note_bokeh(texts.note)]
    if texts.key:
        hooks.append(style.note_bokeh(texts.key, place="below"))
    return hv.Overlay(parts).opts(
        title=texts.title,
        xlim=(-_WIDTH, _WIDTH),
        ylim=(_LOW, _HIGH),
        xaxis=None,
        yaxis=None,
        frame_width=round(_HEIGHT * 2 * _WIDTH / (_HIGH - _LOW)),
        frame_height=_HEIGHT,
        show_legend=False,
        default_tools=[],
        hooks=hooks,
        backend="bokeh",
    )


def _draw_matplotlib(hv: Any, axes: list[RadarAxis], chart: RadarChart, texts: Texts) -> Any:
    parts = []
    own = style.model_style(chart.place)
    marker = style.MATPLOTLIB_MARKERS[own["marker"]]
    for kind, element in _elements(hv, axes, chart):
        color = style.NEUTRAL if kind == "grid" else style.INK if kind.startswith("published") else own["color"]
        options = {
            "grid": {"color": color, "alpha": 0.35, "linewidth": 0.7},
            "fill": {"facecolor": color, "alpha": 0.16, "edgecolor": "none"},
            "ours line": {"color": color, "linewidth": 1.7},
            "published line": {"color": color, "linewidth": 1.3, "linestyle": "dashed"},
            "ours points": {"color": color, "marker": marker, "s": 20, "edgecolors": "none"},
            "published points": {"color": "none", "marker": marker, "s": 26, "edgecolors": color, "linewidth": 1.1},
        }[kind]
        parts.append(element.opts(**options, backend="matplotlib"))
    for element, side, level in _labels(hv, axes, texts):
        level = "center" if level == "middle" else level
        letters: dict[str, Any] = {"color": style.INK, "size": style.TICK_SIZE}
        parts.append(element.opts(horizontalalignment=side, verticalalignment=level, **letters, backend="matplotlib"))
    hooks = [_no_axes_matplotlib, style.title_matplotlib(texts.title, note=texts.note, key=texts.key)]
    return hv.Overlay(parts).opts(
        title="",
        xlim=(-_WIDTH, _WIDTH),
        ylim=(_LOW, _HIGH),
        aspect="equal",
        fig_inches=4,
        show_legend=False,
        hooks=hooks,
        backend="matplotlib",
    )


def _no_grid_bokeh(plot: Any, element: Any) -> None:
    plot.state.tags = [*plot.state.tags, "fixed aspect"]
    for grid in plot.state.grid:
        grid.visible = False


def _no_axes_matplotlib(plot: Any, element: Any) -> None:
    plot.handles["axis"].set_axis_off()
