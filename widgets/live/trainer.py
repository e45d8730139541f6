"""One thread that advances training runs in turns."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from functools import cache
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from workbench.training.step_record import StepRecord

_log = logging.getLogger(__name__)
_SECONDS_AT_EXIT = 10.0
#: Trainers that have to be stopped before the interpreter ends.
_at_work: set[LiveTrainer] = set()


class LiveTrainer:
    """Advances runs in turns, a step each, until they end or are stopped.

    One thread for all: `workbench.train` swaps the global random states while a step runs, so that runs which take
    turns are each what they would be alone, and runs in two threads would not be.

    Args:
        runs: Runs by name, from `workbench.train`.
        on_record: Called with name and record after each step.
        on_end: Called with name and error, or None, when a run has ended by itself.
        on_stop: Called once, last, when all runs are closed. Like the other two, in the trainer's thread.
    """

    def __init__(
        self,
        runs: Mapping[str, Iterator[StepRecord]],
        *,
        on_record: Callable[[str, StepRecord], None],
        on_end: Callable[[str, Exception | None], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._runs = dict(runs)
        self._on_record, self._on_end, self._on_stop = on_record, on_end, on_stop
        self._may_run = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="LiveTraining", daemon=True)

    @property
    def is_paused(self) -> bool:
        """Whether it waits for `resume`."""
        return not self._may_run.is_set()

    def start(self) -> None:
        """Begin; once."""
        _watch_exit()
        _at_work.add(self)
        self._may_run.set()
        self._thread.start()

    def pause(self) -> None:
        """Hold after the present step."""
        self._may_run.clear()

    def resume(self) -> None:
        """Go on after a pause."""
        self._may_run.set()

    def stop(self) -> None:
        """End after the present step; every run is closed, so that its store says "stopped". Does not wait."""
        self._is_stopping = True
        self._may_run.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the thread, at most this many seconds; returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        n_threads = torch.get_num_threads()
        # For this thread alone: one core is left to the page and the kernel, or training waits for them at every turn.
        torch.set_num_threads(max(1, n_threads - 1))
        try:
            self._take_turns()
        finally:
            torch.set_num_threads(n_threads)  # which new threads begin with
            _at_work.discard(self)
            self._on_stop()

    def _take_turns(self) -> None:
        waiting = deque(self._runs)
        while waiting:
            self._may_run.wait()
            if self._is_stopping:
                break
            name = waiting.popleft()
            if self._advance(name):
                waiting.append(name)
        for name in waiting:
            self._close(name)
        self._runs.clear()

    def _advance(self, name: str) -> bool:
        """One step of a run; returns whether it goes on."""
        try:
            record = next(self._runs[name], None)
            if record is not None:
                self._on_record(name, record)
                return True
        except Exception as error:  # noqa: BLE001  (said to people; the other run goes on)
            self._say(name, error)
            self._close(name)
            self._on_end(name, error)
        else:
            self._on_end(name, None)
        return False

    def _close(self, name: str) -> None:
        """Write what a run has gathered."""
        try:
            close = getattr(self._runs[name], "close", None)  # generators have one
            if close is not None:
                close()
        except Exception as error:  # noqa: BLE001  (a model or task of the user's own)
            self._say(name, error)
            self._on_end(name, error)

    @staticmethod
    def _say(name: str, error: Exception) -> None:
        if not isinstance(error, WorkbenchError):  # a bug: the log has the traceback
            _log.error("The run %s failed.", name, exc_info=error)


@cache
def _watch_exit() -> None:
    """Let a kernel that is shut down or restarted leave closed stores behind.

    Stores are written by threads of a pool, which takes no more work when functions of ``atexit`` run; those of
    ``threading`` run before.
    """
    getattr(threading, "_register_atexit", atexit.register)(_stop_all)


def _stop_all() -> None:
    for trainer in list(_at_work):
        trainer.stop()
    end = time.monotonic() + _SECONDS_AT_EXIT
    for trainer in list(_at_work):
        trainer.join(max(0.0, end - time.monotonic()))
