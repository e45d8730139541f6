"""The figure of the timeline: the kernel holds the data, the page gets the points that it can show of the view."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import counted, percent_range
from workbench.plots.style import BROKEN, depth_colors, model_style
from workbench.plots.timeline_drawing import lead_in_words
from workbench.plots.timeline_events import TimelineEvent, signal_of
from workbench.plots.timeline_evidence import ALARM, FARTHEST
from workbench.plots.timeline_figure import own_band
from workbench.plots.timeline_panels import PanelAxis
from workbench.studies import signals as sig
from workbench.widgets.live.latest_state import LatestState
from workbench.widgets.live.latest_state import script as live_script

if TYPE_CHECKING:
    from workbench.plots.timeline_panels import Story
    from workbench.widgets.live.history import LiveModes
    from workbench.widgets.timeline_parts.followed_run import FollowedRun, SignalLine

#: As lists of dash lengths, by the names of `model_style`.
_DASHES = {"solid": [], "dashed": [6, 3], "dotted": [2, 3], "dashdot": [7, 3, 2, 3]}
#: Number of alarms in the list next to the figure, and of stretches of broken probe measurements.
_N_LISTED, _N_STRETCHES = 60, 200
#: Beyond the view, on either side, so much of it is sent too: panning shows lines at once.
_MARGIN = 0.25
_FLOAT32 = 3e38


@dataclass
class Wishes:
    """The settings of the view; any thread may set a field.

    Attributes:
        signals: Signals from top to bottom.
        shown: Names of the runs that are shown.
        reduce: ``"min"``, ``"max"`` or ``"mean"``; None: the worst value.
        view: First and last step; None: all there are, also those to come.
        width: Pixels that a panel is wide.
        seen: Signals whose panels are on the screen, and the only ones to send lines of; None: all.
        selection: Details shown next to the panels; None: nothing.
    """

    signals: list[str]
    shown: list[str]
    reduce: str | None = None
    view: tuple[float, float] | None = None
    width: int = 800
    seen: frozenset[str] | None = None
    selection: PanelSelection | None = None


@dataclass(frozen=True)
class Detail:
    """The details of one run at a step.

    Attributes:
        run: Its name.
        heat: The signal with its layers and heads, shape (row, column); None: there is none.
        rows: Labels of its rows.
        columns: Labels of its columns; one empty label where there are only rows.
        step: Step of the heat map.
        modes: The nearest recorded ones; None: no spectra.
        n_layers: Number of layers of the modes.
    """

    run: str
    heat: np.ndarray | None
    rows: list[str]
    columns: list[str]
    step: int
    modes: LiveModes | None
    n_layers: int


@dataclass(frozen=True)
class PanelSelection:
    """A step that was chosen, by an alarm or by hand.

    Attributes:
        step: The step.
        signal: Signal of the heat maps; empty: no signal has layers.
        run: Whose alarm it is; empty: none's.
        event: The alarm; None: a step chosen by hand.
        dims: Names of the heat maps' rows and columns.
        details: Details, one per run.
    """

    step: int
    signal: str
    run: str = ""
    event: TimelineEvent | None = None
    dims: tuple[str, str] = ("", "")
    details: list[Detail] = field(default_factory=list)


def _files(*names: str) -> str:
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


class TimelineCanvas(LatestState):
    """Draws runs on one axis of steps with plain canvases, in the colours of JupyterLab's theme.

    Args:
        runs: Runs by name.
        wishes: What is looked at.
        healthy: Healthy runs, or a number of steps, or None; as in `workbench.plots.timeline`.
        quantiles: Quantiles of the healthy band.
        ask: Called with the request of the user on the page, such as ``{"view": [0, 10]}``.

    """

    _esm = live_script("latest_state.js", "plane.js", "traces.js") + _files("panels.js", "details.js", "timeline.js")
    _css = _files("timeline.css")

    def __init__(
        self,
        runs: dict[str, FollowedRun],
        wishes: Wishes,
        healthy: Sequence[FollowedRun] | int | None,
        quantiles: tuple[float, float],
        ask: Callable[[dict[str, Any]], None],
    ) -> None:
        self.runs, self.wishes = runs, wishes
        self._healthy, self._quantiles, self._ask = healthy, quantiles, ask
        self._axes: dict[Any, bool] = {}
        self._bands: dict[Any, sig.SignalBand] = {}
        self._token, self._is_held = "", False
        super().__init__()

    @property
    def extent(self) -> tuple[float, float]:
        """First and last step of all runs."""
        stories = [run.story for run in self.runs.values()]
        first, last = min(s.first_step for s in stories), max(s.last_step for s in stories)
        return float(first), float(max(last, first + 1))

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Everything that is drawn, as it is now."""
        wishes, buffers = self.wishes, _Buffers()
        shown = [self.runs[name] for name in list(wishes.shown)]
        token = self._token  # before the view is read: a later view gets a later state
        extent = self.extent
        space = 0.015 * (extent[1] - extent[0])
        view = wishes.view or (extent[0] - space, extent[1] + space)
        reduce = wishes.reduce
        content = {
            "token": token,
            "view": list(view),
            "is_whole": wishes.view is None,
            "extent": list(extent),
            "runs": [_described(run, run in shown, buffers) for run in self.runs.values()],
            "broken": BROKEN,
            "signals": self._offered(),
            "chosen": list(wishes.signals),
            "reduce": reduce or "worst",
            "panels": [
                *(self._evidence(run, view, buffers) for run in shown if run.story.evidence is not None),
                *(self._panel(name, shown, view, reduce, buffers) for name in list(wishes.signals)),
            ],
            "alarms": self._listed(shown),
            "band": self._band_in_words(),
            "selection": _selected(wishes.selection, shown, buffers),
        }
        return content, buffers.done

    def _evidence(self, run: FollowedRun, view: tuple[float, float], buffers: _Buffers) -> dict[str, Any]:
        """The evidence of a run, as far as it can be seen."""
        name, story = f"evidence of {run.name}", run.story
        if story.evidence is None or (self.wishes.seen is not None and name not in self.wishes.seen):
            return {"name": name, "is_seen": False}
        margin, n = self._reach(view)
        lines, marks = [], []
        for line in story.evidence.lines:
            step, value = sig.decimate(line.step, line.value, n, view[0] - margin, view[1] + margin)
            lines.append(
                {"run": run.name, "signal": line.signal, "color": line.color, **buffers.put(step=step, value=value)}
            )
            for event in story.onsets:
                row = int(np.searchsorted(line.step, event.step, side="right")) - 1
                if event.source == line.signal and row >= 0:
                    marks.append(_marked(run.name, event, "alarm") | {"value": float(line.value[row])})
        low, high = story.evidence.view
        of_run = f": {run.name}" if len(self.runs) > 1 else ""
        return {
            "name": name,
            "run": run.name,
            "is_seen": True,
            "title": f"evidence of a change{of_run}",
            "note": story.evidence.note,
            "is_log": True,
            "low": low,
            "high": high,
            "limit": ALARM,
            "farthest": FARTHEST,
            "lines": lines,
            "bands": [],
            "marks": marks,
        }

    def _reach(self, view: tuple[float, float]) -> tuple[float, int]:
        """Steps beyond the view that are sent too, and the number of points that are enough."""
        n = max(50, int(0.75 * self.wishes.width * (1 + 2 * _MARGIN)))  # lines are thicker than a pixel
        return _MARGIN * (view[1] - view[0]), n

    def _panel(
        self,
        name: str,
        shown: Sequence[FollowedRun],
        view: tuple[float, float],
        reduce: str | None,
        buffers: _Buffers,
    ) -> dict[str, Any]:
        """One signal of all runs shown, as far as it can be seen."""
        if self.wishes.seen is not None and name not in self.wishes.seen:
            return {"name": name, "is_seen": False}
        margin, n = self._reach(view)
        found = [(run, line) for run in shown if (line := run.line(name, reduce)) is not None]
        lines, values, remarks = [], [np.zeros(0)], []
        for run, line in found:
            step, value = sig.decimate(line.step, line.value, n, view[0] - margin, view[1] + margin)
            values.append(value[slice(*np.searchsorted(step, view))])
            lines.append({"run": run.name, **buffers.put(step=step, value=value)})
            if line.remark:
                remarks.append(f"{run.name} {line.remark}" if len(shown) > 1 else line.remark)
        remarks += [f"{run.name} not recorded" for run in shown if name not in run.entries]
        variable = found[0][1].variable if found else name
        axis = PanelAxis.of(variable, np.concatenate(values), shows_all=True)
        return {
            "name": name,
            "is_seen": True,
            "title": found[0][1].title if found else name,
            "note": "; ".join(remarks),
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
        """The kind of axis goes by all steps of the runs, so that zooming does not change it."""
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
    ) -> list[tuple[str | None, sig.SignalBand]]:
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
            self._bands[key] = sig.healthy_band(pairs, quantiles=self._quantiles)
        return [(None, self._bands[key])]

    def _marks(self, name: str, found: Sequence[tuple[FollowedRun, SignalLine]]) -> list[dict[str, Any]]:
        """First alarms and divergences on their lines."""
        marks = []
        for run, line in found:
            story = run.story
            places = [(event, "alarm") for event in story.onsets if signal_of(event, [name]) == name]
            places += [(story.diverged, "cross")] if story.diverged is not None else []
            for event, kind in places:
                row = int(np.searchsorted(line.step, event.step, side="right")) - 1
                if row >= 0:
                    marks.append(_marked(run.name, event, kind) | {"value": float(line.value[row])})
        return marks

    def _offered(self) -> list[dict[str, str]]:
        entries: dict[str, sig.Entry] = {}
        for run in self.runs.values():
            entries = {**run.entries, **entries} if entries else dict(run.entries)
        return [{"name": name, "part": entry.part, "title": entry.long_name} for name, entry in entries.items()]

    def _listed(self, shown: Sequence[FollowedRun]) -> list[dict[str, Any]]:
        """The first alarms of all runs shown, by step."""
        found = [_marked(run.name, event, "alarm") for run in shown for event in run.story.onsets]
        return sorted(found, key=lambda mark: mark["step"])[:_N_LISTED]

    def _band_in_words(self) -> str:
        if self._healthy is None:
            return ""
        share = percent_range(*self._quantiles)
        if isinstance(self._healthy, int):
            return f"{share} of a run's own values before step {self._healthy}"
        return f"{share} of {counted(len(self._healthy), 'healthy run')}"

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        if "ask" in content:
            self._is_held = True  # one state, when all is done
            try:
                self._ask(content["ask"])
            finally:
                self._token, self._is_held = str(content.get("token", "")), False
            self.refresh()
        if content.get("painted") == 0:  # a page that is new
            self.wishes.seen = None
        super()._receive(_, content, buffers)

    def refresh(self) -> None:
        """As `LatestState.refresh`; while a wish of the page is carried out, once at its end."""
        if not self._is_held:
            super().refresh()


