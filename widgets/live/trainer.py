"""Training runs that take turns, and can be paused between two steps."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from workbench.training.step_record import StepRecord

_log = logging.getLogger(__name__)


class LiveTrainer:
    """Advances runs in turns, one step each, until they end or are stopped.

    All runs share one thread: `workbench.train` swaps the global random states during a step, so runs that take turns
    have the same results as alone, while runs in two threads would not. `pause`, `resume` and `stop` may be called from
    any thread.

    Args:
        runs: Runs by name, from `workbench.train`.
        on_record: Called with name and record after each step.
        on_end: Called with name and error (None if there is none) when a run has ended by itself.
        on_hold: Called with True when it pauses, and with False when it continues.
    """

    def __init__(
        self,
        runs: Mapping[str, Iterator[StepRecord]],
        *,
        on_record: Callable[[str, StepRecord], None],
        on_end: Callable[[str, Exception | None], None],
        on_hold: Callable[[bool], None],
    ) -> None:
        self._runs = dict(runs)
        self._on_record, self._on_end, self._on_hold = on_record, on_end, on_hold
        self._may_run = threading.Event()
        self._may_run.set()
        self._is_stopping = False

    def pause(self) -> None:
        """Pause after the current step."""
        self._may_run.clear()

    def resume(self) -> None:
        """Continue after a pause."""
        self._may_run.set()

    def stop(self) -> None:
        """End after the current step, without waiting; all runs are closed and recorded as "stopped"."""
        self._is_stopping = True
        self._may_run.set()

    def work(self) -> None:
        """Advance the runs until the last one has ended, or `stop` is called."""
        waiting = deque(self._runs)
        while waiting:
            self._hold()
            if self._is_stopping:
                break
            name = waiting.popleft()
            if self._advance(name):
                waiting.append(name)
        for name in waiting:
            self._close(name)
        self._runs.clear()

    def _hold(self) -> None:
        """Wait while paused."""
        if self._may_run.is_set():
            return
        self._on_hold(True)
        self._may_run.wait()
        self._on_hold(False)

    def _advance(self, name: str) -> bool:
        """Advance a run by one step, and return whether it continues."""
        try:
            record = next(self._runs[name], None)
            if record is not None:
                self._on_record(name, record)
                return True
        except Exception as error:  # noqa: BLE001  (shown to the user; the other run continues)
            self._say(name, error)
            self._close(name)
            self._on_end(name, error)
        else:
            self._on_end(name, None)
        return False

    def _close(self, name: str) -> None:
        """Close a run, so that its record is written completely."""
        try:
            close = getattr(self._runs[name], "close", None)  # generators have one
            if close is not None:
                close()
        except Exception as error:  # noqa: BLE001  (of a user-supplied model or task)
            self._say(name, error)
            self._on_end(name, error)

    @staticmethod
    def _say(name: str, error: Exception) -> None:
        if not isinstance(error, WorkbenchError):  # a bug: the log has the traceback
            _log.error("The run %s failed.", name, exc_info=error)
