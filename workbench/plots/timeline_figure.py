"""Timeline of several runs: their signals and events on one axis of steps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np

from workbench.errors import OptionError
from workbench.formatting import capitalized, clipped, counted, percent_range
from workbench.io.run_access import named_runs
from workbench.option_checks import NonNegativeInt, checked, one_of
from workbench.plots import style
from workbench.plots.dataset_columns import require_choices
from workbench.plots.figure_files import redrawable
from workbench.plots.timeline_events import signal_of
from workbench.plots.timeline_evidence import ALARM
from workbench.plots.timeline_matplotlib import CROWDED, TimelinePicture
from workbench.plots.timeline_panels import RunEvents, SignalPanel
from workbench.plots.timeline_words import EVIDENCE_TITLE, accounts, landmarks, lead_in_words, marks_in_words
from workbench.plots.traces_figure import Trace, with_unit
from workbench.studies import signals as sig
from workbench.studies.signals import Quantiles, SignalBand, decimate, healthy_band

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from workbench.plots.timeline_events import TimelineEvent
    from workbench.plots.timeline_evidence import EvidencePanel


@checked
@redrawable
def timeline(
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset],
    *,
    signals: str | Sequence[str] | None = None,
    reduce: Annotated[str, one_of(sig.REDUCTIONS)] | None = None,
    healthy: xr.DataTree | Mapping[str, xr.DataTree] | int | None = None,
    band: Quantiles = (0.05, 0.95),
    shows_all: bool = False,
    places: Mapping[str, NonNegativeInt] | None = None,
    view: tuple[float, float] | None = None,
    selected: int | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw signals of several runs on one axis of steps, with alarms, faults, actions, divergence and lead times.

    The first panel has one lane per run with its events: active faults, the first alarm of each signal (filled: a
    mechanism; hollow: loss, largest token losses or gradient norm), actions, the divergence, and the lead time from the
    first alarm of a mechanism to the first established signal or the divergence. Measurements of probes are dots if
    they passed and squares if they found a fault. The text above states the first alarm and its likely cause. The next
    panels show the evidence of each run, where available: the signals that reached an alarm first or are nearest to one
    (`workbench.alarms.evidence_of` adds it to older runs). Then there is one panel per signal with one line per run;
    alarms are marked on the line of their signal.

    Args:
        runs: One run, or several by name. They may differ in recorded variables and steps, and need no events.
        signals: A name or names from ``wb.signals.names(run)``, such as ``"effective_rank D2"``. None selects loss and
            gradient norm, the signals with the first alarms, and those that distinguish mechanisms.
        reduce: Reduction over layers, heads and other dimensions: ``"min"``, ``"max"`` or ``"mean"``. None selects the
            worst value: the minimum of ranks and entropies, the maximum of other signals.
        healthy: Healthy runs; the range between two quantiles of their values at each step is shaded. If it is a
            number, the range is that of the values of each run before that step.
        band: The two quantiles.
        shows_all: Whether the axes fit all values, as in `traces`.
        places: Style number (color, marker, dash) of each run, by name; None numbers them in the order given.
        view: First and last step in view; the axes fit the values between them. None selects all steps.
        selected: Step to mark in all panels; None marks none.
        backend: ``"bokeh"`` for the screen (linked zoom and cursor, tooltips) or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only; for matplotlib a single element that draws all panels.
        Lines with more than a few thousand points are drawn as the minimum and maximum of short intervals, so that no
        spike is lost.

    Raises:
        SchemaError: If there is no run, or no run has one of the signals.
        OptionError: If the backend or the reduction does not exist, the band is invalid, or a run has no style number.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> figure = wb.plots.timeline({"a failed run": run}, signals=["loss", "effective_rank D2"])
        >>> len(figure)  # panels
        3

    See Also:
        `workbench.signals.names`: Lists the signals of a run.
        `workbench.plots.traces`: Draws monitors without events.
        `workbench.widgets.Timeline`: Shows a timeline that can be changed.
    """
    trees = named_runs(runs, needs_spectra=False)
    order = style.model_places(trees, places)
    references = healthy_runs(healthy)
    all_events = [RunEvents.of(name, run, place) for place, (name, run) in zip(order, trees.items(), strict=True)]
    chosen = chosen_signals(trees, all_events, signals)
    panels = []
    for name in chosen:
        lines = [
            _line(run, name, run_events, reduce) for run, run_events in zip(trees.values(), all_events, strict=True)
        ]
        bands = _bands(lines, all_events, references, healthy, name, reduce, band)
        panels.append(SignalPanel.of(name, lines, all_events, bands, shows_all=shows_all, span=view))
    span = view or _view(panels, all_events)
    word = _band_in_words(references, healthy, band)
    with style.drawing(backend) as hv:
        if backend == "matplotlib":
            return TimelinePicture(all_events, panels, span, word, selected).element(hv)
        drawing = Drawing(hv, span, all_events, selected)
        drawn = [drawing.lane(word)]
        drawn += [
            drawing.evidence(run_events, run_events.evidence)
            for run_events in all_events
            if run_events.evidence is not None
        ]
        drawn += [drawing.panel(panel, is_last=panel is panels[-1]) for panel in panels]
        return style.laid_out(hv, drawn, backend)


