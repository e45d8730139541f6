"""The runs of one start, as the kernel knows them: their process, what it tells, and what has come of each run."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from workbench.widgets.live.process import TrainingProcess

if TYPE_CHECKING:
    from workbench.widgets.live.history import RunHistory
    from workbench.widgets.live.step_news import StepNews
    from workbench.widgets.live.switches import State, Switches

STARTING, TRAINING, PAUSING, PAUSED, STOPPING, OVER = "starting", "training", "pausing", "paused", "stopping", "over"


class Listener(Protocol):
    """What is called when something has happened, in the thread that hears the process."""

    def run_in_page(self, function: Any, *arguments: Any) -> None:
        """Call a function so that what it sends reaches the page and is answered."""

    def take_step(self, name: str, news: StepNews) -> None:
        """A run has made a step, which is in its history."""

    def take_end(self, name: str) -> None:
        """A run is over, and its verdict is in its history."""

    def take_state(self) -> None:
        """The state is another one."""

    def take_refusal(self, sentence: str) -> None:
        """The runs could not begin."""

    def take_sign_of_life(self) -> None:
        """Nothing has happened, but the process is there."""

    def take_exit(self) -> None:
        """All runs are over and closed; the last call."""


class LiveRuns:
    """Runs in training in a process of their own.

    Args:
        job: What `wire.packed` has made.
        histories: Empty, or as far as the runs go that are continued; by name, the first one first.
        switches: KSS and faults of the first run, as they are in the kernel.
        listener: Called when something has happened.

    Attributes:
        histories: As given; filled while the runs go on.
        state: ``"starting"``, ``"training"``, ``"pausing"``, ``"paused"``, ``"stopping"`` or ``"over"``.
        sentences: What people have to know of runs that ended badly.
        is_refused: Whether they could not begin.
    """

    def __init__(self, job: bytes, histories: dict[str, RunHistory], switches: Switches, listener: Listener) -> None:
        self.histories, self.state = histories, STARTING
        self.sentences: list[str] = []
        self.is_refused = False
        self._switches, self._listener = switches, listener
        self._first = next(iter(histories))
        self._n_asked = 0
        self._moments: deque[float] = deque(maxlen=50)
        self._process = TrainingProcess(job, hear=self._hear, on_exit=self._exit)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def per_second(self) -> float:
        """Steps of all runs per second, over the last few; 0 while it is not known."""
        moments = list(self._moments)
        return (len(moments) - 1) / (moments[-1] - moments[0]) if len(moments) > 1 else 0.0

    def pause(self) -> None:
        """Hold after the present step."""
        if self.state in (STARTING, TRAINING):
            self._go_to(PAUSING)
            self._process.send("pause")

    def resume(self) -> None:
        """Go on after a pause."""
        if self.state in (PAUSING, PAUSED):
            self._moments.clear()
            self._go_to(TRAINING)
            self._process.send("resume")

    def stop(self) -> None:
        """End after the present step, and close the records; a second time: end the process at once."""
        if self.state == STOPPING:
            self._process.kill()
        elif self.state != OVER:
            self._go_to(STOPPING)
            self._process.send("stop")

    def switch(self, changed: State) -> None:
        """Tell the process what has been switched."""
        self._n_asked += 1
        self._process.send("switch", self._n_asked, changed)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all runs are closed, at most this many seconds; returns whether they are."""
        return self._process.join(timeout)

    def _go_to(self, state: str) -> None:
        self.state = state
        self._listener.take_state()

    def _hear(self, what: str, *values: Any) -> None:
        self._listener.run_in_page(getattr(self, f"_hear_{what}"), *values)

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
            self.sentences.append(f"The run {name} ended. {error.rstrip('.')}.")
        history.verdict = history.verdict or "finished"
        self._listener.take_end(name)

    def _hear_switches(self, n_applied: int, state: State) -> None:
        if n_applied == self._n_asked:  # else what was asked for since is on its way
            self._switches.load(state)

    def _hear_refused(self, sentence: str) -> None:
        self.is_refused = True
        self._listener.take_refusal(sentence)

    def _hear_beat(self) -> None:
        self._listener.take_sign_of_life()

    def _exit(self, death: str) -> None:
        self._listener.run_in_page(self._end, death)

    def _end(self, death: str) -> None:
        is_wanted = self.state == STOPPING
        if death and not is_wanted:
            self.sentences.append(f"{death}; what it had written is kept. Press Restart to go on from a checkpoint.")
        for history in self.histories.values():
            if not history.verdict:
                history.verdict = "stopped" if is_wanted or not death else "ended unexpectedly"
                history.is_broken = bool(death) and not is_wanted
        self.state = OVER
        self._listener.take_exit()
