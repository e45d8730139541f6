"""Train interactively: switch KSS and faults on and off during training, and compare with a control run."""

from __future__ import annotations

import asyncio
import contextvars
import math
import tempfile
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import xarray as xr

from workbench.errors import OptionError, StoreError, require_known
from workbench.io.store import open_run
from workbench.option_kinds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from workbench.plots.figure_files import save as save_figure
from workbench.plots.timeline_events import events_of
from workbench.training.recording import Recording
from workbench.training.training_plan import TrainingPlan
from workbench.widgets.base import KINDS, WorkbenchWidget
from workbench.widgets.live import cells
from workbench.widgets.live.latest_state import AlarmList, SwitchPanel
from workbench.widgets.live.live_canvas import LiveCanvas, live_figure
from workbench.widgets.live.live_runs import ENDED, PAUSED, PAUSING, STARTING, STOPPING, TRAINING, LiveRuns, Switches
from workbench.widgets.live.setup import Setup
from workbench.widgets.live.starts import Branches, PairedRuns, SavedStep, Start, best_step, remarks_on

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from workbench.callbacks.alarms import Alarms
    from workbench.callbacks.faults import Fault
    from workbench.callbacks.guard import Actions
    from workbench.callbacks.kss import KSS
    from workbench.callbacks.recorder import Recorder
    from workbench.widgets.live.history import RunHistory, StepNews
    from workbench.widgets.live.live_runs import State
    from workbench.zoo import ArchitectureConfig


#: Defaults of settings without a control.
_SETTINGS = {"warmup": 20, "flush_every": 25, "profile_options": {"n_snapshots": 512}}
#: Settings that the controls provide.
_TAKEN = ("n_steps", "learning_rate", "seed", "spectra_every", "store", "checkpoints")
#: Seconds that the runs have for closing their stores when the widget is closed.
_SECONDS_AT_CLOSE = 60.0


