"""The kernel's side of the training process: starts it, sends commands, and receives messages."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from workbench.widgets.live import wire

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_MODULE = "workbench.widgets.live.training_process"
#: Seconds that training processes have for closing their stores when the kernel ends.
_SECONDS_AT_EXIT = 10.0
#: Environment variables that linear algebra libraries read when they are loaded.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
#: Processes that must be stopped before the interpreter ends.
_at_work: set[TrainingProcess] = set()


class TrainingProcess:
    """A separate Python process that trains the runs of one start.

    It uses one thread less than the kernel would, so that a core stays free for the page and the kernel.

    Args:
        job: Result of `wire.packed`.
        hear: Called with each message, in a thread of this object.
        on_exit: Called last, in that thread: with an error if the process did not end by itself, else with "".
    """

    def __init__(self, job: bytes, *, hear: Callable[..., None], on_exit: Callable[[str], None]) -> None:
        self._hear, self._on_exit = hear, on_exit
        self._sending = threading.Lock()
        n_threads = max(1, torch.get_num_threads() - 1)
        self._first = ("job", list(sys.path), n_threads, job)
        environment = os.environ | dict.fromkeys(_THREADS, str(n_threads))
        # In a new session, interrupting a cell does not interrupt the training.
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path)])},
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._work, name="LiveTraining", daemon=True)
        _watch_exit()
        _at_work.add(self)
        self._sending.acquire()  # the job must be sent before any command
        self._thread.start()

    @property
    def pid(self) -> int:
        """Identifier of the process."""
        return self._process.pid

    def send(self, *command: Any) -> None:
        """Send a command: ``"pause"``, ``"resume"``, ``"stop"``, or ``"switch"`` with its number and the changes."""
        with self._sending:
            self._write(command)

    def let_go(self) -> None:
        """Close the pipe, so that the process stops as it does when the kernel has ended."""
        with self._sending:
            if self._process.stdin is not None and not self._process.stdin.closed:
                try:
                    self._process.stdin.close()
                except OSError:
                    _log.debug("The training process had already ended.")

    def kill(self) -> None:
        """Kill the process without closing its stores."""
        self._process.kill()

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until all messages are received, and return whether they are."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _write(self, message: tuple[Any, ...]) -> None:
        try:
            wire.send(message, self._process.stdin)
        except (OSError, ValueError):  # the process has ended, which the other pipe reports
            _log.debug("The training process accepts no more commands.")

    def _work(self) -> None:
        try:
            self._write(self._first)
        finally:
            self._sending.release()
        while (message := wire.receive(self._process.stdout)) is not None:
            self._hear(*message)
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                _log.debug("A pipe of the training process was broken.")
        _at_work.discard(self)
        self._on_exit(_failure(code))


def _failure(code: int) -> str:
    """Return a description of an exit code; empty if the process ended by itself."""
    if code == 0:
        return ""
    if code > 0:
        return f"The training process ended unexpectedly (exit code {code})"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    cause = ", possibly out of memory" if name == "SIGKILL" else ""
    return f"The training process crashed or was killed ({name}{cause})"


@cache
def _watch_exit() -> None:
    """Ensure that all processes are stopped and their stores closed when the interpreter ends."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    for process in list(_at_work):
        process.let_go()
    end = time.monotonic() + _SECONDS_AT_EXIT
    for process in list(_at_work):
        process.join(max(0.0, end - time.monotonic()))
