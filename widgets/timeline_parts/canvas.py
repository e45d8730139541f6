"""The figure of the timeline: the kernel holds the data, and sends the page its state and visible points, or all."""

from __future__ import annotations

import base64
import html
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from workbench.formatting import capitalized, counted, listed, percent_range
from workbench.plots.style import BROKEN, depth_colors, model_style
from workbench.plots.timeline_events import TimelineEvent, signal_of
from workbench.plots.timeline_figure import own_band
from workbench.plots.timeline_panels import ALARM, FARTHEST, PanelAxis, RunEvents, lead_in_words, no_alarms_in_words
from workbench.studies import signals as sig
from workbench.studies.signals import SignalBand, decimate, healthy_band
from workbench.widgets.live.history import LiveModes
from workbench.widgets.live.latest_state import LatestState
from workbench.widgets.live.latest_state import script as live_script
from workbench.widgets.timeline_parts.followed_run import FollowedRun, SignalLine


@dataclass(frozen=True)
class Detail:
    """One run at a step: a signal, (row, column), with labels and layer of each row, and the nearest modes."""

    run: str
    heat: np.ndarray | None
    rows: list[str]
    columns: list[str]
    row_layers: list[int | None]
    step: int
    modes: LiveModes | None
    mode_layers: list[int]


@dataclass(frozen=True)
class PanelSelection:
    """A step that was selected, directly or by an event, with each run's details; ``dims`` names the maps' axes."""

    step: int
    signal: str
    run: str = ""
    event: TimelineEvent | None = None
    dims: tuple[str, str] = ("", "")
    details: list[Detail] = field(default_factory=list)

    @classmethod
    def of(
        cls, runs: Sequence[FollowedRun], step: int, signal: str, *, run: str = "", event: TimelineEvent | None = None
    ) -> PanelSelection:
        """Read the details of each run at its recorded step nearest to a step."""
        details, dims = [], ("", "")
        for each in runs:
            detail, found = _detail(each, step, signal)
            details.append(detail)
            dims = found or dims
        return cls(step, signal, run, event, dims, details)


def _detail(run: FollowedRun, step: int, signal: str) -> tuple[Detail, tuple[str, str] | None]:
    """Return the details of a run at a step, and the names of the rows and columns of its heat map."""
    heat = run.heat(signal, step) if signal else None
    modes, layers = run.modes(step) or (None, [])
    if heat is None:
        return Detail(run.name, None, [], [], [], step, modes, layers), None
    values = np.asarray(heat.values, float)
    rows, columns = heat.dims[0], heat.dims[1] if heat.ndim > 1 else ""
    labels = _labels(heat, rows), _labels(heat, columns) if columns else [""], _layers(heat, rows)
    detail = Detail(run.name, values.reshape(len(values), -1), *labels, int(heat["step"]), modes, layers)
    return detail, (str(rows), str(columns))


def _labels(heat: xr.DataArray, dim: Any) -> list[str]:
    names = f"{dim}_name"
    if dim == "module" and names in heat.coords:
        return [str(name) for name in heat[names].values]
    labels = heat[dim].values if dim in heat.coords else range(heat.sizes[dim])
    return [str(label) for label in labels]


def _layers(heat: xr.DataArray, dim: Any) -> list[int | None]:
    """Return the layer of each row; None for modules outside of all layers, which are recorded as -1."""
    if "layer" not in heat.coords or heat["layer"].dims != (dim,):
        return list(range(heat.sizes[dim])) if dim == "layer" else [None] * heat.sizes[dim]
    return [int(layer) if layer >= 0 else None for layer in heat["layer"].values]


#: Name of a dash style of `model_style` -> dash lengths.
DASHES = {"solid": [], "dashed": [6, 3], "dotted": [2, 3], "dashdot": [7, 3, 2, 3]}
#: Maximum number of stretches of probe measurements that found a fault.
_N_STRETCHES = 200
_FLOAT32 = 3e38


