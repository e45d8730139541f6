"""Train interactively: switch KSS and faults on and off, and see whether the run converges."""

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

from workbench.errors import OptionError, StoreError
from workbench.io.store import open_run
from workbench.plots.figure_files import save as save_figure
from workbench.training.recording import Recording
from workbench.training.training_plan import TrainingPlan
from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.export import ExportBar
from workbench.widgets.files import KINDS, export_runs
from workbench.widgets.live import cells
from workbench.widgets.live.alarm_list import AlarmList
from workbench.widgets.live.branches import Branches, SavedStep, best_step, remarks_on
from workbench.widgets.live.buttons import Buttons
from workbench.widgets.live.fault_panel import FaultPanel
from workbench.widgets.live.kss_panel import KSSPanel
from workbench.widgets.live.live_canvas import LiveCanvas
from workbench.widgets.live.live_runs import OVER, PAUSED, TRAINING, LiveRuns
from workbench.widgets.live.paired_runs import PairedRuns
from workbench.widgets.live.setup import Setup
from workbench.widgets.live.starts import Start, recorded_histories
from workbench.widgets.live.static_figure import live_figure
from workbench.widgets.live.switches import Switches

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import xarray as xr
    from torch import nn

    from workbench.callbacks.actions import Actions
    from workbench.callbacks.alarms import Alarms
    from workbench.callbacks.faults import Fault
    from workbench.callbacks.kss import KSS
    from workbench.callbacks.recorder import Recorder
    from workbench.widgets.live.history import RunHistory
    from workbench.widgets.live.step_news import StepNews
    from workbench.widgets.live.switches import State
    from workbench.zoo import ArchitectureConfig

#: Settings of a run that are not on the page, unless the caller has set them.
_SETTINGS = {"warmup": 20, "flush_every": 25, "profile_options": {"n_snapshots": 512}}
#: Given by the controls.
_TAKEN = ("n_steps", "learning_rate", "seed", "spectra_every", "store", "checkpoints")
#: Seconds that a widget which is closed leaves to its runs for closing their stores.
_SECONDS_AT_CLOSE = 60.0


