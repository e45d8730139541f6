"""The state of the timeline as it is sent to the page, and the details of a selected step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from workbench.plots.style import depth_colors, model_style
from workbench.plots.timeline_events import TimelineEvent
from workbench.plots.timeline_panels import PanelAxis, RunEvents, lead_in_words
from workbench.studies import signals as sig
from workbench.widgets.live.history import LiveModes
from workbench.widgets.timeline_parts.followed_run import FollowedRun


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
