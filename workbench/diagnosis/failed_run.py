"""Read a failed run for the symptoms, and find when and how it failed from its loss alone, without a healthy run.

A store, a tree in memory or a minimal log becomes a `Record`, with or without checkpoints. Missing data are None, and
symptoms that need them are omitted. Events of kind "fault" and the faults of a configuration are removed here, the only
place where runs are read, so that no symptom can use them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from workbench.contracts.results import CheckReport
from workbench.diagnosis.checkpoint_evidence import WeightMeasurement
from workbench.errors import SchemaError, StoreError
from workbench.formatting import percent
from workbench.io.store import open_run_or_log
from workbench.schema.events import Event
from workbench.schema.statuses import FailureKind

#: Parts that symptoms read.
PARTS = (
    "monitors", "optimizer", "activations", "attention", "router", "curvature", "spectra", "precision", "reduction",
    "update",
)  # fmt: skip
_LEAST_STEPS = 5
#: A run whose last loss or gradient norm exceeds these limits has diverged (RKSP's label, as in
#: `workbench.TrainingPlan`), if it exceeds their median by this factor too: those of sums are always large.
_LOSS_LIMIT, _NORM_LIMIT, _RISE = 50.0, 500.0, 5.0


@dataclass(frozen=True)
class Record:
    """All recorded data of a run that symptoms may read.

    ``parts`` have a coordinate ``step`` and include ``monitors``, without the updates whose loss is missing; ``tree``
    has all updates, and events except faults. What was not recorded is empty or None. ``probe`` are stored integer
    inputs, shape (example, token). ``contracts`` are those that the watch has tested; None if it has tested none.
    """

    parts: Mapping[str, xr.Dataset]
    tree: xr.DataTree
    configuration: Mapping[str, Any] = field(default_factory=dict)
    subject: str = ""
    diverged_at: int | None = None
    weights: WeightMeasurement | None = None
    source: str = ""
    probe: Mapping[str, np.ndarray] = field(default_factory=dict)
    contracts: CheckReport | None = None

    @property
    def n_classes(self) -> int | None:
        """Number of classes of the labels, such as the size of the vocabulary; None if it was not recorded."""
        name, config = str(self.setting("model", "name")), self.setting("model", "config", default={})
        if "Classification" in name:  # of transformers, whose configurations have a vocabulary too
            return len(config.get("id2label", ())) or None
        is_of_labels = not name.endswith(("ForQuestionAnswering", "ForMultipleChoice"))
        found = self.setting("task", "vocab_size") or config.get("n_classes") or config.get("vocab_size")
        return int(found) if found and is_of_labels and isinstance(found, int | float) else None

    def events_of(self, kind: str) -> list[Event]:
        """Return the events of a kind that the run recorded, in the order of their steps."""
        if "events" not in self.tree.children or "source" not in self.tree["events"]:
            return []
        events = self.tree["events"].to_dataset()
        names = [name for name in ("step", "source", "score", "message", "layer") if name in events]
        is_of_kind = events["kind"].values == kind
        columns = zip(*(events[name].values[is_of_kind].tolist() for name in names), strict=True)
        return sorted((Event(kind=kind, **dict(zip(names, row, strict=True))) for row in columns), key=_step_of)

    @property
    def every_step(self) -> np.ndarray:
        """Steps of all updates, also of those without a loss."""
        return np.asarray(self.tree["monitors"]["step"].values, dtype=np.int64)

    def every(self, name: str) -> np.ndarray | None:
        """Return a monitor at all updates; None if it was not recorded."""
        monitors = self.tree["monitors"]
        found = np.asarray(monitors[name].values, dtype=np.float64) if name in monitors else np.full(1, np.nan)
        return found if np.isfinite(found).any() else None

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
        raise SchemaError("The run has no monitors with a loss to diagnose; record it with wb.train() or wb.Recorder.")
    parts = {
        name: run.children[name].to_dataset(inherit=False).load()
        for name in PARTS
        if name in run.children and run.children[name].sizes.get("step", 0)
    }
    is_short = "monitors" not in parts or parts["monitors"].sizes["step"] < _LEAST_STEPS
    if is_short and not ("monitors" in parts and _divergence(run) is not None):
        raise SchemaError(f"The run has fewer than {_LEAST_STEPS} recorded steps, too few to diagnose; record more.")
    diverged_at, monitors, events = _divergence(run), parts["monitors"], _events(run)
    tree = xr.DataTree.from_dict(parts if events is None else parts | {"events": events})
    has_loss = np.isfinite(monitors["loss"].values.astype(np.float64))
    ends = len(has_loss) if diverged_at is None else len(has_loss) - int(np.argmax(has_loss[::-1]))
    if has_loss.sum() >= _LEAST_STEPS:  # rows without a loss, such as those between two logged ones
        parts["monitors"] = monitors.isel(step=has_loss | (np.arange(len(has_loss)) >= ends))
    return Record(
        parts=parts,
        configuration=_configuration(run.attrs),
        subject=str(run.attrs.get("subject", "")),
        diverged_at=diverged_at,
        weights=weights,
        source=source,
        tree=tree,
        probe=_probe(run.attrs),
        contracts=contracts_of(run),
    )


def _configuration(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the recorded model, task and training without the injected faults."""
    try:
        found = json.loads(attrs.get("configuration", "{}"))
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if name != "faults"} if isinstance(found, dict) else {}


