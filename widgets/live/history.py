"""The drawn data of one run while it trains: its traces so far, and its current modes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError, StoreError
from workbench.io.run_access import spectra_of
from workbench.io.store import open_run
from workbench.plots.timeline_account import account_of
from workbench.plots.timeline_events import TimelineEvent, divergence_of, events_of, fault_spans
from workbench.plots.timeline_evidence import FARTHEST, LOWEST
from workbench.studies.checks import checks_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import xarray as xr

    from workbench.callbacks.alarms.probe_alarms import Check
    from workbench.widgets.live.step_news import StepNews

#: The traces, top to bottom, by the names that they have in a run.
TRACES = ("loss", "grad_norm", "near_unit_mass", "spectral_radius", "evidence")
_TITLES = {
    "near_unit_mass": {"long_name": "near-unit mass, mean of the layers"},
    "spectral_radius": {"long_name": "spectral radius, largest of the layers"},
}
#: Parts that a longer trace is cut into; of each, the lowest and the highest value are drawn.
_N_PARTS = 300
#: Marks of probes of one kind that are shown at most.
_N_MARKS = 400
#: Spectra that are kept until they are certainly in the store; those before are read from there.
_N_KEPT = 64


@dataclass(frozen=True)
class LiveModes:
    """The modes of one moment.

    Attributes:
        step: Updates done before it.
        points: Real and imaginary parts, float32, shape (mode, 2).
        layer: Layer of each mode, uint8 (the last one stands for all beyond it).
        is_reliable: Whether each mode is reliable, uint8.
        near_unit_mass: Mean over the layers.
        spectral_radius: The largest of the layers'.
        near_unit: Bounds of the moduli that count as near unit.
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
        """Make it from spectra with a ``step`` dimension of one."""
        eigenvalue = spectra["eigenvalue"].values[0]
        layer, mode = np.nonzero(np.isfinite(eigenvalue))
        chosen = eigenvalue[layer, mode]
        return cls(
            step=int(spectra["step"].values[0]),
            points=np.stack([chosen.real, chosen.imag], -1).astype(np.float32),
            layer=np.minimum(layer, 255).astype(np.uint8),
            is_reliable=spectra["is_reliable"].values[0][layer, mode].astype(np.uint8),
            near_unit_mass=_mean(spectra["near_unit_mass"].values[0]),
            spectral_radius=_largest(spectra["spectral_radius"].values[0]),
            near_unit=(float(spectra.attrs["near_unit_lower"]), float(spectra.attrs["near_unit_upper"])),
        )


