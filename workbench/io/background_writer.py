"""Append rows to the store of a run in a separate thread, so that training does not wait for the disk."""

from __future__ import annotations

import atexit
import importlib
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from workbench.errors import OptionError, StoreError
from workbench.io.run_parts import Lost, Part, RecordedRow, WaitingRows, check_layout, events_part
from workbench.io.run_writer import RunWriter
from workbench.schema.events import Event

if TYPE_CHECKING:
    import xarray as xr

#: Approximate memory of a dataset in addition to its values.
_BYTES_PER_DATASET = 10_000
#: Prefixes of the names of threads that write: that of the writer, and those of Zarr.
_THREAD, _THREADS_OF_ZARR = "writer of ", ("zarr_", "asyncio_")

#: Longest wait for a hanging disk at interpreter exit, in seconds.
_SECONDS_AT_EXIT = 30.0

_open_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()
_exit = {"is_over": False}


class RecordingWarning(UserWarning):
    """Warning that a part of a run is not recorded; training continues."""


class BackgroundWriter:
    """Writer that takes rows from the training thread and appends them to a run in another thread.

    Write errors never stop training. An error is reported once, as a `RecordingWarning` of the next call; the rows wait
    in memory, and writing them is retried with each block. If too many rows wait, the oldest rows of the largest part
    are dropped, but never its newest row. An event ``gap`` records the dropped rows once writing succeeds again. A
    store that was removed is not created again.

    Rows are on disk and visible to readers after `flush`, or after a block was written; a killed process loses the rows
    since then. In forked children, such as workers of a data loader, a copy of the writer does nothing.

    Args:
        writer: Writer of the store of the run; the caller must not use it afterwards.
        rows_per_block: Write as soon as this many rows of a part wait.
        seconds_per_block: Write waiting rows after at most this many seconds.
        max_bytes: Largest size of the rows that wait in memory, excluding the block that is being written; rows of half
            this size are written as a block.
    """

    def __init__(
        self,
        writer: RunWriter,
        *,
        rows_per_block: int = 200,
        seconds_per_block: float = 10.0,
        max_bytes: int = 64 << 20,
    ) -> None:
        bounds = {"rows_per_block": rows_per_block, "seconds_per_block": seconds_per_block, "max_bytes": max_bytes}
        for name, value in bounds.items():
            if not value > 0:
                raise OptionError.of(name, value, "positive")
        self.path = writer.path
        self._writer = writer
        self._rows_per_block = rows_per_block
        self._seconds_per_block = seconds_per_block
        self._max_bytes = max_bytes
        layout = writer.layout("events")
        events = WaitingRows(events_part(None if layout is None else [str(name) for name in layout]))
        if layout is not None:
            check_layout(events.empty(), layout, "events", "event", writer.path)
        self._parts = {"events": events}
        self._attrs: dict[str, Any] = {}
        self._last_step = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._tried_at = time.monotonic()
        self._n_requested = self._n_answered = 0
        self._trouble: str | None = None
        self._reason = ""
        self._warning: str | None = None
        self._is_gone = self._is_closed = self._is_uncommitted = False
        self._process = os.getpid()
        self._owner = threading.current_thread()
        _open_writers.add(self)

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def trouble(self) -> str | None:
        """Reason why the last block could not be written; None if it was written."""
        return self._trouble

    def variables(self, part: str) -> frozenset[str] | None:
        """Return the names of the variables of a part in the store; None if it has no rows yet."""
        layout = self._layout(part) if self._is_open() else None
        return None if layout is None else frozenset(map(str, layout.variables))

    def declare(self, part: Part) -> None:
        """Declare the variables of a part before its first row is added."""
        if part.name in self._parts:
            raise StoreError(f"Part '{part.name}' exists already; declare each part once, before its first row.")
        if not self._is_open():
            return
        waiting = WaitingRows(part)
        layout = self._layout(part.name)
        if layout is not None:
            check_layout(waiting.empty(), layout, part.name, part.dim, self.path)
        with self._changed:
            self._parts[part.name] = waiting

    def add(self, part: str, step: int, values: Mapping[str, Any]) -> None:
        """Add a row to a part; the values are copied.

        Args:
            part: Name of a declared part.
            step: Updates before the row; larger than that of the last row of the part.
            values: Value of each variable, without the dimension of the steps. Missing floating-point variables are
                NaN.
        """
        if not self._is_open():
            return
        if part not in self._parts:
            raise StoreError(f"There is no part '{part}'; declare it before its first row.")
        waiting = self._parts[part]
        if waiting.part is None:
            raise StoreError(f"Part '{part}' consists of datasets; use add_dataset().")
        self._put(waiting, waiting.row(int(step), values), part)

    def add_dataset(self, part: str, dataset: xr.Dataset) -> None:
        """Add a row in the form of a dataset, such as spectra, to a part; the dataset is copied.

        Args:
            part: Name of the part; it must not be declared.
            dataset: Dataset with a dimension ``step`` of size one; the same variables and sizes every time.
        """
        if not self._is_open():
            return
        if dataset.sizes.get("step") != 1 or "step" not in dataset.coords:
            raise StoreError(f"A dataset for part '{part}' needs exactly one step; use expand_dims(step=[...]).")
        waiting = self._parts.get(part) or WaitingRows(None, self._layout(part))
        if waiting.part is not None:
            raise StoreError(f"Part '{part}' was declared, so it consists of rows; use add().")
        copy = dataset.copy(deep=True)
        if waiting.layout is None:
            waiting.layout = copy.isel(step=slice(0))
        check_layout(copy, waiting.layout, part, "step", self.path)
        with self._changed:
            self._parts[part] = waiting
        self._put(waiting, RecordedRow(int(dataset["step"].item()), copy, copy.nbytes + _BYTES_PER_DATASET), part)

    def event(self, event: Event) -> None:
        """Add an event; ``layer`` and ``head`` are omitted if the events in the store lack them."""
        if not self._is_open():
            return
        events = self._parts["events"]
        row = {name: value for name, value in event.as_row().items() if name in events.declared.dims}
        self._put(events, events.row(int(event.step), row), "events")

    def commit(self, **attrs: Any) -> None:
        """Set attributes of the run with the next block."""
        if self._is_open():
            with self._changed:
                self._attrs |= attrs
                self._start()

    def flush(self, *, timeout: float | None = None) -> bool:
        """Wait until all rows added so far are on disk and visible to readers.

        Args:
            timeout: Longest wait in seconds; None waits without a limit.

        Returns:
            Whether they are. If not, the rows are kept, and writing is retried with the next block.
        """
        if os.getpid() != self._process:
            return False
        timeout = timeout if self._may_wait() else 0
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            if self._is_closed or self._is_gone or (self._thread is None and not self._has_work()):
                is_written = not self._is_gone and not self._has_work()
            else:
                self._n_requested += 1
                is_written = self._wait_for(self._n_requested, deadline)
        self._pass_on_warning()
        return is_written

    def close(self, **attrs: Any) -> bool:
        """Write the waiting rows and close the writer.

        Returns:
            Whether all rows are on disk. If not, a warning reports how many are lost.
        """
        return self._close(attrs, timeout=None)

    def close_within(self, seconds: float) -> bool:
        """Close the writer like `close`, but wait at most this many seconds for the disk."""
        return self._close({}, timeout=seconds)

    def _close(self, attrs: Mapping[str, Any], timeout: float | None) -> bool:
        if os.getpid() != self._process:
            return False
        with self._changed:
            if not self._is_closed:
                self._attrs |= attrs
        is_written = self.flush(timeout=timeout)
        with self._changed:
            self._is_closed = True
            thread = self._thread
            self._changed.notify_all()
            if self._may_wait():  # otherwise the writing thread finishes the close
                self._give_up_rows()
        if thread is not None and is_written:
            thread.join(timeout)
        if thread is None or not thread.is_alive():
            self._writer.release()
        self._pass_on_warning()
        return is_written

    def _give_up_rows(self) -> bool:
        """Drop the waiting rows and set a warning; return whether there were any."""
        n_lost = sum(len(waiting.take()) for waiting in self._parts.values())
        if n_lost:
            self._warning = f"{n_lost} rows of the run at {self.path} were not written ({self._reason}) and are lost."
        return n_lost > 0

    def _may_wait(self) -> bool:
        """Return whether this thread may wait for the writing threads, because it is not one of them.

        The garbage collector runs in any thread, where it may close a run that is no longer referenced.
        """
        thread = threading.current_thread()
        return thread is self._owner or not thread.name.startswith((_THREAD, *_THREADS_OF_ZARR))

    # The methods below run in the training thread, which holds the lock only to move rows.

    def _is_open(self) -> bool:
        """Return whether the writer accepts rows; False in a forked child and after the store was removed."""
        self._pass_on_warning()
        if self._is_closed:
            raise StoreError(f"The writer of the run at {self.path} is closed; add rows before close().")
        return not self._is_gone and os.getpid() == self._process

    def _pass_on_warning(self) -> None:
        """Issue the warning of the writing thread in this thread, where it is visible."""
        if self._warning is not None:
            warning, self._warning = self._warning, None
            warnings.warn(warning, RecordingWarning, stacklevel=3)

    def _layout(self, part: str) -> xr.Dataset | None:
        try:
            return self._writer.layout(part)
        except OSError:  # the next block reports it
            return None

    def _put(self, waiting: WaitingRows, row: RecordedRow, part: str) -> None:
        with self._changed:
            if part != "events" and waiting.last_step is not None and row.step <= waiting.last_step:
                raise StoreError(
                    f"Step {row.step} of part '{part}' follows step {waiting.last_step}; add rows in increasing order."
                )
            waiting.put(row)
            self._last_step = max(self._last_step, row.step)
            if part != "events":  # an event may come from a run that the garbage collector closes
                self._owner = threading.current_thread()
            self._keep_bound()
            self._start()
            if self._is_block():
                self._changed.notify_all()

    def _n_bytes(self) -> int:
        return sum(waiting.n_bytes for waiting in self._parts.values())

    def _is_block(self) -> bool:
        """Return whether enough rows wait to be written; after a write error, their size does not trigger a retry."""
        is_large = self._trouble is None and 2 * self._n_bytes() >= self._max_bytes
        return is_large or any(waiting.n_new >= self._rows_per_block for waiting in self._parts.values())

    def _keep_bound(self) -> None:
        """Drop the oldest row of the largest part until the remaining rows fit into ``max_bytes``."""
        while self._n_bytes() > self._max_bytes:
            # The newest row is kept, as a row that is larger than the bound would otherwise never be written.
            several = [waiting for waiting in self._parts.values() if len(waiting.rows) > 1]
            if not several:
                return
            largest = max(several, key=lambda waiting: waiting.n_bytes)
            largest.drop_oldest(self._reason or "the disk does not keep up")

    def _start(self) -> None:
        is_running = self._thread is not None and self._thread.is_alive()
        if not is_running and not self._is_gone and not _is_exiting():
            self._tried_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=f"{_THREAD}{self.path.name}", daemon=True)
            self._thread.start()

    def _wait_for(self, request: int, deadline: float) -> bool:
        self._start()
        self._changed.notify_all()
        while self._n_answered < request and not self._is_gone:
            # A thread that was stopped at interpreter exit never answers.
            if time.monotonic() > deadline or _is_exiting() or self._thread is None or not self._thread.is_alive():
                return False
            self._changed.wait(0.2)
        return self._trouble is None

    def _has_work(self) -> bool:
        parts = self._parts.values()
        return bool(self._attrs) or self._is_uncommitted or any(part.rows or part.lost for part in parts)

    # The methods below run in the writing thread.

    def _run(self) -> None:
        while (block := self._next_block()) is not None:
            self._write(block)
            with self._changed:
                self._settle(block)
                self._changed.notify_all()

    def _next_block(self) -> _Block | None:
        """Wait for the next block; return None if there is nothing to write, so that this thread ends."""
        with self._changed:
            while not self._is_due():
                seconds = self._tried_at + self._seconds_per_block - time.monotonic()
                if self._is_closed or self._is_gone or seconds <= 0:
                    self._thread = None
                    break
                self._changed.wait(seconds)
            else:
                return self._take()
            has_lost_rows = self._is_closed and self._give_up_rows()
        if has_lost_rows:  # no other thread waits for this one
            self._pass_on_warning()
        return None

    def _is_due(self) -> bool:
        if self._is_gone:
            return False
        if self._n_requested > self._n_answered:
            return True
        if not self._has_work():
            return False
        return self._is_block() or time.monotonic() >= self._tried_at + self._seconds_per_block

    def _take(self) -> _Block:
        lost = {name: waiting.lost for name, waiting in self._parts.items() if waiting.lost}
        gaps = [self._parts["events"].row(self._last_step, self._gap(name, gap)) for name, gap in lost.items()]
        rows = {name: waiting.take() for name, waiting in self._parts.items() if waiting.rows}
        for name in lost:
            self._parts[name].lost = None
        block = _Block(rows, lost, gaps, self._attrs, self._n_requested)
        self._attrs = {}
        self._is_uncommitted = True
        return block

    def _gap(self, part: str, lost: Lost) -> dict[str, Any]:
        values = {"kind": "gap", "source": part, "score": lost.n_rows, "message": lost.message(part)}
        values |= {"layer": -1, "head": -1}
        return {name: value for name, value in values.items() if name in self._parts["events"].declared.dims}

    def _write(self, block: _Block) -> None:
        """Append all parts that can be written, and commit; rows that could not be written stay in the block."""
        names = [name for name in block.rows if name != "events"]
        if block.gaps or "events" in block.rows:
            names.append("events")  # last, as events refer to rows that are already written
        for name in names:
            rows = block.rows.get(name, []) + (block.gaps if name == "events" else [])
            try:
                self._writer.append(name, self._parts[name].dataset(rows))
            except Exception as error:  # noqa: BLE001  (reported by a warning; training continues after any error)
                block.error = error
            else:
                block.rows.pop(name, None)
                if name == "events":
                    block.lost, block.gaps = {}, []
        try:
            self._writer.commit(**block.attrs)
            block.is_committed = True
        except Exception as error:  # noqa: BLE001
            block.error = block.error or error

    def _settle(self, block: _Block) -> None:
        for name, rows in block.rows.items():
            self._parts[name].put_back(rows)
        for name, lost in block.lost.items():
            self._parts[name].lost = lost.and_also(self._parts[name].lost)
        self._is_uncommitted = not block.is_committed
        self._tried_at = time.monotonic()
        self._n_answered = block.request
        had_trouble, self._trouble, self._reason = self._trouble is not None, None, ""
        if block.error is not None:
            self._trouble, self._reason = str(block.error), _reason(block.error)
            self._is_gone = self._is_store_gone()
            if self._is_gone:
                # The error itself names only the first missing file.
                self._warning = f"{self._writer.gone_message} Training continues without being recorded."
                for waiting in self._parts.values():
                    waiting.take()
            elif not had_trouble:
                n_mb = self._max_bytes / 2**20
                self._warning = (
                    f"{block.error} Training continues; up to {n_mb:.3g} MiB of rows are kept in memory, and writing "
                    "them is retried with each block."
                )
        self._keep_bound()

    def _is_store_gone(self) -> bool:
        try:
            return not self._writer.is_there()
        except OSError:
            return False


