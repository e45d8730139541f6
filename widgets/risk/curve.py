"""The figure of RiskExplorer, built once and written in place: a slider cannot wait for a new one."""

from __future__ import annotations

import html
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.models import (
    BoxAnnotation,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    Label,
    NumeralTickFormatter,
    Range1d,
    Span,
)
from bokeh.plotting import figure

from workbench.formatting import percent, rounded
from workbench.plots import outcome_colors as outcome_looks
from workbench.plots import style
from workbench.plots.risk_grid import RiskGrid, Runs
from workbench.widgets.panel_grid import set_range
from workbench.widgets.risk.forecast import HIGH, LOW
from workbench.widgets.risk.risk_verdict import HEAD, MUTED

if TYPE_CHECKING:
    from workbench.widgets.risk.forecast import Forecast

_HEIGHT = 290
#: Vertical position of recorded runs: below 0 those that survived, above 1 those that diverged.
_RUG = 0.1
_COLOR = style.MODEL_COLORS[7]
_NO_RUNS: dict[str, list[Any]] = {"rate": [], "place": [], "architecture": [], "ended": []}


class CurvePanel:
    """Risk over the learning rate, with the edge, recorded runs, and where the planned rate stands."""

    def __init__(self) -> None:
        self.x_range = Range1d(1e-4, 1.0)
        self.figure = plot = figure(
            height=_HEIGHT, min_width=300, active_drag=None, active_scroll=None, toolbar_location="above",
            tools="pan,xwheel_zoom,box_zoom,reset,save", x_axis_type="log", x_range=self.x_range,
            y_range=Range1d(-2 * _RUG, 1 + 2 * _RUG), x_axis_label="learning rate",
            y_axis_label="probability of divergence",
        )  # fmt: skip
        style.dress_bokeh(SimpleNamespace(state=plot), None)
        plot.sizing_mode = "stretch_width"
        color = _COLOR
        self.curve = ColumnDataSource({"rate": [], "probability": [], "low": [], "high": [], "interval": []})
        self.edge = ColumnDataSource({"rate": [], "low": [], "high": [], "risk": []})
        self.now = ColumnDataSource({"rate": [], "probability": []})
        self.runs = {ended: ColumnDataSource(_NO_RUNS) for ended in ("survived", "diverged")}
        self._silence = BoxAnnotation(fill_color=style.NEUTRAL, fill_alpha=0.18, bottom=0, top=1, visible=False)
        self._words = Label(
            x=0.5, y=0.5, text="no prediction: unlike anything recorded", text_color=style.NEUTRAL, text_align="center",
            text_font_size="11pt", visible=False,
        )  # fmt: skip
        self._line = Span(dimension="height", line_color=style.NEUTRAL, line_width=1.5, line_dash=[4, 3])
        for share in (LOW, HIGH):
            plot.add_layout(Span(dimension="width", location=share, line_color=style.NEUTRAL, line_alpha=0.45))
        for item in (self._silence, self._line, self._words):
            plot.add_layout(item)
        plot.varea("rate", "low", "high", source=self.curve, fill_color=color, fill_alpha=0.18)
        line = plot.line("rate", "probability", source=self.curve, color=color, width=2.4)
        plot.segment("low", "risk", "high", "risk", source=self.edge, color=color, line_width=3)
        plot.scatter("rate", "risk", source=self.edge, marker="diamond", size=15, color=color, line_color="white")
        rug = self._draw_runs()
        plot.scatter("rate", "probability", source=self.now, size=14, color=color, line_color="white", line_width=1.5)
        tips = [("learning rate", "@rate{0.[0000]}"), ("risk", "@probability{0 %}"), ("interval", "@interval")]
        plot.add_tools(
            HoverTool(renderers=[line], tooltips=tips, mode="vline", point_policy="follow_mouse"),
            HoverTool(renderers=rug, tooltips=[("", "@architecture"), ("at", "@rate{0.[0000]}"), ("", "@ended")]),
        )
        (axis,) = plot.yaxis
        axis.ticker, axis.formatter = FixedTicker(ticks=[0, LOW, 0.5, HIGH, 1]), NumeralTickFormatter(format="0 %")

    def write(self, forecast: Forecast) -> None:
        """Draw a forecast."""
        grid = RiskGrid.of(forecast.curve)
        runs = Runs.of(forecast.nearest, grid)
        probability, low, high = grid.probability[0], grid.low[0], grid.high[0]
        if list(self.curve.data["rate"]) != grid.rates.tolist() or not np.array_equal(
            self.curve.data["probability"], probability, equal_nan=True
        ):
            interval = [
                f"{percent(a)} to {percent(b)}" if np.isfinite([a, b]).all() else "–"
                for a, b in zip(low, high, strict=True)
            ]
            self.curve.data = {
                "rate": grid.rates, "probability": probability, "low": low, "high": high, "interval": interval,
            }  # fmt: skip
        set_range(self.x_range, float(grid.rates[0]), float(grid.rates[-1]))
        self._mark_decades(grid.rates)
        edge, low_edge, high_edge = grid.edges[:, 0]
        is_known = np.isfinite(edge)
        self.edge.data = {
            "rate": [edge] if is_known else [], "risk": [LOW] if is_known else [],
            "low": [low_edge] if is_known else [], "high": [high_edge] if is_known else [],
        }  # fmt: skip
        self._write_runs(forecast, grid, runs)
        self._line.location = forecast.rate
        shown = forecast.is_shown
        now = float(forecast.prediction["probability"].values[0])
        self.now.data = {"rate": [forecast.rate] if shown else [], "probability": [now] if shown else []}
        self._silence.visible = self._words.visible = not shown
        self._words.x = float(np.sqrt(grid.rates[0] * grid.rates[-1]))

    def _draw_runs(self) -> list[Any]:
        looks = {"survived": (outcome_looks.SURVIVED, 0.0), "diverged": (outcome_looks.DIVERGED, 0.75)}
        return [
            self.figure.scatter(
                "rate", "place", source=self.runs[ended], size=6, color=color, fill_alpha=fill, line_alpha=0.9
            )
            for ended, (color, fill) in looks.items()
        ]

    def _write_runs(self, forecast: Forecast, grid: RiskGrid, runs: Runs) -> None:
        rates = forecast.nearest["learning_rate"].values
        is_inside = (rates >= grid.bounds[0]) & (rates <= grid.bounds[-1])  # as `Runs` takes them
        names = forecast.nearest["architecture"].values[is_inside].astype(str)
        height = 0.75 * _RUG * runs.spots
        for ended, is_it, middle in (
            ("survived", ~runs.has_diverged, -_RUG), ("diverged", runs.has_diverged, 1 + _RUG),
        ):  # fmt: skip
            self.runs[ended].data = {
                "rate": runs.rate[is_it], "place": middle + height[is_it], "architecture": names[is_it].tolist(),
                "ended": [ended] * int(is_it.sum()),
            }  # fmt: skip

    def _mark_decades(self, rates: np.ndarray) -> None:
        (axis,) = self.figure.xaxis
        decades = np.arange(round(np.log10(rates[0])), round(np.log10(rates[-1])) + 1)
        ticks = [float(f"{10.0**decade:.6g}") for decade in decades]
        if not isinstance(axis.ticker, FixedTicker) or axis.ticker.ticks != ticks:
            axis.ticker = FixedTicker(ticks=ticks)
            axis.major_label_overrides = {tick: f"{tick:g}" for tick in ticks}


def head(forecast: Forecast) -> str:
    """Title and key of the figure, as HTML that takes any width."""
    name = html.escape(str(forecast.case["architecture"].values[0]))

    def mark(sign: str, color: str) -> str:
        return f'<span style="color:{color}" aria-hidden="true">{sign}</span>'

    key = (
        f"{mark('●', _COLOR)} {name} at {rounded(forecast.rate)}",
        f"{mark('◆', _COLOR)} largest rate under {percent(LOW)} risk, with its interval",
        f"recorded runs most like it: {mark('○', outcome_looks.SURVIVED)} survived, "
        f"{mark('●', outcome_looks.DIVERGED)} diverged",
    )
    return f'<div style="{HEAD}">Risk over the learning rate</div><div style="{MUTED}">{" · ".join(key)}</div>'
