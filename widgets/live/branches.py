"""Folders of the runs of `LiveTraining`: each start and restart has a new one, and none is overwritten."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.models.checkpoint import list_checkpoints
from workbench.training.checkpoints import branch_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workbench.widgets.live.history import RunHistory

_NAME = re.compile(r"start-(\d+)")


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint of a run.

    Attributes:
        start: Number of the start, counted from 1.
        run: Name of the run, as in `LiveTraining.runs`.
        step: Updates done.
        store: The run's store.
    """

    start: int
    run: str
    step: int
    store: Path

    def __str__(self) -> str:
        return f"step {self.step}, {self.run}" + (f" (start {self.start})" if self.start > 1 else "")


class Branches:
    """The folder of a `LiveTraining` with ``start-001/with KSS.zarr``, ``start-001/with KSS.checkpoints``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def n_starts(self) -> int:
        """Highest number of a start; 0 if there is none."""
        return max(self._starts(), default=0)

    def new(self) -> Path:
        """Return the folder of the next start, without creating it."""
        return self.place(self.n_starts + 1)

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

    def branch(self, origins: Mapping[str, SavedStep], stores: Mapping[str, Path]) -> None:
        """Copy runs up to a checkpoint to new stores: all of them, or none if one fails."""
        try:
            for name, store in stores.items():
                branch_run(origins[name].store, store, step=origins[name].step)
        except BaseException:
            self.drop(next(iter(stores.values())).parent)
            raise

    @staticmethod
    def drop(place: Path) -> None:
        """Remove the copies of a branch that could not start."""
        shutil.rmtree(place, ignore_errors=True)

    def _starts(self) -> dict[int, Path]:
        places = self.folder.iterdir() if self.folder.is_dir() else ()
        return {int(match.group(1)): place for place in places if (match := _NAME.fullmatch(place.name))}


def remarks_on(saved: Sequence[SavedStep], start: int, histories: Mapping[str, RunHistory]) -> dict[SavedStep, str]:
    """Return remarks on the checkpoints of the current start that are recommended for a restart.

    A checkpoint at the step that diverged would diverge again, so it does not count as before the divergence.

    Args:
        saved: Checkpoints, the latest step first.
        start: Number of the current start.
        histories: Its runs by name, the first run first.
    """
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
    """Return the default checkpoint for a restart.

    Returns:
        The latest before the divergence of the first diverged run that has one, else the latest of all; None if there
        is no checkpoint.
    """
    for name, history in histories.items():
        if history.diverged_at is not None:
            for each in saved:
                if (each.start, each.run) == (start, name) and each.step < history.diverged_at:
                    return each
    return next(iter(saved), None)
