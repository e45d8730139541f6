"""The explosion edge under several controls: the share of diverged runs over the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.studies.outcomes import divergence_rates, largest_rate_without_explosion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import xarray as xr

#: Smallest distance of two labels, as a share of the y axis.
_LABEL_GAP = 0.085
#: Share of the width for the labels.
_LABEL_SHARE = 0.36
#: Horizontal offset between controls at one rate, as a share of the distance of two rates.
_DODGE = 0.13
_RATIO = 2.3


@redrawable
def explosion_edge(
    outcomes: xr.Dataset,
    *,
    below: float = 0.20,
    places: Mapping[str, int] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the share of diverged runs against the learning rate: one line per control, with Wilson intervals.

    At each rate the controls are slightly offset, so that none hides another. The large marker on each line is the
    largest rate up to which less than ``below`` of the runs diverge; the label at the line's end gives its value.

    Args:
        outcomes: Table with one row per run, as `workbench.samples.shaping` gives them.
        below: Share of diverged runs as in `workbench.outcomes.largest_rate_without_explosion`; a horizontal line.
        places: Style number of each control (`style.model_style`), by name; None: in the order of the runs.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the dataset is no table of outcomes, is empty, or holds a run twice.
        OptionError: If the backend or a control's place does not exist, or ``below`` is no share.

    Example:
        >>> import workbench as wb
        >>> figure = wb.plots.explosion_edge(wb.samples.shaping("controls"))
        >>> len(figure)  # panels
        1
    """
    edges = edges_of(outcomes, below=below)
    order = style.model_places([edge.control for edge in edges], places)
    with style.drawing(backend) as hv:
        draw = _draw_bokeh if backend == "bokeh" else _draw_matplotlib
        layout = hv.Layout([draw(hv, edges, order, below)])
        if backend == "matplotlib":
            return layout.opts(sublabel_format="", tight=True, fig_size=220, backend=backend)
        return layout.opts(toolbar="above", backend=backend)


@dataclass(frozen=True)
class EdgeCurve:
    """The values of one control.

    Attributes:
        control: Name of the control.
        columns: ``learning_rate``, ``share`` of diverged runs, ``low`` and ``high`` of its interval, ``n_runs``; only
            rates with runs.
        largest: Index in `columns` of the largest rate up to which few runs diverge; None: there is none.
        is_lower_bound: Whether it is the largest rate that was run.
        missing: Rates of the other controls at which this one did not run.
    """

    control: str
    columns: dict[str, np.ndarray]
    largest: int | None
    is_lower_bound: bool
    missing: tuple[float, ...]

    @property
    def label(self) -> str:
        """The label at the end of the line."""
        if self.largest is None:
            return f"{self.control}: no rate"
        rate = self.columns["learning_rate"][self.largest]
        return f"{self.control}: up to {'at least ' if self.is_lower_bound else ''}{rate:g}"


def edges_of(outcomes: xr.Dataset, *, below: float = 0.20) -> list[EdgeCurve]:
    """The controls of a table of outcomes, as `explosion_edge` draws them.

    Raises:
        SchemaError: If it is no table of outcomes.
        OptionError: If ``below`` is no share.
    """
    largest_rates = largest_rate_without_explosion(outcomes, below=below)
    rates = divergence_rates(outcomes, by_rate=True).rename(divergence_rate="share")
    edges = []
    for control in rates["control"].values:
        of_control = rates.sel(control=control)
        has_runs = (of_control["n_runs"] > 0).values
        names = ("learning_rate", "share", "low", "high", "n_runs")
        columns = {name: of_control[name].values[has_runs] for name in names}
        largest = largest_rates.sel(control=control)
        found = np.flatnonzero(columns["learning_rate"] == float(largest))
        missing = tuple(of_control["learning_rate"].values[~has_runs].tolist())
        edges.append(
            EdgeCurve(
                str(control), columns, int(found[0]) if len(found) else None, bool(largest["is_lower_bound"]), missing
            )
        )
    return edges


