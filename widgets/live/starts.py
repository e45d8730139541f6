"""Starts of `LiveTraining`: the two runs and their callbacks, their folder, and the job for the training process.

Each start and restart has a new folder, ``start-001/with KSS.zarr`` beside ``start-001/with KSS.checkpoints``; none is
overwritten.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.callbacks.alarms import Alarms
from workbench.callbacks.faults import Fault
from workbench.callbacks.guard import Actions
from workbench.callbacks.kss import KSS
from workbench.callbacks.recorder import Recorder
from workbench.callbacks.train import gather
from workbench.errors import StoreError
from workbench.io.store import last_step, open_run
from workbench.models.checkpoint import list_checkpoints
from workbench.training.recording import branch_run
from workbench.widgets.base import known
from workbench.widgets.live.history import RunHistory
from workbench.widgets.live.live_runs import packed
from workbench.widgets.live.setup import Setup

WITH_KSS, WITHOUT_KSS = "with KSS", "without KSS"
WITH_FAULTS, WITHOUT_FAULTS = "with faults", "without faults"
#: Minimum number of spectra in memory. A history keeps at least twice as many as are written at once.
_LEAST_KEPT = 64


class PairedRuns:
    """The callbacks of the two runs of a live training.

    A control has the same faults and the same KSS, never switched on, so that both runs are bitwise identical until
    something is switched on. It has a recorder and alarms with the same settings, and no actions. A second architecture
    has all of them, and is switched together with the first. The recommended KSS, which is used if none is given, is
    off at first if ``is_off`` or if there are faults.
    """

    def __init__(
        self,
        kss: KSS | None,
        faults: Sequence[Fault],
        recorder: Recorder | None,
        alarms: Alarms | None,
        actions: Actions | None,
        *,
        is_off: bool = False,
    ) -> None:
        gather(None, faults=faults, recorder=recorder, alarms=alarms, actions=actions)  # it checks them
        self.faults = tuple(faults)
        self.recorder, self.alarms, self.actions = recorder, alarms, actions
        if kss is None:
            kss = KSS.recommended()
            kss.enabled = not self.faults and not is_off
        self.kss = kss
        self.names = (WITH_FAULTS, WITHOUT_FAULTS) if self.faults else (WITH_KSS, WITHOUT_KSS)

    @property
    def note(self) -> str:
        """A short note on what is switched on, for a run that has not ended."""
        if not self.faults:
            return "KSS on" if self.kss.enabled else "KSS off"
        on = [fault.name.replace("_", " ") for fault in self.faults if fault.enabled]
        words = ["KSS on"] if self.kss.enabled else []
        return " · ".join([*words, f"{' and '.join(on)} on" if on else "no fault on"])

    def of_first(self) -> dict[str, Any]:
        """Return arguments of `workbench.train` for the first run."""
        if self.alarms is not None:
            self.alarms.reset()
        return {
            "kss": self.kss,
            "faults": self.faults,
            "recorder": self.recorder,
            "alarms": self.alarms,
            "actions": self.actions,
        }

    def of_second(self, *, is_control: bool) -> dict[str, Any]:
        """Return the arguments for a control, in which nothing is ever switched on, or for another architecture."""
        kss, faults = KSS(enabled=False, options=self.kss.options), tuple(replace(fault) for fault in self.faults)
        if not is_control:
            kss.load_state_dict(self.kss.state_dict())
        for own, fault in zip(faults, self.faults, strict=True):
            if is_control:
                own.enabled = False
            else:
                own.load_state_dict(fault.state_dict())
        alarms, recorder, actions = copy.copy(self.alarms), self.recorder, self.actions
        if alarms is not None:
            alarms.reset()
        if recorder is not None:
            options = recorder.options
            recorder = Recorder(
                every={part: recorder.every[part] for part in options.fixed},
                budget=options.budget,
                probe=recorder.probe,
                n_probe_tokens=recorder.n_probe_tokens,
                alpha=options.alpha,
                loss_of=options.loss_of,
                profile_options=options.profile_options,
            )
        actions = None if is_control or actions is None else replace(actions)
        return {"kss": kss, "faults": faults, "recorder": recorder, "alarms": alarms, "actions": actions}


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint of a run: number of the start (from 1), the run's name, updates done, and the run's store."""

    start: int
    run: str
    step: int
    store: Path

    def __str__(self) -> str:
        return f"step {self.step}, {self.run}" + (f" (start {self.start})" if self.start > 1 else "")


