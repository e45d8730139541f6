"""Read a failed run for the symptoms: arrays by name, without the faults that a study injected.

A store, a tree in memory or a minimal log becomes a `Record`, with or without checkpoints. Missing data are None, and
symptoms that need them are omitted. Events of kind "fault" and the faults of a configuration are removed here, the only
place where runs are read, so that no symptom can use them.
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
from workbench.io.store import open_run_or_log

if TYPE_CHECKING:
    import xarray as xr

    from workbench.diagnosis.checkpoint_evidence import WeightMeasurement

#: Parts that symptoms read.
PARTS = ("monitors", "optimizer", "activations", "attention", "router", "curvature", "spectra")
_LEAST_STEPS = 5
#: A run whose last loss or gradient norm exceeds these limits has diverged (RKSP's label, as in
#: `workbench.TrainingPlan`).
_LOSS_LIMIT, _NORM_LIMIT = 50.0, 500.0


@dataclass(frozen=True)
class Record:
    """All recorded data of a run that symptoms may read.

    Attributes:
        parts: Name of a part -> dataset with a coordinate ``step``; always includes ``monitors``.
        configuration: Recorded configuration of model, task and training; empty if it was not recorded.
        subject: Name of the model, for titles.
        diverged_at: Step of the recorded divergence; None if there is none.
        weights: Norms of each block's weights from a checkpoint; None if there is no checkpoint.
        source: Path of the run; empty if it was not read from a path.
    """

    parts: Mapping[str, xr.Dataset]
    configuration: Mapping[str, Any] = field(default_factory=dict)
    subject: str = ""
    diverged_at: int | None = None
    weights: WeightMeasurement | None = None
    source: str = ""

    @property
    def steps(self) -> np.ndarray:
        """Steps of the monitors, int64, in increasing order."""
        return self.parts["monitors"]["step"].values.astype(np.int64)

    def has(self, part: str, variable: str) -> bool:
        """Return whether a part holds a variable with any finite value."""
        return (
            part in self.parts and variable in self.parts[part] and bool(np.isfinite(self.values(part, variable)).any())
        )

    def values(self, part: str, variable: str) -> np.ndarray:
        """Return a variable as float64, with first dimension ``step``."""
        return np.asarray(self.parts[part][variable].values, dtype=np.float64)

    def monitor(self, name: str) -> np.ndarray | None:
        """Return a monitor at each step; None if it was not recorded."""
        return self.values("monitors", name) if self.has("monitors", name) else None

    def steps_of(self, part: str) -> np.ndarray:
        """Return the steps at which a part was measured."""
        return self.parts[part]["step"].values.astype(np.int64)

    def setting(self, *path: str, default: Any = None) -> Any:
        """Return a value of the configuration, such as ``setting("training", "warmup")``."""
        found: Any = self.configuration
        for name in path:
            if not isinstance(found, Mapping) or name not in found:
                return default
            found = found[name]
        return default if found is None else found


def read_record(run: Any, *, weights: WeightMeasurement | None = None) -> Record:
    """Read a run for the symptoms.

    Args:
        run: Path of a store or netCDF file, or of a log that `workbench.read_log` reads; a tree from
            `workbench.open_run`, or a dataset from `workbench.read_log`.
        weights: Measurement of a checkpoint, from `checkpoint_evidence.measure_weights`.

    Raises:
        StoreError: If there is no run at the path.
        SchemaError: If the run has no monitors with a loss or too few steps to diagnose, or a log lacks steps.
    """
    import xarray as xr

    source = ""
    if isinstance(run, str | os.PathLike):
        source = str(Path(run))
        run = open_run_or_log(run)
    if isinstance(run, xr.Dataset):
        run = xr.DataTree.from_dict({"/monitors": run})
        run.attrs["subject"] = run["monitors"].attrs.get("subject", "")
    if not isinstance(run, xr.DataTree):
        raise StoreError.of("run", run, "a path, a DataTree, or a Dataset from wb.read_log()")
    if "monitors" not in run.children or "loss" not in run["monitors"] or "step" not in run["monitors"].coords:
        raise SchemaError(
            "The run has no monitors with a loss to diagnose; record it with wb.train() or a wb.Recorder.",
            name="loss",
            expected="a monitor of the run",
        )
    parts = {
        name: run.children[name].to_dataset(inherit=False).load()
        for name in PARTS
        if name in run.children and run.children[name].sizes.get("step", 0)
    }
    is_short = "monitors" not in parts or parts["monitors"].sizes["step"] < _LEAST_STEPS
    if is_short and not ("monitors" in parts and _divergence(run) is not None):
        raise SchemaError(
            f"The run has fewer than {_LEAST_STEPS} recorded steps, too few to diagnose; record more steps.",
            name="step",
            value=parts["monitors"].sizes["step"] if "monitors" in parts else 0,
            expected=f"at least {_LEAST_STEPS} recorded steps",
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
    """Return the recorded model, task and training without the injected faults."""
    try:
        found = json.loads(attrs.get("configuration", "{}"))
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if name != "faults"} if isinstance(found, dict) else {}


def _events(run: xr.DataTree) -> list[tuple[int, str]]:
    """Return steps and kinds of all events except faults."""
    if "events" not in run.children or "kind" not in run["events"]:
        return []
    events = run.children["events"].to_dataset(inherit=False)
    pairs = zip(events["step"].values.tolist(), events["kind"].values.tolist(), strict=True)
    return [(int(step), str(kind)) for step, kind in pairs if str(kind) != "fault"]


def _divergence(run: xr.DataTree) -> int | None:
    """Return the step of divergence, from the events, the limits at the last step, or the end of the finite losses.

    None if the run did not diverge.
    """
    found = [step for step, kind in _events(run) if kind == "divergence"]
    if found:
        return min(found)
    monitors = run.children["monitors"].to_dataset(inherit=False)
    steps, loss = monitors["step"].values, monitors["loss"].values.astype(np.float64)
    norm = monitors["grad_norm"].values.astype(np.float64) if "grad_norm" in monitors else np.zeros(1)
    if loss[-1] > _LOSS_LIMIT or norm[-1] > _NORM_LIMIT:
        return int(steps[-1])
    bad = np.flatnonzero(~np.isfinite(loss))
    if not len(bad) or bad[-1] != len(loss) - 1:  # a gap within a log is not a divergence
        return None
    last_good = np.flatnonzero(np.isfinite(loss))
    return int(steps[last_good[-1] + 1]) if len(last_good) else int(steps[0])


def finite_log10(value: float, least: float = 1e-12) -> float:
    """Return log10 of a number clipped below at ``least``; NaN if it is not finite."""
    return math.log10(max(value, least)) if math.isfinite(value) else math.nan