class Buffers:
    """Binary arrays that accompany a state, identified by their index."""

    def __init__(self) -> None:
        self.done: list[bytes] = []
        self._places: dict[bytes, int] = {}

    def put(self, **arrays: np.ndarray) -> dict[str, int]:
        """Add arrays as float32, and return their indices by name."""
        clipped = {name: np.clip(array, -_FLOAT32, _FLOAT32) for name, array in arrays.items()}
        return {name: self.add(array.astype(np.float32).tobytes()) for name, array in clipped.items()}

    def add(self, content: bytes) -> int:
        """Add bytes, unless the same are present, and return their index."""
        if content not in self._places:
            self._places[content] = len(self.done)
            self.done.append(content)
        return self._places[content]


def described(run: FollowedRun, is_shown: bool, buffers: Buffers) -> dict[str, Any]:
    """Return a run with its events."""
    look, run_events = model_style(run.place), run.run_events
    onsets = run_events.onsets
    first = {id(event) for event in onsets}
    lead = run_events.lead
    return {
        "name": run.name,
        "color": look["color"],
        "dash": DASHES[look["dash"]],
        "is_shown": is_shown,
        "state": run.state,
        "words": run.state_in_words,
        "account": run_events.account,
        "has_alarm": bool(onsets),
        "first": run_events.first_step,
        "last": run_events.last_step,
        "faults": [{"name": span.name, "start": span.start, "stop": span.stop} for span in run_events.faults],
        "onsets": [marked(run.name, event, "alarm") for event in onsets],
        "later": [e.step for e in run_events.events if e.kind == "alarm" and id(e) not in first][:2000],
        "actions": [marked(run.name, event, "action") for event in run_events.events if event.kind == "action"],
        "checks": buffers.put(
            sound=np.unique([check.step for check in run_events.checks if check.is_sound]),
            broken=np.unique([event.step for event in run_events.findings]),
        ),
        "findings": _stretches(run.name, run_events)[:_N_STRETCHES],
        "diverged": None if run_events.diverged is None else marked(run.name, run_events.diverged, "cross"),
        "lead": None if lead is None else [lead.first.step, lead.then.step, lead_in_words(lead)],
    }


def _stretches(run: str, run_events: RunEvents) -> list[dict[str, Any]]:
    """Return stretches of consecutive measurements of a probe that found a fault: the first one, and the last step."""
    found: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any] | None] = {}
    for check in run_events.checks:
        if check.is_sound:
            latest[check.signal] = None
            continue
        stretch = latest.get(check.signal)
        if stretch is None:
            event = TimelineEvent(check.step, "probe", check.signal, message=check.message)
            stretch = latest[check.signal] = marked(run, event, "probe")
            found.append(stretch)
        stretch["last"] = check.step
    data = [event for event in run_events.findings if event.kind == "alarm"]
    return found + [marked(run, event, "probe") | {"last": event.step} for event in data]


def marked(run: str, event: TimelineEvent, kind: str) -> dict[str, Any]:
    """Return an event of a run with the kind of its mark."""
    return {
        "run": run,
        "kind": kind,
        "step": event.step,
        "source": event.source,
        "place": event.place,
        "score": event.score if math.isfinite(event.score) else None,
        "message": event.message,
        "is_established": event.is_established,
    }