class Branches:
    """The folder of a `LiveTraining`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def n_starts(self) -> int:
        """Highest number of a start; 0 if there is none."""
        return max(self._starts(), default=0)

    def place(self, start: int) -> Path:
        """Return the folder of a start."""
        return self.folder / f"start-{start:03d}"

    def stores(self, start: int) -> dict[str, Path]:
        """Return the stores of a start by run; empty if there is no such start."""
        return {store.stem: store for store in sorted(self.place(start).glob("*.zarr"))}

    def saved_steps(self) -> list[SavedStep]:
        """Return all checkpoints: the latest start first, and within a start the latest step first."""
        found = [
            SavedStep(start, checkpoints.stem, step, checkpoints.with_suffix(".zarr"))
            for start, place in self._starts().items()
            for checkpoints in place.glob("*.checkpoints")
            for step in list_checkpoints(checkpoints)
        ]
        return sorted(found, key=lambda saved: (-saved.start, -saved.step, saved.run))

    def histories(self, start: int) -> dict[str, RunHistory]:
        """Return the histories of the runs of a start that has ended."""
        stores = self.stores(start)
        runs = {name: open_run(store) for name, store in stores.items()}
        return {name: RunHistory.of(run, 1 + (last_step(run) or 0), stores[name]) for name, run in runs.items()}

    def drop(self, start: int) -> None:
        """Remove the copies of a branch that could not start."""
        shutil.rmtree(self.place(start), ignore_errors=True)

    def _starts(self) -> dict[int, Path]:
        places = self.folder.iterdir() if self.folder.is_dir() else ()
        return {int(match[1]): place for place in places if (match := re.fullmatch(r"start-(\d+)", place.name))}


@dataclass(frozen=True)
class Start:
    """Runs that are about to start; ``saved`` is the checkpoint to continue from, None for a start from the beginning.

    ``stores`` has the first run first, ``switched`` the names of the runs whose KSS and faults are switched, ``n_kept``
    the number of spectra that the histories keep in memory, and ``job`` the job for the training process.
    """

    branches: Branches
    number: int
    stores: dict[str, Path]
    switched: list[str]
    n_steps: int
    n_kept: int
    job: bytes
    saved: SavedStep | None

    @classmethod
    def of(
        cls, setup: Setup, pair: PairedRuns, branches: Branches, settings: Mapping[str, Any], saved: SavedStep | None
    ) -> Start:
        """Create a start from the values of the controls and further settings of `workbench.train`."""
        task = setup.build_task()
        names = list(setup.architecture_names if setup.has_second else pair.names)
        names = names[: 1 + (setup.has_second or setup.has_control)]
        number = branches.n_starts + 1
        stores = {name: branches.place(number) / f"{name}.zarr" for name in names}
        own = [pair.of_first(), *(pair.of_second(is_control=not setup.has_second) for _ in names[1:])]
        n_steps = setup.n_steps.value
        common = {
            "checkpoint_every": max(20, n_steps // 20),
            **settings,
            "n_steps": n_steps,
            "learning_rate": setup.learning_rate.value,
            "seed": setup.seed.value,
            "spectra_every": setup.spectra_every.value,
        }
        switched = names if setup.has_second else names[:1]
        job = packed(
            {
                "the models": setup.build_models(task, names),
                "the task": task,
                "the settings": {n: {**common, "store": stores[n], **o} for n, o in zip(names, own, strict=True)},
                "resume": saved is not None,
                "switched": switched,
            }
        )
        n_kept = max(_LEAST_KEPT, 2 * int(common["flush_every"]))
        return cls(branches, number, stores, switched, n_steps, n_kept, job, saved)

    def histories(self) -> dict[str, RunHistory]:
        """Return empty histories, or copy the runs of the checkpoint (all or none) and return their histories."""
        if self.saved is None:
            return {name: RunHistory(self.n_steps, store, n_kept=self.n_kept) for name, store in self.stores.items()}
        origins = {name: self._origin_of(name) for name in self.stores}
        try:
            for name, store in self.stores.items():
                branch_run(origins[name].store, store, step=origins[name].step)
        except BaseException:
            self.branches.drop(self.number)
            raise
        return {
            name: RunHistory.of(open_run(store), self.n_steps, store, n_kept=self.n_kept)
            for name, store in self.stores.items()
        }

    def _origin_of(self, name: str) -> SavedStep:
        """Return the checkpoint of a run: the chosen one, or another architecture's latest one up to that step."""
        saved = known(self.saved)
        if len(self.switched) == 1:  # a control continues from the checkpoint of the treatment
            return saved
        for each in self.branches.saved_steps():
            if (each.start, each.run) == (saved.start, name) and each.step <= saved.step:
                return each
        raise StoreError(
            f"The run {name} has no checkpoint up to step {saved.step} of start {saved.start}; choose another."
        )


def remarks_on(saved: Sequence[SavedStep], start: int, histories: Mapping[str, RunHistory]) -> dict[SavedStep, str]:
    """Return remarks on recommended checkpoints, latest first; one at the step that diverged would diverge again."""
    remarks: dict[SavedStep, str] = {}
    for name, history in histories.items():
        own = [each for each in saved if each.start == start and each.run == name]
        for what, step in (("divergence", history.diverged_at), ("first alarm", history.first_alarm)):
            before = next((each for each in own if step is not None and each.step < step), None)
            if before is not None:
                also = f"{remarks[before]} and " if before in remarks else "last before "
                remarks[before] = f"{also}the {what} at step {step}"
    return remarks


def best_step(saved: Sequence[SavedStep], start: int, histories: Mapping[str, RunHistory]) -> SavedStep | None:
    """Return the checkpoint to restart from: the latest before the first divergence, else the latest; None without."""
    for name, history in histories.items():
        if history.diverged_at is not None:
            for each in saved:
                if (each.start, each.run) == (start, name) and each.step < history.diverged_at:
                    return each
    return next(iter(saved), None)
