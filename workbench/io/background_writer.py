"""Writes a run's rows in a thread of its own, so that training never waits for the disk."""

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

#: What a dataset needs beside its numbers, about.
_BYTES_PER_DATASET = 10_000
#: Begin the names of the threads that write: our own, and those that Zarr works in.
_THREAD, _THREADS_OF_ZARR = "writer of ", ("zarr_", "asyncio_")

#: To wait for a disk that hangs.
_SECONDS_AT_EXIT = 30.0

_open_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()
_exit = {"is_over": False}


class RecordingWarning(UserWarning):
    """Something of a run is not recorded; training goes on."""


class BackgroundWriter:
    """Takes rows from the training thread and appends them to a run in another one.

    Whatever happens to the disk, training goes on: the trouble is told once, as a `RecordingWarning` of the next call,
    rows wait in memory and are tried again with each block. Where too much waits, the oldest rows of the part with the
    most bytes are dropped, but never its newest, and an event ``gap`` says which, as soon as writing works again. A
    store that was removed is not made again.

    Rows are on disk and seen by readers after `flush`, or once a block was written; a killed process loses the rows
    since then. Forked children (workers that load data) may hold a copy: in them it does nothing.

    Args:
        writer: Of the run's store; from now on nobody else may use it.
        rows_per_block: Write as soon as so many rows of a part wait.
        seconds_per_block: Write what waits after so many seconds too.
        max_bytes: What may wait in memory, beside the block that is being written; half of it is a block too.

    Raises:
        OptionError: If a bound is not positive.
        StoreError: If the store holds events of another kind.
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
                raise OptionError(f"{name} is {value}, expected a number above 0.")
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
        self._n_asked = self._n_answered = 0
        self._trouble: str | None = None
        self._reason = ""
        self._warning: str | None = None
        self._is_gone = self._is_closed = self._is_uncommitted = False
        self._process = os.getpid()
        self._owner = threading.current_thread()
        _close_at_exit(self)

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def trouble(self) -> str | None:
        """Why the last block could not be written; None: it was."""
        return self._trouble

    def declare(self, part: Part) -> None:
        """Say what the rows of a part will hold, before the first is added.

        Raises:
            StoreError: If the part was declared already, or the store has it with other variables, dimensions, kinds
                or coordinates; nothing is written then.
        """
        if part.name in self._parts:
            raise StoreError(f"Part '{part.name}' is there already; declare each part once, before its first row.")
        if not self._is_open():
            return
        waiting = WaitingRows(part)
        layout = self._layout(part.name)
        if layout is not None:
            check_layout(waiting.empty(), layout, part.name, part.dim, self.path)
        with self._changed:
            self._parts[part.name] = waiting

    def add(self, part: str, step: int, values: Mapping[str, Any]) -> None:
        """Take a row of a part; the values are copied.

        Args:
            part: Its name; declared before.
            step: Updates before the row; higher than that of the part's last row.
            values: Of each variable, without the dimension of the steps. Floating-point ones may be left out: NaN.

        Raises:
            StoreError: If the values are not those declared, or the writer is closed. Trouble with the disk raises
                nothing.
        """
        if not self._is_open():
            return
        if part not in self._parts:
            raise StoreError(f"There is no part '{part}'; declare it before its first row.")
        waiting = self._parts[part]
        if waiting.part is None:
            raise StoreError(f"Part '{part}' takes datasets; use add_dataset().")
        self._put(waiting, waiting.row(int(step), values), part)

    def add_dataset(self, part: str, dataset: xr.Dataset) -> None:
        """Take a row that is a dataset already, such as spectra; it is copied.

        Args:
            part: Its name; not declared.
            dataset: With a dimension ``step`` of size one; the same variables and sizes every time.

        Raises:
            StoreError: If the dataset has not one step, or does not fit what the part holds.
        """
        if not self._is_open():
            return
        if dataset.sizes.get("step") != 1 or "step" not in dataset.coords:
            raise StoreError(f"A dataset for part '{part}' needs one step; use expand_dims(step=[...]).")
        waiting = self._parts.get(part) or WaitingRows(None, self._layout(part))
        if waiting.part is not None:
            raise StoreError(f"Part '{part}' was declared, so it takes rows; use add().")
        copy = dataset.copy(deep=True)
        if waiting.layout is None:
            waiting.layout = copy.isel(step=slice(0))
        check_layout(copy, waiting.layout, part, "step", self.path)
        with self._changed:
            self._parts[part] = waiting
        self._put(waiting, RecordedRow(int(dataset["step"].item()), copy, copy.nbytes + _BYTES_PER_DATASET), part)

    def event(self, event: Event) -> None:
        """Take something that happened; a store whose events lack ``layer`` and ``head`` goes on without."""
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
        """Wait until all that was added is on disk and seen by readers.

        Args:
            timeout: Seconds to wait at most; None: as long as the disk takes.

        Returns:
            Whether it is. If not, the rows are kept and tried again with the next block.
        """
        if os.getpid() != self._process:
            return False
        timeout = timeout if self._may_wait() else 0
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            if self._is_closed or self._is_gone or (self._thread is None and not self._has_work()):
                is_written = not self._is_gone and not self._has_work()
            else:
                self._n_asked += 1
                is_written = self._wait_for(self._n_asked, deadline)
        self._tell()
        return is_written

    def close(self, **attrs: Any) -> bool:
        """Write what waits, and end.

        Args:
            **attrs: Attributes of the run to set with it.

        Returns:
            Whether all is on disk. If not, a warning says what is lost.
        """
        return self._close(attrs, timeout=None)

    def close_within(self, seconds: float) -> bool:
        """As `close`, but a disk that hangs is waited for no longer than so many seconds."""
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
            if self._may_wait():  # otherwise the writing thread does what is left
                self._give_up_rows()
        if thread is not None and is_written:
            thread.join(timeout)
        self._tell()
        return is_written

    def _give_up_rows(self) -> bool:
        """Forget what waits, with a word; returns whether there was anything."""
        n_lost = sum(len(waiting.take()) for waiting in self._parts.values())
        if n_lost:
            self._warning = f"{n_lost} rows of the run at {self.path} were not written ({self._reason}) and are lost."
        return n_lost > 0

    def _may_wait(self) -> bool:
        """Whether this thread may wait for those that write: not where it may be one of them.

        The garbage collector runs in any thread, and closes there a run that nobody holds any more.
        """
        thread = threading.current_thread()
        return thread is self._owner or not thread.name.startswith((_THREAD, *_THREADS_OF_ZARR))

    # What follows runs in the training thread and holds the lock only to move rows.

    def _is_open(self) -> bool:
        """Whether rows are taken: not in a forked child, nor once the store is gone."""
        self._tell()
        if self._is_closed:
            raise StoreError(f"The writer of the run at {self.path} is closed; add rows before close().")
        return not self._is_gone and os.getpid() == self._process

    def _tell(self) -> None:
        """Pass a warning on from the writing thread, whose own warnings nobody would see."""
        if self._warning is not None:
            warning, self._warning = self._warning, None
            warnings.warn(warning, RecordingWarning, stacklevel=3)

    def _layout(self, part: str) -> xr.Dataset | None:
        try:
            return self._writer.layout(part)
        except OSError:  # the next block will tell
            return None

    def _put(self, waiting: WaitingRows, row: RecordedRow, part: str) -> None:
        with self._changed:
            if part != "events" and waiting.last_step is not None and row.step <= waiting.last_step:
                raise StoreError(
                    f"Step {row.step} of part '{part}' comes after step {waiting.last_step}; steps have to rise."
                )
            waiting.put(row)
            self._last_step = max(self._last_step, row.step)
            if part != "events":  # an event may be what a run says that the collector closes
                self._owner = threading.current_thread()
            self._keep_bound()
            self._start()
            if self._is_block():
                self._changed.notify_all()

    def _n_bytes(self) -> int:
        return sum(waiting.n_bytes for waiting in self._parts.values())

    def _is_block(self) -> bool:
        """Whether so much waits that it is written at once; in trouble, bytes alone are no reason to try again."""
        is_large = self._trouble is None and 2 * self._n_bytes() >= self._max_bytes
        return is_large or any(waiting.n_new >= self._rows_per_block for waiting in self._parts.values())

    def _keep_bound(self) -> None:
        """Drop the oldest row of the part with the most waiting, until the rest may stay."""
        while self._n_bytes() > self._max_bytes:
            # The newest stays: a row that is larger than the bound would never be written.
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
            # A thread that the interpreter's end has stopped never answers.
            if time.monotonic() > deadline or _is_exiting() or self._thread is None or not self._thread.is_alive():
                return False
            self._changed.wait(0.2)
        return self._trouble is None

    def _has_work(self) -> bool:
        parts = self._parts.values()
        return bool(self._attrs) or self._is_uncommitted or any(part.rows or part.lost for part in parts)

    # What follows runs in the writing thread.

    def _run(self) -> None:
        while (block := self._next_block()) is not None:
            self._write(block)
            with self._changed:
                self._settle(block)
                self._changed.notify_all()

    def _next_block(self) -> _Block | None:
        """Wait for it; None: there is nothing to do, and the next row starts another thread."""
        with self._changed:
            while not self._is_due():
                seconds = self._tried_at + self._seconds_per_block - time.monotonic()
                if self._is_closed or self._is_gone or seconds <= 0:
                    self._thread = None
                    break
                self._changed.wait(seconds)
            else:
                return self._take()
            is_left_alone = self._is_closed and self._give_up_rows()
        if is_left_alone:  # nobody waits for this thread
            self._tell()
        return None

    def _is_due(self) -> bool:
        if self._is_gone:
            return False
        if self._n_asked > self._n_answered:
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
        block = _Block(rows, lost, gaps, self._attrs, self._n_asked)
        self._attrs = {}
        self._is_uncommitted = True
        return block

    def _gap(self, part: str, lost: Lost) -> dict[str, Any]:
        values = {"kind": "gap", "source": part, "score": lost.n_rows, "message": lost.message(part)}
        values |= {"layer": -1, "head": -1}
        return {name: value for name, value in values.items() if name in self._parts["events"].declared.dims}

    def _write(self, block: _Block) -> None:
        """Append every part that can be, and show readers what there is; what failed stays in the block."""
        names = [name for name in block.rows if name != "events"]
        if block.gaps or "events" in block.rows:
            names.append("events")  # last: an event is about rows that are there
        for name in names:
            rows = block.rows.get(name, []) + (block.gaps if name == "events" else [])
            try:
                self._writer.append(name, self._parts[name].dataset(rows))
            except Exception as error:  # noqa: BLE001  (training goes on, whatever it is; it is told)
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
                # The error may be of any file that was missed first.
                self._warning = f"{self._writer.gone_message} Training goes on and is not recorded any more."
                for waiting in self._parts.values():
                    waiting.take()
            elif not had_trouble:
                n_mb = self._max_bytes / 2**20
                self._warning = (
                    f"{block.error} Training goes on; up to {n_mb:.3g} MiB of rows wait in memory, and are tried again "
                    "with each block."
                )
        self._keep_bound()

    def _is_store_gone(self) -> bool:
        try:
            return not self._writer.is_there()
        except OSError:
            return False


@dataclass
class _Block:
    """What is written at once; what is left of ``rows`` and ``lost`` afterwards could not be."""

    rows: dict[str, list[RecordedRow]]
    lost: dict[str, Lost]
    gaps: list[RecordedRow]
    attrs: dict[str, Any]
    request: int
    is_committed: bool = False
    error: Exception | None = None


def _reason(error: BaseException) -> str:
    """The system's own words, if it was the system."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__
    return str(error).strip().rstrip(".") or type(error).__name__


def _close_at_exit(writer: BackgroundWriter) -> None:
    """Close a writer at the interpreter's end, unless it is closed or gone by then."""
    _open_writers.add(writer)


def _is_exiting() -> bool:
    """Whether threads have stopped, or are about to."""
    return _exit["is_over"] or sys.is_finalizing()


def _close_all() -> None:
    for writer in list(_open_writers):
        writer.close_within(_SECONDS_AT_EXIT)
    _exit["is_over"] = True


# Zarr works in the threads of concurrent.futures, which stop taking work before `atexit` functions are called. What is
# registered here after them is called before them. The first block that is written may import dask and with it the
# processes, which cannot register their own end any more once the interpreter's has begun. Registered with the import:
# whoever trains and stops at the end registers later, and so is called before its writers are closed.
for _kind in ("thread", "process"):
    importlib.import_module(f"concurrent.futures.{_kind}")
getattr(threading, "_register_atexit", atexit.register)(_close_all)
