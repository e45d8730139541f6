"""Figures of divergence: predicted risk against the rate, reliability of predictions, and the explosion edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import counted, percent
from workbench.option_kinds import Fraction, NonNegativeInt, PositiveFloat
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import by_name, columns_of, require_variables
from workbench.plots.primitives import Primitives, decades
from workbench.studies.outcomes import divergence_rates, largest_rate_without_explosion

if TYPE_CHECKING:
    import xarray as xr

_SIZE = (640, 320)
_USEFUL, _FAILURE = style.MODEL_COLORS[2], style.MODEL_COLORS[0]
_EDGES = ("slow_edge", "useful_edge", "useful_edge_low", "useful_edge_high")
_PROBABILITIES = ("failure", "failure_low", "failure_high", "explosion")


@redrawable
def risk_curve(
    risk: xr.Dataset | Mapping[str, xr.Dataset], *, learning_rate: PositiveFloat | None = None, backend: str = "bokeh"
) -> Any:
    """Draw the probability of not learning well against the learning rate, for one planned run or several designs.

    The figure of one run also shows the interval and the probability of an explosion. The green band holds the rates
    predicted to learn well; the vertical line is the largest of them, and the bar at its foot the interval of it.
    The figure of several designs has one line each, with a large mark at the largest rate predicted to learn well.

    Args:
        risk: Dataset from `workbench.risk.over_rates`, or several by name.
        learning_rate: Planned learning rate, drawn as a dot on the curve of one run; None draws no dot.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a dataset lacks a variable, or its risk is unknown.
        OptionError: If the backend does not exist, or there is no design.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> case = wb.samples.open("divergence_sweep", "norms").isel(run=[0])
        >>> risk = wb.risk.over_rates(wb.sweeps.replan(case, n_steps=400), np.geomspace(1e-4, 1, 5))
        >>> len(wb.plots.risk_curve(risk)), len(wb.plots.risk_curve({"one": risk, "other": risk}))  # panels
        (1, 1)

    See Also:
        `workbench.risk.over_rates`: Computes the probabilities.
        `workbench.plots.pilot_losses`: Draws measured losses of short runs.
    """
    import xarray as xr

    is_one = isinstance(risk, xr.Dataset)
    named = by_name(risk, what="risk", source="wb.risk.over_rates()")
    for name, data in named.items():
        what = f"risk of '{name}'" if name else "risk"
        require_variables(data, (*_PROBABILITIES, *_EDGES), what=what, source="wb.risk.over_rates()")
        if np.isnan(data["failure"].values.astype(float)).all():
            reason = str(data.attrs.get("reason", ""))
            raise SchemaError(f"The {what} is unknown. {reason}".strip())
    rates = np.concatenate([data["learning_rate"].values.astype(float) for data in named.values()])
    view = float(rates.min()), float(rates.max())
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "probability")
        notes = _draw_one(draw, named[""], learning_rate) if is_one else _draw_designs(draw, named)
        panel = draw.panel(
            title="Risk vs. learning rate",
            note=notes,
            view=(view, (0.0, 1.0)),
            size=_SIZE,
            names=("learning rate", "probability" if is_one else "probability of not learning well"),
            ticks=(decades(*view), [0.0, 0.25, 0.5, 0.75, 1.0]),
            formats=("plain", "percent"),
            is_log=(True, False),
            legend=True,
        )
        return style.laid_out(hv, [panel], backend)


def _draw_one(draw: Primitives, risk: xr.Dataset, learning_rate: float | None) -> Sequence[str]:
    """Draw the risk of one planned run, and return the explanations of the marks."""
    rate = risk["learning_rate"].values.astype(float)
    failure, low, high, explosion = (risk[name].values.astype(float) for name in _PROBABILITIES)
    slow, edge, *interval = (float(np.clip(float(risk[name]), rate[0], rate[-1])) for name in _EDGES)
    notes = []
    if slow < edge:
        draw.boxes(slow, 0, edge, 1, colors=_USEFUL, alpha=0.22)
        within = f"within {counted(risk.attrs['n_steps'], 'update')} at width {risk.attrs['d_model']}"
        notes.append(f"green: rates predicted to learn well {within}")
    if rate[0] < edge < rate[-1]:
        draw.bars(edge, 0, edge, 1, color=_USEFUL, width=2)
    if interval[0] < interval[1]:
        draw.bars(interval[0], 0.02, interval[1], 0.02, color=_USEFUL, width=5)
        notes.append("bar: interval of the largest one")
    draw.band(rate, low, high, color=_FAILURE)
    draw.line(rate, failure, color=_FAILURE, width=2.4, label="not learning well")
    if np.isfinite(explosion).any():
        draw.line(rate, explosion, color=style.DIVERGED, dash="dashed", width=2, label="explosion")
    if learning_rate is not None and rate[0] <= learning_rate <= rate[-1]:
        at = _failure_at(risk, learning_rate)
        tips = [("planned learning rate", "$x"), ("not learning well", percent(at))]
        draw.dots([learning_rate], [at], color=_FAILURE, size=13, edge=style.MARK_GROUND, tips=tips)
    return notes


def _draw_designs(draw: Primitives, named: Mapping[str, xr.Dataset]) -> Sequence[str]:
    """Draw one line for each design, and return the explanations of the marks."""
    notes = []
    for place, (name, risk) in enumerate(named.items()):
        styling = style.model_style(place)
        rate, failure = (risk[one].values.astype(float) for one in ("learning_rate", "failure"))
        draw.line(rate, failure, color=styling["color"], dash=styling["dash"], width=2.2, label=name)
        edge = float(risk["useful_edge"])
        if rate[0] <= edge <= rate[-1]:
            tips = [("", name), ("largest useful rate", "$x")]
            draw.dots(
                [edge], [_failure_at(risk, edge)], color=styling["color"], marker=styling["marker"], size=13,
                edge=style.MARK_GROUND, tips=tips,
            )  # fmt: skip
            notes = ["large mark: largest rate predicted to learn well"]
    return notes


def _failure_at(risk: xr.Dataset, rate: float) -> float:
    """Return the probability of not learning well at a rate, interpolated between those of the dataset."""
    return float(np.interp(np.log(rate), np.log(risk["learning_rate"].values.astype(float)), risk["failure"].values))


_SOURCE = "wb.risk.reliability()"
_WIDTH, _HEIGHT, _BELOW, _GAP = 380, 340, 90, 18
_SPAN = (-0.02, 1.02)
#: Horizontal offset between the bins of several predictions.
_BIN_DODGE = 0.012


@redrawable
def reliability(
    reliability: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the observed fraction of runs that diverged against the predicted probability.

    Each dot is a bin of runs with similar predicted probability. On the dashed diagonal predictions are calibrated;
    below it they are too high, above it too low. The bars are confidence intervals of the observed fraction. The lower
    panel shows the number of runs of each bin.

    Args:
        reliability: Dataset with dim ``bin``: mean_probability, rate (fraction that diverged), low, high and n_runs; an
            empty bin has 0 runs or NaN and is not drawn. Attributes: ``ece`` (expected calibration error), optionally
            ``level`` (confidence level) and ``n_left_out`` (runs without a prediction). Or several datasets by name.
        places: Style number (color, marker, dash) of each prediction, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of two panels with options for that backend only.

    Raises:
        SchemaError: If there is no dataset, one lacks a variable, or every bin is empty.
        OptionError: If the backend does not exist, or a prediction has no style number.

    Example:
        >>> import workbench as wb
        >>> bins = wb.risk.reliability([0.9, 0.8, 0.2, 0.1], [True, True, False, False])
        >>> figure = wb.plots.reliability(bins)
        >>> len(figure)  # panels
        2

    See Also:
        `workbench.risk.reliability`: Computes the bins.
    """
    series = bins_of(reliability)
    order = style.model_places([bins.name for bins in series], places)
    shifts = _BIN_DODGE * (np.arange(len(series)) - (len(series) - 1) / 2)
    with style.drawing(backend) as hv:
        above = Primitives(hv, backend, "predicted probability", "fraction that diverged")
        below = Primitives(hv, backend, "predicted probability", "runs")
        above.line([0, 1], [0, 1], color=style.NEUTRAL, dash="dashed", width=1)
        for bins, place, shift in zip(series, order, shifts, strict=True):
            styling, columns = style.model_style(place), bins.columns
            color, x = styling["color"], columns["mean_probability"] + shift
            above.bars(x, columns["low"], x, columns["high"], color=color, width=1.4, alpha=0.65)
            above.line(x, columns["rate"], color=color, dash=styling["dash"], width=1.6, label=bins.label)
            tips = [
                ("", bins.name),
                ("predicted probability", "@mean_probability{0.0 %}"),
                ("diverged", "@rate{0.0 %} of @n_runs runs"),
                ("interval", "@low{0 %} to @high{0 %}"),
            ]
            dots: dict[str, Any] = {
                "color": color,
                "marker": styling["marker"],
                "columns": columns,
                "tips": tips[not bins.name :],
            }
            above.dots(x, columns["rate"], size=8, label=bins.label, **dots)
            below.bars(x, 0, x, columns["n_runs"], color=color, width=7 if len(series) == 1 else 4, alpha=0.85)
        most = max(bins.columns["n_runs"].max() for bins in series)
        panels = [
            above.panel(
                title="Reliability diagram",
                note=_reliability_note(series),
                view=(_SPAN, (-0.03, 1.03)),
                size=(_WIDTH, _HEIGHT),
                names=("", "fraction of runs that diverged"),
                formats=("percent", "percent"),
                legend=True,
                bare=(True, False),
                at=(0, _BELOW + _GAP),
            ),
            below.panel(
                title="",
                view=(_SPAN, (0.0, 1.08 * most)),
                size=(_WIDTH, _BELOW),
                names=("predicted probability of divergence", "runs"),
                formats=("percent", "plain"),
            ),
        ]
        return style.laid_out(hv, panels, backend)


