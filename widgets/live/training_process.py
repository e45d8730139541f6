"""The training process: receives a job and commands through its standard input, trains, and reports each step.

It is a new process, not a fork. The figure is updated while a cell runs in the kernel, and training does not wait for
the page. The process ends when its runs have ended, on request, and when the kernel has ended.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.callbacks.actions import Action
    from workbench.callbacks.alarms import Alarms
    from workbench.training.step_record import StepRecord
    from workbench.widgets.live.switches import State, Switches
    from workbench.widgets.live.trainer import LiveTrainer

#: Seconds between two heartbeats, which also let the page show for how long the process has been starting.
_BEAT = 1.0
#: Seconds that a process without a kernel has for closing its stores.
_PATIENCE = 60.0
#: Maximum number of queued messages to the kernel; training waits when the queue is full.
_N_WAITING = 2000


class Worker:
    """The runs of one start in the training process."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._answers = answers
        self._waiting: queue.Queue[tuple[Any, ...] | None] = queue.Queue(_N_WAITING)
        self._jobs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._trainer: LiveTrainer | None = None
        self._switches: list[Switches] = []
        self._done: list[Action] = []
        self._n_told = self._n_applied = 0
        self._early: list[tuple[Any, ...]] = []
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._writer = threading.Thread(target=self._write, name="answers", daemon=True)
        self._writer.start()
        # Commands are read while torch is being imported, so that the kernel does not wait for its pipe.
        threading.Thread(target=self._read, args=(commands,), name="commands", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def work(self) -> None:
        """Run the job of the kernel to its end."""
        job = self._jobs.get()
        if job is not None:
            try:
                self._train(*job[1:])
            except Exception as error:  # noqa: BLE001  (shown on the page)
                self._tell("refused", sentence_of(error))
        self._is_over.set()
        self._waiting.put(None)
        self._writer.join(_PATIENCE)

    def _train(self, path: list[str], n_threads: int, payload: bytes) -> None:
        sys.path[:] = path  # for modules next to the notebook
        self._tell("stage", "importing torch")
        import torch

        from workbench.callbacks.train import train
        from workbench.widgets.live.switches import Switches
        from workbench.widgets.live.trainer import LiveTrainer

        torch.set_num_threads(n_threads)
        self._tell("stage", "building the models and the data")
        job = pickle.loads(payload)
        of_runs, resume = job["the settings"], job["resume"]
        # A checkpoint contains states of the switches; a run continues with those of the page instead.
        switches = {name: Switches(own["kss"], own["faults"], self._tell_switches) for name, own in of_runs.items()}
        states = {name: own.state for name, own in switches.items()}
        runs = {
            name: train(job["the models"][name], job["the task"], resume=resume, **own) for name, own in of_runs.items()
        }
        for name, own in switches.items():
            own.load(states[name])
        alarms: dict[str, Alarms | None] = {name: own["alarms"] for name, own in of_runs.items()}
        actions = {name: own.get("actions") for name, own in of_runs.items()}

        def take(name: str, record: StepRecord) -> None:
            from workbench.widgets.live.step_news import StepNews

            own = actions[name]
            fresh = [] if own is None else own.done[counts[name] :]
            counts[name] += len(fresh)
            self._tell("step", name, StepNews.of(record, alarms[name], fresh))

        counts = {name: 0 if own is None else len(own.done) for name, own in actions.items()}
        trainer = LiveTrainer(
            runs,
            on_record=take,
            on_end=lambda name, error: self._tell("end", name, None if error is None else sentence_of(error)),
            on_hold=lambda is_held: self._tell("held", is_held),
        )
        self._tell("begun")
        with self._lock:
            self._switches = [switches[name] for name in job["switched"]]
            self._trainer = trainer
            early, self._early = self._early, []
            for command in early:
                self._obey(*command)
        trainer.work()

    def _read(self, commands: Any) -> None:
        while True:
            try:
                command = pickle.load(commands)
            except (EOFError, OSError, pickle.UnpicklingError):
                break
            if command[0] == "job":
                self._jobs.put(command)
            else:
                with self._lock:
                    self._obey(*command)
        # The kernel has ended or closed the pipe.
        self._jobs.put(None)
        with self._lock:
            self._obey("stop")
        if not self._is_over.wait(_PATIENCE):
            os._exit(1)

    def _obey(self, what: str, *values: Any) -> None:
        """Execute a command; commands that arrive before the runs exist are queued."""
        trainer = self._trainer
        if trainer is None:
            self._early.append((what, *values))
        elif what == "switch":
            self._n_applied, changed = values
            for switches in self._switches:
                switches.load(changed)
            self._tell_switches()
        else:
            {"pause": trainer.pause, "resume": trainer.resume, "stop": trainer.stop}[what]()

    def _tell_switches(self, _: State | None = None) -> None:
        """Send the state of the first run's switches and the number of the last applied change to the kernel."""
        if self._switches:
            self._tell("switches", self._n_applied, self._switches[0].state)

    def _tell(self, *message: Any) -> None:
        self._waiting.put(message)

    def _write(self) -> None:
        while (message := self._waiting.get()) is not None:
            try:
                pickle.dump(message, self._answers, protocol=pickle.HIGHEST_PROTOCOL)
                self._answers.flush()
            except OSError:  # the kernel has ended, and training must not wait
                continue

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT):
            if self._waiting.empty():
                self._tell("beat")


def sentence_of(error: Exception) -> str:
    """Return an error as one sentence."""
    from workbench.errors import WorkbenchError

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
