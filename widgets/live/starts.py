"""One start of `LiveTraining`: its runs, their stores, and the job for the training process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import StoreError
from workbench.io.run_access import last_step
from workbench.io.store import open_run
from workbench.widgets.base import known
from workbench.widgets.live import wire
from workbench.widgets.live.history import RunHistory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workbench.widgets.live.branches import Branches, SavedStep
    from workbench.widgets.live.paired_runs import PairedRuns
    from workbench.widgets.live.setup import Setup

#: Minimum number of spectra in memory. A history keeps at least twice as many as are written at once.
_LEAST_KEPT = 64


@dataclass(frozen=True)
class Start:
    """Runs that are about to start.

    Attributes:
        number: Number of the start, from 1.
        stores: Stores by run, the first run first.
        switched: Names of the runs whose KSS and faults are switched.
        n_steps: Steps of each run.
        n_kept: Number of spectra that the histories keep in memory.
        job: Job for the training process.
        saved: Checkpoint to continue from; None to start from the beginning.
    """

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
        """Create a start from the values of the controls.

        Args:
            setup: The controls.
            pair: The callbacks of the runs.
            branches: The folder.
            settings: Further settings of `workbench.train`.
            saved: Checkpoint to continue from; None to start from the beginning.
        """
        task = setup.build_task()
        names = list(setup.architecture_names if setup.has_second else pair.names)
        names = names[: 1 + (setup.has_second or setup.has_control)]
        number = branches.n_starts + 1
        stores = {name: branches.place(number) / f"{name}.zarr" for name in names}
        of_second = pair.of_second if setup.has_second else pair.of_control
        own = [pair.of_first(), *(of_second() for _ in names[1:])]
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
        job = wire.packed(
            {
                "the models": setup.build_models(task, names),
                "the task": task,
                "the settings": {n: {**common, "store": stores[n], **o} for n, o in zip(names, own, strict=True)},
                "resume": saved is not None,
                "switched": switched,
            }
        )
        n_kept = max(_LEAST_KEPT, 2 * int(common["flush_every"]))
        return cls(number, stores, switched, n_steps, n_kept, job, saved)

    def histories(self, branches: Branches) -> dict[str, RunHistory]:
        """Return empty histories, or copy the runs of the checkpoint and return their histories."""
        if self.saved is None:
            return {name: RunHistory(self.n_steps, store, n_kept=self.n_kept) for name, store in self.stores.items()}
        branches.branch(self._origins(branches), self.stores)
        return {
            name: RunHistory.of(open_run(store), self.n_steps, store, n_kept=self.n_kept)
            for name, store in self.stores.items()
        }

    def _origins(self, branches: Branches) -> dict[str, SavedStep]:
        """Return the checkpoint of each run: the chosen one, or another architecture's latest one up to that step."""
        saved = known(self.saved)
        names = list(self.stores)
        if len(self.switched) == 1:  # a control continues from the checkpoint of the treatment
            return dict.fromkeys(names, saved)
        origins = {}
        for name in names:
            own = [
                each
                for each in branches.saved_steps()
                if (each.start, each.run) == (saved.start, name) and each.step <= saved.step
            ]
            if not own:
                raise StoreError(
                    f"The run {name} has no checkpoint up to step {saved.step} of start {saved.start}; choose a later "
                    "one."
                )
            origins[name] = own[0]
        return origins


def recorded_histories(stores: Mapping[str, Path]) -> dict[str, RunHistory]:
    """Return the histories of runs that have ended."""
    runs = {name: open_run(store) for name, store in stores.items()}
    return {name: RunHistory.of(run, 1 + (last_step(run) or 0), stores[name]) for name, run in runs.items()}