@dataclass
class _Block:
    """Rows that are written together; those that remain in ``rows`` and ``lost`` could not be written."""

    rows: dict[str, list[RecordedRow]]
    lost: dict[str, Lost]
    gaps: list[RecordedRow]
    attrs: dict[str, Any]
    request: int
    is_committed: bool = False
    error: Exception | None = None


def _reason(error: BaseException) -> str:
    """Return the message of the operating system if it caused the error, else that of the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__
    return str(error).strip().rstrip(".") or type(error).__name__


def _is_exiting() -> bool:
    """Return whether interpreter exit has stopped the threads, or is about to."""
    return _exit["is_over"] or sys.is_finalizing()


def _close_all() -> None:
    for writer in list(_open_writers):
        writer.close_within(_SECONDS_AT_EXIT)
    _exit["is_over"] = True


# Zarr uses the threads of concurrent.futures, which accept no work when `atexit` functions are called. Exit functions
# are called in reverse order of registration, so one that is registered here, after theirs, is called before them. The
# first block may import dask and with it concurrent.futures.process, which cannot register its exit function after
# interpreter exit has begun; hence both modules are imported here. Code that stops training at exit registers its
# function later than this module, so it is called before the writers are closed.
for _kind in ("thread", "process"):
    importlib.import_module(f"concurrent.futures.{_kind}")
getattr(threading, "_register_atexit", atexit.register)(_close_all)