class _Buffers:
    """Binary arrays that travel beside a state, named by their place."""

    def __init__(self) -> None:
        self.done: list[bytes] = []

    def put(self, **arrays: np.ndarray) -> dict[str, int]:
        """Add arrays as float32; by the same names, where they are."""
        places = {}
        for name, array in arrays.items():
            places[name] = len(self.done)
            self.done.append(np.clip(array, -_FLOAT32, _FLOAT32).astype(np.float32).tobytes())
        return places


def _described(run: FollowedRun, is_shown: bool, buffers: _Buffers) -> dict[str, Any]:
    """A run and what happened in it."""
    look, story = model_style(run.place), run.story
    onsets = story.onsets
    first = {id(event) for event in onsets}
    lead = story.lead
    return {
        "name": run.name,
        "color": look["color"],
        "dash": _DASHES[look["dash"]],
        "is_shown": is_shown,
        "state": run.state,
        "words": run.state_in_words,
        "account": story.account,
        "has_alarm": bool(onsets),
        "first": story.first_step,
        "last": story.last_step,
        "faults": [{"name": span.name, "start": span.start, "stop": span.stop} for span in story.faults],
        "onsets": [_marked(run.name, event, "alarm") for event in onsets],
        "later": [e.step for e in story.events if e.kind == "alarm" and id(e) not in first][:2000],
        "actions": [_marked(run.name, event, "action") for event in story.events if event.kind == "action"],
        "checks": buffers.put(
            sound=np.unique([check.step for check in story.checks if check.is_sound]),
            broken=np.unique([event.step for event in story.findings]),
        ),
        "findings": _stretches(run.name, story)[:_N_STRETCHES],
        "diverged": None if story.diverged is None else _marked(run.name, story.diverged, "cross"),
        "lead": None if lead is None else [lead.first.step, lead.then.step, lead_in_words(lead)],
    }


