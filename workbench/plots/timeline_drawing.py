"""Panels of the timeline as holoviews elements for bokeh: one lane per run, one panel per signal."""

from __future__ import annotations

import textwrap
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import capitalized, clipped
from workbench.plots import style
from workbench.plots.timeline_evidence import ALARM
from workbench.plots.timeline_matplotlib import CROWDED
from workbench.plots.timeline_words import EVIDENCE_TITLE, accounts, landmarks, lead_in_words, marks_in_words
from workbench.studies.lines import decimate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workbench.plots.timeline_events import TimelineEvent
    from workbench.plots.timeline_evidence import EvidencePanel
    from workbench.plots.timeline_panels import RunEvents, SignalPanel
    from workbench.plots.traces_figure import Trace

#: Number of buckets of the envelope that represents a line, about two per pixel.
_N_BUCKETS = 1200
_WIDTH, _HEIGHT, _ROW = 660, 112, 54
_LONGEST_NAME = 24
_LONGEST_LINE = 105


class Drawing:
    """Drawing of panels with a common axis of steps.

    Args:
        hv: The holoviews module.
        span: Steps in view.
        all_events: Events of each run, in the order of the runs.
        selected: Step to mark; None marks none.
    """

    def __init__(
        self, hv: Any, span: tuple[float, float], all_events: Sequence[RunEvents], selected: int | None = None
    ) -> None:
        self.hv, self.span, self.all_events, self.selected = hv, span, list(all_events), selected
        self._cursor: Any = None

    def lane(self, band: str = "") -> Any:
        """Draw the events, one lane per run."""
        hv, n = self.hv, len(self.all_events)
        dims = [hv.Dimension("step"), hv.Dimension("row", label="run")]
        parts = []
        for index, run_events in enumerate(self.all_events):
            row, color = n - 1 - index, style.model_style(run_events.place)["color"]
            spans = [
                (
                    fault.start,
                    row - 0.26,
                    run_events.last_step if fault.stop is None else fault.stop,
                    row + 0.26,
                    fault.name,
                )
                for fault in run_events.faults
            ]
            if spans:
                boxes = hv.Rectangles(spans, kdims=self._corners("row"), vdims=["fault"])
                parts.append(self._opts(boxes, **self._fill(color, 0.22), **self._hover([("fault", "@fault")])))
            end = run_events.diverged.step if run_events.diverged is not None else run_events.last_step
            line = hv.Curve({"step": [run_events.first_step, end], "row": [row, row]}, *dims)
            parts.append(self._opts(line, **self._line(run_events.place, 2.0)))
            parts += self._marks(run_events, row, color, dims)
        for index, run_events in enumerate(self.all_events):  # on top of everything else
            parts += self._lead(run_events, n - 1 - index, dims)
        ticks = [
            (n - 1 - index, clipped(run_events.run, _LONGEST_NAME, keep_end=True))
            for index, run_events in enumerate(self.all_events)
        ]
        summary = [part for line in accounts(self.all_events) for part in textwrap.wrap(line, _LONGEST_LINE)]
        note = "\n".join(filter(None, [*summary, "   ".join(marks_in_words(self.all_events)), band]))
        has_lead = any(run_events.lead is not None for run_events in self.all_events)
        view = (-0.45, n - 0.15 if has_lead else n - 0.55)
        height = round(_ROW * (view[1] - view[0]))
        return self._framed(parts, "Events", note, view=view, height=height, ticks=ticks)

    def evidence(self, run_events: RunEvents, evidence: EvidencePanel) -> Any:
        """Draw the evidence of a run: its strongest signals and the line at which an alarm is raised."""
        hv, title = self.hv, EVIDENCE_TITLE
        if len(self.all_events) > 1:
            title += f": {run_events.run}"
        dims = [hv.Dimension("step"), hv.Dimension("value", label=title)]
        parts = self._shades([run_events], title, evidence.view) + self._vertical_lines(
            [run_events], evidence.view, dims
        )
        limit = hv.Curve({"step": self.span, "value": [ALARM] * 2}, *dims)
        parts.append(self._opts(limit, color=style.NEUTRAL, line_width=1.2, line_dash="dashed"))
        for line, dash in zip(evidence.lines, cycle(style.MODEL_DASHES)):
            step, value = decimate(line.step, line.value, _N_BUCKETS)
            curve = hv.Curve({"step": step, "value": value}, *dims, label=line.signal)
            hover = self._hover([("", line.signal), ("step", "@step"), ("evidence", "@value")])
            parts.append(self._opts(curve, color=line.color, line_width=1.6, line_dash=dash, **hover))
        legend = {line.signal: line.color for line in evidence.lines}
        return self._framed(parts, title, evidence.note, view=evidence.view, height=_HEIGHT, is_log=True, legend=legend)

    def panel(self, signal: SignalPanel, *, is_last: bool) -> Any:
        """Draw one signal of all runs."""
        hv, panel = self.hv, signal.panel
        dims = [hv.Dimension("step"), hv.Dimension("value", label=panel.title)]
        parts = self._shades(self.all_events, panel.title, panel.view)
        for place, band in signal.bands:
            if len(band["step"]):
                columns = (band["step"], band["lower"], band["upper"])
                edges = [hv.Dimension(edge, label=f"{edge} {panel.title}") for edge in ("lower", "upper")]
                area = hv.Area(columns, kdims=dims[:1], vdims=edges)
                styling = {"color": style.NEUTRAL, "dash": "solid"} if place is None else style.model_style(place)
                fill = self._fill(styling["color"], 0.28 if place is None else 0.16)
                if len(signal.bands) >= CROWDED:  # only the edges
                    edge = {"line_color": styling["color"], "line_dash": styling["dash"], "line_alpha": 0.7}
                    fill = {"fill_alpha": 0.0, **edge}
                parts.append(self._opts(area, **fill))
        parts += self._vertical_lines(self.all_events, panel.view, dims)
        for line, run_events in zip(panel.lines, self.all_events, strict=True):
            parts += self._drawn(line, run_events, panel, dims)
        for line, onset, run_events in zip(panel.lines, signal.onsets, self.all_events, strict=True):
            if onset is not None:
                event, value = onset
                marked = _columns([event]) | {"value": [value]}
                parts.append(
                    self._alarm(marked, dims, style.model_style(run_events.place)["color"], event.is_established)
                )
            if line.cross is not None:
                step, value = line.cross
                parts.append(self._cross(step, float(np.clip(value, *panel.limits)), run_events, dims))
        frame: dict[str, Any] = {"view": panel.view, "is_log": panel.is_logarithmic, "is_last": is_last}
        return self._framed(parts, capitalized(panel.title), panel.note, height=_HEIGHT, **frame)

    def _shades(self, all_events: Sequence[RunEvents], title: str, view: tuple[float, float]) -> list[Any]:
        """Shade the steps with an active fault; nothing if many runs have faults, which the lanes show as well."""
        parts: list[Any] = []
        is_crowded = sum(bool(run_events.faults) for run_events in all_events) >= CROWDED
        for run_events in [] if is_crowded else all_events:
            spans = [
                (s.start, view[0], run_events.last_step if s.stop is None else s.stop, view[1])
                for s in run_events.faults
            ]
            if spans:
                boxes = self.hv.Rectangles(spans, kdims=self._corners(title))
                parts.append(self._opts(boxes, **self._fill(style.model_style(run_events.place)["color"], 0.09)))
        return parts

    def _vertical_lines(self, all_events: Sequence[RunEvents], view: tuple[float, float], dims: list[Any]) -> list[Any]:
        """Draw vertical lines at the ends of the lead time (or the first alarm) and at the selected step."""
        styles = [
            (event.step, self._line(run_events.place, 1.0) | {"line_dash": dash, "alpha": 0.75})
            for run_events in all_events
            for event, dash in landmarks(run_events)
        ]
        if self.selected is not None:
            styles.append((self.selected, {"color": style.NEUTRAL, "line_dash": "dotted", "line_width": 1.6}))
        return [
            self._opts(self.hv.Curve({"step": [step] * 2, "value": list(view)}, *dims), **styling)
            for step, styling in styles
        ]

    def _probes(self, run_events: RunEvents, row: int, dims: list[Any]) -> list[Any]:
        """Draw the measurements of probes below the line of the run: small if they passed, strong if they failed."""
        height, parts = row - 0.19, []
        if sound := sorted({check.step for check in run_events.checks if check.is_sound}):
            points = self._points({"step": sound, "row": [height] * len(sound)}, dims)
            parts.append(self._opts(points, color=style.NEUTRAL, marker="circle", size=3))
        if found := run_events.findings:
            points = self._points(_columns(found) | {"row": [height] * len(found)}, dims)
            parts.append(self._opts(points, color=style.BROKEN, marker="square", size=7, **self._hover(_TIPS)))
        return parts

    def _drawn(self, line: Trace, run_events: RunEvents, panel: Any, dims: list[Any]) -> list[Any]:
        step, value = decimate(line.step, line.value, _N_BUCKETS)
        columns = {"step": step, "value": value}
        hover = self._hover([("", run_events.run), ("step", "@step"), (panel.title, "@value")])
        curve = self.hv.Curve(columns, *dims, label=run_events.run)
        parts = [self._opts(curve, **self._line(run_events.place, 1.5), **({} if line.has_markers else hover))]
        if line.has_markers:
            styling = style.model_style(run_events.place)
            dots = self.hv.Scatter(columns, *dims)
            parts.append(self._opts(dots, color=styling["color"], marker=styling["marker"], size=6, **hover))
        return parts

    def _marks(self, run_events: RunEvents, row: int, color: str, dims: list[Any]) -> list[Any]:
        """Draw later alarms, first alarms, actions and the divergence on the line of the lane."""
        onsets = run_events.onsets
        later = [event for event in run_events.events if event.kind == "alarm" and event not in onsets]
        parts = self._probes(run_events, row, dims)
        if later:
            ends = [(event.step, row - 0.14, event.step, row + 0.14) for event in later]
            segments = self.hv.Segments(ends, kdims=self._corners("row"))
            parts.append(self._opts(segments, color=color, alpha=0.7, line_width=1.2))
        for is_established in (False, True):
            if own := [event for event in onsets if event.is_established is is_established]:
                columns = _columns(own) | {"row": [row] * len(own)}
                parts.append(self._alarm(columns, dims, color, is_established))
        if actions := [event for event in run_events.events if event.kind == "action"]:
            columns = _columns(actions) | {"row": [row] * len(actions)}
            points = self._points(columns, dims)
            parts.append(self._opts(points, color=color, marker="diamond", size=10, **self._hover(_TIPS)))
        if run_events.diverged is not None:
            parts.append(self._cross(run_events.diverged.step, row, run_events, dims))
        return parts

    def _lead(self, run_events: RunEvents, row: int, dims: list[Any]) -> list[Any]:
        """Draw the lead time as an arrow with a label."""
        lead = run_events.lead
        if lead is None or not lead.meets(*self.span):
            return []
        hv, height = self.hv, row + 0.4
        start, stop = lead.first.step, lead.then.step
        ends = [(start, height, stop, height), (start, height - 0.09, start, height + 0.09)]
        segments = hv.Segments(ends, kdims=self._corners("row"))
        ink = style.NEUTRAL
        parts = [self._opts(segments, color=ink, line_width=1.6)]
        head = self._points({"step": [stop], "row": [height]}, dims)
        parts.append(self._opts(head, color=ink, marker="triangle", size=8, angle=-90 if stop >= start else 90))
        # The label is above the arrow, as close to its center as the frame allows.
        width = self.span[1] - self.span[0]
        x = float(
            np.clip(np.clip([start, stop], *self.span).mean(), self.span[0] + 0.22 * width, self.span[1] - 0.22 * width)
        )
        label = hv.Labels({("step", "row"): [(x, height + 0.08)], "text": [lead_in_words(lead)]}, dims, "text")
        text = {"text_align": "center", "text_baseline": "bottom", "text_color": ink, "text_font_size": "9pt"}
        return [*parts, self._opts(label, **text)]

    def _alarm(self, columns: dict[str, Any], dims: list[Any], color: str, is_established: bool) -> Any:
        fill = {"fill_alpha": 0.0} if is_established else {}
        styling = {"marker": "inverted_triangle", "size": 11, "line_width": 1.8, "color": color, **fill}
        return self._opts(self._points(columns, dims), **styling, **self._hover(_TIPS))

    def _cross(self, step: int, value: float, run_events: RunEvents, dims: list[Any]) -> Any:
        points = self._points({"step": [step], dims[1].name: [value]}, dims)
        color = style.model_style(run_events.place)["color"]
        return self._opts(points, color=color, marker="x", size=12, line_width=2.4)

    def _points(self, columns: dict[str, Any], dims: list[Any]) -> Any:
        others = [name for name in columns if name not in (dims[0].name, dims[1].name)]
        return self.hv.Scatter(columns, dims[0], [dims[1], *others])

    def _framed(
        self,
        parts: list[Any],
        title: str,
        note: str,
        *,
        view: tuple[float, float],
        height: int,
        is_log: bool = False,
        is_last: bool = False,
        legend: Mapping[str, str] | None = None,
        ticks: list[tuple[int, str]] | None = None,
    ) -> Any:
        styling: dict[str, Any] = {
            "title": title,
            "xlim": self.span,
            "ylim": view,
            "logy": is_log,
            "xlabel": "step",
            "ylabel": "",
            "show_legend": bool(legend),
            "frame_width": _WIDTH,
            "frame_height": height,
            "show_grid": ticks is None,
            "default_tools": [],
            "tools": ["xpan", "xwheel_zoom", "xbox_zoom", "reset", "save"],
            "active_tools": [],
        }
        styling |= {"legend_position": "right"} if legend else {}
        styling |= {"yticks": ticks, "yaxis": "right"} if ticks is not None else {}
        hooks = [style.dress_bokeh, style.bare_bokeh((is_last, True)), self._linked_cursor]
        hooks += [_lane_axis_bokeh if ticks else style.log_ticks_bokeh if is_log else _plain_ticks_bokeh]
        hooks += [style.note_bokeh(note)] if note else []
        return self.hv.Overlay(parts).opts(**styling, hooks=hooks, backend="bokeh")

    def _linked_cursor(self, plot: Any, element: Any) -> None:
        """Add one vertical line at the pointer to all panels, as a holoviews hook."""
        from bokeh.models import CrosshairTool, Span

        if plot.state.select({"type": CrosshairTool}):
            return
        if self._cursor is None:
            self._cursor = Span(dimension="height", line_color=style.NEUTRAL, line_width=1)
        plot.state.add_tools(CrosshairTool(overlay=self._cursor, visible=False))

    def _corners(self, panel: str) -> list[Any]:
        """Return the dimensions of boxes and segments; holoviews links axes of equal dimensions, here the steps."""
        up = [self.hv.Dimension(name, label=f"{name} {panel}") for name in ("low", "high")]
        return [self.hv.Dimension("step"), up[0], self.hv.Dimension("stop"), up[1]]

    def _opts(self, element: Any, **options: Any) -> Any:
        return element.opts(**options, backend="bokeh")

    def _line(self, place: int, width: float) -> dict[str, Any]:
        styling = style.model_style(place)
        return {"color": styling["color"], "line_width": width, "line_dash": styling["dash"]}

    def _fill(self, color: str, alpha: float) -> dict[str, Any]:
        return {"color": color, "fill_alpha": alpha, "line_alpha": 0.0}

    def _hover(self, tips: list[tuple[str, str]]) -> dict[str, Any]:
        return {"tools": ["hover"], "hover_tooltips": tips}


