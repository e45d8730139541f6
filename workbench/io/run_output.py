"""Append the output of a run (rows, datasets, events) to its store in blocks. Errors here never stop training."""

from __future__ import annotations

import atexit
import hashlib
import importlib
import math
import os
import re
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import StoreError
from workbench.io.run_index import RunEntry
from workbench.io.run_parts import Part, RecordedRow, WaitingRows, check_layout, events_part
from workbench.io.run_writer import RunWriter
from workbench.schema.events import Event
from workbench.schema.runs import MONITORS, PARTS

if TYPE_CHECKING:
    import xarray as xr

#: Approximate memory of a dataset in addition to its values.
_BYTES_PER_DATASET = 10_000
#: Dimension of each coordinate whose name differs from it.
_ALONG = {"layer_name": "layer", "module_name": "module"}
#: Prefixes of the names of Zarr's threads.
_THREADS_OF_ZARR = ("zarr_", "asyncio_")

#: Rows after which the first block of a run with a limit is written.
_FIRST_ROWS = 10
#: Clock of the costs of observation; a test replaces it to be independent of the speed of its machine.
stopwatch = time.perf_counter

_open_outputs: weakref.WeakSet[RunOutput] = weakref.WeakSet()


class RecordingWarning(UserWarning):
    """Warning that a part of a run is not recorded; training continues."""


