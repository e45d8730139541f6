"""Explosion edge under several controls: the fraction of runs that diverged against the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.option_checks import Fraction, NonNegativeInt
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives
from workbench.studies.outcomes import divergence_rates, largest_rate_without_explosion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import xarray as xr

#: Smallest distance of two labels, as a fraction of the y axis.
_LABEL_GAP = 0.085
#: Fraction of the width for the labels.
_LABEL_FRACTION = 0.36
#: Horizontal offset between controls at the same rate, as a fraction of the distance between two rates.
_DODGE = 0.13
_FRACTION = "fraction of runs that diverged"


@redrawable
def explosion_edge(
    outcomes: xr.Dataset,
    *,
    below: Fraction = 0.20,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the fraction of runs that diverged against the learning rate: one line per control, with Wilson intervals.

    At each learning rate the controls are slightly offset, so that none hides another. The large marker on each line is
    the largest rate up to which a fraction of less than ``below`` diverged; the label at the end of the line states its
    value.

    Args:
        outcomes: Table with one entry per run, such as `workbench.samples.open`.
        below: Fraction of diverged runs as in `workbench.outcomes.largest_rate_without_explosion`, drawn as a
            horizontal line.
        places: Style number (color, marker, dash) of each control, by name; None numbers them in the order of the runs.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the dataset is not a table of outcomes, is empty, or holds a run twice.
        OptionError: If the backend does not exist, a control has no style number, or ``below`` is not a fraction.

    Example:
        >>> import workbench as wb
        >>> figure = wb.plots.explosion_edge(wb.samples.open("shaping", "controls"))
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.outcomes.largest_rate_without_explosion`: Computes the large markers.
        `workbench.plots.rate_curve`: Draws the loss over the learning rate.
    """
    edges = edges_of(outcomes, below=below)
    order = style.model_places([edge.control for edge in edges], places)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", _FRACTION)
        return style.laid_out(hv, [_panel(draw, edges, order, below)], backend)


@dataclass(frozen=True)
class EdgeCurve:
    """Values of one control.

    Attributes:
        control: Name of the control.
        columns: ``learning_rate``, ``fraction`` of runs that diverged, ``low`` and ``high`` of its interval, and
            ``n_runs``; only rates with runs.
        largest: Index in ``columns`` of the largest rate up to which few runs diverge; None if there is none.
        is_lower_bound: Whether this is the largest rate that was run.
        missing: Rates of the other controls at which this control has no run.
    """

    control: str
    columns: dict[str, np.ndarray]
    largest: int | None
    is_lower_bound: bool
    missing: tuple[float, ...]

    @property
    def label(self) -> str:
        """Label at the end of the line."""
        if self.largest is None:
            return f"{self.control}: no rate"
        rate = self.columns["learning_rate"][self.largest]
        return f"{self.control}: up to {'at least ' if self.is_lower_bound else ''}{rate:g}"


def edges_of(outcomes: xr.Dataset, *, below: float = 0.20) -> list[EdgeCurve]:
    """Return the controls of a table of outcomes, as `explosion_edge` draws them."""
    largest_rates = largest_rate_without_explosion(outcomes, below=below)
    rates = divergence_rates(outcomes, by_rate=True).rename(divergence_rate="fraction")
    edges = []
    for control in rates["control"].values:
        of_control = rates.sel(control=control)
        has_runs = (of_control["n_runs"] > 0).values
        names = ("learning_rate", "fraction", "low", "high", "n_runs")
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
    """Return heights near the values, at least a gap apart and at least ``lowest``; equal values keep their order."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    heights = [0.0] * len(values)
    above = np.inf
    for rank, i in enumerate(order):
        floor = lowest + gap * (len(values) - 1 - rank)
        above = heights[i] = max(min(values[i], above - gap), floor)
    return heights


def dodged(rates: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the rates of each control, slightly offset so that none hides another."""
    known = np.unique(np.concatenate(rates))
    gap = np.diff(np.log(known)).min() if len(known) > 1 else 0.0
    shifts = _DODGE * gap * (np.arange(len(rates)) - (len(rates) - 1) / 2)
    return [of_control * np.exp(shift) for of_control, shift in zip(rates, shifts, strict=True)]


def _note(edges: Sequence[EdgeCurve], below: float) -> list[str]:
    counts = np.concatenate([edge.columns["n_runs"] for edge in edges])
    n_runs = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    remarks = [
        f"{n_runs} runs per point, 95 % Wilson intervals",
        f"large marker: largest rate with less than {100 * below:g} % diverged",
    ]
    remarks += [
        f"{edge.control} not run at {', '.join(f'{x:g}' for x in edge.missing)}" for edge in edges if edge.missing
    ]
    return remarks


def _view(edges: Sequence[EdgeCurve]) -> tuple[list[float], float, tuple[float, float]]:
    """Return the rates, the position of the labels, and the range of the axis, which includes the labels."""
    rates = sorted({float(x) for edge in edges for x in edge.columns["learning_rate"]})
    width = np.log(rates[-1] / rates[0]) or 1.0
    left, start = rates[0] * np.exp(-0.06 * width), rates[-1] * np.exp(0.06 * width)
    return rates, start, (left, start * np.exp(width * _LABEL_FRACTION / (1 - _LABEL_FRACTION)))


def _panel(draw: Primitives, edges: Sequence[EdgeCurve], order: Sequence[int], below: float) -> Any:
    rates, start, span = _view(edges)
    draw.rule(below, dash="dashed")
    heights = spread([edge.columns["fraction"][-1] for edge in edges], _LABEL_GAP)
    for edge, x, height, place in zip(
        edges, dodged([edge.columns["learning_rate"] for edge in edges]), heights, order, strict=True
    ):
        look, columns = style.model_style(place), edge.columns
        color, marker, fraction = look["color"], look["marker"], columns["fraction"]
        tips = [
            ("", edge.control),
            ("learning rate", "@learning_rate"),
            ("diverged", "$y{0 %} of @n_runs runs"),
            ("95 % interval", "@low{0 %} to @high{0 %}"),
        ]
        shown = {name: columns[name] for name in ("learning_rate", "low", "high", "n_runs")}
        draw.bars(x, columns["low"], x, columns["high"], color=color, width=1.2, alpha=0.6)
        draw.line(x, fraction, color=color, dash=look["dash"], width=2)
        draw.dots(x, fraction, color=color, marker=marker, size=7, columns=shown, tips=tips)
        if edge.largest is not None:
            draw.dots(x[[edge.largest]], fraction[[edge.largest]], color=color, marker=marker, size=17, alpha=0.35)
        draw.words(start, height, edge.label, color=color)
    return draw.panel(
        title="Explosion edge",
        note=_note(edges, below),
        view=(span, (-0.04, 1.04)),
        size=(720, 300),
        names=("learning rate", _FRACTION),
        ticks=(rates, None),
        formats=("plain", "percent"),
        is_log=(True, False),
    )