def _stretches(run: str, story: Story) -> list[dict[str, Any]]:
    """Broken measurements of one probe in a row, by the first of them, and the step of the last."""
    found: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any] | None] = {}
    for check in story.checks:
        if check.is_sound:
            latest[check.signal] = None
            continue
        stretch = latest.get(check.signal)
        if stretch is None:
            event = TimelineEvent(check.step, "probe", check.signal, message=check.message)
            stretch = latest[check.signal] = _marked(run, event, "probe")
            found.append(stretch)
        stretch["last"] = check.step
    data = [event for event in story.findings if event.kind == "alarm"]
    return found + [_marked(run, event, "probe") | {"last": event.step} for event in data]


def _marked(run: str, event: TimelineEvent, kind: str) -> dict[str, Any]:
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


def _selected(
    selection: PanelSelection | None, shown: Sequence[FollowedRun], buffers: _Buffers
) -> dict[str, Any] | None:
    """The details shown next to the panels."""
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
        }
        packed["heat"] = packed["modes"] = None
        if detail.heat is not None:
            packed["heat"] = buffers.put(value=detail.heat.ravel())["value"]
            heats.append(detail.heat[np.isfinite(detail.heat)])
        if detail.modes is not None:
            modes = detail.modes
            packed["modes"] = len(buffers.done)
            buffers.done += [modes.points.tobytes(), modes.layer.tobytes(), modes.is_reliable.tobytes()]
            packed |= {
                "modes_step": modes.step,
                "near_unit": modes.near_unit,
                "depth_colors": depth_colors(detail.n_layers),
            }
            packed |= {"near_unit_mass": _plain(modes.near_unit_mass), "spectral_radius": _plain(modes.spectral_radius)}
        details.append(packed)
    axis = PanelAxis.of(selection.signal.split(" ")[0], np.concatenate(heats), shows_all=True)
    event = selection.event
    return {
        "step": selection.step,
        "signal": selection.signal,
        "run": selection.run,
        "event": None if event is None else _marked(selection.run, event, "alarm"),
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