class RunHistory:
    """Everything the page shows of one run. One thread adds to it, any thread may read it.

    Args:
        n_steps: Steps that the run can have.
        store: Store of the run, from which modes of earlier steps are read; None: only the latest are known.
        n_kept: Spectra to keep until they are in the store.

    Attributes:
        n_done: Steps done.
        n_layers: Layers of the model; 0 until there are spectra.
        modes: The latest; None until there are any.
        verdict: Outcome of the run, such as ``"diverged at step 42"``; empty while it goes on.
        is_broken: Whether it ended in a divergence or an error.
        diverged_at: Step at which it diverged; None: it has not.
        is_watched: Whether alarms listen to it.
        events: Faults, alarms and what they were put down to.
        nearest: Signal with the strongest evidence in the latest row; empty: none is known.
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
        self._has_kss, self._has_fault = np.zeros(n_steps, bool), np.zeros(n_steps, bool)
        self._has_spectra = np.zeros(n_steps, bool)

    @classmethod
    def of(cls, run: xr.DataTree, n_steps: int, store: Path | None = None, *, n_kept: int = _N_KEPT) -> RunHistory:
        """Make it from a run's record so far, for a run that continues from there, or has ended."""
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
        history.events = [event for event in events_of(run) if event.step < history.n_done]
        history._checks = checks_of(run)
        if (diverged := divergence_of(history.events)) is not None:
            history._end_at(diverged.step)
        spans = fault_spans(history.events)
        history._active = frozenset(span.name for span in spans if span.stop is None)
        for span in spans:
            history._has_fault[span.start : history.n_done if span.stop is None else span.stop] = True
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
            history._take(spectra.isel(step=[-1]).load())
        return history

    def add(self, news: StepNews) -> None:
        """Take in one step."""
        self._values[:2, news.step] = news.loss, news.grad_norm
        self._has_kss[news.step] = news.kss_enabled
        self._has_fault[news.step] = bool(news.active_faults)
        if news.spectra is not None:
            modes = self._take(news.spectra)
            self._values[2:4, news.step] = modes.near_unit_mass, modes.spectral_radius
            self._has_spectra[news.step] = True
        if news.is_watched:
            self.is_watched = True
            on = frozenset(news.active_faults)
            self.events += [TimelineEvent(news.step, "fault", name) for name in sorted(on ^ self._active)]
            self._active = on
        self.events += news.events
        self._checks += news.checks
        if news.evidence is not None:
            names, values = news.evidence
            self._take_evidence(news.step, values, names)
        if news.cause and self.diverged_at is None:
            self._end_at(news.step)
        self.n_done = news.step + 1

    @property
    def recorded_steps(self) -> np.ndarray:
        """Steps at which spectra were recorded, rising."""
        return np.flatnonzero(self._has_spectra[: self.n_done])

    def spectra_at(self, step: int | None = None) -> xr.Dataset | None:
        """The spectra of the latest recorded step up to this one, with a ``step`` dimension of one.

        Args:
            step: None: the latest of all.

        Returns:
            None if there are none, or their step could not be written.
        """
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
        except (StoreError, SchemaError, OSError, KeyError):  # not written, as the disk was full, or removed
            return None

    def modes_at(self, step: int | None = None) -> LiveModes | None:
        """The modes of the latest recorded step up to this one; of all, if None."""
        if step is None or (self.modes is not None and self.modes.step <= step):
            return self.modes
        spectra = self.spectra_at(step)
        return None if spectra is None else LiveModes.of(spectra)

    def values_at(self, step: int) -> dict[str, float]:
        """The values of all traces at a step; NaN where there is none."""
        inside = 0 <= step < self.n_done
        return {name: float(self._values[row, step]) if inside else math.nan for row, name in enumerate(TRACES)}

    @property
    def first_alarm(self) -> int | None:
        """Step of the first alarm; None: there was none."""
        return next((event.step for event in list(self.events) if event.kind == "alarm"), None)

    def as_run(self) -> xr.DataTree:
        """The traces as a run, for figures of `workbench.plots`: they are monitors, one of each name in ``TRACES``."""
        import xarray as xr

        step = np.arange(self.n_done)
        names = [name for name in TRACES if name != "evidence"]
        monitors = {
            name: ("step", self._values[TRACES.index(name), : self.n_done].astype(float), _TITLES.get(name, {}))
            for name in names
        }
        parts = {"/monitors": xr.Dataset(monitors, {"step": step})}
        if self.diverged_at is not None:
            end = {"step": self.diverged_at, "kind": "divergence", "source": "", "score": math.nan, "message": ""}
            parts["/events"] = xr.Dataset({name: ("event", np.array([value])) for name, value in end.items()})
        return xr.DataTree.from_dict(parts)

    @property
    def account(self) -> str:
        """The first alarm and its likely cause, or that there was none; empty if no alarms listen."""
        return account_of(list(self.events), last_step=max(self.n_done - 1, 0), is_watched=self.is_watched)

    @property
    def has_alarm(self) -> bool:
        """Whether there was an alarm."""
        return any(event.kind == "alarm" for event in list(self.events))

    def checked(self, *, is_sound: bool) -> list[int]:
        """Steps of the measurements of probes that were sound, or that found a fault; of many, evenly chosen ones."""
        steps = {check.step for check in list(self._checks) if check.is_sound is is_sound}
        if not is_sound:  # every batch is checked, and its alarm is the only trace of that
            steps |= {event.step for event in list(self.events) if event.kind == "alarm" and event.source == "data"}
        return sorted(steps)[:: -(-len(steps) // _N_MARKS) or 1]

    def trace(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one trace, as float32; long ones as their lowest and highest value in each part."""
        values = self._values[TRACES.index(name), : self.n_done]
        step = np.flatnonzero(np.isfinite(values))
        return _thinned(step.astype(np.float32), values[step])

    def kss_spans(self) -> list[tuple[int, int]]:
        """First step, and first step after, of each stretch with KSS on; gaps too short to be seen are left out."""
        return _spans(self._has_kss[: self.n_done])

    def fault_spans(self) -> list[tuple[int, int]]:
        """The same of stretches with any fault on."""
        return _spans(self._has_fault[: self.n_done])

    def latest(self, name: str) -> float:
        """The last value of a trace; NaN if it is not finite or there is none."""
        return float(self._values[TRACES.index(name), self.n_done - 1]) if self.n_done else math.nan

    def _take_evidence(self, step: int, values: np.ndarray, names: np.ndarray) -> None:
        if np.isnan(values).all() or step >= self._values.shape[1]:
            return
        strongest = int(np.nanargmax(values))
        self.nearest = str(names[strongest])
        self._values[TRACES.index("evidence"), step] = np.clip(values[strongest], LOWEST, FARTHEST)

    def _take(self, spectra: xr.Dataset) -> LiveModes:
        self.n_layers = spectra.sizes["layer"]
        modes = LiveModes.of(spectra)
        kept = {**self._kept, modes.step: spectra}  # another dict: a page may be reading this one
        self._kept = dict(list(kept.items())[-self._n_kept :])
        self.modes = modes
        return modes

    def _end_at(self, step: int) -> None:
        self.diverged_at, self.verdict, self.is_broken = step, f"diverged at step {step}", True


def pack(
    histories: Mapping[str, RunHistory], modes: Mapping[str, LiveModes | None], *, has_traces: bool = True
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """All of it for the page: a small description of each run, and its buffers.

    Args:
        histories: By the name of the run.
        modes: The modes to show of each run.
        has_traces: Whether the traces are among the buffers.

    Returns:
        runs: Dicts, one per run.
        buffers: Buffers of each run: its points, layers and reliable modes, then steps and values of each trace.
    """
    runs, buffers = [], []
    for name, history in histories.items():
        n_done, shown = history.n_done, modes[name]
        runs.append(
            {
                "name": name,
                "n_done": n_done,
                "n_layers": history.n_layers,
                "verdict": history.verdict,
                "is_broken": history.is_broken,
                "kss_spans": history.kss_spans(),
                "fault_spans": history.fault_spans(),
                "is_watched": history.is_watched,
                "account": history.account,
                "has_alarm": history.has_alarm,
                "nearest": history.nearest,
                "sound": history.checked(is_sound=True),
                "broken": history.checked(is_sound=False),
                "modes_step": None if shown is None else shown.step,
                "near_unit_mass": None if shown is None else _plain(shown.near_unit_mass),
                "spectral_radius": None if shown is None else _plain(shown.spectral_radius),
                "near_unit": None if shown is None else shown.near_unit,
            }
        )
        arrays = [] if shown is None else [shown.points, shown.layer, shown.is_reliable]
        buffers += [array.tobytes() for array in arrays] or [b"", b"", b""]
        buffers += pack_traces(history) if has_traces else []
    return runs, buffers


def pack_traces(history: RunHistory) -> list[bytes]:
    """Steps and values of each trace, as float32."""
    return [array.tobytes() for trace in TRACES for array in history.trace(trace)]


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
    # The newest value is drawn as it is, for the eye follows it.
    ends = np.append(np.repeat(step[starts], 2), step[-1]), np.append(np.stack([low, high], -1).ravel(), value[-1])
    return ends[0].astype(np.float32), ends[1].astype(np.float32)


def _plain(value: float) -> float | None:
    """Convert a number for JSON."""
    return value if math.isfinite(value) else None


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _largest(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else math.nan
