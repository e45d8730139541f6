"""Training runs that are advanced in turns, and held between two steps."""

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
    """Advances runs in turns, a step each, until they end or are stopped.

    In one thread for all: `workbench.train` swaps the global random states while a step runs, so that runs which take
    turns are each what they would be alone, and runs in two threads would not be. `pause`, `resume` and `stop` may be
    called from any thread.

    Args:
        runs: Runs by name, from `workbench.train`.
        on_record: Called with name and record after each step.
        on_end: Called with name and error, or None, when a run has ended by itself.
        on_hold: Called with True when it holds after a `pause`, and with False when it goes on.
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
        """Hold after the present step."""
        self._may_run.clear()

    def resume(self) -> None:
        """Go on after a pause."""
        self._may_run.set()

    def stop(self) -> None:
        """End after the present step; every run is closed, so that its store says "stopped". Does not wait."""
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
        """Wait while it is paused."""
        if self._may_run.is_set():
            return
        self._on_hold(True)
        self._may_run.wait()
        self._on_hold(False)

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
