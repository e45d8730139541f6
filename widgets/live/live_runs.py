"""The runs of one start in the kernel: the training process, its messages, and the outcome of each run."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workbench.widgets.live import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.widgets.live.history import RunHistory
    from workbench.widgets.live.step_news import StepNews
    from workbench.widgets.live.switches import State, Switches


STARTING, TRAINING, PAUSING, PAUSED, STOPPING, ENDED = "starting", "training", "pausing", "paused", "stopping", "ended"


class Listener(NamedTuple):
    """Functions that are called in the thread that receives messages from the process."""

    run_in_page: Callable[..., None]
    take_step: Callable[[str, StepNews], None]
    take_end: Callable[[str], None]
    take_state: Callable[[], None]
    take_refusal: Callable[[str], None]
    take_heartbeat: Callable[[], None]
    take_exit: Callable[[], None]


class LiveRuns:
    """Training runs in a separate process."""

    def __init__(self, job: bytes, histories: dict[str, RunHistory], switches: Switches, listener: Listener) -> None:
        self.histories, self.state = histories, STARTING
        self.stage, self.began = "starting Python", time.monotonic()
        self.sentences: list[str] = []
        self.is_refused = False
        self._switches, self._listener = switches, listener
        self._first = next(iter(histories))
        self._n_asked = 0
        self._moments: deque[float] = deque(maxlen=50)
        self._process = TrainingProcess(job, hear=self._hear, on_exit=self._exit)

    @property
    def pid(self) -> int:
        """Identifier of the process."""
        return self._process.pid

    @property
    def per_second(self) -> float:
        """Steps of all runs per second, averaged over the latest ones; 0 if unknown."""
        moments = list(self._moments)
        return (len(moments) - 1) / (moments[-1] - moments[0]) if len(moments) > 1 else 0.0

    def pause(self) -> None:
        """Pause after the current step."""
        if self.state in (STARTING, TRAINING):
            self._go_to(PAUSING)
            self._process.send("pause")

    def resume(self) -> None:
        """Continue after a pause."""
        if self.state in (PAUSING, PAUSED):
            self._moments.clear()
            self._go_to(TRAINING)
            self._process.send("resume")

    def stop(self) -> None:
        """End the runs after the current step and close the records; a second call kills the process."""
        if self.state == STOPPING:
            self._process.kill()
        elif self.state != ENDED:
            self._go_to(STOPPING)
            self._process.send("stop")

    def switch(self, changed: State) -> None:
        """Send a change of the switches to the process."""
        self._n_asked += 1
        self._process.send("switch", self._n_asked, changed)

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until all runs are closed, and return whether they are."""
        return self._process.join(timeout)

    def _go_to(self, state: str) -> None:
        self.state = state
        self._listener.take_state()

    def _hear(self, what: str, *values: Any) -> None:
        self._listener.run_in_page(getattr(self, f"_hear_{what}"), *values)

    def _hear_stage(self, stage: str) -> None:
        self.stage = stage
        self._listener.take_state()

    def _hear_begun(self) -> None:
        if self.state == STARTING:
            self._go_to(TRAINING)

    def _hear_held(self, is_held: bool) -> None:
        if is_held and self.state == PAUSING:
            self._go_to(PAUSED)

    def _hear_step(self, name: str, news: StepNews) -> None:
        history = self.histories[name]
        had_diverged = history.diverged_at is not None
        history.add(news)
        if news.cause and not had_diverged:
            self.sentences.append(f"The run {name} diverged at step {news.step}: {news.divergence}.")
        if name == self._first:
            self._switches.follow_schedule(news.step)
        self._moments.append(time.monotonic())
        self._listener.take_step(name, news)

    def _hear_end(self, name: str, error: str | None) -> None:
        history = self.histories[name]
        if error is not None:
            history.verdict, history.is_broken = "failed", True
            self.sentences.append(f"The run {name} failed. {error.rstrip('.')}.")
        history.verdict = history.verdict or "finished"
        self._listener.take_end(name)

    def _hear_switches(self, n_applied: int, state: State) -> None:
        if n_applied == self._n_asked:  # otherwise a later change is still in transit
            self._switches.load(state)

    def _hear_refused(self, sentence: str) -> None:
        self.is_refused = True
        self._listener.take_refusal(sentence)

    def _hear_beat(self) -> None:
        self._listener.take_heartbeat()

    def _exit(self, failure: str) -> None:
        self._listener.run_in_page(self._end, failure)

    def _end(self, failure: str) -> None:
        is_requested = self.state == STOPPING
        if failure and not is_requested:
            self.sentences.append(f"{failure}; the data written so far are kept. Press Restart to continue.")
        for history in self.histories.values():
            if not history.verdict:
                history.verdict = "stopped" if is_requested or not failure else "ended unexpectedly"
                history.is_broken = bool(failure) and not is_requested
        self.state = ENDED
        self._listener.take_exit()


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