@redrawable
def sentence_alone(sentence: str, *, backend: str = "bokeh") -> Any:
    """Draw a small figure that states why there is nothing to draw yet."""
    with style.drawing(backend) as hv:
        words = hv.Labels({("x", "y"): [(0.0, 0.5)], "text": [sentence]}, ["x", "y"], "text")
        frame = {"xlim": (0, 1), "ylim": (0, 1), "xaxis": None, "yaxis": None, "title": "", "backend": backend}
        if backend == "bokeh":
            text: dict[str, Any] = {"text_color": style.NEUTRAL, "text_align": "left", "text_font_size": "11pt"}
            hooks = [style.dress_bokeh]
            return words.opts(**text, **frame, frame_width=700, frame_height=60, toolbar=None, hooks=hooks)
        text = {"color": style.INK, "horizontalalignment": "left", "size": 11}
        hooks = [_no_frame_matplotlib]
        return words.opts(**text, **frame, fig_inches=(7.0, 0.6), aspect=11.0, hooks=hooks)


def _no_frame_matplotlib(plot: Any, element: Any) -> None:
    """Hide the axes, as a holoviews hook."""
    plot.handles["axis"].set_axis_off()


def chosen_signals(
    runs: Mapping[str, xr.DataTree], all_events: Sequence[RunEvents], signals: Sequence[str] | None
) -> list[str]:
    """Return the requested signals, or a default selection."""
    known = list(dict.fromkeys(name for run in runs.values() for name in sig.names(run)))
    if signals is None:
        onsets = sorted(
            (event for run_events in all_events for event in run_events.onsets), key=lambda event: event.step
        )
        alarmed = [name for event in onsets if (name := signal_of(event, known)) is not None]
        signals = sig.default_names(runs, alarmed) or known[:4]
    signals = [signals] if isinstance(signals, str) else list(dict.fromkeys(signals))
    require_choices("signals", signals, known)
    return signals


def healthy_runs(healthy: xr.DataTree | Mapping[str, xr.DataTree] | int | None) -> dict[str, xr.DataTree]:
    """Return the runs in ``healthy``; none if it is a number of steps or None."""
    if healthy is None:
        return {}
    if isinstance(healthy, int | np.integer) and not isinstance(healthy, bool):
        if healthy < 2:
            raise OptionError.of("healthy", healthy, "runs, or a number of steps of at least 2")
        return {}
    return named_runs(cast("Any", healthy), needs_spectra=False)


def _line(run: xr.DataTree, name: str, run_events: RunEvents, reduce: str | None) -> Trace:
    """Return one signal of a run; without values if the run lacks it, which the panel then states."""
    diverged = None if run_events.diverged is None else run_events.diverged.step
    if name not in sig.catalogue(run):
        return Trace(run_events.run, name, name, np.zeros(0, int), np.zeros(0), diverged=diverged)
    found = sig.read(run, name, reduce=reduce)
    title = with_unit(found.long_name, found.unit)
    return Trace(
        run_events.run, title, found.variable, found.step, found.value, found.part == "spectra", diverged=diverged
    )


def _bands(
    lines: list[Trace],
    all_events: Sequence[RunEvents],
    references: Mapping[str, xr.DataTree],
    healthy: Any,
    name: str,
    reduce: str | None,
    quantiles: tuple[float, float],
) -> list[tuple[int | None, SignalBand]]:
    if references:
        found = [sig.read(run, name, reduce=reduce) for run in references.values() if name in sig.catalogue(run)]
        return [(None, healthy_band([(line.step, line.value) for line in found], quantiles=quantiles))]
    if healthy is None:
        return []
    return [
        (run_events.place, own_band(line.step, line.value, int(healthy), quantiles))
        for line, run_events in zip(lines, all_events, strict=True)
    ]


def own_band(step: np.ndarray, value: np.ndarray, before: int, quantiles: tuple[float, float]) -> SignalBand:
    """Return the quantile range of the values of a line before a step, constant over all its steps."""
    start = value[(step < before) & np.isfinite(value)]
    if not len(start):
        return SignalBand(np.zeros(0), np.zeros(0), np.zeros(0))
    lower, upper = np.quantile(start, quantiles)
    return SignalBand(step[[0, -1]].astype(float), np.repeat(lower, 2), np.repeat(upper, 2))


def _band_in_words(references: Mapping[str, Any], healthy: Any, quantiles: tuple[float, float]) -> str:
    quantile_range = f"{percent_range(*quantiles)} range"
    if references:
        return f"gray band: {quantile_range} of {counted(len(references), 'healthy run')}"
    return "" if healthy is None else f"band: {quantile_range} of each run before step {healthy}"


def _view(panels: Sequence[SignalPanel], all_events: Sequence[RunEvents]) -> tuple[float, float]:
    ends = [end for run_events in all_events for end in (run_events.first_step, run_events.last_step)]
    steps = [line.step[[0, -1]] for panel in panels for line in panel.panel.lines if len(line.step)]
    first, last = min(ends), max(ends, default=1)
    if steps:
        first, last = min(first, np.min(steps)), max(last, np.max(steps))
    space = 0.02 * (last - first) or 0.5
    return float(first - space), float(last + space)


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