class LiveTraining(WorkbenchWidget):
    """A training run with switches for KSS and faults, and a control run or another architecture for comparison.

    Both runs have the same data and seed. Treatment and control also have the same parameters, so they differ only in
    what is switched on; as long as nothing is switched on, they are bitwise identical. With ``versus=`` the second run
    trains another architecture, and both runs are switched together.

    The runs take turns in a separate process, so the figure is updated even while a cell runs in the kernel. Changes of
    ``kss`` and ``faults``, on the page or in a cell, take effect from the next step. The process receives copies of all
    other objects: functions and objects of the notebook are sent by cloudpickle, and their changes stay in the process.
    To wait for the end, use ``live.wait()`` in a script, or ``await live.finished()`` in a notebook.

    A slider shows the modes of any recorded step. Every start and restart records its runs, with checkpoints, in a new
    folder. A restart continues copies of the runs from a checkpoint, by default the latest before the divergence; the
    previous runs stay visible as pale lines. Running the cell again ends the training of the widget that it created
    before, and so does a new widget that records into the same folder. The process also ends with the kernel.

    Args:
        architecture: A configuration of ``wb.zoo``, which the controls can change; or any model, which is copied for
            each run and not changed. None for a small transformer without normalization, which diverges early.
        task: A task, any data that ``wb.train`` accepts and that can be read repeatedly, or the name of one of the
            choices. None for associative recall.
        versus: Another configuration or model to train in place of the control.
        learning_rate: Peak learning rate.
        n_steps: Updates per run.
        seed: Seed of the initial parameters, of training, and of the data of a task chosen by name.
        kss: The KSS to switch. None for the recommended one, switched off if there are faults or two architectures.
        compare: Whether to train a second run.
        spectra_every: Steps between two measurements of the eigenvalues.
        folder: Folder for the records of the runs. None for a temporary one, which is removed when the kernel ends.
        faults: Faults from ``wb.faults``, each with a switch on the page; treatment and control are then called "with
            faults" and "without faults".
        recorder: Recorder of mechanism monitors; the second run has one with the same settings.
        alarms: Alarms on the recorder's monitors, for both runs. The first alarm and its likely cause stay visible, the
            strongest evidence is a trace with a mark for each measurement of a probe, and the newest alarms are listed
            below the figure.
        actions: Actions that alarms may trigger; a control has none.
        theme: ``"page"``, or ``"projector"`` for large type.
        **settings: Further settings of ``wb.train``, such as ``optimizer``, ``warmup`` or ``checkpoint_every``.

    Attributes:
        kss: The `workbench.KSS` of the first run; can be changed here or on the page.
        faults: The faults of the first run; can be switched here (``live.faults[0].enabled = True``) or on the page.
        folder: Folder that contains the records of the runs.
        setup: The controls of what is trained, by name.
        canvas: The figure.
        alarm_list: The list of alarms.

    Raises:
        OptionError: If a setting is unknown or invalid.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> live = widgets.LiveTraining(learning_rate=3e-3, n_steps=200, faults=[wb.faults.LargeRate(factor=30)])
        >>> live.status
        'ready: press Start'
        >>> live.faults[0].enabled = True
        >>> live.close()

    See Also:
        `workbench.train`: Trains without a widget.
        `workbench.widgets.Timeline`: Follows runs that train elsewhere.
    """

    kinds = KINDS

    def __init__(
        self,
        architecture: ArchitectureConfig | nn.Module | None = None,
        task: Any = None,
        *,
        versus: ArchitectureConfig | nn.Module | None = None,
        learning_rate: PositiveFloat = 1e-2,
        n_steps: PositiveInt = 300,
        seed: NonNegativeInt = 0,
        kss: KSS | None = None,
        compare: bool = True,
        spectra_every: PositiveInt = 1,
        folder: str | os.PathLike[str] | None = None,
        faults: Sequence[Fault] = (),
        recorder: Recorder | None = None,
        alarms: Alarms | None = None,
        actions: Actions | None = None,
        theme: str = "page",
        **settings: Any,
    ) -> None:
        self._runs: LiveRuns | None = None
        self._sentences: list[str] = []
        super().__init__(theme=theme)
        known = [f.name for cls in (TrainingPlan, Recording) for f in fields(cls) if f.name not in _TAKEN]
        known += ["loss", "penalties"]
        require_known("LiveTraining", settings, known, word="setting")
        self._pair = PairedRuns(kss, faults, recorder, alarms, actions, is_off=versus is not None)
        self.kss, self.faults = self._pair.kss, self._pair.faults
        self.setup = Setup(
            architecture, task, versus=versus, learning_rate=learning_rate, seed=seed, n_steps=n_steps,
            spectra_every=spectra_every, compare=compare, control=self._pair.names[1],
        )  # fmt: skip
        self._settings = {**_SETTINGS, **settings}
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="live-training-", ignore_cleanup_errors=True)
            folder = self._temporary.name
        self.folder = Path(folder)
        self._branches = Branches(self.folder)
        self._next: Callable[[], None] | None = None
        self._start = 0
        self._switched: list[str] = []
        self.canvas = LiveCanvas(lambda: self.status, self._note, self._guarded, self._settle)
        self.alarm_list = AlarmList()
        self._at_close(self.alarm_list.close)
        self._panel = SwitchPanel(self.kss, self.faults, self._guarded)
        self._page_thread: str | None = None
        self._switches = Switches(self.kss, self.faults, self._tell_switched)
        self._at_close(self._switches.close)
        switched: tuple[KSS | Fault, ...] = (self.kss, *self.faults)
        for each in switched:
            self._at_close(each.observe(lambda name, before, after: self.canvas.refresh()))
        self._buttons = Buttons(self)
        alarm_lists = [self.alarm_list] if alarms is not None else []
        self._fill(
            [self.setup.box, self._buttons.box, self._panel, self.canvas, *alarm_lists],
            suggested="exports/live_training",
        )
        for control in (self.setup.first.family, self.setup.task, self.setup.second.family, self.setup.compare):
            self._watch(control, lambda _: self.setup.adapt())
        self._offer()
        cells.succeed(self, self.folder)

    @property
    def state(self) -> str:
        """``"ready"``, ``"starting"``, ``"training"``, ``"pausing"``, ``"paused"``, ``"stopping"`` or ``"ended"``."""
        if self._runs is not None:
            return self._runs.state
        return ENDED if self.canvas.histories else "ready"

    @property
    def status(self) -> str:
        """The status in one line."""
        histories, state = self.canvas.histories, self.state
        if not histories:
            return "ready: press Start"
        if state == STARTING and self._runs is not None:
            return f"{state}: {self._runs.stage} · {time.monotonic() - self._runs.began:.0f} s"
        n_done = max(history.n_done for history in histories.values())
        line = f"{state} · step {n_done} of {self.canvas.n_steps}"
        if state == TRAINING and self._runs is not None:
            return f"{line} · {self._runs.per_second:.0f} steps per second"
        if state == ENDED:
            return " · ".join([line, *(f"{name}: {history.verdict}" for name, history in histories.items())])
        return line

    @property
    def summary(self) -> str:
        """The status, for programs that show no pictures."""
        return f"LiveTraining, {self.status}."

    @property
    def is_running(self) -> bool:
        """Whether any run has not ended; paused runs count as running."""
        return self._runs is not None

    @property
    def step(self) -> int | None:
        """Step whose modes are shown, None for the latest; can be set to a recorded step."""
        return self.canvas.step

    @step.setter
    def step(self, step: int | None) -> None:
        self.canvas.go_to(step)

    @property
    def runs(self) -> dict[str, xr.DataTree]:
        """The records of the latest start by run, up to the last block written; for any plot or widget."""
        return self.runs_of(self._start)

    @property
    def n_starts(self) -> int:
        """Number of starts in the folder; 0 if there is none."""
        return self._branches.n_starts

    def runs_of(self, start: int) -> dict[str, xr.DataTree]:
        """Return the records of a start by run; empty if it has recorded nothing.

        Args:
            start: Number of the start, from 1 to `n_starts`.
        """
        return {name: open_run(store) for name, store in self._branches.stores(start).items()}

    @property
    def checkpoints(self) -> list[SavedStep]:
        """All checkpoints in the folder, from which `restart` can continue, latest first."""
        return self._branches.saved_steps()

    def start(self) -> None:
        """Train from the beginning with the values of the controls; active runs are stopped first.

        Errors that occur only in the training process are shown under the widget.

        Raises:
            WorkbenchError: If the values of the controls are invalid, or the model or the task cannot be sent to the
                process.
        """
        self._buttons.start.disabled = True  # at once, because building and sending the models takes seconds
        try:
            self._after_stop(self._begin)
        finally:
            self._offer()

    def restart(self, checkpoint: SavedStep | None = None) -> None:
        """Continue from a checkpoint in a new branch, with the current switches.

        If the settings of the checkpoint differ from the controls, an error is shown under the widget.

        Args:
            checkpoint: One of `checkpoints`. None for the latest before the divergence if a run of the current start
                has diverged, otherwise the latest.

        Raises:
            StoreError: If there is no checkpoint.
            OptionError: If the checkpoint is not before the last step.
        """
        checkpoint = checkpoint or best_step(self.checkpoints, self._start, self.canvas.histories)
        if checkpoint is None:
            raise StoreError("There is no checkpoint yet; train for more steps, or pass a smaller checkpoint_every.")
        if checkpoint.step >= self.setup.n_steps.value:
            raise OptionError(
                f"The checkpoint is at step {checkpoint.step}, but the run has only {self.setup.n_steps.value} steps; "
                "set more steps, or choose an earlier checkpoint."
            )
        self._after_stop(partial(self._begin, checkpoint))

    def pause(self) -> None:
        """Pause after the current step."""
        with self.turn:
            if self._runs is not None:
                self._runs.pause()

    def resume(self) -> None:
        """Continue after a pause."""
        with self.turn:
            if self._runs is not None:
                self._runs.resume()

    def stop(self) -> None:
        """End the runs after the current step and close their records, without waiting; a second call kills them."""
        with self.turn:
            if self._runs is not None:
                self._runs.stop()

    def _retire(self, reason: str) -> None:
        """End the training because another widget replaces this one."""
        with self.turn:
            if self._runs is not None:
                self._next = None
                self._sentences.append(f"This training was ended: {reason}.")
                self._runs.stop()

    def wait(self, timeout: NonNegativeFloat | None = None) -> None:
        """Wait until the runs have ended; the kernel runs no other cell meanwhile, but the figure is updated.

        Args:
            timeout: Maximum seconds to wait; None for no limit.

        Raises:
            TimeoutError: If the runs have not ended by then.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (runs := self._runs) is not None:  # a restart creates others
            if not runs.join(max(0.0, min(end - time.monotonic(), 3600.0))) and time.monotonic() >= end:
                raise TimeoutError(f"The runs did not end within {timeout:g} s.")

    async def finished(self) -> None:
        """Wait until the runs have ended, while the page responds: ``await live.finished()``."""
        while self.is_running:
            await asyncio.sleep(0.05)

    def figure(self, backend: str = "bokeh") -> Any:
        """Return a separate figure: the modes of each run at the displayed step, and the traces below.

        Raises:
            OptionError: If there are no modes yet.
        """
        return live_figure(self.canvas.histories, step=self.canvas.step, backend=backend)

    def page(self) -> str:
        """Return the figure as one HTML page that stays interactive without a kernel and without a network."""
        with tempfile.TemporaryDirectory() as folder:
            return save_figure(self.figure("bokeh"), Path(folder) / "page.html").read_text(encoding="utf-8")

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Suffixes of files that cannot be written at present -> reason."""
        if any(history.modes is not None for history in self.canvas.histories.values()):
            return {}
        return dict.fromkeys(self.kinds, "There is nothing to save yet; press Start and wait for the first step.")

    def close(self) -> None:
        """Stop training, close the runs, and remove the widget; the records stay."""
        if not hasattr(self, "_picture"):  # the constructor raised an exception
            return
        cells.forget(self)
        if self._runs is not None:
            self._next = None
            self.stop()
            try:
                self.wait(_SECONDS_AT_CLOSE)
            except TimeoutError:  # a model that never returns
                self.stop()
                self.wait()
        super().close()

    def _shown_runs(self) -> Mapping[str, xr.DataTree]:
        return self.runs

    def _run_in_page(self, function: Any, *arguments: Any) -> None:
        """Call a function in the context of the page, which is answered even while a cell runs; show its errors."""

        def run() -> None:
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001  (a bug: the training continues)
                self._fail(f"{type(error).__name__}: {error}")

        self.canvas.context.copy().run(run)

    def _hear(self, what: str, *values: Any) -> None:
        """Show what `LiveRuns` tells about the training process, in the thread that receives its messages."""
        if what == "step":
            self._show_step(*values)
        elif what == "end":  # of one run
            self.canvas.refresh()
            with self._attempt():
                self._offer()
        elif what == "state":
            self._show_state()
        elif what == "refused":  # the runs could not start
            self._sentences += values
            self._put_back()
        elif what == "beat":
            self.canvas.say_alive()
            self._move_controls()
            if self.state == STARTING:
                self.canvas.refresh()
        else:
            self._show_exit()

    def _show_step(self, name: str, news: StepNews) -> None:
        if news.actions and name == next(iter(self.canvas.histories)) and self._pair.actions is not None:
            self._pair.actions.done.extend(news.actions)
        self.alarm_list.hear(name, news.events)
        self.canvas.refresh()

    def _show_state(self) -> None:
        self._move_controls()
        self.canvas.is_active = self.is_running
        self._offer()
        self.canvas.refresh()
        if self.state == PAUSED:
            self._settle()

    def _show_exit(self) -> None:
        """Show that all runs are closed, and run the waiting action, such as a restart."""
        with self._attempt():
            if self._runs is not None:
                self._sentences += self._runs.sentences
            self._runs, action, self._next = None, self._next, None
            if action is not None:
                action()
            self._show_state()
        self._settle()

    def _begin(self, saved: SavedStep | None = None) -> None:
        """Start the runs in a new folder, from the beginning or from a checkpoint."""
        start = Start.of(self.setup, self._pair, self._branches, self._settings, saved)
        before = (self.canvas.histories, self.canvas.earlier, self.canvas.n_steps, self._start, self._switched)
        earlier = {} if saved is None else self._left_by(saved)
        histories = start.histories()

        def put_back() -> None:
            if saved is not None:
                self._branches.drop(start.number)
            self.canvas.show(*before[:3])
            self._start, self._switched = before[3:]

        self._put_back = put_back
        self._sentences.clear()
        self._show("")
        self._start, self._switched = start.number, start.switched
        self.canvas.show(histories, earlier, start.n_steps)
        self.alarm_list.clear()
        for name, store in start.stores.items() if saved is not None else ():
            self.alarm_list.hear(name, events_of(open_run(store)))
        self.alarm_list.refresh()
        self._runs = LiveRuns(start.job, histories, self._switches, self._run_in_page, self._hear)
        self._show_state()

    def _left_by(self, saved: SavedStep) -> dict[tuple[str, int], RunHistory]:
        """Return the runs that a restart from a checkpoint replaces, and the earlier ones that are still shown."""
        histories, earlier = self.canvas.histories, self.canvas.earlier
        if saved.start != self._start:
            histories, earlier = self._branches.histories(saved.start), {}
        return earlier | {(name, saved.start): history for name, history in histories.items()}

    def _move_controls(self) -> None:
        """Let controls respond while a cell runs: the kernel receives clicks in the thread that last sent to them."""
        if (thread := cells.page_thread()) is None or thread == self._page_thread:
            return
        self._page_thread = thread
        self._panel.context = contextvars.copy_context()
        self._panel.say_alive()
        for control in self._buttons.controls:
            control.send_state("disabled")

    def _after_stop(self, action: Callable[[], None]) -> None:
        """Run an action when no run is active: now, or once the current runs are closed."""
        with self.turn:
            if self._runs is None:
                action()
                return
            self._next = action
            if self.state != "stopping":
                self._runs.stop()

    def _note(self, name: str) -> str:
        return self._pair.note if name in self._switched else ""

    def _tell_switched(self, changed: State) -> None:
        if self._runs is not None:
            self._runs.switch(changed)

    def _show(self, sentence: str) -> None:
        """Show a sentence, or errors of the runs until others start."""
        super()._show(sentence or " ".join([*self._sentences, *(self._runs.sentences if self._runs else [])]))

    def _offer(self) -> None:
        """Enable the controls that apply to the current state, and list the checkpoints."""
        saved, histories = self.checkpoints, self.canvas.histories
        remarks = remarks_on(saved, self._start, histories)
        best = best_step(saved, self._start, histories)
        self._buttons.offer(self.state, saved, best, remarks)
        for control in self.setup.controls:
            control.disabled = self.is_running


