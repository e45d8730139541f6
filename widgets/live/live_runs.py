"""The runs of one start in the kernel: the training process, its messages, and the outcome of each run."""

from __future__ import annotations

import atexit
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import cloudpickle
import torch

from workbench.callbacks.faults import Fault
from workbench.callbacks.kss import KSS
from workbench.callbacks.observation import Observers
from workbench.errors import OptionError
from workbench.widgets.live.history import RunHistory, StepNews

State = dict[str, dict[str, Any]]
STARTING, TRAINING, PAUSING, PAUSED, STOPPING, ENDED = "starting", "training", "pausing", "paused", "stopping", "ended"
_log = logging.getLogger(__name__)
_MODULE = "workbench.widgets.live.training_process"
#: Seconds that training processes have for closing their stores when the kernel ends.
_SECONDS_AT_EXIT = 10.0
#: Environment variables that linear algebra libraries read when they are loaded.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
#: Runs whose process must be stopped before the interpreter ends.
_at_work: set[LiveRuns] = set()


class LiveRuns:
    """Training runs in a separate Python process, which leaves a core free for the page and the kernel.

    In the thread that receives the messages of the process, ``run_in_page`` calls functions in the context of the page;
    there ``tell`` is called with ``"step"`` (name of the run and `StepNews`), ``"end"`` (of a run), ``"state"``,
    ``"refused"`` (with a sentence), ``"beat"`` and ``"exit"``.
    """

    def __init__(
        self,
        job: bytes,
        histories: dict[str, RunHistory],
        switches: Switches,
        run_in_page: Callable[..., None],
        tell: Callable[..., None],
    ) -> None:
        self.histories, self.state = histories, STARTING
        self.stage, self.began = "starting Python", time.monotonic()
        self.sentences: list[str] = []
        self._switches, self._run_in_page, self._tell = switches, run_in_page, tell
        self._n_asked = 0
        self._moments: deque[float] = deque(maxlen=50)
        self._sending = threading.Lock()
        n_threads = max(1, torch.get_num_threads() - 1)
        environment = os.environ | dict.fromkeys(_THREADS, str(n_threads))
        # In a new session, interrupting a cell does not interrupt the training.
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path)])},
            start_new_session=True,
        )
        first = ("job", list(sys.path), n_threads, job)
        self._thread = threading.Thread(target=self._work, args=(first,), name="LiveTraining", daemon=True)
        _watch_exit()
        _at_work.add(self)
        self._sending.acquire()  # the job must be sent before any command
        self._thread.start()

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
            self._send("pause")

    def resume(self) -> None:
        """Continue after a pause."""
        if self.state in (PAUSING, PAUSED):
            self._moments.clear()
            self._go_to(TRAINING)
            self._send("resume")

    def stop(self) -> None:
        """End the runs after the current step and close the records; a second call kills the process."""
        if self.state == STOPPING:
            self._process.kill()
        elif self.state != ENDED:
            self._go_to(STOPPING)
            self._send("stop")

    def switch(self, changed: State) -> None:
        """Send a change of the switches to the process."""
        self._n_asked += 1
        self._send("switch", self._n_asked, changed)

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until all runs are closed, and return whether they are."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def let_go(self) -> None:
        """Close the pipe, so that the process stops as it does when the kernel has ended."""
        with self._sending:
            _close(self._process.stdin)

    def _go_to(self, state: str) -> None:
        self.state = state
        self._tell("state")

    def _send(self, *command: Any) -> None:
        with self._sending:
            self._write(command)

    def _write(self, message: tuple[Any, ...]) -> None:
        pipe: Any = self._process.stdin
        try:
            pickle.dump(message, pipe, protocol=pickle.HIGHEST_PROTOCOL)
            pipe.flush()
        except (OSError, ValueError):  # the process has ended, which the other pipe reports
            _log.debug("The training process accepts no more commands.")

    def _work(self, first: tuple[Any, ...]) -> None:
        try:
            self._write(first)
        finally:
            self._sending.release()
        pipe: Any = self._process.stdout
        while True:
            try:
                message = pickle.load(pipe)
            except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # ended, maybe in the middle of a message
                break
            self._run_in_page(self._hear, *message)
        code = self._process.wait()
        for each in (self._process.stdin, self._process.stdout):
            _close(each)
        _at_work.discard(self)
        self._run_in_page(self._end, _failure(code))

    def _hear(self, what: str, *values: Any) -> None:
        """Handle a message of the process, and pass on what the widget shows."""
        if what == "stage":
            (self.stage,) = values
            self._tell("state")
        elif what == "begun" and self.state == STARTING:
            self._go_to(TRAINING)
        elif what == "held" and values[0] and self.state == PAUSING:
            self._go_to(PAUSED)
        elif what == "step":
            self._hear_step(*values)
        elif what == "end":
            self._hear_end(*values)
        elif what == "switches":
            n_applied, state = values
            if n_applied == self._n_asked:  # otherwise a later change is still in transit
                self._switches.load(state)
        elif what in ("refused", "beat"):
            self._tell(what, *values)

    def _hear_step(self, name: str, news: StepNews) -> None:
        history = self.histories[name]
        history.add(news)
        self.sentences += [
            f"The run {name} diverged at step {event.step}: {event.message}."
            for event in news.events
            if event.kind == "divergence" and history.diverged_at == event.step
        ]
        if name == next(iter(self.histories)):
            self._switches.follow_schedule(news.step)
        self._moments.append(time.monotonic())
        self._tell("step", name, news)

    def _hear_end(self, name: str, error: str | None) -> None:
        history = self.histories[name]
        if error is not None:
            history.verdict, history.is_broken = "failed", True
            self.sentences.append(f"The run {name} failed. {error.rstrip('.')}.")
        history.verdict = history.verdict or "finished"
        self._tell("end")

    def _end(self, failure: str) -> None:
        is_requested = self.state == STOPPING
        if failure and not is_requested:
            self.sentences.append(f"{failure}; the data written so far are kept. Press Restart to continue.")
        for history in self.histories.values():
            if not history.verdict:
                history.verdict = "stopped" if is_requested or not failure else "ended unexpectedly"
                history.is_broken = bool(failure) and not is_requested
        self.state = ENDED
        self._tell("exit")


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        _log.debug("A pipe of the training process was broken.")


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
    for runs in list(_at_work):
        runs.let_go()
    end = time.monotonic() + _SECONDS_AT_EXIT
    for runs in list(_at_work):
        runs.join(max(0.0, end - time.monotonic()))


