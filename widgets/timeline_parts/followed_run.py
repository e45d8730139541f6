"""A run of the timeline, whose displayed lines are updated while its store grows."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xarray as xr

from workbench.errors import SchemaError, StoreError
from workbench.formatting import duration
from workbench.io.far_places import FarPlace, UnreachableError, place_of
from workbench.io.stages import stages_at
from workbench.io.store import named_runs, open_run_or_log, spectra_of
from workbench.plots.timeline_panels import RunEvents
from workbench.schema.statuses import RunState
from workbench.studies import signals as sig
from workbench.widgets.live.history import LiveModes

#: Seconds without a new row after which a running run is reported as silent.
SILENT_AFTER = 120.0
#: Consecutive failures after which a store is reported as unreadable; a single read may fall between two writes.
_PATIENCE = 3


@dataclass(frozen=True)
class SignalLine:
    """The finite values of one signal of a run, float64, by step; the remark is on values that are not drawn."""

    step: np.ndarray
    value: np.ndarray
    title: str
    variable: str
    remark: str
    n_rows: int


@dataclass(frozen=True)
class _Snapshot:
    """A run at one moment; immutable, so that any thread may read it while a new one is created."""

    tree: xr.DataTree
    run_events: RunEvents
    entries: dict[str, sig.Entry]
    lines: dict[tuple[str, str], SignalLine] = field(default_factory=dict)


class FollowedRun:
    """A run, and the new data in its store."""

    def __init__(self, name: str, run: xr.DataTree | xr.Dataset | str | os.PathLike[str], place: int) -> None:
        self.name, self.place = name, place
        self.path = place_of(run, "run") if isinstance(run, str | os.PathLike) else None
        self.problem = ""
        self._n_failed = 0
        self._is_folder_of_logs = (
            isinstance(self.path, Path) and self.path.is_dir() and not (self.path / "zarr.json").exists()
        )
        self._stamp = self._stamp_now()
        tree = open_run_or_log(run) if isinstance(run, str | os.PathLike) else run
        self._now = self._snapshot_of(named_runs({name: tree}, needs_spectra=False)[name])

    @property
    def run_events(self) -> RunEvents:
        """Events so far."""
        return self._now.run_events

    @property
    def tree(self) -> xr.DataTree:
        """The run as it was last read."""
        return self._now.tree

    @property
    def entries(self) -> dict[str, sig.Entry]:
        """The available signals."""
        return self._now.entries

    @property
    def state(self) -> str:
        """State: running, finished, stopped, diverged, removed or unreadable; empty if unknown."""
        if self.problem:
            return "removed" if "removed" in self.problem else "unreadable"
        recorded = str(self._now.tree.attrs.get("state", ""))
        return RunState.DIVERGED if self.run_events.diverged is not None and recorded != RunState.RUNNING else recorded

    @property
    def state_in_words(self) -> str:
        """The state and the last recorded step, as text."""
        words = self.state
        if words == RunState.RUNNING and self.path is not None and self._stamp is not None:
            silent = time.time() - self._stamp[0] / 1e9
            words += f", silent for {duration(silent)}" if silent > SILENT_AFTER else ""
        if self.run_events.diverged is not None:
            ending = f"diverged at step {self.run_events.diverged.step}"
            return ending if words in (RunState.DIVERGED, "") else f"{words}, {ending}"
        reached = f"up to step {self.run_events.last_step}" if self.entries else "nothing recorded yet"
        return f"{words}, {reached}" if words else reached

    def poll(self) -> bool:
        """Read new rows of the displayed lines from the store, if there are any."""
        if self.path is None:
            return False
        try:
            stamp = self._stamp_now()
        except StoreError as error:
            return self._report(f"The run '{self.name}' was not reached: {error}")
        if stamp is None:
            return self._report(self._removal)
        if stamp == self._stamp and not self.problem:
            return False
        try:
            new = self._advanced(open_run_or_log(getattr(self.path, "url", self.path)))
        except (StoreError, SchemaError, OSError, KeyError, ValueError) as error:
            self._n_failed += 1
            if not isinstance(error, UnreachableError) and self._stamp_now() is None:
                return self._report(self._removal)
            if self._n_failed < _PATIENCE:
                return False
            return self._report(f"The run '{self.name}' can no longer be read: {error}")
        self._now, self._stamp, self.problem, self._n_failed = new, stamp, "", 0
        return True

    def line(self, name: str, reduce: str | None) -> SignalLine | None:
        """Return a signal; None if the run has no signal of this name."""
        now = self._now
        if name not in now.entries:
            return None
        reduce = reduce or sig.worst(name)
        if (name, reduce) not in now.lines:
            try:
                now.lines[name, reduce] = _line(now.tree, name, reduce, None, now.run_events)
            except (StoreError, OSError):
                return SignalLine(np.zeros(0), np.zeros(0), name, name, "not read before the run was removed", 0)
        return now.lines[name, reduce]

    def heat(self, name: str, step: int) -> xr.DataArray | None:
        """Return a signal with layers at the nearest recorded step; None if it has no layers or cannot be read."""
        now = self._now
        if name not in now.entries or not now.entries[name].places:
            return None
        try:
            return sig.heat(now.tree, name, step)
        except (SchemaError, StoreError, OSError):
            return None

    def modes(self, step: int) -> tuple[LiveModes, list[int]] | None:
        """Return the modes of the nearest recorded spectra and their layer numbers; None if there are no spectra."""
        tree = self._now.tree
        if "spectra" not in tree.children or "step" not in tree["spectra"].dims or not tree["spectra"].sizes["step"]:
            return None
        try:
            spectra = spectra_of(tree)
            nearest = int(np.abs(spectra["step"].values - step).argmin())
            chosen = spectra.isel(step=[nearest]).load()
        except (StoreError, OSError):
            return None
        layers = chosen["layer"].values if "layer" in chosen.coords else range(chosen.sizes["layer"])
        return LiveModes.of(chosen), [int(layer) for layer in layers]

    @property
    def recorded_steps(self) -> np.ndarray:
        """Steps with recorded spectra; if there are none, steps of signals with layers."""
        tree = self._now.tree
        of_layers = {entry.part for entry in self.entries.values() if entry.places}
        for parts in ({"spectra"}, of_layers):
            found = [tree[part].to_dataset() for part in parts & set(tree.children) if "step" in tree[part].dims]
            steps = np.concatenate([np.zeros(0, int), *(data["step"].values for data in found)])
            if len(steps):
                return np.unique(steps)
        return np.zeros(0, int)

    def _snapshot_of(self, tree: xr.DataTree) -> _Snapshot:
        return _Snapshot(tree, RunEvents.of(self.name, tree, self.place), sig.catalogue(tree))

    def _advanced(self, tree: xr.DataTree) -> _Snapshot:
        """Return the snapshot of a store with new rows, with the lines of the previous snapshot."""
        old, new = self._now, self._snapshot_of(tree)
        is_same = _is_continued(old, new)
        for name, reduce in list(old.lines):
            if name in new.entries:
                before = old.lines[name, reduce] if is_same else None
                new.lines[name, reduce] = _line(tree, name, reduce, before, new.run_events)
        return new

    @property
    def _removal(self) -> str:
        return f"The run '{self.name}' was removed from {self.path}; the data read so far stay visible."

    def _report(self, sentence: str) -> bool:
        """Set the problem, and return whether it has changed."""
        if self.problem == sentence:
            return False
        self.problem = sentence
        return True

    def _stamp_now(self) -> tuple[int, int, int] | None:
        """Return a value that changes with each commit to the store; None if there is no store."""
        if self.path is None:
            return None
        stamps = [self._stamp_of(place) for place in stages_at(self.path) or [self.path]]
        known = [stamp for stamp in stamps if stamp is not None]
        if len(known) < len(stamps):
            return None
        return max(known)[0], sum(stamp[1] for stamp in known), sum(stamp[2] for stamp in known)

    def _stamp_of(self, path: Path | FarPlace) -> tuple[int, int, int] | None:
        if isinstance(path, FarPlace):
            found = path.stamp("zarr.json")
            return None if found is None else (int(1e9 * (found.seconds or time.time())), 0, hash(found.text))
        try:
            files = [file.stat() for file in path.rglob("*")] if self._is_folder_of_logs else []
            store = path / "zarr.json" if path.is_dir() else path
            at = max(files, key=lambda file: file.st_mtime_ns) if self._is_folder_of_logs else os.stat(store)
        except (OSError, ValueError):
            return None
        return at.st_mtime_ns, at.st_ino, at.st_size


def _is_continued(old: _Snapshot, new: _Snapshot) -> bool:
    """Return whether the store still contains the rows read before; False if it was replaced or resumed."""
    if old.tree.attrs.get("created") != new.tree.attrs.get("created"):
        return False
    counts = [
        sum(event.kind in ("resumed", "action") for event in snapshot.run_events.events) for snapshot in (old, new)
    ]
    if counts[0] != counts[1]:
        return False
    for part in old.tree.children:
        if part == "events" or "step" not in old.tree.children[part].dims:
            continue
        before = old.tree.children[part].to_dataset()["step"].values
        after = new.tree.children[part].to_dataset()["step"].values if part in new.tree.children else before[:0]
        if len(after) < len(before) or (len(before) and before[-1] != after[len(before) - 1]):
            return False
    return True


def _line(tree: xr.DataTree, name: str, reduce: str, before: SignalLine | None, run_events: RunEvents) -> SignalLine:
    """Return a signal as a line, reading only the rows that are new since the previous line."""
    first_row = 0 if before is None else before.n_rows
    found = sig.read(tree, name, reduce=reduce, first_row=first_row)
    step, value = found.finite
    n_rows = first_row + len(found.step)
    remarks = [] if before is None or not before.remark.startswith("infinite") else [before.remark]
    if not remarks and np.isinf(found.value).any():
        remarks.append(f"infinite from step {found.step[np.isinf(found.value)][0]}")
    if before is not None:
        if not len(found.step):
            return before
        step, value = np.concatenate([before.step, step]), np.concatenate([before.value, value])
    if not len(step):
        remarks.append("undefined so far" if n_rows else "not recorded yet")
    elif run_events.diverged is not None and len(found.value) and np.isnan(found.value[-1]):
        remarks.append(f"undefined after step {step[-1]}")
    title = found.long_name + (f" ({found.unit})" if found.unit not in ("1", "") else "")
    return SignalLine(step, value, title, found.variable, "; ".join(remarks), n_rows)
