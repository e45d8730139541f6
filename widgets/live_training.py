"""Train interactively: switch KSS and faults on and off, and see whether the run converges."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections import deque
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.callbacks.train import train
from workbench.errors import OptionError, StoreError, WorkbenchError
from workbench.io.store import open_run
from workbench.training.recording import Recording
from workbench.training.training_plan import TrainingPlan
from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.live.alarm_list import AlarmList
from workbench.widgets.live.branches import Branches, SavedStep
from workbench.widgets.live.fault_panel import FaultPanel
from workbench.widgets.live.history import RunHistory
from workbench.widgets.live.kss_panel import KSSPanel
from workbench.widgets.live.live_canvas import LiveCanvas
from workbench.widgets.live.paired_runs import WITH_KSS, WITHOUT_KSS, PairedRuns
from workbench.widgets.live.setup import Setup
from workbench.widgets.live.trainer import LiveTrainer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    import xarray as xr
    from torch import nn

    from workbench.callbacks.actions import Action, Actions
    from workbench.callbacks.alarms import Alarms
    from workbench.callbacks.faults import Fault
    from workbench.callbacks.kss import KSS
    from workbench.callbacks.recorder import Recorder
    from workbench.training.step_record import StepRecord
    from workbench.zoo import ArchitectureConfig

WITH, WITHOUT = WITH_KSS, WITHOUT_KSS
#: Settings of a run that are not on the page, unless the caller has set them.
_SETTINGS = {"warmup": 20, "flush_every": 25, "profile_options": {"n_snapshots": 512}}
#: Given by the controls.
_TAKEN = ("n_steps", "learning_rate", "seed", "spectra_every", "store", "checkpoints")


class LiveTraining(WorkbenchWidget):
    """A model in training with switches for KSS and faults and, next to it, the same run without.

    Both runs have the same parameters, data and seed, and take turns in one thread, so that they differ only in what is
    switched on; as long as nothing is, they are the same to the bit. The kernel stays free meanwhile: run other
    cells, change ``kss`` or a fault from one of them, open ``runs``. In a script, or where a cell needs the end,
    ``await live.finished()``.

    Every start and restart records its runs, with checkpoints, in a new folder; a restart from a checkpoint continues
    with copies, so nothing is ever overwritten.

    Args:
        architecture: A configuration of ``wb.zoo``, which the controls then change; or any model, which is copied for
            each run and not changed. None: a small transformer without normalization, which soon diverges.
        task: A task, or any data that ``wb.train`` takes; or the name of one of the choices. None: associative recall.
        learning_rate: Peak rate.
        n_steps: Updates of a run.
        seed: Seed of fresh parameters, of training, and of the data of a task chosen by name.
        kss: The KSS to switch; None: the recommended one, switched off where there are faults.
        compare: Whether the same run with nothing switched on trains next to it.
        spectra_every: Steps between two measurements of the eigenvalues.
        folder: Folder in which the runs are recorded; None: a temporary one, which is removed when the kernel ends.
        faults: Faults from ``wb.faults``, each with a switch on the page; the runs are then called "with faults" and
            "without faults".
        recorder: Records mechanism monitors of the treatment; the control gets one with the same settings.
        alarms: Alarms on the recorder's monitors, for both runs: the first one and its likely cause stay in sight, the
            strongest evidence is a trace, with a mark for each measurement of a probe, and the newest alarms are listed
            under the figure.
        actions: Actions that alarms may trigger, in the treatment only.
        **settings: Further settings of ``wb.train``, such as ``optimizer``, ``warmup`` or ``checkpoint_every``.

    Attributes:
        kss: The `workbench.KSS` of the treatment; change it here or on the page, it acts from the next step
            on.
        faults: Those of the treatment; ``live.faults[0].enabled = True``, here or on the page.
        folder: Folder in which the runs are recorded.
        setup: The controls of what is trained, by name.
        canvas: The figure.
        alarm_list: The list of the latest alarms.

    Raises:
        OptionError: If a setting is unknown or impossible.
    """

    def __init__(
        self,
        architecture: ArchitectureConfig | nn.Module | None = None,
        task: Any = None,
        *,
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
        **settings: Any,
    ) -> None:
        super().__init__()
        known = [f.name for cls in (TrainingPlan, Recording) for f in fields(cls) if f.name not in _TAKEN]
        known += ["loss", "penalties"]
        if unknown := [name for name in settings if name not in known]:
            raise OptionError(
                f"LiveTraining knows no setting '{unknown[0]}'; besides its own it takes {', '.join(known)}."
            )
        self._pair = PairedRuns(kss, faults, recorder, alarms, actions)
        self.kss, self.faults, self._names = self._pair.kss, self._pair.faults, self._pair.names
        self.setup = Setup(
            architecture, task, learning_rate=learning_rate, seed=seed, n_steps=n_steps, spectra_every=spectra_every,
            compare=compare, control=self._names[1],
        )  # fmt: skip
        self._settings = {**_SETTINGS, **settings}
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="live-training-", ignore_cleanup_errors=True)
            folder = self._temporary.name
        self.folder = Path(folder)
        self._branches = Branches(self.folder)
        self._trainer: LiveTrainer | None = None
        self._next: Callable[[], None] | None = None
        self._place: Path | None = None
        self._n_steps = n_steps
        self._pace = _Pace()
        self._sentences: list[str] = []
        self._state = "ready"
        self._alarms: dict[str, Alarms | None] = {}
        self._n_acted = 0
        self.canvas = LiveCanvas(lambda: self.status, self._pair.note)
        self.alarm_list = AlarmList()
        self.at_close(self.alarm_list.close)
        self._panel = KSSPanel(self.kss, self.guarded)
        panels = [self._panel, *([FaultPanel(self.faults, self.guarded)] if self.faults else [])]
        switches: tuple[KSS | Fault, ...] = (self.kss, *self.faults)
        for switched in switches:
            self.at_close(switched.observe(lambda name, before, after: self.canvas.refresh()))
        self._make_buttons()
        told = [self.alarm_list] if alarms is not None else []
        self.fill([self.setup.box, self._buttons, *panels, self.canvas, *told])
        for control in (self.setup.family, self.setup.task):
            self.watch(control, lambda _: self.setup.adapt())
        self._offer()

    @property
    def status(self) -> str:
        """The status in one line."""
        histories = self.canvas.histories.values()
        if self._state == "ready" or not histories:
            return "ready: press Start"
        n_done = max(history.n_done for history in histories)
        line = f"{self._state} · step {n_done} of {self._n_steps}"
        return f"{line} · {self._pace.per_second:.0f} steps per second" if self._state == "training" else line

    @property
    def is_running(self) -> bool:
        """Whether there are runs that have not ended, paused or not."""
        return self._trainer is not None

    @property
    def runs(self) -> dict[str, xr.DataTree]:
        """The runs of the latest start by name, as recorded up to their last block; for any plot or widget."""
        stores = sorted(self._place.glob("*.zarr")) if self._place is not None else []
        return {store.stem: open_run(store) for store in stores}

    @property
    def checkpoints(self) -> list[SavedStep]:
        """Every checkpoint in the folder, from which `restart` can continue; the latest first."""
        return self._branches.saved_steps()

    def start(self) -> None:
        """Train from the start with the values of the controls; an active run is stopped first.

        Raises:
            WorkbenchError: If the controls ask for something impossible.
        """
        self._after_stop(self._begin)

    def restart(self, checkpoint: SavedStep | None = None) -> None:
        """Continue from a checkpoint, in a new branch: the treatment with the present switches.

        Args:
            checkpoint: One of `checkpoints`; None: the latest.

        Raises:
            StoreError: If there is none, or it was made with other settings than the controls have now.
        """
        if checkpoint is None and not (saved := self.checkpoints):
            raise StoreError("There is no checkpoint yet; train for some steps, or pass a smaller checkpoint_every.")
        self._after_stop(partial(self._begin, checkpoint or saved[0]))

    def pause(self) -> None:
        """Pause after the present step."""
        with self.turn:
            if self._trainer is not None:
                self._trainer.pause()
                self._show_state("paused")

    def resume(self) -> None:
        """Continue after a pause."""
        with self.turn:
            if self._trainer is not None:
                self._pace.rest()
                self._show_state("training")
                self._trainer.resume()

    def stop(self) -> None:
        """End the runs after the present step; their status is "stopped", and a checkpoint is written."""
        with self.turn:
            if self._trainer is not None:
                self._show_state("stopping")
                self._trainer.stop()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the runs have ended. The page is blocked meanwhile; in a notebook use `finished`.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: If they are not over by then.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (trainer := self._trainer) is not None:  # a restart makes another
            if not trainer.join(min(end - time.monotonic(), 3600.0)) and time.monotonic() >= end:
                raise TimeoutError(f"The runs were not over after {timeout:g} s.")

    async def finished(self) -> None:
        """Wait until the runs have ended, while the page stays responsive: ``await live.finished()``."""
        while self.is_running:
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Stop training, close the runs properly, and remove the widget; the recorded runs stay."""
        if getattr(self, "_trainer", None) is not None:
            self._next = None
            self.stop()
            self.wait()
        super().close()

    def _begin(self, saved: SavedStep | None = None) -> None:
        """Start the runs, in a new folder, from the start or from a checkpoint."""
        place, setup = self._branches.new(), self.setup
        task = setup.build_task()
        stores = {name: place / f"{name}.zarr" for name in self._names[: 1 + setup.compare.value]}
        n_steps = setup.n_steps.value
        settings = {
            "checkpoint_every": max(20, n_steps // 20),
            **self._settings,
            "n_steps": n_steps,
            "learning_rate": setup.learning_rate.value,
            "seed": setup.seed.value,
            "spectra_every": setup.spectra_every.value,
        }
        models = {name: setup.build_model(task) for name in stores}
        if saved is not None:
            self._branches.branch(saved, list(stores.values()))
        try:
            with self._pair.arguments(resume=saved is not None) as arguments:
                runs = {
                    name: train(
                        models[name], task, store=store, resume=saved is not None, **arguments[name], **settings
                    )
                    for name, store in stores.items()
                }
        except BaseException:
            if saved is not None:
                self._branches.drop(place)
            raise
        self._place, self._n_steps = place, n_steps
        self._attach_alarms({name: arguments[name]["alarms"] for name in runs}, stores if saved is not None else {})
        self._sentences.clear()
        self._show("")
        self._pace = _Pace()
        self.canvas.n_steps = n_steps
        self.canvas.histories = {
            name: RunHistory(n_steps) if saved is None else RunHistory.of(open_run(store), n_steps)
            for name, store in stores.items()
        }
        self._trainer = LiveTrainer(runs, on_record=self._take, on_end=self._end, on_stop=self._finish)
        self._trainer.start()
        self._show_state("training")

    def _attach_alarms(self, alarms: dict[str, Alarms | None], recorded: dict[str, Path]) -> None:
        """Clear the alarms of other runs, and load the recorded ones of runs that are resumed."""
        self._alarms = alarms
        self._n_acted = len(self._done)
        self.alarm_list.clear()
        for name, store in recorded.items():
            self.alarm_list.learn(name, open_run(store))
        self.alarm_list.refresh()

    @property
    def _done(self) -> list[Action]:
        """Everything that alarms have triggered."""
        return [] if self._pair.actions is None else self._pair.actions.done

    def _after_stop(self, action: Callable[[], None]) -> None:
        """Run an action when no run is active: now, or when the present ones are closed."""
        with self.turn:
            if self._trainer is None:
                action()
                return
            self._next = action
            self.stop()

    def _take(self, name: str, record: StepRecord) -> None:
        """Take the record of one step; called in the trainer's thread."""
        history = self.canvas.histories[name]
        history.add(record)
        if record.diverged and not history.is_broken:
            history.verdict, history.is_broken = f"diverged at step {record.step}", True
            self._sentences.append(f"The run {name} diverged at step {record.step}: {_evidence(record)}.")
        acted = self._done[self._n_acted :]
        self._n_acted += len(acted)
        alarms = self._alarms.get(name)
        if alarms is not None:
            history.hear(record, alarms)
        self.alarm_list.hear(name, record, alarms, acted)
        self._pace.count()
        self.canvas.refresh()
        if self._state == "paused":  # this was the last step before the pause: it may have written a checkpoint
            with self.attempt():
                self._offer()

    def _end(self, name: str, error: Exception | None) -> None:
        """A run is over by itself; in the trainer's thread."""
        history = self.canvas.histories[name]
        if error is not None:
            history.verdict, history.is_broken = "failed", True
            said = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
            self._sentences.append(f"The run {name} ended. {said.rstrip('.')}.")
        history.verdict = history.verdict or "finished"
        self.canvas.refresh()
        with self.attempt():
            self._offer()
            self._say()

    def _finish(self) -> None:
        """All runs are closed; in the trainer's thread, its last act."""
        with self.attempt():
            self._trainer, action, self._next = None, self._next, None
            for history in self.canvas.histories.values():
                history.verdict = history.verdict or "stopped"
            self._show_state("over")
            if action is None:
                self._say()
            else:
                action()

    def _say(self) -> None:
        """Why runs have ended badly, for the line under the widget."""
        if self._sentences:
            raise WorkbenchError(" ".join(self._sentences))

    def _make_buttons(self) -> None:
        def button(text: str, tip: str, act: Callable[[], None]) -> ipywidgets.Button:
            made = ipywidgets.Button(description=text, tooltip=tip, layout={"width": "104px"})
            self.on_click(made, lambda _: act())
            return made

        self._start = button("Start", "Train afresh with the settings above", self.start)
        self._pause = button("Pause", "Hold after the present step, or go on", self._pause_or_resume)
        self._stop = button("Stop", "End the runs and close their records", self.stop)
        self._restart = button(
            "Restart", "Go on from the checkpoint on the right, in a new branch",
            lambda: self.restart(self._choice.value),
        )  # fmt: skip
        self._start.button_style = "primary"
        self._choice = ipywidgets.Dropdown(
            options=[], description="from", style={"description_width": "initial"}, layout={"width": "250px"}
        )
        self._buttons = ipywidgets.HBox(
            [self._start, self._pause, self._stop, self._restart, self._choice],
            layout={"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 6px", "margin": "4px 0"},
        )

    def _pause_or_resume(self) -> None:
        if self._trainer is not None and self._trainer.is_paused:
            self.resume()
        else:
            self.pause()

    def _show_state(self, state: str) -> None:
        self._state = state
        self._offer()
        self.canvas.refresh()

    def _offer(self) -> None:
        """Enable what makes sense now, and offer the checkpoints that there are."""
        saved, chosen, newest = self.checkpoints, self._choice.value, next(iter(self._choice.options), None)
        if list(self._choice.options) != saved:
            keeps = chosen in saved and chosen != newest  # the newest stays the newest, another choice stays itself
            self._choice.options = saved
            self._choice.value = chosen if keeps else next(iter(saved), None)
        self._choice.disabled = self._restart.disabled = not saved
        is_running, is_stopping = self.is_running, self._state == "stopping"
        for control in self.setup.controls:
            control.disabled = is_running
        self._start.disabled = is_running
        self._pause.disabled = self._stop.disabled = not is_running or is_stopping
        self._pause.description = "Resume" if self._state == "paused" else "Pause"


class _Pace:
    """Steps per second, over the last few."""

    def __init__(self) -> None:
        self._moments: deque[float] = deque(maxlen=50)

    def count(self) -> None:
        """One more step is done."""
        self._moments.append(time.monotonic())

    def rest(self) -> None:
        """Do not count the time that has passed."""
        self._moments.clear()

    @property
    def per_second(self) -> float:
        """The present rate; 0 while it is not known."""
        moments = list(self._moments)
        return (len(moments) - 1) / (moments[-1] - moments[0]) if len(moments) > 1 else 0.0


def _evidence(record: StepRecord) -> str:
    if record.cause == "loss":
        return f"its loss rose to {record.loss:.3g}"
    if record.cause == "grad_norm":
        return f"its gradient norm rose to {record.grad_norm:.3g}"
    return "its loss or gradients are not finite"