_TIPS = [("", "@what"), ("step", "@step"), ("score", "@score"), ("", "@message")]


def _columns(events: Sequence[TimelineEvent]) -> dict[str, list[Any]]:
    return {
        "step": [event.step for event in events],
        "what": [", ".join(filter(None, [f"{event.kind} {event.source}", event.place])) for event in events],
        "score": ["" if np.isnan(event.score) else f"{event.score:.3g}" for event in events],
        "message": [event.message for event in events],
    }


def _plain_ticks_bokeh(plot: Any, element: Any) -> None:
    """Format a linear axis, as a holoviews hook: few ticks, plain numbers."""
    from bokeh.models import BasicTickFormatter

    for axis in plot.state.yaxis:
        axis.ticker.desired_num_ticks = 4
        axis.formatter = BasicTickFormatter(power_limit_high=6, power_limit_low=-4)


def _lane_axis_bokeh(plot: Any, element: Any) -> None:
    """Format the axis of the lanes, as a holoviews hook: names of runs on the right, no axis line."""
    longest = max(len(name) for axis in plot.state.yaxis for name in axis.major_label_overrides.values())
    plot.state.min_border_right = 30 + 9 * longest  # bokeh measures the names before their font size is set
    for axis in plot.state.yaxis:
        axis.axis_line_color = axis.major_tick_line_color = None
        axis.major_label_text_font_size = f"{style.LABEL_SIZE}pt"