class Switches:
    """The state of the KSS and the faults of one run; changes on one side are sent to the other."""

    def __init__(self, kss: KSS, faults: Iterable[Fault], tell: Callable[[State], None]) -> None:
        self.kss, self.faults = kss, {fault.name: fault for fault in faults}
        self._tell = tell
        self._lock = threading.Lock()
        self._loading = threading.local()
        self._told = self.state
        switched: tuple[KSS | Fault, ...] = (self.kss, *self.faults.values())
        self._undo = [each.observe(self._hear) for each in switched]

    @property
    def state(self) -> State:
        """The state of all switches as plain values."""
        return {"kss": self.kss.state_dict(), **{name: fault.state_dict() for name, fault in self.faults.items()}}

    def load(self, state: State) -> None:
        """Load the state of the other side."""
        self._loading.is_on = True
        try:
            for name, values in state.items():
                (self.kss if name == "kss" else self.faults[name]).load_state_dict(values)
        finally:
            self._loading.is_on = False
            with self._lock:
                self._told = self.state

    def follow_schedule(self, step: int) -> None:
        """Let faults follow their schedules, as in the training process."""
        self._loading.is_on = True
        try:
            for fault in self.faults.values():
                fault.begin_step(step)
        finally:
            self._loading.is_on = False

    def close(self) -> None:
        """Stop sending changes."""
        while self._undo:
            self._undo.pop()()

    def _hear(self, *_: Any) -> None:
        if getattr(self._loading, "is_on", False):
            return
        with self._lock:  # several changes at once are sent together
            state, told = self.state, self._told
            changed = {
                name: {key: value for key, value in values.items() if told[name][key] != value}
                for name, values in state.items()
            }
            self._told = state
        if changed := {name: values for name, values in changed.items() if values}:
            self._tell(changed)


_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class _Pickler(cloudpickle.Pickler):
    """A pickler that pickles definitions of a notebook by value; locks arrive unlocked, observers are not sent."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to reconstruct the object."""
        if type(obj) in _LOCKS:
            return _LOCKS[type(obj)], ()
        if type(obj) is Observers:
            return Observers, ()
        return super().reducer_override(obj)


def packed(parts: Mapping[str, Any]) -> bytes:
    """Return the parts of a job as one pickle, in which shared objects stay shared."""
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(dict(parts))
    except Exception as error:  # pickling runs code of models and data, which may raise anything
        for name, part in parts.items():
            try:
                _Pickler(io.BytesIO()).dump(part)
            except Exception as cause:
                raise OptionError(
                    f"Training runs in a separate process, and {name} cannot be sent to it ({cause}); remove open "
                    "files, connections and generators, and pass data that can be read repeatedly."
                ) from cause
        raise OptionError(f"The runs cannot be sent to the training process ({error}).") from error
    return stream.getvalue()