def contracts_of(run: xr.DataTree) -> CheckReport | None:
    """Return the contracts that the watch of a run has tested; None if it has tested none."""
    stored = run.attrs.get("contracts")
    return None if stored is None else CheckReport.of_json(json.loads(stored))


def _probe(attrs: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """Return the inputs of the probe that are tables of integers; empty if they have no names."""
    try:
        named = json.loads(attrs.get("probe", "{}"))["mapping"].items()
        found = {name: np.array(each["values"]) for name, each in named if isinstance(each, dict) and "values" in each}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {name: each for name, each in found.items() if each.ndim == 2}


def _events(run: xr.DataTree) -> xr.Dataset | None:
    """Return all events except faults."""
    if "events" not in run.children or "kind" not in run["events"]:
        return None
    events = run.children["events"].to_dataset(inherit=False).load()
    return events.isel(event=np.flatnonzero(events["kind"].values != "fault"))


def _step_of(event: Event) -> int:
    return event.step


def _divergence(run: xr.DataTree) -> int | None:
    """Return the step of divergence, from the events, the limits at the last step, or the end of the finite losses.

    None if the run did not diverge. Missing losses are no divergence while the gradients are finite, nor if as many
    were missing before, as in a loop that logs every tenth one.
    """
    events = _events(run)
    if events is not None and (is_divergence := events["kind"].values == "divergence").any():
        return int(events["step"].values[is_divergence].min())
    monitors = run.children["monitors"].to_dataset(inherit=False)
    steps, loss = monitors["step"].values, monitors["loss"].values.astype(np.float64)
    norm = monitors["grad_norm"].values.astype(np.float64) if "grad_norm" in monitors else np.full(len(loss), np.nan)
    for one, limit in ((loss, _LOSS_LIMIT), (norm, _NORM_LIMIT)):
        if one[-1] > limit and (len(one) < _LEAST_STEPS or one[-1] > _RISE * np.nanmedian(one)):
            return int(steps[-1])
    good = np.flatnonzero(np.isfinite(loss))
    if not len(good):
        return int(steps[0]) if "grad_norm" in monitors and not np.isfinite(norm).any() else None
    n_missing = len(loss) - 1 - good[-1]
    is_usual = n_missing <= max(np.diff(good, prepend=-1)) - 1 or np.isfinite(norm[good[-1] + 1 :]).any()
    return None if is_usual else int(steps[good[-1] + 1])


#: Longest window of the running median that removes noise, in steps; for short runs a tenth of the run.
_WINDOW = 15
#: A rise counts as a spike if it exceeds this fraction of the total decrease of the loss, and the noise.
_LEAST_RISE = 0.3
#: Standard deviation of a median over that of a mean.
_OF_MEDIAN = 1.25
#: Multiple of the noise from which on a single loss has risen.
_OUTLIER = 4.0
#: A rise by less than this fraction of the loss is not a failure.
_VISIBLE = 0.05
#: A level that this fraction of the losses reached before, such as those of another kind of batch, is no rise.
_USUAL = 0.1
#: A stalled run has stopped learning once the loss has completed this fraction of its decrease.
_MOST = 0.9


@dataclass(frozen=True)
class Failure:
    """How a run failed: diverged, a lasting or passing spike, or stalled, if it can only have learned too little.

    It began at ``step`` and ``row`` of the monitors, the last at which the loss was low; for a stalled run, where most
    of the decrease was complete. ``rise`` is the largest of the ``smooth`` loss (running median) above its lowest level
    so far, in nat; of a run that diverged, that of single losses, 0 if noise explains it. ``noise`` is the robust
    standard deviation from step to step, and ``recovered`` the fraction of the rise that was recovered.
    """

    kind: FailureKind
    step: int
    row: int
    rise: float
    smooth: np.ndarray
    noise: float
    recovered: float
    has_loss: bool = True

    @property
    def floor(self) -> float:
        """Largest difference between two smoothed losses that noise explains in a run of this length, in nat."""
        return noise_floor(len(self.smooth), self.noise)

    @property
    def is_stalled(self) -> bool:
        """Whether the run only learned too little, so that there is no step at which it failed."""
        return self.kind is FailureKind.STALLED

    def last_row(self, steps: np.ndarray) -> int:
        """Return the row of the last measurement before the failure, else the first; for a stalled run the last row."""
        if self.is_stalled:
            return len(steps) - 1
        before = np.flatnonzero(steps <= self.step + 1)
        return int(before[-1]) if len(before) else 0

    @property
    def is_seen(self) -> bool:
        """Whether the loss itself shows the failure, which it never does for a stalled run."""
        if self.kind is not FailureKind.SPIKE:
            return self.kind is FailureKind.DIVERGED
        best = np.minimum.accumulate(self.smooth)
        return bool(self.rise > _VISIBLE * abs(best[np.argmax(self.smooth - best)]))

    @property
    def has_recovered(self) -> bool:
        """Whether nearly all of the rise was recovered by the end."""
        return self.recovered > 0.9

    @property
    def words(self) -> str:
        """The failure as a clause without a capital letter or a period."""
        if not self.has_loss:
            return "no loss was recorded"
        if self.kind is FailureKind.DIVERGED:
            if not self.rise:
                return f"the run diverged after step {self.step} without an earlier rise of the loss"
            return f"the loss began to rise at step {self.step} and the run diverged"
        if self.kind is FailureKind.SPIKE and self.is_seen:
            back = f", of which {percent(self.recovered)} was recovered" if self.recovered > _LEAST_RISE else ""
            return f"the loss rose by {self.rise:.3g} nat after step {self.step}{back}"
        if self.kind is FailureKind.SPIKE:
            return f"the loss did not diverge, and it rose by at most {self.rise:.2g} nat, after step {self.step}"
        return (
            f"the loss neither diverged nor rose noticeably, and most of its decrease was complete by step {self.step}"
        )


def find_failure(record: Record) -> Failure:
    """Return when and how the loss of a run failed."""
    steps, loss = record.steps, record.values("monitors", "loss")
    known = np.isfinite(loss)
    filled = np.interp(np.arange(len(loss)), np.flatnonzero(known), loss[known]) if known.any() else np.zeros(len(loss))
    window = _window(len(loss))
    smooth = running_median(filled, window)
    noise = float(np.median(np.abs(np.diff(loss[known])))) / np.sqrt(2) * 1.48 if known.sum() > 2 else 0.0
    best = np.minimum.accumulate(smooth)
    rises = smooth - best
    peak = int(np.argmax(rises))
    rise = float(rises[peak])
    if record.diverged_at is not None:
        end = int(np.searchsorted(steps, record.diverged_at))
        row = _last_good(filled, best, noise, min(end, len(loss) - 1))
        rise = float(np.max(filled[row:]) - best[row])  # of single losses, since the last ones are few
        rise = rise if rise > _OUTLIER * noise else 0.0
        return Failure(FailureKind.DIVERGED, int(steps[row]), row, rise, smooth, noise, 0.0)
    learned = float(smooth[0] - best[-1])
    is_early = int(np.argmin(smooth[: peak + 1])) < window - 1  # the low loss is a median of few, or a single one
    if rise > max(_LEAST_RISE * max(learned, 0.0), noise_floor(len(loss), noise) + 3 * noise * is_early, 1e-6):
        row = _last_good(smooth, best, noise / np.sqrt(window), peak)
        after = float(np.min(smooth[peak:]))
        recovered = float(np.clip((smooth[peak] - after) / rise, 0, 1))
        low = int(np.argmax(smooth <= smooth[peak] - rise / 2))  # first row of the time before the rise
        before = filled[low : max(row + 1 - window, 0)]  # without the rows of the rise that the median had not shown
        if np.count_nonzero(before >= smooth[peak] - noise) < max(_USUAL * len(before), 1):
            return Failure(FailureKind.SPIKE, int(steps[row]), row, rise, smooth, noise, recovered)
    row = int(np.argmax(smooth <= smooth[0] - _MOST * learned)) if learned > 0 else 0
    return Failure(FailureKind.STALLED, int(steps[row]), row, rise, smooth, noise, 0.0, bool(known.any()))


def noise_floor(n: int, noise: float) -> float:
    """Return a limit for the range of the running medians of ``n`` losses that only fluctuate, in nat."""
    of_median = _OF_MEDIAN * noise / np.sqrt(_window(n))
    return float(2 * of_median * (np.sqrt(2 * np.log(max(n / _window(n), 2))) + 1.5))


def _window(n: int) -> int:
    return int(np.clip(n // 10, 1, _WINDOW))


def running_median(values: np.ndarray, window: int) -> np.ndarray:
    """Return the median over the last ``window`` values (fewer at the start), with the same length."""
    padded = np.concatenate([np.full(window - 1, np.nan), values])
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)


def _last_good(values: np.ndarray, best: np.ndarray, noise: float, end: int) -> int:
    """Return the last row up to ``end`` at which the loss was within its noise of the lowest loss so far."""
    good = np.flatnonzero(values[: end + 1] <= best[: end + 1] + 2 * noise)
    return int(good[-1]) if len(good) else 0