@dataclass(frozen=True)
class Bins:
    """Non-empty bins of one prediction, by increasing ``mean_probability``, with its expected calibration error."""

    name: str
    columns: dict[str, np.ndarray]
    ece: float
    level: float
    n_left_out: int

    @property
    def label(self) -> str:
        """Entry of the legend, such as "forward: ECE 0.031"."""
        left_out = f", {self.n_left_out} runs without prediction" if self.n_left_out else ""
        return (f"{self.name}: " if self.name else "") + f"ECE {self.ece:.3f}{left_out}"


def bins_of(reliability: xr.Dataset | Mapping[str, xr.Dataset]) -> list[Bins]:
    """Return the predictions as `reliability` draws them."""
    series = []
    needed = ["mean_probability", "rate", "low", "high", "n_runs"]
    for name, data in by_name(reliability, what="reliability table", source=_SOURCE).items():
        columns = columns_of(data, needed, what="reliability table", source=_SOURCE, dim="bin")
        has_runs = (columns["n_runs"] > 0) & np.isfinite(columns["mean_probability"])
        if not has_runs.any():
            raise SchemaError(f"No bin of the reliability table '{name}' holds a run; create it with {_SOURCE}.")
        if "ece" not in data.attrs:
            raise SchemaError(f"The reliability table '{name}' lacks the attribute ece; create it with {_SOURCE}.")
        order = np.argsort(columns["mean_probability"][has_runs])
        columns = {key: column[has_runs][order] for key, column in columns.items()}
        level, n_left_out = float(data.attrs.get("level", 0.95)), int(data.attrs.get("n_left_out", 0))
        series.append(Bins(name, columns, float(data.attrs["ece"]), level, n_left_out))
    return series


def _reliability_note(series: list[Bins]) -> list[str]:
    counts = {int(bins.columns["n_runs"].sum()) for bins in series}
    words = [f"{counts.pop()} runs, one dot per bin" if len(counts) == 1 else "one dot per bin"]
    return [*words, f"bars: {100 * series[0].level:g} % Wilson intervals", "dashed: perfect calibration"]


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
    """Fraction of diverged runs by rate for one control.

    ``largest`` is the row of the largest rate up to which few runs diverge, None if there is none; ``missing`` are
    rates of other controls.
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


def _edge_note(edges: Sequence[EdgeCurve], below: float) -> list[str]:
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
        note=_edge_note(edges, below),
        view=(span, (-0.04, 1.04)),
        size=(720, 300),
        names=("learning rate", _FRACTION),
        ticks=(rates, None),
        formats=("plain", "percent"),
        is_log=(True, False),
    )
