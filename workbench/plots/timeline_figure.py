"""Timeline of several runs: their signals and events on one axis of steps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np

from workbench.errors import OptionError
from workbench.formatting import capitalized, clipped, counted, percent_range
from workbench.io.store import named_runs
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt, one_of
from workbench.plots import style
from workbench.plots.curve_figures import Trace, with_unit
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import require_choices
from workbench.plots.primitives import Primitives, decades, flowed
from workbench.plots.timeline_events import signal_of
from workbench.plots.timeline_panels import (
    ALARM,
    EVIDENCE_TITLE,
    RunEvents,
    SignalPanel,
    accounts,
    landmarks,
    lead_in_words,
    marks_in_words,
)
from workbench.studies import signals as sig
from workbench.studies.signals import Quantiles, SignalBand, decimate, healthy_band

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from workbench.plots.timeline_events import TimelineEvent
    from workbench.plots.timeline_panels import EvidencePanel


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
        A holoviews Layout with options for that backend only.
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
        return Drawing(hv, backend, span, all_events, selected).figure(panels, word)


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
#: Pixels: width of the panels, height of a signal and of a lane; above a frame, of its title and of a line of its note.
_WIDTH, _HEIGHT, _ROW, _TITLE, _NOTE = 660, 112, 54, 45, 18
_LONGEST_NAME = 24
_LONGEST_LINE = 105
#: From this number of runs on, edges are drawn instead of shades, whose colors would mix.
_CROWDED = 3
_TIPS = [("", "@what"), ("step", "@step"), ("score", "@score"), ("", "@message")]


class Drawing:
    """Drawing of panels with a common axis of steps; ``selected`` is a step to mark."""

    def __init__(
        self,
        hv: Any,
        backend: str,
        span: tuple[float, float],
        all_events: Sequence[RunEvents],
        selected: int | None = None,
    ) -> None:
        self.hv, self.backend, self.span, self.selected = hv, backend, span, selected
        self.all_events = list(all_events)
        self._runs = [(run_events, style.model_style(run_events.place)["color"]) for run_events in all_events]
        self._cursor: Any = None

    def figure(self, panels: Sequence[SignalPanel], band: str = "") -> Any:
        """Draw the events, the evidence of each run and the signals, from the lowest panel up."""
        below, drawn = 0, []
        watched = [(run_events, run_events.evidence) for run_events in self.all_events if run_events.evidence]
        makers = [lambda bottom: self.lane(band, bottom)]
        makers += [partial(self.evidence, *each) for each in watched]
        makers += [partial(self.panel, panel, is_last=panel is panels[-1]) for panel in panels]
        for make in reversed(makers):
            panel, height = make(below)
            drawn.append(panel)
            below += height
        return style.laid_out(self.hv, drawn[::-1], self.backend)

    def lane(self, band: str, bottom: int) -> tuple[Any, int]:
        """Draw the events, one lane per run; return the panel and its height with its texts."""
        n = len(self.all_events)
        draw = Primitives(self.hv, self.backend, "step", self.hv.Dimension("row", label="run"))
        rows = {id(run_events): n - 1 - index for index, run_events in enumerate(self.all_events)}
        spans = [
            (*span, rows[id(run_events)], color) for run_events, color in self._runs for span in _spans(run_events)
        ]
        if spans:
            start, stop, names, at, colors = (np.array(column) for column in zip(*spans, strict=True))
            look: dict[str, Any] = {"colors": colors, "columns": {"fault": names}, "tips": [("fault", "@fault")]}
            draw.boxes(start, at - 0.26, stop, at + 0.26, alpha=0.22, **look)
        for run_events, color in self._runs:
            row, dash = rows[id(run_events)], style.model_style(run_events.place)["dash"]
            end = run_events.diverged.step if run_events.diverged is not None else run_events.last_step
            draw.line([run_events.first_step, end], [row, row], color=color, dash=dash, width=2)
        self._marks(draw, rows)
        for index, run_events in enumerate(self.all_events):  # on top of everything else
            self._lead(draw, run_events, n - 1 - index)
        has_lead = any(run_events.lead is not None for run_events in self.all_events)
        view = (-0.45, n - 0.15 if has_lead else n - 0.55)
        self._mark_selected(draw, view)
        titles = [clipped(run_events.run, _LONGEST_NAME, keep_end=True) for run_events in self.all_events]
        lines = [part for line in accounts(self.all_events) for part in textwrap.wrap(line, _LONGEST_LINE)]
        lines += [flowed(marks_in_words(self.all_events), n_characters=_LONGEST_LINE), band]
        if self.selected is not None:
            lines.append(f"dotted line: selected step {self.selected:,}")
        return self._framed(
            draw,
            "Events",
            "\n".join(filter(None, lines)),
            view=view,
            height=round(_ROW * (view[1] - view[0])),
            bottom=bottom,
            ticks=[(n - 1 - index, name) for index, name in enumerate(titles)],
        )

    def evidence(self, run_events: RunEvents, evidence: EvidencePanel, bottom: int) -> tuple[Any, int]:
        """Draw the evidence of a run: its strongest signals and the line at which an alarm is raised."""
        title = EVIDENCE_TITLE + (f": {run_events.run}" if len(self.all_events) > 1 else "")
        draw = Primitives(self.hv, self.backend, "step", self.hv.Dimension("value", label=title))
        self._shade(draw, [run_events], evidence.view)
        draw.line(self.span, [ALARM] * 2, color=style.NEUTRAL, width=1.2, dash="dashed")
        for line, dash in zip(evidence.lines, cycle(style.MODEL_DASHES)):
            tips = [("", line.signal), ("step", "@step"), ("evidence", "@value")]
            at = decimate(line.step, line.value, _N_BUCKETS)
            draw.line(*at, color=line.color, dash=dash, label=clipped(line.signal, 22, keep_end=True), tips=tips)
        note = textwrap.wrap(evidence.note, _LONGEST_LINE, max_lines=3, placeholder=" …")
        return self._framed(draw, title, "\n".join(note), view=evidence.view, bottom=bottom, is_log=True, legend=True)

    def panel(self, signal: SignalPanel, bottom: int, *, is_last: bool) -> tuple[Any, int]:
        """Draw one signal of all runs."""
        panel = signal.panel
        draw = Primitives(self.hv, self.backend, "step", self.hv.Dimension("value", label=panel.title))
        for place, band in signal.bands:
            look = {"color": style.NEUTRAL, "dash": "solid"} if place is None else style.model_style(place)
            if len(signal.bands) < _CROWDED:
                alpha = 0.28 if place is None else 0.16
                draw.band(band["step"], band["lower"], band["upper"], color=look["color"], alpha=alpha)
                continue
            for edge in ("lower", "upper"):
                draw.line(band["step"], band[edge], color=look["color"], dash=look["dash"], width=0.8)
        self._shade(draw, self.all_events, panel.view)
        for line, run_events in zip(panel.lines, self.all_events, strict=True):
            look = style.model_style(run_events.place)
            at, color = decimate(line.step, line.value, _N_BUCKETS), look["color"]
            tips = [("", run_events.run), ("step", "@step"), (panel.title, "@value")]
            of_line = () if line.has_markers else tips
            draw.line(*at, color=color, dash=look["dash"], width=1.5, label=run_events.run, tips=of_line)
            if line.has_markers:
                draw.dots(*at, color=color, marker=look["marker"], size=6, tips=tips)
        onsets = [
            (*onset, color) for onset, (_, color) in zip(signal.onsets, self._runs, strict=True) if onset is not None
        ]
        self._alarms(draw, onsets)
        crosses = [
            (line.cross[0], float(np.clip(line.cross[1], *panel.limits)), color)
            for line, (_, color) in zip(panel.lines, self._runs, strict=True)
            if line.cross is not None
        ]
        _dots(draw, crosses, marker="x", size=12)
        note = textwrap.wrap(panel.note, _LONGEST_LINE, max_lines=3, placeholder=" …")
        title = clipped(capitalized(panel.title), 70, keep_end=True)
        frame: dict[str, Any] = {"view": panel.view, "is_log": panel.is_logarithmic, "is_last": is_last}
        return self._framed(draw, title, "\n".join(note), bottom=bottom, **frame)

    def _shade(self, draw: Primitives, all_events: Sequence[RunEvents], view: tuple[float, float]) -> None:
        """Shade active faults unless many runs have some, and draw the ends of lead times and the selected step."""
        is_crowded = sum(bool(run_events.faults) for run_events in all_events) >= _CROWDED  # the lanes show them too
        runs = [(run_events, style.model_style(run_events.place)["color"]) for run_events in all_events]
        spans = [(start, stop, color) for run_events, color in runs for start, stop, _ in _spans(run_events)]
        if spans and not is_crowded:
            start, stop, colors = (np.array(column) for column in zip(*spans, strict=True))
            draw.boxes(start, view[0], stop, view[1], colors=colors, alpha=0.09)
        ends = [(event.step, dash, color) for run_events, color in runs for event, dash in landmarks(run_events)]
        for kind in ("dashed", "dotted"):
            if of_kind := [(step, color) for step, dash, color in ends if dash == kind]:
                at, paint = (np.array(column) for column in zip(*of_kind, strict=True))
                draw.bars(at, view[0], at, view[1], color=paint, width=1, dash=kind, alpha=0.75)
        self._mark_selected(draw, view)

    def _mark_selected(self, draw: Primitives, view: tuple[float, float]) -> None:
        if self.selected is not None:
            draw.bars(self.selected, view[0], self.selected, view[1], color=style.NEUTRAL, dash="dotted")

    def _marks(self, draw: Primitives, rows: Mapping[int, int]) -> None:
        """Draw probes below the lines of the runs, and on them alarms, actions and divergences; one element a kind."""
        found: dict[str, list[tuple[Any, float, str]]] = {kind: [] for kind in ("later", "onset", "action", "end")}
        probes: dict[bool, list[tuple[Any, float, str]]] = {True: [], False: []}
        for run_events, color in self._runs:
            row, onsets = rows[id(run_events)], run_events.onsets
            sound = sorted({check.step for check in run_events.checks if check.is_sound})
            probes[True] += [(step, row - 0.19, style.NEUTRAL) for step in sound]
            probes[False] += [(event, row - 0.19, style.BROKEN) for event in run_events.findings]
            for event in run_events.events:
                if event.kind == "alarm" and event not in onsets:
                    found["later"].append((event.step, row, color))
                elif event.kind == "action":
                    found["action"].append((event, row, color))
            found["onset"] += [(event, row, color) for event in onsets]
            if run_events.diverged is not None:
                found["end"].append((run_events.diverged.step, row, color))
        _dots(draw, probes[True], size=3)
        _dots(draw, probes[False], marker="square", size=7)
        if found["later"]:
            at, height, colors = (np.array(column) for column in zip(*found["later"], strict=True))
            draw.bars(at, height - 0.14, at, height + 0.14, color=colors, width=1.2, alpha=0.7)
        self._alarms(draw, found["onset"])
        _dots(draw, found["action"], marker="diamond", size=9)
        _dots(draw, found["end"], marker="x", size=12)

    def _alarms(self, draw: Primitives, alarms: Sequence[tuple[TimelineEvent, float, str]]) -> None:
        for is_established in (False, True):
            of_kind = [alarm for alarm in alarms if alarm[0].is_established is is_established]
            _dots(draw, of_kind, marker="inverted_triangle", size=11, is_hollow=is_established)

    def _lead(self, draw: Primitives, run_events: RunEvents, row: int) -> None:
        """Draw the lead time as an arrow with a label."""
        lead = run_events.lead
        if lead is None or not lead.meets(*self.span):
            return
        height, start, stop = row + 0.4, lead.first.step, lead.then.step
        draw.bars(
            [start, start], [height, height - 0.09], [stop, start], [height, height + 0.09], color=draw.ink, width=1.6
        )
        draw.words(stop, height, "▶" if stop >= start else "◀", align="right" if stop >= start else "left", size=7)
        # The label is above the arrow, as close to its center as the frame allows.
        words, width = lead_in_words(lead), self.span[1] - self.span[0]
        half = 0.5 * width * min(0.9, 6.2 * len(words) / _WIDTH)
        middle = np.clip([start, stop], *self.span).mean()
        x = float(np.clip(middle, self.span[0] + half, self.span[1] - half))
        draw.words(x, height + 0.08, words, align="center", valign="bottom")

    def _framed(
        self,
        draw: Primitives,
        title: str,
        note: str,
        *,
        view: tuple[float, float],
        bottom: int,
        height: int = _HEIGHT,
        is_log: bool = False,
        is_last: bool = False,
        legend: bool = False,
        ticks: list[tuple[int, str]] | None = None,
    ) -> tuple[Any, int]:
        """Return a panel and its height with its texts, in pixels."""
        panel = draw.panel(
            title=title,
            note=note,
            view=(self.span, view),
            size=(_WIDTH, height),
            names=("step", ""),
            ticks=(None, (decades(*view, n_most=5) or None) if is_log else ticks),
            is_log=(False, is_log),
            legend=legend,
            grid=ticks is None,
            bare=(not is_last, False),
            at=(0, bottom),
            hooks=[self._linked_cursor] if ticks or is_log else [self._linked_cursor, _few_ticks_bokeh],
        )
        return panel, height + _TITLE + _NOTE * (note.count("\n") + 1 if note else 0)

    def _linked_cursor(self, plot: Any, element: Any) -> None:
        """Add one vertical line at the pointer to all panels, as a holoviews hook."""
        from bokeh.models import CrosshairTool, Span

        if plot.state.select({"type": CrosshairTool}):
            return
        if self._cursor is None:
            self._cursor = Span(dimension="height", line_color=style.NEUTRAL, line_width=1)
        plot.state.add_tools(CrosshairTool(overlay=self._cursor, visible=False))


def _spans(run_events: RunEvents) -> list[tuple[int, int, str]]:
    """Return the first and the last step of each active fault, and its name."""
    return [
        (fault.start, run_events.last_step if fault.stop is None else fault.stop, fault.name)
        for fault in run_events.faults
    ]


def _dots(draw: Primitives, marks: Sequence[tuple[Any, float, str]], **look: Any) -> None:
    """Draw one marker for each event, or step, at a height and in a color; an event has a tooltip."""
    if not marks:
        return
    events, heights, colors = zip(*marks, strict=True)
    at = [event if isinstance(event, int) else event.step for event in events]
    if not isinstance(events[0], int):
        look["tips"] = _TIPS
        look["columns"] = {
            "what": [", ".join(filter(None, [f"{event.kind} {event.source}", event.place])) for event in events],
            "score": ["" if np.isnan(event.score) else f"{event.score:.3g}" for event in events],
            "message": [event.message for event in events],
        }
    draw.dots(at, heights, color=colors if len(set(colors)) > 1 else colors[0], **look)


def _few_ticks_bokeh(plot: Any, element: Any) -> None:
    """Format a linear axis, as a holoviews hook: few ticks, plain numbers."""
    from bokeh.models import BasicTickFormatter

    for axis in plot.state.yaxis:
        axis.ticker.desired_num_ticks = 4
        axis.formatter = BasicTickFormatter(power_limit_high=6, power_limit_low=-4)
