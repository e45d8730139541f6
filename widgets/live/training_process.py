"""The training process: receives a job and commands through its standard input, trains, and reports each step.

It is a new process, not a fork. The figure is updated while a cell runs in the kernel, and training does not wait for
the page. The process ends when its runs have ended, on request, and when the kernel has ended.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from workbench.training.callback import StepRecord
    from workbench.widgets.live.live_runs import State, Switches

_log = logging.getLogger(__name__)
#: Seconds between two heartbeats, which also let the page show for how long the process has been starting.
_BEAT = 1.0
#: Seconds that a process without a kernel has for closing its stores.
_PATIENCE = 60.0


class Worker:
    """The runs of one start in the training process; commands are carried out between two steps."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._answers = answers
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._telling = threading.Lock()
        self._switches: list[Switches] = []
        self._n_applied = 0
        self._is_over = threading.Event()
        # Commands are read while torch is being imported, so that the kernel does not wait for its pipe.
        threading.Thread(target=self._read, args=(commands,), name="commands", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def work(self) -> None:
        """Run the job of the kernel to its end."""
        what, *job = self._commands.get()
        if what == "job":
            try:
                self._train(*job)
            except Exception as error:  # noqa: BLE001  (shown on the page)
                self._tell("refused", _sentence_of(error))
        self._is_over.set()

    def take_turns(
        self, runs: Mapping[str, Iterator[StepRecord]], on_record: Callable[[str, StepRecord], None]
    ) -> None:
        """Advance runs in turns, one step each, until they end or are stopped; stopped ones are closed.

        All runs share one thread: `workbench.train` swaps the global random states during a step, so runs that take
        turns have the same results as alone, while runs in two threads would not.
        """
        waiting = deque(runs)
        while waiting and not self._obey():
            name = waiting.popleft()
            try:
                record = next(runs[name], None)
                if record is not None:
                    on_record(name, record)
                    waiting.append(name)
                    continue
            except Exception as error:  # noqa: BLE001  (shown to the user; the other run continues)
                self._fail(name, error)
                self._close(name, runs[name])
            else:
                self._tell("end", name, None)
        for name in waiting:
            self._close(name, runs[name])

    def _train(self, path: list[str], n_threads: int, payload: bytes) -> None:
        sys.path[:] = path  # for modules next to the notebook
        self._tell("stage", "importing torch")
        import torch

        from workbench.callbacks.train import train
        from workbench.widgets.live.history import StepNews
        from workbench.widgets.live.live_runs import Switches

        torch.set_num_threads(n_threads)
        self._tell("stage", "building the models and the data")
        job = pickle.loads(payload)
        of_runs = job["the settings"]
        # A checkpoint contains states of the switches; a run continues with those of the page instead.
        switches = {name: Switches(own["kss"], own["faults"], self._tell_switches) for name, own in of_runs.items()}
        states = {name: own.state for name, own in switches.items()}
        runs = {
            name: train(job["the models"][name], job["the task"], resume=job["resume"], **own)
            for name, own in of_runs.items()
        }
        for name, own in switches.items():
            own.load(states[name])
        done = {name: own["actions"].done if own.get("actions") else [] for name, own in of_runs.items()}
        counts = {name: len(actions) for name, actions in done.items()}

        def take(name: str, record: StepRecord) -> None:
            fresh, counts[name] = done[name][counts[name] :], len(done[name])
            self._tell("step", name, StepNews.of(record, of_runs[name]["alarms"], fresh))

        self._tell("begun")
        self._switches = [switches[name] for name in job["switched"]]
        self.take_turns(runs, take)

    def _obey(self) -> bool:
        """Carry out the waiting commands, wait while paused, and return whether to stop."""
        is_paused = False
        while True:
            try:
                what, *values = self._commands.get(block=is_paused)
            except queue.Empty:
                return False
            if what == "stop":
                return True
            if what == "switch":
                self._n_applied, changed = values
                for switches in self._switches:
                    switches.load(changed)
                self._tell_switches()
            elif is_paused != (what == "pause"):
                is_paused = not is_paused
                self._tell("held", is_paused)

    def _read(self, commands: Any) -> None:
        while True:
            try:
                self._commands.put(pickle.load(commands))
            except (EOFError, OSError, pickle.UnpicklingError):  # the kernel has ended or closed the pipe
                break
        self._commands.put(("stop",))
        if not self._is_over.wait(_PATIENCE):
            os._exit(1)

    def _tell_switches(self, _: State | None = None) -> None:
        """Send the state of the first run's switches and the number of the last applied change to the kernel."""
        if self._switches:
            self._tell("switches", self._n_applied, self._switches[0].state)

    def _tell(self, *message: Any) -> None:
        with self._telling:
            try:
                pickle.dump(message, self._answers, protocol=pickle.HIGHEST_PROTOCOL)
                self._answers.flush()
            except OSError:  # the kernel has ended, and training must not wait
                pass

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT):
            self._tell("beat")

    def _close(self, name: str, run: Any) -> None:
        """Close a run, so that its record is written completely."""
        try:
            getattr(run, "close", lambda: None)()  # generators have one
        except Exception as error:  # noqa: BLE001  (of a user-supplied model or task)
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        if not isinstance(error, WorkbenchError):  # a bug: the log has the traceback
            _log.error("The run %s failed.", name, exc_info=error)
        self._tell("end", name, _sentence_of(error))


def _sentence_of(error: Exception) -> str:
    return str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"


def main() -> None:
    """Run with the standard streams of this process; standard output is redirected to standard error."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    Worker(commands, answers).work()


if __name__ == "__main__":
    main()
