"""A recorded run for widgets: its spectra at or before a step, and how it ended."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.io.run_access import at_step, divergence_step, named_runs, spectra_of
from workbench.io.store import open_run
from workbench.plots.plane_view import depth_of

if TYPE_CHECKING:
    import xarray as xr

#: Runs up to this size are read into memory completely, larger ones step by step.
_BYTES_IN_MEMORY = 256e6


class RecordedRun:
    """A run with access to its spectra by step.

    Args:
        name: Name of the run.
        data: A run (a tree with the part ``spectra``, and optionally ``monitors`` and ``events``), a spectra dataset,
            or the path of a stored run. Spectra without the dimension ``step`` belong to step 0.

    Attributes:
        tree: The run.
        diverged_at: Step of the first divergence; None if there is none.
        ended_at: Step at which it finished or was stopped; None if it was not, or if this is unknown.
        steps: Recorded steps of the spectra, int64, increasing; 0 is the initialization.
        n_layers: Layers of the model.
        extent: First and last recorded step of any data.
    """

    def __init__(self, name: str, data: xr.DataTree | xr.Dataset | str | os.PathLike[str]) -> None:
        self.name = name
        if isinstance(data, str | os.PathLike):
            data = open_run(data)
        self.tree = named_runs({name: data})[name]
        self.spectra = spectra_of(self.tree)
        at_step(self.spectra, "last", name=name)
        if self.spectra.nbytes <= _BYTES_IN_MEMORY:
            self.spectra.load()
        self.steps = _steps(name, self.spectra)
        self.n_layers = depth_of(self.spectra)
        monitors = self.part("monitors")
        steps = self.steps if monitors is None else np.concatenate([self.steps, monitors["step"].values])
        self.extent = int(steps.min()), int(steps.max())
        self._recent: dict[int, xr.Dataset] = {}
        self.diverged_at = divergence_step(self.tree)
        self.ended_at = _end(self.part("events"))

    def at(self, step: int) -> xr.Dataset | None:
        """Return the latest spectra recorded at or before a step; None if there are none."""
        place = int(np.searchsorted(self.steps, step, side="right")) - 1
        return None if place < 0 else self._recorded(place)

    def near(self, step: int) -> xr.Dataset:
        """Return the latest spectra recorded at or before a step, or the first ones if there are none."""
        found = self.at(step)
        return self._recorded(0) if found is None else found

    def remark(self, step: int) -> str:
        """Return a remark on the spectra shown at a step; empty if they were recorded at this step."""
        if self.at(step) is None:
            return f"recorded from step {self.steps[0]}"
        if self.diverged_at is not None and step >= self.diverged_at:
            return f"diverged at step {self.diverged_at}"
        if self.ended_at is not None and step > self.ended_at:
            return f"ended at step {self.ended_at}"
        shown = int(self.steps[self.steps <= step][-1])
        if shown == step:
            return ""
        return f"recorded to step {shown}" if shown == self.steps[-1] else f"step {shown}"

    def title(self, step: int) -> str:
        """Return the name, followed by the remark if there is one."""
        remark = self.remark(step)
        return f"{self.name} · {remark}" if remark else self.name

    def part(self, name: str) -> xr.Dataset | None:
        """Return a part such as the monitors or events; None if there is none."""
        return self.tree[name].to_dataset() if name in self.tree.children else None

    def _recorded(self, place: int) -> xr.Dataset:
        if "step" not in self.spectra.dims:
            return self.spectra
        if place not in self._recent:
            while len(self._recent) >= 4:
                self._recent.pop(next(iter(self._recent)))
            self._recent[place] = self.spectra.isel(step=place).load()
        return self._recent[place]


def _end(events: xr.Dataset | None) -> int | None:
    if events is None:
        return None
    kinds = events["kind"].values.astype(str)
    ends = np.flatnonzero(np.isin(kinds, ("finished", "stopped")) & ~(np.cumsum((kinds == "resumed")[::-1])[::-1] > 0))
    return int(events["step"].values[ends[-1]]) if len(ends) else None


def _steps(name: str, spectra: xr.Dataset) -> np.ndarray:
    if "step" not in spectra.dims:
        return np.zeros(1, np.int64)
    steps = spectra["step"].values if "step" in spectra.coords else np.zeros(0)
    if not len(steps) or (np.diff(steps) <= 0).any():
        raise SchemaError(
            f"Run '{name}' needs a coordinate 'step' with at least one step and strictly increasing values."
        )
    return steps.astype(np.int64)
