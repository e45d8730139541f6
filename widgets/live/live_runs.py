"""The runs of one start in the kernel: the training process, its messages, and the outcome of each run."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.widgets.live.process import TrainingProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.widgets.live.history import RunHistory
    from workbench.widgets.live.step_news import StepNews
    from workbench.widgets.live.switches import State, Switches

STARTING, TRAINING, PAUSING, PAUSED, STOPPING, ENDED = "starting", "training", "pausing", "paused", "stopping", "ended"


class Listener(NamedTuple):
    """Functions that are called in the thread that receives messages from the process.

    Attributes:
        run_in_page: Calls a function such that its messages reach the page and are answered.
        take_step: Called with the name of a run and the news of a step, after its history was updated.
        take_end: Called with the name of a run that has ended; its verdict is in its history.
        take_state: Called after a change of the state.
        take_refusal: Called with an error if the runs could not start.
        take_heartbeat: Called regularly while the process is running.
        take_exit: Called last, when all runs have ended and are closed.
    """

    run_in_page: Callable[..., None]
    take_step: Callable[[str, StepNews], None]
    take_end: Callable[[str], None]
    take_state: Callable[[], None]
    take_refusal: Callable[[str], None]
    take_heartbeat: Callable[[], None]
    take_exit: Callable[[], None]


class LiveRuns:
    """Training runs in a separate process.

    Args:
        job: Result of `wire.packed`.
        histories: Histories by run, the first run first: empty, or those of runs that are continued.
        switches: KSS and faults of the first run, as they are in the kernel.
        listener: Functions to call for each message.

    Attributes:
        histories: The given histories, which are filled during training.
        state: ``"starting"``, ``"training"``, ``"pausing"``, ``"paused"``, ``"stopping"`` or ``"ended"``.
        stage: What the process does while it is starting.
        began: Time of the start, as `time.monotonic`.
        sentences: Messages to the user about runs that diverged or failed.
        is_refused: Whether the runs could not start.
    """

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