def spread(values: Sequence[float], gap: float, *, lowest: float = 0.0) -> list[float]:
    """Heights near the values, at least a gap apart, none below the lowest; equal values keep their order downwards."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    heights = [0.0] * len(values)
    above = np.inf
    for rank, i in enumerate(order):
        floor = lowest + gap * (len(values) - 1 - rank)
        above = heights[i] = max(min(values[i], above - gap), floor)
    return heights


def dodged(rates: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The rates of each control, slightly offset so that none hides another."""
    known = np.unique(np.concatenate(rates))
    gap = np.diff(np.log(known)).min() if len(known) > 1 else 0.0
    shifts = _DODGE * gap * (np.arange(len(rates)) - (len(rates) - 1) / 2)
    return [of_control * np.exp(shift) for of_control, shift in zip(rates, shifts, strict=True)]


def _note(edges: Sequence[EdgeCurve]) -> str:
    counts = np.concatenate([edge.columns["n_runs"] for edge in edges])
    n_runs = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    remarks = [f"{n_runs} runs a point, 95 % Wilson intervals"]
    remarks += [
        f"{edge.control} not run at {', '.join(f'{x:g}' for x in edge.missing)}" for edge in edges if edge.missing
    ]
    return "; ".join(remarks)


def _view(edges: Sequence[EdgeCurve]) -> tuple[list[float], float, tuple[float, float]]:
    """The rates, the position of the labels and the range of the axis, which includes them."""
    rates = sorted({float(x) for edge in edges for x in edge.columns["learning_rate"]})
    width = np.log(rates[-1] / rates[0]) or 1.0
    left, start = rates[0] * np.exp(-0.06 * width), rates[-1] * np.exp(0.06 * width)
    return rates, start, (left, start * np.exp(width * _LABEL_SHARE / (1 - _LABEL_SHARE)))


def _elements(hv: Any, edges: Sequence[EdgeCurve], start: float) -> list[tuple[Any, Any, Any, Any, Any]]:
    """Intervals, line, markers, marker of the largest rate with few diverged runs (or None), label of each control."""
    x, y = hv.Dimension("place", label="learning rate"), hv.Dimension("share", label="runs that diverged")
    heights = spread([edge.columns["share"][-1] for edge in edges], _LABEL_GAP)
    places = dodged([edge.columns["learning_rate"] for edge in edges])
    elements = []
    for edge, place, height in zip(edges, places, heights, strict=True):
        columns = {"place": place, **edge.columns}
        whiskers = hv.Segments((place, columns["low"], place, columns["high"]), ["place", "low", "place_", "high"])
        line = hv.Curve(columns, x, y, label=edge.control)
        dots = hv.Scatter(columns, x, [y, "learning_rate", "low", "high", "n_runs"], label=edge.control)
        ring = None
        if edge.largest is not None:
            ring = hv.Scatter({k: v[[edge.largest]] for k, v in columns.items()}, x, y, label=edge.control)
        elements.append(
            (
                whiskers,
                line,
                dots,
                ring,
                hv.Text(start, height, edge.label, halign="left", fontsize=style.TICK_SIZE - 1),
            )
        )
    return elements