class LiveTraining(WorkbenchWidget):
    """A model in training with switches for KSS and faults and, next to it, the same run without; or another model.

    Both runs have the same data and seed, and treatment and control the same parameters, so that these differ only in
    what is switched on; as long as nothing is, they are the same to the bit. With ``versus=`` the second run is of
    another architecture, and both are switched together.

    The runs take turns in a process of their own, and the picture moves also while a cell runs in the kernel. ``kss``
    and ``faults`` act from the next step on wherever they are changed, on the page or in a cell. The process gets
    copies of all else: functions and objects of the notebook are sent there (by cloudpickle), and what they change
    there stays there. In a script, or where a cell needs the end: ``live.wait()``, or ``await live.finished()``.

    A slider shows the modes of any recorded step. Every start and restart records its runs, with checkpoints, in a new
    folder; a restart goes on with copies from a checkpoint, by default the latest before the divergence, and the runs
    that it leaves stay in sight as pale lines. Running the cell again ends the training of the widget that it made
    before, and so does a widget that records into the same folder. The process ends with the kernel, too.

    Args:
        architecture: A configuration of ``wb.zoo``, which the controls then change; or any model, which is copied for
            each run and not changed. None: a small transformer without normalization, which soon diverges.
        task: A task, or any data that ``wb.train`` takes and that can be read again; or the name of one of the choices.
            None: associative recall.
        versus: Another configuration or model, to train next to the first in place of the control.
        learning_rate: Peak rate.
        n_steps: Updates of a run.
        seed: Seed of fresh parameters, of training, and of the data of a task chosen by name.
        kss: The KSS to switch; None: the recommended one, switched off where there are faults or two architectures.
        compare: Whether a second run trains next to the first.
        spectra_every: Steps between two measurements of the eigenvalues.
        folder: Folder in which the runs are recorded; None: a temporary one, which is removed when the kernel ends.
        faults: Faults from ``wb.faults``, each with a switch on the page; treatment and control are then called "with
            faults" and "without faults".
        recorder: Records mechanism monitors; the second run gets one with the same settings.
        alarms: Alarms on the recorder's monitors, for both runs: the first one and its likely cause stay in sight, the
            strongest evidence is a trace, with a mark for each measurement of a probe, and the newest alarms are listed
            under the figure.
        actions: Actions that alarms may trigger; not in a control.
        theme: ``"page"``, or ``"projector"`` for large type.
        **settings: Further settings of ``wb.train``, such as ``optimizer``, ``warmup`` or ``checkpoint_every``.

    Attributes:
        kss: The `workbench.KSS` of the first run; change it here or on the page.
        faults: Those of the first run; ``live.faults[0].enabled = True``, here or on the page.
        folder: Folder in which the runs are recorded.
        setup: The controls of what is trained, by name.
        canvas: The figure.
        alarm_list: The list of the alarms.
        export_bar: Buttons that write the figure or the runs.

    Raises:
        OptionError: If a setting is unknown or impossible.
    """

    kinds = KINDS

    def __init__(
        self,
        architecture: ArchitectureConfig | nn.Module | None = None,
        task: Any = None,
        *,
        versus: ArchitectureConfig | nn.Module | None = None,
        learning_rate: float = 1e-2,
        n_steps: int = 300,
        seed: int = 0,
        kss: KSS | None = None,
        compare: bool = True,
        spectra_every: int = 1,
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
        if unknown := [name for name in settings if name not in known]:
            raise OptionError(
                f"LiveTraining knows no setting '{unknown[0]}'; besides its own it takes {', '.join(known)}."
            )
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
        self.canvas = LiveCanvas(lambda: self.status, self._note, self.guarded, self.settle)
        self.alarm_list = AlarmList()
        self.at_close(self.alarm_list.close)
        self._panel = KSSPanel(self.kss, self.guarded)
        self._panels = [self._panel, *([FaultPanel(self.faults, self.guarded)] if self.faults else [])]
        self._thread: str | None = None
        self._switches = Switches(self.kss, self.faults, self._tell_switched)
        self.at_close(self._switches.close)
        switched: tuple[KSS | Fault, ...] = (self.kss, *self.faults)
        for each in switched:
            self.at_close(each.observe(lambda name, before, after: self.canvas.refresh()))
        self._buttons = Buttons(self)
        self.export_bar = ExportBar(self, self.kinds)
        self.export_bar.suggest("exports/live_training")
        told = [self.alarm_list] if alarms is not None else []
        self.fill([self.setup.box, self._buttons.box, *self._panels, self.canvas, *told, self.export_bar])
        for control in (self.setup.first.family, self.setup.task, self.setup.second.family, self.setup.compare):
            self.watch(control, lambda _: self.setup.adapt())
        self._offer()
        cells.succeed(self, self.folder)

    @property
    def state(self) -> str:
        """``"ready"``, ``"starting"``, ``"training"``, ``"pausing"``, ``"paused"``, ``"stopping"`` or ``"over"``."""
        if self._runs is not None:
            return self._runs.state
        return OVER if self.canvas.histories else "ready"

    @property
    def status(self) -> str:
        """The status in one line."""
        histories, state = self.canvas.histories, self.state
        if not histories:
            return "ready: press Start"
        n_done = max(history.n_done for history in histories.values())
        line = f"{state} · step {n_done} of {self.canvas.n_steps}"
        if state == TRAINING and self._runs is not None:
            return f"{line} · {self._runs.per_second:.0f} steps per second"
        if state == OVER:
            return " · ".join([line, *(f"{name}: {history.verdict}" for name, history in histories.items())])
        return line

    @property
    def summary(self) -> str:
        """The status, for readers that show no pictures."""
        return f"LiveTraining, {self.status}."

    @property
    def is_running(self) -> bool:
        """Whether there are runs that have not ended, paused or not."""
        return self._runs is not None

    @property
    def step(self) -> int | None:
        """Step whose modes are shown; None: the latest. Set it to go there, to the latest recorded step up to it."""
        return self.canvas.step

    @step.setter
    def step(self, step: int | None) -> None:
        self.canvas.go_to(step)

    @property
    def runs(self) -> dict[str, xr.DataTree]:
        """The runs of the latest start by name, as recorded up to their last block; for any plot or widget."""
        return self.runs_of(self._start)

    @property
    def n_starts(self) -> int:
        """Number of the latest start in the folder; 0: none yet."""
        return self._branches.n_starts

    def runs_of(self, start: int) -> dict[str, xr.DataTree]:
        """The runs of an earlier start by name, from 1 to `n_starts`; none if it has recorded nothing."""
        return {name: open_run(store) for name, store in self._branches.stores(start).items()}

    @property
    def checkpoints(self) -> list[SavedStep]:
        """Every checkpoint in the folder, from which `restart` can continue; the latest first."""
        return self._branches.saved_steps()

    def start(self) -> None:
        """Train from the start with the values of the controls; active runs are stopped first.

        What the controls alone cannot tell, the process says when it has begun; it is under the widget then.

        Raises:
            WorkbenchError: If the controls ask for something impossible, or the model or the task cannot be sent to the
                process.
        """
        self._after_stop(self._begin)

    def restart(self, checkpoint: SavedStep | None = None) -> None:
        """Continue from a checkpoint, in a new branch, with the present switches.

        A checkpoint of other settings than the controls have now is refused, under the widget.

        Args:
            checkpoint: One of `checkpoints`; None: the latest before the divergence if a run of the present start
                diverged, else the latest.

        Raises:
            StoreError: If there is none.
            OptionError: If it is that of the last step already.
        """
        checkpoint = checkpoint or best_step(self.checkpoints, self._start, self.canvas.histories)
        if checkpoint is None:
            raise StoreError("There is no checkpoint yet; train for some steps, or pass a smaller checkpoint_every.")
        if checkpoint.step >= self.setup.n_steps.value:
            raise OptionError(
                f"The checkpoint is of step {checkpoint.step}, and the run has {self.setup.n_steps.value} steps; set "
                "more steps, or choose an earlier checkpoint."
            )
        self._after_stop(partial(self._begin, checkpoint))

    def pause(self) -> None:
        """Pause after the present step."""
        with self.turn:
            if self._runs is not None:
                self._runs.pause()

    def resume(self) -> None:
        """Continue after a pause."""
        with self.turn:
            if self._runs is not None:
                self._runs.resume()

    def stop(self) -> None:
        """End the runs after the present step and close their records; does not wait. A second time: end at once."""
        with self.turn:
            if self._runs is not None:
                self._runs.stop()

    def retire(self, reason: str) -> None:
        """End the training because another widget takes this one's place."""
        with self.turn:
            if self._runs is not None:
                self._next = None
                self._sentences.append(f"This training was ended: {reason}.")
                self._runs.stop()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the runs have ended; the kernel runs no other cell meanwhile, but the picture moves.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: If they are not over by then.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (runs := self._runs) is not None:  # a restart makes others
            if not runs.join(max(0.0, min(end - time.monotonic(), 3600.0))) and time.monotonic() >= end:
                raise TimeoutError(f"The runs were not over after {timeout:g} s.")

    async def finished(self) -> None:
        """Wait until the runs have ended, while the page stays responsive: ``await live.finished()``."""
        while self.is_running:
            await asyncio.sleep(0.05)

    def figure(self, backend: str = "bokeh") -> Any:
        """What is shown as a figure of its own: the modes of each run at the shown step, and the traces below.

        Raises:
            OptionError: If there are no modes yet.
        """
        return live_figure(self.canvas.histories, step=self.canvas.step, backend=backend)

    def page(self) -> str:
        """The figure as one HTML page that stays interactive, without a kernel and without a network."""
        with tempfile.TemporaryDirectory() as folder:
            return save_figure(self.figure("bokeh"), Path(folder) / "page.html").read_text(encoding="utf-8")

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Endings of files that cannot be written now, and why."""
        if any(history.modes is not None for history in self.canvas.histories.values()):
            return {}
        return dict.fromkeys(self.kinds, "There is nothing to write yet; press Start and wait for the first step.")

    def close(self) -> None:
        """Stop training, close the runs properly, and remove the widget; the recorded runs stay."""
        if not hasattr(self, "_picture"):  # its settings were refused: nothing was made
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

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        if ending == ".nc":
            return export_runs(self.runs, path, overwrite=overwrite)
        return super()._write(path, ending, overwrite=overwrite)

    # What LiveRuns calls, in the thread that hears the process.

    def run_in_page(self, function: Any, *arguments: Any) -> None:
        """Call a function so that what it sends is answered also while a cell runs; its errors are shown."""

        def run() -> None:
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001  (a bug of ours: the training goes on)
                self._fail(f"{type(error).__name__}: {error}")

        self.canvas.context.copy().run(run)

    def take_step(self, name: str, news: StepNews) -> None:
        """A run has made a step."""
        if news.actions and name == next(iter(self.canvas.histories)) and self._pair.actions is not None:
            self._pair.actions.done.extend(news.actions)
        self.alarm_list.hear(name, news)
        self.canvas.refresh()

    def take_end(self, name: str) -> None:
        """A run is over by itself."""
        self.canvas.refresh()
        with self.attempt():
            self._offer()

    def take_state(self) -> None:
        """The state is another one."""
        self._let_controls_be_heard()
        self.canvas.is_active = self.is_running
        self._offer()
        self.canvas.refresh()
        if self.state == PAUSED:
            self.settle()

    def take_refusal(self, sentence: str) -> None:
        """The runs could not begin: what was shown before is shown again."""
        self._sentences.append(sentence)
        self._put_back()

    def take_sign_of_life(self) -> None:
        """Nothing has happened, but the process is there."""
        self.canvas.say_alive()
        self._let_controls_be_heard()

    def take_exit(self) -> None:
        """All runs are closed."""
        with self.attempt():
            if self._runs is not None:
                self._sentences += self._runs.sentences
            self._runs, action, self._next = None, self._next, None
            if action is not None:
                action()
            self.take_state()
        self.settle()

    def _begin(self, saved: SavedStep | None = None) -> None:
        """Start the runs, in a new folder, from the start or from a checkpoint."""
        start = Start.of(self.setup, self._pair, self._branches, self._settings, saved)
        before = (self.canvas.histories, self.canvas.earlier, self.canvas.n_steps, self._start, self._switched)
        earlier = {} if saved is None else self._left_by(saved)
        histories = start.histories(self._branches)

        def put_back() -> None:
            if saved is not None:
                self._branches.drop(self._branches.place(start.number))
            self.canvas.show(*before[:3])
            self._start, self._switched = before[3:]

        self._put_back = put_back
        self._sentences.clear()
        self._show("")
        self._start, self._switched = start.number, start.switched
        self.canvas.show(histories, earlier, start.n_steps)
        self.alarm_list.clear()
        for name, store in start.stores.items() if saved is not None else ():
            self.alarm_list.learn(name, open_run(store))
        self.alarm_list.refresh()
        self._runs = LiveRuns(start.job, histories, self._switches, self)
        self.take_state()

    def _left_by(self, saved: SavedStep) -> dict[tuple[str, int], RunHistory]:
        """The runs that a restart from a checkpoint leaves, and those that they left."""
        histories, earlier = self.canvas.histories, self.canvas.earlier
        if saved.start != self._start:
            histories, earlier = recorded_histories(self._branches.stores(saved.start)), {}
        return earlier | {(name, saved.start): history for name, history in histories.items()}

    def _let_controls_be_heard(self) -> None:
        """Let clicks be heard while a cell runs: the kernel hears a control in the thread that sent to it last."""
        if (thread := cells.page_thread()) is None or thread == self._thread:
            return
        self._thread = thread
        for panel in self._panels:
            panel.context = contextvars.copy_context()
            panel.say_alive()
        for control in self._buttons.controls:
            control.send_state("disabled")

    def _after_stop(self, action: Callable[[], None]) -> None:
        """Run an action when no run is active: now, or when the present ones are closed."""
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
        """Show a sentence, or what has to be known of runs that ended badly until others begin."""
        super()._show(sentence or " ".join([*self._sentences, *(self._runs.sentences if self._runs else [])]))

    def _offer(self) -> None:
        """Enable what makes sense now, and offer the checkpoints that there are."""
        saved, histories = self.checkpoints, self.canvas.histories
        remarks = remarks_on(saved, self._start, histories)
        best = best_step(saved, self._start, histories)
        self._buttons.offer(self.state, saved, best, remarks)
        for control in self.setup.controls:
            control.disabled = self.is_running
