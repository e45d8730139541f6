"""The folders of the runs of `LiveTraining`: a new one for each start and each restart, never overwritten."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from workbench.models.run_checkpoints import list_checkpoints
from workbench.training.checkpoints import branch_run

_NAME = re.compile(r"start-(\d+)")


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint that a run of the room has written.

    Attributes:
        start: Number of the start, from 1.
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
    """The folder of a `LiveTraining`: ``start-001/with KSS.zarr``, ``start-001/with KSS.checkpoints``, and so on.

    Args:
        folder: May hold starts of earlier days.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def n_starts(self) -> int:
        """Highest number of a start; 0: none yet."""
        return max(self._starts(), default=0)

    def new(self) -> Path:
        """The folder of the next start; created by the caller."""
        return self.folder / f"start-{self.n_starts + 1:03d}"

    def saved_steps(self) -> list[SavedStep]:
        """Every checkpoint; those of the latest start first, and of each the latest step first."""
        found = [
            SavedStep(start, checkpoints.stem, step, checkpoints.with_suffix(".zarr"))
            for start, place in self._starts().items()
            for checkpoints in place.glob("*.checkpoints")
            for step in list_checkpoints(checkpoints)
        ]
        return sorted(found, key=lambda saved: (-saved.start, -saved.step, saved.run))

    def branch(self, saved: SavedStep, stores: list[Path]) -> None:
        """Copy a run as it was at a checkpoint to each of these places, or to none of them.

        Raises:
            CheckpointError: If the checkpoint is gone.
            StoreError: If the disk is full, or a place is taken.
        """
        try:
            for store in stores:
                branch_run(saved.store, store, step=saved.step)
        except BaseException:
            self.drop(stores[0].parent)
            raise

    @staticmethod
    def drop(place: Path) -> None:
        """Remove the copies of a branch that could not begin."""
        shutil.rmtree(place, ignore_errors=True)

    def _starts(self) -> dict[int, Path]:
        places = self.folder.iterdir() if self.folder.is_dir() else ()
        return {int(match.group(1)): place for place in places if (match := _NAME.fullmatch(place.name))}
