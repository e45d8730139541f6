"""Read a failed run for the symptoms: plain arrays by name, without the faults that a study injected.

A store, a tree in memory or a thin log becomes a `Record`, with or without checkpoints. Missing data are None, and
symptoms that need them are left out. Events of kind "fault" and the faults of a configuration are removed here, the
only place where runs are read, so that no symptom can use them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError, StoreError
from workbench.io.store import open_run
from workbench.io.training_logs import is_log, read_log

if TYPE_CHECKING:
    import xarray as xr

    from workbench.diagnosis.checkpoint_evidence import WeightMeasurement

#: Parts that symptoms read.
PARTS = ("monitors", "optimizer", "activations", "attention", "router", "curvature", "spectra")
_LEAST_STEPS = 5
#: A run whose last step is beyond these has diverged (RKSP's label, as in `workbench.TrainingPlan`).
_LOSS_LIMIT, _NORM_LIMIT = 50.0, 500.0


@dataclass(frozen=True)
class Record:
    """All recorded data of a run that symptoms may read.

    Attributes:
        parts: Name of a part -> dataset with a coordinate ``step``; always includes ``monitors``.
        configuration: Model, task and training as the store records them; empty where it does not.
        subject: Name of the model, for titles.
        diverged_at: Step of the recorded divergence; None: none was recorded.
        weights: Sizes of each block's weights from checkpoints; None: there are none.
        source: Path of the run, or "".
    """

    parts: Mapping[str, xr.Dataset]
    configuration: Mapping[str, Any] = field(default_factory=dict)
    subject: str = ""
    diverged_at: int | None = None
    weights: WeightMeasurement | None = None
    source: str = ""

    @property
    def steps(self) -> np.ndarray:
        """Steps of the monitors, int64, rising."""
        return self.parts["monitors"]["step"].values.astype(np.int64)

    def has(self, part: str, variable: str) -> bool:
        """Whether a part holds a variable with any finite value."""
        return (
            part in self.parts and variable in self.parts[part] and bool(np.isfinite(self.values(part, variable)).any())
        )

    def values(self, part: str, variable: str) -> np.ndarray:
        """A variable as float64, first dimension ``step``."""
        return np.asarray(self.parts[part][variable].values, dtype=np.float64)

    def monitor(self, name: str) -> np.ndarray | None:
        """A monitor at each step; None if it was not recorded."""
        return self.values("monitors", name) if self.has("monitors", name) else None

    def steps_of(self, part: str) -> np.ndarray:
        """The steps at which a part was measured."""
        return self.parts[part]["step"].values.astype(np.int64)

    def setting(self, *path: str, default: Any = None) -> Any:
        """A value of the configuration, such as ``setting("training", "warmup")``."""
        found: Any = self.configuration
        for name in path:
            if not isinstance(found, Mapping) or name not in found:
                return default
            found = found[name]
        return default if found is None else found


def read_record(run: Any, *, weights: WeightMeasurement | None = None) -> Record:
    """Read a run for the symptoms.

    Args:
        run: Path of a store or netCDF file, or of a log that `read_log` reads; a tree as `workbench.open_run` gives it,
            or a dataset from `read_log`.
        weights: Measurement of its checkpoints, see `workbench.diagnosis.checkpoint_evidence`.

    Raises:
        StoreError: If there is no run at the path.
        SchemaError: If it has no monitors with a loss, or too few steps to diagnose; if a log lacks steps.
    """
    import xarray as xr

    source = ""
    if isinstance(run, str | os.PathLike):
        source = str(Path(run))
        run = read_log(run) if is_log(run) else open_run(run)
    if isinstance(run, xr.Dataset):
        run = xr.DataTree.from_dict({"/monitors": run})
        run.attrs["subject"] = run["monitors"].attrs.get("subject", "")
    if not isinstance(run, xr.DataTree):
        raise StoreError(
            f"A run is a path, a DataTree or a Dataset from read_log, not a {type(run).__name__}; pass one of them."
        )
    if "monitors" not in run.children or "loss" not in run["monitors"] or "step" not in run["monitors"].coords:
        raise SchemaError(
            "The run has no monitors with a loss to diagnose; record it with wb.train() or a wb.Recorder."
        )
    parts = {
        name: run.children[name].to_dataset(inherit=False).load()
        for name in PARTS
        if name in run.children and run.children[name].sizes.get("step", 0)
    }
    is_short = "monitors" not in parts or parts["monitors"].sizes["step"] < _LEAST_STEPS
    if is_short and not ("monitors" in parts and _divergence(run) is not None):
        raise SchemaError(
            f"The run has fewer than {_LEAST_STEPS} recorded steps, too few to diagnose; record more of it."
        )
    return Record(
        parts=parts,
        configuration=_configuration(run.attrs),
        subject=str(run.attrs.get("subject", "")),
        diverged_at=_divergence(run),
        weights=weights,
        source=source,
    )


def _configuration(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Model, task and training of a store, without the faults that were injected."""
    try:
        found = json.loads(attrs.get("configuration", "{}"))
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if name != "faults"} if isinstance(found, dict) else {}


def _events(run: xr.DataTree) -> list[tuple[int, str]]:
    """Steps and kinds of the events, without those of faults."""
    if "events" not in run.children or "kind" not in run["events"]:
        return []
    events = run.children["events"].to_dataset(inherit=False)
    pairs = zip(events["step"].values.tolist(), events["kind"].values.tolist(), strict=True)
    return [(int(step), str(kind)) for step, kind in pairs if str(kind) != "fault"]


def _divergence(run: xr.DataTree) -> int | None:
    """Step at which it diverged: by its events, where the loss is not finite, or by the label at its last step."""
    found = [step for step, kind in _events(run) if kind == "divergence"]
    if found:
        return min(found)
    monitors = run.children["monitors"].to_dataset(inherit=False)
    steps, loss = monitors["step"].values, monitors["loss"].values.astype(np.float64)
    norm = monitors["grad_norm"].values.astype(np.float64) if "grad_norm" in monitors else np.zeros(1)
    if loss[-1] > _LOSS_LIMIT or norm[-1] > _NORM_LIMIT:
        return int(steps[-1])
    bad = np.flatnonzero(~np.isfinite(loss))
    if not len(bad) or bad[-1] != len(loss) - 1:  # a gap within a log is no divergence
        return None
    last_good = np.flatnonzero(np.isfinite(loss))
    return int(steps[last_good[-1] + 1]) if len(last_good) else int(steps[0])


def finite_log10(value: float, least: float = 1e-12) -> float:
    """log10 of a number, which is raised to ``least``; NaN if it is not finite."""
    return math.log10(max(value, least)) if math.isfinite(value) else math.nan