def selected(selection: PanelSelection | None, shown: Sequence[FollowedRun], buffers: Buffers) -> dict[str, Any] | None:
    """Return the details shown next to the panels."""
    if selection is None:
        return None
    names = {run.name for run in shown}
    details, heats = [], [np.zeros(0)]
    for detail in selection.details:
        if detail.run not in names:
            continue
        packed: dict[str, Any] = {
            "run": detail.run,
            "step": detail.step,
            "rows": detail.rows,
            "columns": detail.columns,
            "row_layers": detail.row_layers,
        }
        packed["heat"] = packed["modes"] = None
        if detail.heat is not None:
            packed["heat"] = buffers.put(value=detail.heat.ravel())["value"]
            heats.append(detail.heat[np.isfinite(detail.heat)])
        if detail.modes is not None:
            modes = detail.modes
            packed["modes"] = [buffers.add(array.tobytes()) for array in (modes.points, modes.layer, modes.is_reliable)]
            packed |= {
                "modes_step": modes.step,
                "near_unit": modes.near_unit,
                "depth_colors": depth_colors(len(detail.mode_layers)),
                "mode_layers": detail.mode_layers,
            }
            packed |= {"near_unit_mass": _plain(modes.near_unit_mass), "spectral_radius": _plain(modes.spectral_radius)}
        details.append(packed)
    axis = PanelAxis.of(selection.signal.split(" ")[0], np.concatenate(heats), shows_all=True)
    event = selection.event
    return {
        "step": selection.step,
        "signal": selection.signal,
        "run": selection.run,
        "event": None if event is None else marked(selection.run, event, event.kind),
        "layer": None if event is None else event.layer,
        "head": None if event is None else event.head,
        "dims": list(selection.dims),
        "low": axis.low,
        "high": axis.high,
        "is_log": axis.is_logarithmic,
        "is_low_bad": bool(selection.signal) and sig.bad_direction(selection.signal) == "low",
        "details": details,
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


#: Maximum number of alarms in the list next to the figure.
N_LISTED = 60
#: Fraction of the view that is also sent on either side, so that panning shows lines immediately.
_MARGIN = 0.25


@dataclass
class ViewSettings:
    """The settings of the view; any thread may set a field.

    ``reduce`` is None for the worst value, ``view`` for all steps, including future ones, and ``seen`` (the signals
    whose panels are on the screen; lines of others are not sent) for all. The width of a panel is in pixels.
    """

    signals: list[str]
    shown: list[str]
    reduce: str | None = None
    view: tuple[float, float] | None = None
    width: int = 800
    seen: frozenset[str] | None = None
    selection: PanelSelection | None = None


@dataclass(frozen=True)
class CanvasPart:
    """The part of the record that is sent, with enough points per line; ``seen`` is as in `ViewSettings`."""

    runs: Sequence[FollowedRun]
    signals: Sequence[str]
    steps: tuple[float, float]
    n_points: int
    seen: frozenset[str] | None = None

    def has(self, panel: str) -> bool:
        """Return whether the lines of a panel are sent."""
        return self.seen is None or panel in self.seen


def _files(*names: str) -> str:
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


class TimelineCanvas(LatestState):
    """Draws runs on a shared step axis with HTML canvases; ``ask`` is called with a request of the page."""

    _esm = live_script("latest_state.js", "plane.js", "traces.js", "hover.js") + _files(
        "state.js", "panels.js", "details.js", "lists.js", "timeline.js"
    )
    _css = _files("timeline.css")

    def __init__(
        self,
        runs: dict[str, FollowedRun],
        settings: ViewSettings,
        healthy: Sequence[FollowedRun] | int | None,
        quantiles: tuple[float, float],
        ask: Callable[[dict[str, Any]], None],
    ) -> None:
        self.runs, self.settings = runs, settings
        self._healthy, self._quantiles, self._ask = healthy, quantiles, ask
        self._axes: dict[Any, bool] = {}
        self._bands: dict[Any, SignalBand] = {}
        self._token, self._is_held = "", False
        super().__init__()

    @property
    def extent(self) -> tuple[float, float]:
        """First and last step of all runs."""
        all_events = [run.run_events for run in self.runs.values()]
        first, last = min(s.first_step for s in all_events), max(s.last_step for s in all_events)
        return float(first), float(max(last, first + 1))

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return all data to draw."""
        settings = self.settings
        token = self._token  # before the view is read, so that a later view gets a later state
        shown = [self.runs[name] for name in list(settings.shown)]
        view = self.view
        # A line is thicker than a pixel, so fewer points than pixels are sufficient.
        margin = _MARGIN * (view[1] - view[0])
        n = max(50, int(0.75 * settings.width * (1 + 2 * _MARGIN)))
        part = CanvasPart(shown, list(settings.signals), (view[0] - margin, view[1] + margin), n, settings.seen)
        content, buffers = self.content(part)
        content |= {"token": token, "selection": selected(settings.selection, shown, buffers)}
        return content, buffers.done

    @property
    def view(self) -> tuple[float, float]:
        """First and last step in view."""
        extent = self.extent
        space = 0.015 * (extent[1] - extent[0])
        return self.settings.view or (extent[0] - space, extent[1] + space)

    def content(self, part: CanvasPart) -> tuple[dict[str, Any], Buffers]:
        """Return the state without the selection, for a part of the record."""
        buffers, shown = Buffers(), part.runs
        content = {
            "view": list(self.view),
            "is_whole": self.settings.view is None,
            "extent": list(self.extent),
            "runs": [described(run, run.name in self.settings.shown, buffers) for run in self.runs.values()],
            "broken": BROKEN,
            "signals": self._offered(),
            "chosen": list(self.settings.signals),
            "reduce": self.settings.reduce or "worst",
            "panels": [
                *(self._evidence(run, part, buffers) for run in shown if run.run_events.evidence is not None),
                *(self._panel(name, part, buffers) for name in part.signals),
            ],
            "alarms": self._listed(shown),
            "no_alarms": capitalized(no_alarms_in_words([run.run_events for run in shown])),
            "band": self._band_in_words(),
        }
        return content, buffers

    def _evidence(self, run: FollowedRun, part: CanvasPart, buffers: Buffers) -> dict[str, Any]:
        """Return the evidence panel of a run."""
        name, run_events = f"evidence of {run.name}", run.run_events
        if run_events.evidence is None or not part.has(name):
            return {"name": name, "is_seen": False}
        lines, marks = [], []
        for line, dash in zip(run_events.evidence.lines, cycle(DASHES.values())):
            step, value = decimate(line.step, line.value, part.n_points, *part.steps)
            lines.append(
                {"run": run.name, "signal": line.signal, "color": line.color, "dash": dash}
                | buffers.put(step=step, value=value)
            )
            for event in run_events.onsets:
                row = int(np.searchsorted(line.step, event.step, side="right")) - 1
                if event.source == line.signal and row >= 0:
                    marks.append(marked(run.name, event, "alarm") | {"value": float(line.value[row])})
        low, high = run_events.evidence.view
        of_run = f": {run.name}" if len(self.runs) > 1 else ""
        return {
            "name": name,
            "run": run.name,
            "is_seen": True,
            "title": f"evidence of a change{of_run}",
            "note": run_events.evidence.note,
            "remarks": [],
            "is_log": True,
            "low": low,
            "high": high,
            "limit": ALARM,
            "farthest": FARTHEST,
            "lines": lines,
            "bands": [],
            "marks": marks,
        }

    def _panel(self, name: str, part: CanvasPart, buffers: Buffers) -> dict[str, Any]:
        """Return the panel of one signal with all displayed runs."""
        if not part.has(name):
            return {"name": name, "is_seen": False}
        reduce = self.settings.reduce
        found = [(run, line) for run in part.runs if (line := run.line(name, reduce)) is not None]
        lines, values, remarks = [], [np.zeros(0)], []
        for run, line in found:
            step, value = decimate(line.step, line.value, part.n_points, *part.steps)
            values.append(value[slice(*np.searchsorted(step, self.view))])
            lines.append({"run": run.name, **buffers.put(step=step, value=value)})
            if line.remark:
                remarks.append([run.name, line.remark])
        remarks += [[run.name, "not recorded"] for run in part.runs if name not in run.entries]
        variable = found[0][1].variable if found else name
        axis = PanelAxis.of(variable, np.concatenate(values), shows_all=True)
        return {
            "name": name,
            "is_seen": True,
            "title": found[0][1].title if found else name,
            "note": "",
            "remarks": remarks,
            "is_log": self._is_log(name, reduce, found) and axis.low > 0,
            "low": axis.low,
            "high": axis.high,
            "lines": lines,
            "bands": [
                {"run": run, **buffers.put(step=band.step, lower=band.lower, upper=band.upper)}
                for run, band in self._bands_of(name, reduce, found)
                if len(band.step)
            ],
            "marks": self._marks(name, found),
        }

    def _is_log(self, name: str, reduce: str | None, found: Sequence[tuple[FollowedRun, SignalLine]]) -> bool:
        """Return whether the axis is logarithmic, judged by all steps so that zooming does not change it."""
        key = name, reduce, tuple((run.name, line.n_rows) for run, line in found)
        if key not in self._axes:
            if len(self._axes) > 500:
                self._axes.clear()
            ends = [np.array([line.value.min(), line.value.max()]) for _, line in found if len(line.value)]
            pooled = np.concatenate([np.zeros(0), *ends])
            self._axes[key] = bool(len(pooled)) and PanelAxis.of(found[0][1].variable, pooled).is_logarithmic
        return self._axes[key]

    def _bands_of(
        self, name: str, reduce: str | None, found: Sequence[tuple[FollowedRun, SignalLine]]
    ) -> list[tuple[str | None, SignalBand]]:
        if self._healthy is None:
            return []
        if isinstance(self._healthy, int):
            return [(run.name, own_band(line.step, line.value, self._healthy, self._quantiles)) for run, line in found]
        lines = [line for run in self._healthy if (line := run.line(name, reduce)) is not None]
        key = name, reduce, tuple(line.n_rows for line in lines)
        if key not in self._bands:
            if len(self._bands) > 200:
                self._bands.clear()
            pairs = [(line.step, line.value) for line in lines]
            self._bands[key] = healthy_band(pairs, quantiles=self._quantiles)
        return [(None, self._bands[key])]

    def _marks(self, name: str, found: Sequence[tuple[FollowedRun, SignalLine]]) -> list[dict[str, Any]]:
        """Return the marks of first alarms and divergences on their lines."""
        marks = []
        for run, line in found:
            run_events = run.run_events
            places = [(event, "alarm") for event in run_events.onsets if signal_of(event, [name]) == name]
            places += [(run_events.diverged, "cross")] if run_events.diverged is not None else []
            for event, kind in places:
                row = int(np.searchsorted(line.step, event.step, side="right")) - 1
                if row >= 0:
                    marks.append(marked(run.name, event, kind) | {"value": float(line.value[row])})
        return marks

    def _offered(self) -> list[dict[str, str]]:
        entries: dict[str, sig.Entry] = {}
        for run in self.runs.values():
            entries = {**run.entries, **entries} if entries else dict(run.entries)
        return [{"name": name, "part": entry.part, "title": entry.long_name} for name, entry in entries.items()]

    def _listed(self, shown: Sequence[FollowedRun]) -> list[dict[str, Any]]:
        """Return the first alarms of all displayed runs, by step."""
        found = [marked(run.name, event, "alarm") for run in shown for event in run.run_events.onsets]
        return sorted(found, key=lambda mark: mark["step"])[:N_LISTED]

    def _band_in_words(self) -> str:
        if self._healthy is None:
            return ""
        quantiles = percent_range(*self._quantiles)
        if isinstance(self._healthy, int):
            return f"{quantiles} of each run's values before step {self._healthy}"
        return f"{quantiles} of {counted(len(self._healthy), 'healthy run')}"

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        if "ask" in content:
            self._is_held = True  # one state is sent after all changes
            try:
                self._ask(content["ask"])
            finally:
                self._token, self._is_held = str(content.get("token", "")), False
            self.refresh()
        if content.get("painted") == 0:  # a new page
            self.settings.seen = None
        super()._receive(_, content, buffers)

    def refresh(self) -> None:
        """Refresh as in `LatestState`, but only once at the end of a request of the page."""
        if not self._is_held:
            super().refresh()


#: Maximum number of buckets of a line, each of which keeps its lowest and highest value.
_N_BUCKETS = 1400
#: Maximum bytes of all lines, which limits the points per line, and of all details, which limits the steps.
_MOST_OF_LINES, _MOST_OF_DETAILS = 6_000_000, 4_000_000
#: Maximum number of steps with details, in addition to first alarms.
_N_STEPS = 24

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}
</style>
</head>
<body>
<main class="workbench-{theme}">
<h1>{title}</h1>
<p>{summary}</p>
<div id="timeline"></div>
<noscript>This page needs JavaScript to draw its figure.</noscript>
</main>
<script type="text/plain" id="record">{record}</script>
<script type="module">
{script}
</script>
</body>
</html>
"""


def saved_page(canvas: TimelineCanvas, mapped: str, *, summary: str, theme: str) -> str:
    """Return the page as HTML."""
    here = Path(__file__)
    script = str(canvas._esm) + "\n" + here.with_name("saved_page.js").read_text()
    return _PAGE.format(
        title=html.escape(
            f"Timeline of {listed(list(canvas.runs)) if len(canvas.runs) < 3 else counted(len(canvas.runs), 'run')}"
        ),
        summary=html.escape(summary),
        theme=theme,
        css=here.with_name("saved_page.css").read_text() + str(canvas._css),
        record=packed(*record_of(canvas, mapped)),
        script=script.replace("</", "<\\/"),
    )


def record_of(canvas: TimelineCanvas, mapped: str) -> tuple[dict[str, Any], list[bytes]]:
    """Return all data that the page may request: signals of all runs, and details of first alarms and some steps."""
    runs = list(canvas.runs.values())
    names = list(dict.fromkeys(name for run in runs for name in run.entries))
    n_lines = sum(len(run.entries) for run in runs)
    n_buckets = int(np.clip(_MOST_OF_LINES / (2 * 8 * max(n_lines, 1)), 100, _N_BUCKETS))
    content, buffers = canvas.content(CanvasPart(runs, names, canvas.extent, n_buckets))

    def packed_at(step: int, signal: str, **of_alarm: Any) -> dict[str, Any]:
        return selected(PanelSelection.of(runs, step, signal, **of_alarm), runs, buffers) or {}

    alarms = sorted(((run, event) for run in runs for event in run.run_events.onsets), key=lambda pair: pair[1].step)
    has_layers = {name for run in runs for name, entry in run.entries.items() if entry.places}
    alarmed = {(run.name, event.source): signal_of(event, names) or "" for run, event in alarms}
    shown = [mapped, *canvas.settings.signals, *alarmed.values()]
    mappable = list(dict.fromkeys(name for name in shown if name in has_layers)) or [""]

    moments = []
    for run, event in alarms[:N_LISTED]:
        signal = alarmed[run.name, event.source]
        moments.append(
            packed_at(event.step, signal if signal in has_layers else mappable[0], run=run.name, event=event)
        )
    steps = np.unique(np.concatenate([np.zeros(0, int), *(run.recorded_steps for run in runs)]))
    if len(steps):
        before = sum(map(len, buffers.done))
        moments += [packed_at(int(steps[-1]), signal) for signal in mappable]
        taken = sum(map(len, buffers.done)) - before
        room = int(np.clip(_MOST_OF_DETAILS / max(taken, 1), 4, _N_STEPS))
        moments += [packed_at(step, signal) for step in _spread(steps[:-1], room - 1) for signal in mappable]
    select, chosen = None, canvas.settings.selection
    if chosen is not None:
        signal = chosen.signal if chosen.event is None else chosen.event.source
        select = {"step": chosen.step, "signal": signal, "run": chosen.run or None}
        if chosen.event is None:
            moments.append(packed_at(chosen.step, chosen.signal))
    return content | {"moments": moments, "mappable": mappable, "select": select}, buffers.done


def packed(content: Mapping[str, Any], buffers: list[bytes]) -> str:
    """Return JSON and arrays compressed as one text, which `saved_page.js` unpacks."""
    head = json.dumps({**content, "sizes": list(map(len, buffers))}, allow_nan=False).encode()
    content_bytes = b"".join([len(head).to_bytes(4, "little"), head, *buffers])
    return base64.b64encode(zlib.compress(content_bytes, 9)).decode()


def _spread(steps: np.ndarray, n: int) -> list[int]:
    """Return at most n evenly spaced elements of increasing steps."""
    kept = np.unique(np.linspace(0, len(steps) - 1, min(n, len(steps))).round().astype(int))
    return [int(step) for step in steps[kept]]
