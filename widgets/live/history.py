"""The displayed data of one run during training: its traces so far, and its current modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr

from workbench.callbacks.alarms import WATCHED, Alarm, Alarms, Attribution
from workbench.callbacks.alarms.probe_alarms import Check
from workbench.callbacks.guard import Action
from workbench.errors import SchemaError, StoreError
from workbench.io.store import open_run, spectra_of
from workbench.plots.timeline_events import (
    TimelineEvent,
    account_of,
    alarms_of,
    divergence_of,
    events_of,
    fault_spans,
)  # fmt: skip
from workbench.plots.timeline_panels import FARTHEST, LOWEST
from workbench.studies.signals import checks_of
from workbench.training.callback import StepRecord

#: Names of the traces in a run, from top to bottom.
TRACES = ("loss", "grad_norm", "near_unit_mass", "spectral_radius", "evidence")
_TITLES = {
    "near_unit_mass": {"long_name": "near-unit mass, mean over layers"},
    "spectral_radius": {"long_name": "spectral radius, largest over layers"},
}
#: Number of parts of a longer trace; only the lowest and the highest value of each part are drawn.
_N_PARTS = 300
#: Maximum number of displayed marks of probes of one kind.
_N_MARKS = 400
#: Number of spectra kept in memory until they are in the store; earlier ones are read from the store.
_N_KEPT = 64
_SIGNALS = [watched.name for watched in WATCHED]


class StepNews(NamedTuple):
    """What the training process sends about one step: events as recorded, and ``evidence``, signals by name."""

    step: int
    loss: float
    grad_norm: float
    kss_enabled: bool = False
    active_faults: tuple[str, ...] = ()
    spectra: xr.Dataset | None = None
    is_watched: bool = False
    events: tuple[TimelineEvent, ...] = ()
    checks: tuple[Check, ...] = ()
    evidence: tuple[np.ndarray, np.ndarray] | None = None
    actions: tuple[Action, ...] = ()

    @classmethod
    def of(cls, record: StepRecord, alarms: Alarms | None = None, actions: Sequence[Action] = ()) -> StepNews:
        """Create the news from the record of a step, the alarms of the run, and the actions since the last step."""
        events, step = [], record.step
        known = () if alarms is None else (*_SIGNALS, *alarms.checks, "data", "limits", "logits")
        raised: tuple[Alarm, ...] = record.alarms
        for alarm in raised:
            place = (at if at >= 0 else None for at in (alarm.layer, alarm.head))
            if alarm.signal not in known:
                events.append(TimelineEvent(alarm.step, "setting", alarm.signal))
            events.append(TimelineEvent(alarm.step, "alarm", alarm.signal, alarm.score, alarm.message, *place))
        found: Attribution | None = alarms.attribute() if alarms is not None and record.alarms else None
        if found is not None:
            events.append(TimelineEvent(step, "attribution", found.cause, found.score, found.message))
        events += [TimelineEvent(action.step, "action", action.kind, message=action.message) for action in actions]
        if record.cause:
            events.append(TimelineEvent(step, "divergence", record.cause, message=_divergence(record)))
        row = None if alarms is None else alarms.latest_evidence
        is_new = row is not None and row.step == step
        return cls(
            step,
            record.loss,
            record.grad_norm,
            record.kss_enabled,
            tuple(record.active_faults),
            record.spectra,
            alarms is not None,
            tuple(events),
            () if alarms is None else tuple(check for check in alarms.checks.values() if check.step == step),
            (row.coords["signal"], row.values["evidence"]) if row is not None and is_new else None,
            tuple(actions),
        )


def _divergence(record: StepRecord) -> str:
    if record.cause == "loss":
        return f"its loss rose to {record.loss:.3g}"
    if record.cause == "grad_norm":
        return f"its gradient norm rose to {record.grad_norm:.3g}"
    return "its loss or gradients are not finite"


@dataclass(frozen=True)
class LiveModes:
    """The modes at one step, as float32 points and uint8 layers.

    ``near_unit`` has the bounds of the band; the mass is the mean over layers, the radius the largest.
    """

    step: int
    points: np.ndarray
    layer: np.ndarray
    is_reliable: np.ndarray
    near_unit_mass: float
    spectral_radius: float
    near_unit: tuple[float, float]

    @classmethod
    def of(cls, spectra: xr.Dataset) -> LiveModes:
        """Create the modes from spectra with a ``step`` dimension of size 1."""
        eigenvalue = spectra["eigenvalue"].values[0]
        layer, mode = np.nonzero(np.isfinite(eigenvalue))
        chosen = eigenvalue[layer, mode]
        mass, radius = (values[np.isfinite(values)] for values in (
            spectra["near_unit_mass"].values[0], spectra["spectral_radius"].values[0]
        ))  # fmt: skip
        return cls(
            step=int(spectra["step"].values[0]),
            points=np.stack([chosen.real, chosen.imag], -1).astype(np.float32),
            layer=np.minimum(layer, 255).astype(np.uint8),
            is_reliable=spectra["is_reliable"].values[0][layer, mode].astype(np.uint8),
            near_unit_mass=float(mass.mean()) if len(mass) else math.nan,
            spectral_radius=float(radius.max()) if len(radius) else math.nan,
            near_unit=(float(spectra.attrs["near_unit_lower"]), float(spectra.attrs["near_unit_upper"])),
        )


class RunHistory:
    """The displayed data of one run; one thread adds to it, any thread may read it.

    It keeps the latest ``n_kept`` spectra and reads others from the store. ``verdict`` is the outcome, such as
    "diverged at step 42" (empty while it is running), ``is_broken`` whether this is a divergence or an error,
    ``is_watched`` whether there are alarms, and ``nearest`` the signal with the strongest evidence in the latest row.
    """

    def __init__(self, n_steps: int, store: Path | None = None, *, n_kept: int = _N_KEPT) -> None:
        self.n_done = 0
        self.n_layers = 0
        self.modes: LiveModes | None = None
        self.verdict, self.is_broken = "", False
        self.diverged_at: int | None = None
        self.is_watched, self.events, self.nearest = False, list[TimelineEvent](), ""
        self.store = store
        self._kept: dict[int, xr.Dataset] = {}
        self._n_kept = n_kept
        self._active: frozenset[str] = frozenset()
        self._checks: list[Check] = []
        self._values = np.full((len(TRACES), n_steps), np.nan, np.float32)
        self._has_kss, self._has_spectra = np.zeros(n_steps, bool), np.zeros(n_steps, bool)

    @classmethod
    def of(cls, run: xr.DataTree, n_steps: int, store: Path | None = None, *, n_kept: int = _N_KEPT) -> RunHistory:
        """Create the history from the record of a run that is continued or has ended."""
        history = cls(n_steps, store, n_kept=n_kept)
        if "monitors" not in run.children:
            return history
        monitors = run["monitors"].to_dataset().isel(step=slice(n_steps))
        step = monitors["step"].values
        for row, name in enumerate(TRACES[:2]):
            history._values[row, step] = monitors[name].values
        if "kss_enabled" in monitors:
            history._has_kss[step] = monitors["kss_enabled"].values.astype(bool)
        history.n_done = int(step[-1]) + 1 if len(step) else 0
        history._take_events([event for event in events_of(run) if event.step < history.n_done])
        history._checks = checks_of(run)
        history._active = frozenset(span.name for span in fault_spans(history.events) if span.stop is None)
        if "evidence" in run.children:
            evidence = run["evidence"].to_dataset()["evidence"]
            history.is_watched = True
            for at, row in zip(evidence["step"].values, evidence.transpose("step", "signal").values, strict=True):
                history._take_evidence(int(at), row, evidence["signal"].values)
        if "spectra" in run.children:
            spectra = spectra_of(run)
            history._values[2, spectra["step"]] = spectra["near_unit_mass"].mean("layer").values
            history._values[3, spectra["step"]] = spectra["spectral_radius"].max("layer").values
            history._has_spectra[spectra["step"]] = True
            history._take_spectra(spectra.isel(step=[-1]).load())
        return history

    def add(self, news: StepNews) -> None:
        """Add one step."""
        self._values[:2, news.step] = news.loss, news.grad_norm
        self._has_kss[news.step] = news.kss_enabled
        if news.spectra is not None:
            modes = self._take_spectra(news.spectra)
            self._values[2:4, news.step] = modes.near_unit_mass, modes.spectral_radius
            self._has_spectra[news.step] = True
        self.is_watched |= news.is_watched
        on = frozenset(news.active_faults)
        toggled = [TimelineEvent(news.step, "fault", name) for name in sorted(on ^ self._active)]
        self._active = on
        self._take_events([*toggled, *news.events])
        self._checks += news.checks
        if news.evidence is not None:
            names, values = news.evidence
            self._take_evidence(news.step, values, names)
        self.n_done = news.step + 1

    @property
    def recorded_steps(self) -> np.ndarray:
        """Steps with recorded spectra, in increasing order."""
        return np.flatnonzero(self._has_spectra[: self.n_done])

    def spectra_at(self, step: int | None = None) -> xr.Dataset | None:
        """Return the spectra of the latest recorded step up to a step; None if there are none to read."""
        recorded = self.recorded_steps
        last = len(recorded) if step is None else int(np.searchsorted(recorded, step, side="right"))
        if not last:
            return None
        at = int(recorded[last - 1])
        kept = self._kept.get(at)
        if kept is not None or self.store is None:
            return kept
        try:
            spectra = spectra_of(open_run(self.store))
            return spectra.sel(step=[at]).load()
        except (StoreError, SchemaError, OSError, KeyError):  # not written because the disk was full, or removed
            return None

    def modes_at(self, step: int | None = None) -> LiveModes | None:
        """Return the modes of the latest recorded step up to a step; None for the latest of all."""
        if step is None or (self.modes is not None and self.modes.step <= step):
            return self.modes
        spectra = self.spectra_at(step)
        return None if spectra is None else LiveModes.of(spectra)

    def values_at(self, step: int) -> dict[str, float]:
        """Return the values of all traces at a step; NaN for missing values."""
        inside = 0 <= step < self.n_done
        return {name: float(self._values[row, step]) if inside else math.nan for row, name in enumerate(TRACES)}

    @property
    def first_alarm(self) -> int | None:
        """Step of the first alarm; None if there was none."""
        return next((event.step for event in alarms_of(list(self.events))), None)

    def as_run(self) -> xr.DataTree:
        """Return the traces as monitors of a run with the names in ``TRACES``, for figures of `workbench.plots`."""
        monitors = {
            name: ("step", self._values[row, : self.n_done].astype(float), _TITLES.get(name, {}))
            for row, name in enumerate(TRACES)
            if name != "evidence"
        }
        parts = {"/monitors": xr.Dataset(monitors, {"step": np.arange(self.n_done)})}
        if self.diverged_at is not None:
            end = {"step": self.diverged_at, "kind": "divergence", "source": "", "score": math.nan, "message": ""}
            parts["/events"] = xr.Dataset({name: ("event", np.array([value])) for name, value in end.items()})
        return xr.DataTree.from_dict(parts)

    @property
    def account(self) -> str:
        """A sentence on the first alarm and its likely cause, or that there was none; empty without `Alarms`."""
        return account_of(list(self.events), last_step=max(self.n_done - 1, 0), is_watched=self.is_watched)

    def checked(self, *, is_sound: bool) -> list[int]:
        """Return the steps at which probes found no fault (or a fault), thinned out evenly if there are many."""
        steps = {check.step for check in list(self._checks) if check.is_sound is is_sound}
        if not is_sound:  # every batch is checked; only alarms are recorded
            steps |= {event.step for event in alarms_of(list(self.events)) if event.source == "data"}
        return sorted(steps)[:: -(-len(steps) // _N_MARKS) or 1]

    def trace(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a trace as float32; of a long trace, the lowest and highest value of each part."""
        values = self._values[TRACES.index(name), : self.n_done]
        step = np.flatnonzero(np.isfinite(values))
        return _thinned(step.astype(np.float32), values[step])

    def kss_spans(self) -> list[tuple[int, int]]:
        """Return (first step, step after the last) of each stretch with KSS on, ignoring gaps too short to see."""
        return _spans(self._has_kss[: self.n_done])

    def fault_spans(self) -> list[tuple[int, int]]:
        """Return (first step, step after the last) of each stretch with any fault on."""
        has_fault = np.zeros(self.n_done, bool)
        for span in fault_spans(list(self.events)):
            has_fault[span.start : span.stop] = True
        return _spans(has_fault)

    def _take_evidence(self, step: int, values: np.ndarray, names: np.ndarray) -> None:
        if np.isnan(values).all() or step >= self._values.shape[1]:
            return
        strongest = int(np.nanargmax(values))
        self.nearest = str(names[strongest])
        self._values[TRACES.index("evidence"), step] = np.clip(values[strongest], LOWEST, FARTHEST)

    def _take_spectra(self, spectra: xr.Dataset) -> LiveModes:
        self.n_layers = spectra.sizes["layer"]
        modes = LiveModes.of(spectra)
        kept = {**self._kept, modes.step: spectra}  # a new dict, because a page may be reading the old one
        self._kept = dict(list(kept.items())[-self._n_kept :])
        self.modes = modes
        return modes

    def _take_events(self, events: list[TimelineEvent]) -> None:
        self.events += events
        if self.diverged_at is None and (diverged := divergence_of(events)) is not None:
            self.diverged_at, self.verdict, self.is_broken = diverged.step, f"diverged at step {diverged.step}", True


def _spans(is_on: np.ndarray) -> list[tuple[int, int]]:
    turns = np.diff(is_on.astype(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(turns == 1), np.flatnonzero(turns == -1)
    is_gap = starts[1:] - ends[:-1] > len(is_on) // (2 * _N_PARTS)
    starts, ends = np.append(starts[:1], starts[1:][is_gap]), np.append(ends[:-1][is_gap], ends[-1:])
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _thinned(step: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(step) <= 2 * _N_PARTS:
        return step, value
    starts = np.linspace(0, len(step), _N_PARTS, endpoint=False).astype(int)
    low, high = np.minimum.reduceat(value, starts), np.maximum.reduceat(value, starts)
    # The newest value is always drawn.
    ends = np.append(np.repeat(step[starts], 2), step[-1]), np.append(np.stack([low, high], -1).ravel(), value[-1])
    return ends[0].astype(np.float32), ends[1].astype(np.float32)
