"""Pass the output of a run (rows, datasets, events) to its store. Errors here never stop training."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import StoreError
from workbench.io.background_writer import BackgroundWriter, RecordingWarning
from workbench.io.run_parts import Part
from workbench.schema.events import Event
from workbench.schema.runs import MONITORS, PARTS

if TYPE_CHECKING:
    import xarray as xr


#: Longest wait for a full block, in seconds: normally, and while the disk hangs.
_PATIENCE, _IMPATIENCE = 10.0, 0.05
#: Dimension of each coordinate whose name differs from it.
_ALONG = {"layer_name": "layer", "module_name": "module"}


class RunOutput:
    """Output of a run, written to its store if it has one.

    The first row of a part determines the variables of all its rows. A write error or an invalid row causes a
    `RecordingWarning` and an event, and training continues.

    Args:
        writer: Writer of the store; None writes nothing.
        wait_every: Wait for the disk after this many steps, so that a killed process loses no more than that; None
            never waits.
    """

    def __init__(self, writer: BackgroundWriter | None, *, wait_every: int | None = None) -> None:
        self.writer = writer
        self._wait_every = wait_every
        self._names: dict[str, frozenset[str]] = {}
        self._stored: dict[str, str] = {}
        self._late: set[str] = set()
        self._lost: set[str] = set()
        self._n_rows = 0
        self._is_behind = False

    @property
    def path(self) -> Path | None:
        """Path of the store."""
        return None if self.writer is None else self.writer.path

    def add(
        self, part: str, step: int, values: Mapping[str, Any], coords: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Write a row.

        Args:
            part: Such as ``"monitors"``.
            step: Step of the row; steps must increase.
            values: Value of each variable, without the dimension of the steps.
            coords: Values along the other dimensions, and ``layer_name`` or ``module_name``.
        """
        if self.writer is None or part in self._lost:
            return
        try:
            if part == "monitors":  # their names are those of the user
                self._stored = self._stored or stored_names(values, self.writer.variables(part) or ())
                values = {self._stored.get(name, name): value for name, value in values.items()}
            if part not in self._names:
                # A resumed run of an earlier version keeps the variables with which it began.
                stored = self.writer.variables(part)
                first = {name: value for name, value in values.items() if stored is None or name in stored}
                self.writer.declare(_declared(part, first, coords or {}, self._stored))
                self._names[part] = frozenset(first)
                self._late |= values.keys() - first.keys()
            kept = {name: value for name, value in values.items() if name in self._names[part]}
            self._warn_of_late_column(step, values, kept)
            self.writer.add(part, step, kept)
        except StoreError as error:
            self._give_up(part, step, error)

    def end_step(self) -> None:
        """End a step; wait for the disk if a block is full, but only briefly while the disk hangs."""
        if self.writer is None or self._wait_every is None:
            return
        self._n_rows += 1
        if self._n_rows >= self._wait_every:
            is_written = self.writer.flush(timeout=_IMPATIENCE if self._is_behind else _PATIENCE)
            self._is_behind = not is_written and self.writer.trouble is None
            self._n_rows = 0

    def add_dataset(self, part: str, dataset: xr.Dataset) -> None:
        """Write a row in the form of a dataset with a dimension ``step`` of size one."""
        if self.writer is None or part in self._lost:
            return
        try:
            self.writer.add_dataset(part, dataset)
        except StoreError as error:
            self._give_up(part, int(dataset["step"].item()), error)

    def event(self, event: Event) -> None:
        """Write an event."""
        if self.writer is not None:
            self.writer.event(event)

    def commit(self, **attrs: Any) -> None:
        """Set attributes of the run with the next block."""
        if self.writer is not None:
            self.writer.commit(**attrs)

    def flush(self, **attrs: Any) -> None:
        """Wait until everything is on disk, and set attributes of the run."""
        if self.writer is None:
            return
        if attrs:
            self.commit(**attrs)
        self.writer.flush()
        self._n_rows = 0

    def close(self, **attrs: Any) -> None:
        """Write the waiting rows, set attributes of the run, and close the writer."""
        if self.writer is not None:
            self.writer.close(**attrs)

    def _warn_of_late_column(self, step: int, values: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        for name in values.keys() - kept.keys() - self._late:
            self._late.add(name)
            name = as_text(name)
            message = (
                f"'{name}' was first logged at step {step} and is not recorded, as the first row did not have it; log "
                "it from the first step on, as NaN where it is unknown."
            )
            self.event(Event(step, "not recorded", source=name, message=message))
            issue_warning(message)

    def _give_up(self, part: str, step: int, error: StoreError) -> None:
        message = f"Part '{part}' is not written from step {step} on: {error}"
        self._lost.add(part)
        self.event(Event(step, "not recorded", source=part, message=message))
        issue_warning(f"{message} Training continues.")


def issue_warning(sentence: str) -> None:
    """Issue a `RecordingWarning`."""
    warnings.warn(sentence, RecordingWarning, stacklevel=3)


def _declared(
    part: str, values: Mapping[str, Any], coords: Mapping[str, np.ndarray], stored: Mapping[str, str]
) -> Part:
    """Return the declaration of a part, derived from its first row."""
    rules = MONITORS if part == "monitors" else PARTS[part]
    attrs: dict[str, dict[str, Any]] = {name: dict(rules[name].attrs) for name in values if name in rules}
    for name, own in stored.items():
        if name != own and part == "monitors":
            attrs[own] = {"long_name": as_text(name), "units": "1", "logged_as": as_text(name)}
    dims = {name: rules[name].dims[1:] if name in rules else () for name in values}
    if not any(dims.values()):
        return Part.of_scalars(part, values, attrs)
    used = {dim for of_variable in dims.values() for dim in of_variable}
    along: dict[str, Any] = {}
    for name, at in coords.items():
        dim = _ALONG.get(name, "module" if part == "optimizer" and name == "layer" else name)
        if dim in used:
            along[name] = at.tolist() if dim == name else (dim, at.tolist())
    return Part(part, dims, coords=along, attrs=attrs)


_FREE = re.compile(r"(?!__)\w(?:[\w .+-]*[\w+-])?")
#: Names of dimensions and of files of a store; longest name that is stored unchanged.
_RESERVED, _LONGEST = frozenset(("step", "event", "layer", "head", "term", "module", "c", "zarr.json")), 120


def stored_names(names: Iterable[str], stored: Collection[str] = ()) -> dict[str, str]:
    """Return a name for each metric: its own, or one without characters of paths that no other metric has."""
    names = list(names)
    own = {n for n in names if _FREE.fullmatch(n) and len(n.encode()) <= _LONGEST and n not in _RESERVED}
    plain = {name: re.sub(r"[^\w.+-]+", "_", name).strip("_.+-")[:40] or "metric" for name in {*names} - own}
    plain = {name: f"logged_{base}" if base in _RESERVED else base for name, base in plain.items()}
    # Some file systems do not distinguish capital letters.
    n_equal = Counter(name.lower() for name in [*own, *plain.values(), *MONITORS.keys() - own])
    found = dict.fromkeys(names, "")
    for name in names:
        base = plain.get(name, name)
        apart = f"{base}_{hashlib.sha256(as_text(name).encode()).hexdigest()[:8]}"
        equal = [other for other in own if other.lower() == base.lower()]
        is_first = name in own and name == min(equal, key=lambda other: (other not in MONITORS, other))
        found[name] = base if is_first or (n_equal[base.lower()] == 1 and apart not in stored) else apart
    return found


def as_text(name: str) -> str:
    """Return a name that can be stored as text; only lone surrogates are replaced."""
    return name.encode(errors="backslashreplace").decode()