class Buttons:
    """A row of buttons and the list of checkpoints."""

    def __init__(self, owner: LiveTraining) -> None:
        def button(text: str, tip: str, act: Callable[[], None]) -> ipywidgets.Button:
            made = ipywidgets.Button(description=text, tooltip=tip, layout={"width": "max-content", "min_width": "8em"})
            owner._on_click(made, lambda _: act())
            return made

        self.start = button("Start", "Train from the beginning with the settings above", owner.start)
        self.pause = button("Pause", "Pause after the current step, or resume", self._pause_or_resume)
        self.stop = button("Stop", "End the runs and close their records; press again to end immediately", owner.stop)
        self.restart = button(
            "Restart",
            "Continue from the checkpoint on the right in a new branch",
            lambda: owner.restart(self.choice.value),
        )
        self.start.button_style = "primary"
        self.choice = ipywidgets.Dropdown(
            options=[],
            description="from",
            style={"description_width": "initial"},
            layout={"width": "max-content", "min_width": "16em", "max_width": "98%"},
        )
        self.controls = [self.start, self.pause, self.stop, self.restart, self.choice]
        self.box = ipywidgets.HBox(
            self.controls,
            layout={"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 6px", "margin": "4px 0"},
        )
        self.box.add_class("workbench-live-setup")
        self._owner = owner
        self._best: SavedStep | None = None

    def offer(
        self, state: str, saved: Sequence[SavedStep], best: SavedStep | None, remarks: Mapping[SavedStep, str]
    ) -> None:
        """Enable the buttons that apply to a state, and list the checkpoints."""
        is_running = state not in ("ready", ENDED)
        ordered = [*remarks, *(each for each in saved if each not in remarks)]
        options = [(f"{each}: {remarks[each]}" if each in remarks else str(each), each) for each in ordered]
        chosen = self.choice.value
        if list(self.choice.options) != options:
            keeps = chosen in saved and chosen != self._best  # a choice of the user is kept, the default follows `best`
            self.choice.options = options
            self.choice.value = chosen if keeps else best
        elif chosen == self._best:
            self.choice.value = best
        self._best = best
        self.choice.disabled = self.restart.disabled = not saved
        self.start.disabled = is_running
        self.pause.disabled = not is_running or state == STOPPING
        self.stop.disabled = not is_running
        self.pause.description = "Resume" if state in (PAUSING, PAUSED) else "Pause"
        self.stop.description = "Stop now" if state == STOPPING else "Stop"

    def _pause_or_resume(self) -> None:
        if self.pause.description == "Resume":
            self._owner.resume()
        else:
            self._owner.pause()