def _draw_bokeh(hv: Any, edges: Sequence[EdgeCurve], places: Sequence[int], below: float) -> Any:
    rates, start, span = _view(edges)
    rule = hv.HLine(below).opts(color=style.NEUTRAL, line_width=1, line_dash="dashed", backend="bokeh")
    lines = [rule]
    for place, edge, (whiskers, line, dots, ring, label) in zip(
        places, edges, _elements(hv, edges, start), strict=True
    ):
        look = style.model_style(place)
        color, options = look["color"], {"color": look["color"], "marker": look["marker"], "backend": "bokeh"}
        tips = [
            ("", edge.control),
            ("learning rate", "@learning_rate"),
            ("diverged", "@share{0 %} of @n_runs"),
            ("interval", "@low{0 %} to @high{0 %}"),
        ]
        lines.append(whiskers.opts(color=color, line_width=1.2, line_alpha=0.6, backend="bokeh"))
        lines.append(line.opts(color=color, line_dash=look["dash"], line_width=2, backend="bokeh"))
        lines.append(dots.opts(size=7, tools=["hover"], hover_tooltips=tips, **options))
        if ring is not None:
            lines.append(ring.opts(size=17, fill_alpha=0.35, line_width=2, **options))
        lines.append(label.opts(text_color=color, text_font_size="9.5pt", backend="bokeh"))
    return hv.Overlay(lines).opts(
        title=_title(below),
        xlim=span,
        ylim=(-0.04, 1.04),
        logx=True,
        xlabel="learning rate",
        ylabel="runs that diverged",
        xticks=rates,
        frame_width=720,
        frame_height=300,
        show_grid=True,
        show_legend=False,
        default_tools=[],
        tools=["pan", "xwheel_zoom", "box_zoom", "reset", "save"],
        active_tools=[],
        hooks=[style.dress_bokeh, _axes_bokeh, style.note_bokeh(_note(edges))],
        backend="bokeh",
    )


def _draw_matplotlib(hv: Any, edges: Sequence[EdgeCurve], places: Sequence[int], below: float) -> Any:
    rates, start, span = _view(edges)
    rule = hv.HLine(below).opts(color=style.NEUTRAL, linewidth=0.8, linestyle="dashed", backend="matplotlib")
    lines = [rule]
    for place, (whiskers, line, dots, ring, label) in zip(places, _elements(hv, edges, start), strict=True):
        look = style.model_style(place)
        color, marker = look["color"], style.MATPLOTLIB_MARKERS[look["marker"]]
        lines.append(whiskers.opts(color=color, linewidth=0.9, alpha=0.6, backend="matplotlib"))
        lines.append(line.opts(color=color, linestyle=look["dash"], linewidth=1.4, backend="matplotlib"))
        lines.append(dots.opts(color=color, marker=marker, s=22, edgecolors="none", backend="matplotlib"))
        if ring is not None:
            lines.append(
                ring.opts(color=color, marker=marker, s=130, alpha=0.4, edgecolors="none", backend="matplotlib")
            )
        lines.append(label.opts(color=color, backend="matplotlib"))
    return hv.Overlay(lines).opts(
        title="",
        xlim=span,
        ylim=(-0.04, 1.04),
        logx=True,
        xlabel="learning rate",
        ylabel="runs that diverged",
        show_legend=False,
        aspect=_RATIO,
        fig_inches=(7.6, 3.3),
        hooks=[
            style.dress_matplotlib,
            _axes_matplotlib(rates),
            style.title_matplotlib(_title(below), note=_note(edges)),
        ],
        backend="matplotlib",
    )


def _title(below: float) -> str:
    return f"Explosion edge; large marker: last rate with less than {100 * below:g} % diverged"


def _axes_bokeh(plot: Any, element: Any) -> None:
    """Plain rates on the x axis, percent on the y axis."""
    from bokeh.models import BasicTickFormatter, NumeralTickFormatter

    for axis in plot.state.xaxis:
        axis.formatter = BasicTickFormatter(power_limit_high=6, power_limit_low=-6)
    for axis in plot.state.yaxis:
        axis.formatter = NumeralTickFormatter(format="0 %")


def _axes_matplotlib(rates: Sequence[float]) -> Any:
    """A holoviews hook: plain rates on the x axis, percent on the y axis."""

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, StrMethodFormatter

        axis = plot.handles["axis"]
        axis.set_aspect("auto")
        axis.set_box_aspect(1 / _RATIO)
        axis.xaxis.set_major_locator(FixedLocator(rates))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))

    return hook