class RunOutput:
    """Output of a run, written to its store if it has one.

    The first row of a part determines the variables of all its rows. An invalid row ends its part, with a
    `RecordingWarning` and an event. After a write error, which is reported once, the rows wait in memory, and writing
    them is retried with each block. If too many rows wait, the oldest rows of the largest part are dropped, but never
    its newest row; an event ``gap`` records them once writing succeeds again. A store that was removed is not created
    again.

    Rows are on disk and visible to readers after `flush`, or after a block was written; a killed process loses the rows
    since then. In forked children, such as workers of a data loader, a copy of the output does nothing.

    Args:
        writer: Writer of the store, which the caller must not use afterwards; None writes nothing.
        rows_per_block: Write as soon as this many rows of a part wait.
        seconds_per_block: Write with the first row or event that comes this many seconds after the last block.
        max_bytes: Largest size of the rows that wait in memory; rows of half this size are written as a block.
        share: Largest share of the time for writing blocks, which follow each other at larger intervals if they take
            longer; None if there is no limit.
    """

    def __init__(
        self,
        writer: RunWriter | None,
        *,
        rows_per_block: int = 200,
        seconds_per_block: float = 10.0,
        max_bytes: int = 64 << 20,
        share: float | None = None,
    ) -> None:
        self.path = None if writer is None else writer.path
        self._writer = writer
        self._rows_per_block, self._seconds_per_block, self._max_bytes = rows_per_block, seconds_per_block, max_bytes
        self._names: dict[str, frozenset[str]] = {}
        self._stored, self._renamed = dict[str, str](), dict[str, str]()
        self._late: set[str] = set()
        self._lost: set[str] = set()
        self._parts: dict[str, WaitingRows] = {}
        self._attrs: dict[str, Any] = {}
        self._last_step = 0
        self._lock = threading.RLock()
        self._tried_at, self._rests_until = time.monotonic(), 0.0
        self._share = share
        self._is_first_of_share = share is not None
        #: Function that returns a context whose time is a cost of the observation, by its name.
        self.timed: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext()
        self._trouble = ""
        #: Function that returns what the observation has cost so far; None if it is not known.
        self.share: Callable[[], float] | None = None
        self._is_gone = self._is_closed = self._is_uncommitted = False
        self._process = os.getpid()
        if writer is not None:
            layout = writer.layout("events")
            self._parts["events"] = WaitingRows(events_part(None if layout is None else list(map(str, layout))))
            if layout is not None:
                check_layout(self._parts["events"].empty(), layout, "events", "event", writer.path)
            self._entry = RunEntry(writer.path)
            self._entry.write(writer.attrs, writer.root)
            _open_outputs.add(self)

    def add(
        self, part: str, step: int, values: Mapping[str, Any], coords: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Write a row.

        Args:
            part: Such as ``"monitors"``.
            step: Step of the row; steps must increase.
            values: Value of each variable, without the dimension of the steps; they are copied.
            coords: Values along the other dimensions, and ``layer_name`` or ``module_name``.
        """
        if not self._is_open() or part in self._lost:
            return
        try:
            if part == "monitors":  # their names are those of the user
                if not self._stored:
                    layout = self._layout(part)
                    self._stored = stored_names(values, () if layout is None else set(map(str, layout)))
                    self._renamed = {name: own for name, own in self._stored.items() if name != own}
                if self._renamed:
                    values = {self._renamed.get(name, name): value for name, value in values.items()}
            if part not in self._names:
                values = self._declare(part, values, coords or {})
            if values.keys() != self._names[part]:
                kept = {name: value for name, value in values.items() if name in self._names[part]}
                for name in values.keys() - kept.keys() - self._late:
                    self._warn_of_late_column(step, name)
                values = kept
            self._put(part, self._parts[part].row(int(step), values))
            if part == "monitors":
                self._entry.row(int(step), values)
        except StoreError as error:
            self._give_up(part, step, error)

    def add_dataset(self, part: str, dataset: xr.Dataset) -> None:
        """Write a row in the form of a dataset with a dimension ``step`` of size one; the dataset is copied."""
        if not self._is_open() or part in self._lost:
            return
        step, copy = int(dataset["step"].item()), dataset.copy(deep=True)
        try:
            waiting = self._parts.setdefault(part, WaitingRows(None, self._layout(part)))
            waiting.layout = copy.isel(step=slice(0)) if waiting.layout is None else waiting.layout
            check_layout(copy, waiting.layout, part, "step", self.path)
            self._put(part, RecordedRow(step, copy, copy.nbytes + _BYTES_PER_DATASET))
        except StoreError as error:
            self._give_up(part, step, error)

    def event(self, event: Event) -> None:
        """Write an event; ``layer`` and ``head`` are omitted if the events in the store lack them."""
        if self._is_open() and self._writer is not None:
            self._put("events", self._event_row(event))
            if self._entry.event(event):
                with self._lock:
                    self._entry.write(self._writer.attrs, self._writer.root)

    def commit(self, **attrs: Any) -> None:
        """Set attributes of the run with the next block."""
        self._attrs |= attrs

    def flush(self, **attrs: Any) -> bool:
        """Write all rows added so far, and set attributes of the run.

        Returns:
            Whether they are on disk. If not, the rows are kept, and writing is retried with the next block.
        """
        self.commit(**attrs)
        if self._writer is None or self._is_gone or os.getpid() != self._process:
            return False
        with self._lock:
            is_done = not (self._attrs or self._is_uncommitted or any(p.rows or p.lost for p in self._parts.values()))
            return is_done or self._write()

    def close(self, **attrs: Any) -> bool:
        """Write the waiting rows, set attributes of the run, and release the store.

        Returns:
            Whether all rows are on disk. If not, a warning reports how many are lost.
        """
        if self._writer is None or self._is_closed or os.getpid() != self._process:
            return self._is_closed
        if _is_thread_of_zarr():  # where the garbage collector may run, and where Zarr would wait for itself
            threading.Thread(target=self.close, kwargs=attrs).start()
            return False
        is_written = self.flush(**attrs)
        self._is_closed = True
        if n_lost := sum(waiting.clear() for waiting in self._parts.values()):
            issue_warning(f"{n_lost} rows of the run at {self.path} were not written ({self._trouble}) and are lost.")
        if self._writer.copy is not None and (sentence := self._writer.copy.close()):
            issue_warning(sentence)
        self._writer.release()
        return is_written

    def _is_open(self) -> bool:
        """Return whether rows are written; False in a forked child and after the store was removed."""
        if self._is_closed:
            raise StoreError(f"The output of the run at {self.path} is closed; add rows before close().")
        return self._writer is not None and not self._is_gone and os.getpid() == self._process

    def _layout(self, part: str) -> xr.Dataset | None:
        try:
            return None if self._writer is None else self._writer.layout(part)
        except OSError:  # the next block reports it
            return None

    def _declare(self, part: str, values: Mapping[str, Any], coords: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Set the variables of a part from its first row, and return those that are recorded."""
        layout = self._layout(part)
        # A resumed run of an earlier version keeps the variables with which it began.
        first = {name: value for name, value in values.items() if layout is None or name in layout.variables}
        waiting = WaitingRows(_declared(part, first, coords, self._stored))
        if layout is not None:
            check_layout(waiting.empty(), layout, part, "step", self.path)
        self._parts[part], self._names[part] = waiting, frozenset(first)
        self._late |= values.keys() - first.keys()
        return first

    def _event_row(self, event: Event) -> RecordedRow:
        events = self._parts["events"]
        assert events.part is not None
        row = {name: value for name, value in event.as_row().items() if name in events.part.dims}
        return events.row(int(event.step), row)

    def _put(self, part: str, row: RecordedRow) -> None:
        with self._lock:
            waiting = self._parts[part]
            if part != "events" and waiting.last_step is not None and row.step <= waiting.last_step:
                raise StoreError(
                    f"Step {row.step} of part '{part}' follows step {waiting.last_step}; add rows in increasing order."
                )
            waiting.put(row)
            self._last_step = max(self._last_step, row.step)
            now = time.monotonic()
            # With a limit, the first block, which creates the arrays, comes while the run is still young.
            at_once = min(self._rows_per_block, _FIRST_ROWS) if self._is_first_of_share else self._rows_per_block
            is_block = waiting.n_new >= at_once or now >= self._tried_at + self._seconds_per_block
            is_block &= now >= self._rests_until
            # After a write error, the size of the rows does not trigger a retry.
            if is_block or (not self._trouble and 2 * self._n_bytes() >= self._max_bytes):
                begun = stopwatch()
                self._write()
                if self._share is not None:
                    self._rests_until = time.monotonic() + (stopwatch() - begun) / self._share
                self._is_first_of_share = False
            self._keep_bound()

    def _n_bytes(self) -> int:
        return sum(waiting.n_bytes for waiting in self._parts.values())

    def _keep_bound(self) -> None:
        """Drop the oldest row of the largest part until the remaining rows fit into ``max_bytes``."""
        while self._n_bytes() > self._max_bytes:
            # The newest row is kept, as a row that is larger than the bound would otherwise never be written.
            several = [waiting for waiting in self._parts.values() if len(waiting.rows) > 1]
            if not several:
                return
            max(several, key=lambda waiting: waiting.n_bytes).drop_oldest(self._trouble)

    def _write(self) -> bool:
        """Append the waiting rows of each part that can be written, and commit; return whether all are on disk."""
        if self._writer is None or _is_thread_of_zarr():
            return False
        with self.timed("store"):
            error = self._write_parts(self._writer)
        self._report(error)
        if self._writer.copy is not None and (sentence := self._writer.copy.hear()):
            issue_warning(sentence)
        return error is None

    def _write_parts(self, writer: RunWriter) -> Exception | None:
        """Append the waiting rows of each part and commit; return an error of writing, if there was one."""
        self._tried_at, self._is_uncommitted = time.monotonic(), True
        error: Exception | None = None
        # Events are written last, as they refer to rows that are already written.
        for name, waiting in sorted(self._parts.items(), key=lambda item: item[0] == "events"):
            waiting.n_new = 0
            lost = {part: each.lost for part, each in self._parts.items() if each.lost} if name == "events" else {}
            gaps = [
                Event(self._last_step, "gap", source=part, score=gap.n_rows, message=gap.message(part))
                for part, gap in lost.items()
            ]
            if not (rows := [*waiting.rows, *map(self._event_row, gaps)]):
                continue
            try:
                writer.append(name, waiting.dataset(rows))
            except Exception as reason:  # noqa: BLE001  (reported by a warning; training continues after any error)
                error = reason
            else:
                waiting.clear()
                for part in lost:
                    self._parts[part].lost = None
        try:
            if self.share is not None and math.isfinite(share := self.share()):
                self._attrs["watching_share"] = share
            writer.commit(**self._attrs)
            self._entry.write(writer.attrs, writer.root)
            self._attrs, self._is_uncommitted = {}, False
        except Exception as reason:  # noqa: BLE001
            error = error or reason
        return error

    def _report(self, error: Exception | None) -> None:
        """Report the first of several write errors."""
        had_trouble, self._trouble = bool(self._trouble), "" if error is None else _reason(error)
        if error is None or self._writer is None:
            return
        try:
            self._is_gone = not self._writer.is_there()
        except OSError:
            self._is_gone = False
        if self._is_gone:
            for waiting in self._parts.values():
                waiting.clear()
            # The error itself names only the first missing file.
            issue_warning(f"{self._writer.gone_message} Training continues without being recorded.")
        elif not had_trouble:
            issue_warning(
                f"{error} Training continues; up to {self._max_bytes / 2**20:.3g} MiB of rows are kept in memory, and "
                "writing them is retried with each block."
            )

    def _warn_of_late_column(self, step: int, name: str) -> None:
        self._late.add(name)
        name = as_text(name)
        message = (
            f"'{name}' was first logged at step {step} and is not recorded, as the first row did not have it; log it "
            "from the first step on, as NaN where it is unknown."
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


def _is_thread_of_zarr() -> bool:
    return threading.current_thread().name.startswith(_THREADS_OF_ZARR)


def _reason(error: BaseException) -> str:
    """Return the message of the operating system if it caused the error, else that of the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__
    return str(error).strip().rstrip(".") or type(error).__name__


def before_exit(function: Callable[[], None]) -> None:
    """Call a function when the interpreter exits, while stores can still be written; the last one is called first."""
    getattr(threading, "_register_atexit", atexit.register)(function)


def _close_all() -> None:
    for output in list(_open_outputs):
        output.close()


# Zarr uses the threads of concurrent.futures, which accept no work when `atexit` functions are called. A function that
# is registered here, after theirs, is called before them. The first block may import dask and with it
# concurrent.futures.process, which cannot register its exit function after interpreter exit has begun.
for _kind in ("thread", "process"):
    importlib.import_module(f"concurrent.futures.{_kind}")
before_exit(_close_all)


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
