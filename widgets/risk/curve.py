"""The figure of RiskExplorer, which is built once and updated in place so that sliders respond quickly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.models import BoxAnnotation, ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d, Span
from bokeh.plotting import figure

from workbench.plots import outcome_colors, style

if TYPE_CHECKING:
    import xarray as xr

    from workbench.risk.risk import Risk

#: Width and height of the frame in pixels, before it is scaled to the page width.
_SIZE = (640, 240)
_FAILURE, _USEFUL = style.MODEL_COLORS[0], style.MODEL_COLORS[2]
_CURVES = ("failure", "failure_low", "failure_high", "explosion")
#: Legend below the figure.
KEY = (
    "blue: risk of not learning well · dashed: risk of an explosion · green: useful learning rates, up to the useful "
    "edge (line) · bar: its 80 % interval · dot: planned learning rate"
)


class CurvePanel:
    """The risk over the learning rate, the useful learning rates, and the planned learning rate."""

    def __init__(self) -> None:
        self.figure = plot = figure(
            frame_width=_SIZE[0], frame_height=_SIZE[1], active_drag=None, active_scroll=None, toolbar_location="above",
            tools="pan,xwheel_zoom,box_zoom,reset,save", x_axis_type="log", x_range=Range1d(1e-5, 10.0),
            y_range=Range1d(0.0, 1.0), x_axis_label="learning rate", y_axis_label="probability",
        )  # fmt: skip
        style.dress_bokeh(SimpleNamespace(state=plot), None)
        self.curve = ColumnDataSource({name: [] for name in ("rate", *_CURVES)})
        self.now = ColumnDataSource({"rate": [], "failure": []})
        self.interval = ColumnDataSource({"low": [], "high": [], "height": []})
        self.band = BoxAnnotation(fill_color=_USEFUL, fill_alpha=0.22, bottom=0, top=1, visible=False)
        self.edge = Span(dimension="height", line_color=_USEFUL, line_width=2, visible=False)
        for item in (self.band, self.edge):
            plot.add_layout(item)
        plot.varea("rate", "failure_low", "failure_high", source=self.curve, fill_color=_FAILURE, fill_alpha=0.18)
        line = plot.line("rate", "failure", source=self.curve, color=_FAILURE, width=2.4)
        plot.line(
            "rate", "explosion", source=self.curve, color=outcome_colors.DIVERGED, line_width=2, line_dash="dashed"
        )
        plot.segment("low", "height", "high", "height", source=self.interval, color=_USEFUL, line_width=5)
        plot.scatter("rate", "failure", source=self.now, size=14, color=_FAILURE, line_color="white", line_width=1.5)
        tips = [
            ("learning rate", "@rate{0.[000000]}"), ("risk of not learning well", "@failure{0 %}"),
            ("risk of an explosion", "@explosion{0 %}"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline", point_policy="follow_mouse"))
        (axis,) = plot.yaxis
        axis.ticker, axis.formatter = FixedTicker(ticks=[0, 0.25, 0.5, 0.75, 1]), NumeralTickFormatter(format="0 %")
        (axis,) = plot.xaxis
        decades = [10.0**power for power in range(-5, 2)]
        axis.ticker = FixedTicker(ticks=decades)
        axis.major_label_overrides = {decade: f"{decade:g}" for decade in decades}

    @property
    def rates(self) -> np.ndarray:
        """The learning rates of the curve."""
        return np.geomspace(self.figure.x_range.start, self.figure.x_range.end, 81)

    def write(self, curve: xr.Dataset, risk: Risk) -> None:
        """Update the curve and the planned rate; nothing is drawn if the risk is unknown."""
        is_known = not risk.reason
        self.band.visible = self.edge.visible = is_known
        rows: dict[str, Any] = {name: curve[name].values if is_known else [] for name in _CURVES}
        self.curve.data = {"rate": curve["learning_rate"].values if is_known else [], **rows}
        edge = risk.useful_edge
        self.now.data = {"rate": [risk.learning_rate] * is_known, "failure": [risk.failure.value] * is_known}
        self.interval.data = {
            "low": [edge.low] * is_known, "high": [edge.high] * is_known, "height": [0.02] * is_known,
        }  # fmt: skip
        if is_known:
            self.band.left, self.band.right, self.edge.location = risk.slow_edge.value, edge.value, edge.value
