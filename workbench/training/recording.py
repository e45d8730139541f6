"""What a training run leaves behind: rows for its store, spectra on the way, checkpoints."""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.atomic import check_free
from workbench.background_writer import BackgroundWriter
from workbench.errors import SnapshotError, StoreError, ThresholdError
from workbench.run_parts import Part
from workbench.run_writer import RunWriter
from workbench.schema import EVENTS, MONITORS
from workbench.spectral.profile import profile
from workbench.spectral.spectra import RankWarning, versions
from workbench.subjects.anatomy import read_anatomy
from workbench.subjects.batches import Batches
from workbench.subjects.checkpoint import Subject
from workbench.subjects.probing import on_device_of
from workbench.training.checkpoints import latest_checkpoint

if TYPE_CHECKING:
    import xarray as xr
    from torch import nn

#: A block is written after so many seconds too, so that a slow run can be watched.
_SECONDS_PER_BLOCK = 10.0


@dataclass(frozen=True)
class Recording:
    """What to keep of a run, and where.

    Attributes:
        store: Path of the run's Zarr store; None: nothing is written.
        flush_every: Steps in a block; a killed process loses at most the last block.
        spectra_every: Take spectra of the residual stream every so many steps, from step 0 on, at the last step and
            where the run diverges; None: never.
        profile_options: Further arguments of `workbench.profile`, such as ``{"n_snapshots": 512}``.
        probe: Inputs to take spectra on; None: the task's own fixed ones.
        checkpoint_every: Steps between checkpoints; None: none.
        checkpoints: Folder of the checkpoints; None: beside the store, ``run.zarr`` -> ``run.checkpoints``.
    """

    store: Path | str | None = None
    flush_every: int = 200
    spectra_every: int | None = None
    profile_options: Mapping[str, Any] = field(default_factory=dict)
    probe: Any = None
    checkpoint_every: int | None = None
    checkpoints: Path | str | None = None

    def __post_init__(self) -> None:
        for name in ("flush_every", "spectra_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ThresholdError(f"{name} is {value}, expected at least 1 step.")
        if self.checkpoint_every and self.checkpoint_folder is None:
            raise ThresholdError("checkpoint_every needs a place; pass store= or checkpoints=.")

    @property
    def checkpoint_folder(self) -> Path | None:
        """Where checkpoints go; None if nothing is written at all."""
        if self.checkpoints is not None:
            return Path(self.checkpoints)
        return Path(self.store).with_suffix(".checkpoints") if self.store is not None else None


class SpectraTaker:
    """Takes spectra of one model on the same inputs again and again.

    Args:
        model: The model; its anatomy is read now.
        inputs: As `workbench.profile` takes them; not an iterator, as they are used each time.
        options: Further arguments of `workbench.profile`.

    Raises:
        AnatomyError: If the residual stream cannot be read with certainty.
    """

    def __init__(self, model: nn.Module, inputs: Any, options: Mapping[str, Any]) -> None:
        self.subject = Subject(model, type(model).__name__, f"module {type(model).__qualname__}")
        self.inputs = inputs
        self.options = dict(options)
        probe, _ = Batches.of(inputs, self.subject).probe_and_all()
        self._anatomy = read_anatomy(model, on_device_of(model, probe), stack=self.options.get("stack"))
        self._has_warned = False

    def take(self, step: int) -> xr.Dataset:
        """Spectra after ``step`` updates, dims ``step``, ``layer`` and ``mode``; as many modes each time.

        Raises:
            SnapshotError: If the stream holds NaN or infinite values, or does not vary.
        """
        options = {"progress": False, **self.options, "anatomy": self._anatomy}
        with warnings.catch_warnings():
            if self._has_warned:  # the rank of each layer is in the data
                warnings.simplefilter("ignore", RankWarning)
            spectra = profile(self.subject, self.inputs, **options)
        self._has_warned = True
        n_modes = self.options.get("rank") or self._anatomy.width
        spectra = spectra.reindex(mode=np.arange(n_modes), fill_value={"is_reliable": False})
        return spectra.expand_dims(step=[step])


class RunRecorder:
    """Gathers the rows of a run and writes them in blocks; keeps nothing if there is no store.

    Args:
        writer: Of the run's store, or None.
        flush_every: Steps in a block.
    """

    background = None

    def __init__(self, writer: RunWriter | None, flush_every: int) -> None:
        self.writer = writer
        self.flush_every = flush_every
        self._monitors: list[dict[str, float]] = []
        self._spectra: list[xr.Dataset] = []
        self._events: list[dict[str, Any]] = []
        self._written_at = time.monotonic()

    def add(self, step: int, monitors: Mapping[str, float], spectra: xr.Dataset | None) -> None:
        """Take in what one step gave; writes a block when it is full."""
        if self.writer is None:
            return
        self._monitors.append({"step": step, **monitors})
        if spectra is not None:
            self._spectra.append(spectra)
        is_full = len(self._monitors) >= self.flush_every
        if is_full or time.monotonic() - self._written_at > _SECONDS_PER_BLOCK:
            self.flush()

    def event(self, step: int, kind: str, *, source: str = "", score: float = math.nan, message: str = "") -> None:
        """Take in something that happened; see ``schema.EVENTS``."""
        if self.writer is not None:
            self._events.append({"step": step, "kind": kind, "source": source, "score": score, "message": message})

    def flush(self, **attrs: Any) -> None:
        """Write what was gathered, show it to readers, and set attributes of the run.

        Raises:
            StoreError: If it cannot be written; the rows are kept for another try.
        """
        import xarray as xr

        if self.writer is None:
            return
        if self._monitors:
            self.writer.append("monitors", _table(self._monitors, MONITORS, "step"))
            self._monitors = []
        if self._spectra:
            self.writer.append("spectra", xr.concat(self._spectra, "step", combine_attrs="override"))
            self._spectra = []
        if self._events:
            self.writer.append("events", _table(self._events, EVENTS, "event"))
            self._events = []
        self.writer.commit(**attrs)
        self._written_at = time.monotonic()

    def close(self) -> None:
        """Nothing is left to do."""


class BackgroundRunRecorder:
    """A `RunRecorder` whose rows are written in a thread of their own, beside those of a `workbench.Recorder`.

    Trouble with the disk never stops the training: it is told once, and what was lost is in the events.

    Args:
        writer: Of the run's store, or None.
        flush_every: Steps in a block.
    """

    def __init__(self, writer: RunWriter | None, flush_every: int) -> None:
        self.background = None
        if writer is not None:
            self.background = BackgroundWriter(writer, rows_per_block=flush_every, seconds_per_block=_SECONDS_PER_BLOCK)
        self._is_declared = False

    def add(self, step: int, monitors: Mapping[str, float], spectra: xr.Dataset | None) -> None:
        """Take in what one step gave."""
        if self.background is None:
            return
        if not self._is_declared:
            rules = {name: MONITORS[name] for name in monitors if name in MONITORS}
            self.background.declare(Part.of_scalars("monitors", monitors, {k: rule.attrs for k, rule in rules.items()}))
            self._is_declared = True
        self.background.add("monitors", step, monitors)
        if spectra is not None:
            self.background.add_dataset("spectra", spectra)

    def event(self, step: int, kind: str, **what: Any) -> None:
        """Take in something that happened; see ``schema.EVENTS``."""
        if self.background is not None:
            self.background.event(step, kind, **what)

    def flush(self, **attrs: Any) -> None:
        """Wait until everything is on disk, and set attributes of the run."""
        if self.background is not None:
            self.background.commit(**attrs)
            self.background.flush()

    def close(self) -> None:
        """Write what there is, and end the thread."""
        if self.background is not None:
            self.background.close()


def check_places(recording: Recording, *, overwrite: bool) -> None:
    """Refuse places that an earlier run has taken, before anything is done.

    Raises:
        StoreError: If there is a store or a checkpoint already, and ``overwrite`` is False.
    """
    if recording.store is not None:
        check_free(Path(recording.store), overwrite=overwrite)
    if recording.checkpoint_every and not overwrite and latest_checkpoint(recording.checkpoint_folder) is not None:
        raise StoreError(
            f"{recording.checkpoint_folder} holds checkpoints of an earlier run; pass resume=True to go on with it, "
            "overwrite=True to replace it, or another checkpoints=."
        )


def open_writer(recording: Recording, configuration: Mapping[str, Any], *, overwrite: bool) -> RunWriter | None:
    """A fresh store for a run, and no checkpoints of an earlier one; None if nothing is to be written.

    Raises:
        StoreError: If the path is taken or cannot be written.
    """
    if recording.checkpoint_every and overwrite:
        while (old := latest_checkpoint(recording.checkpoint_folder)) is not None:
            shutil.rmtree(old)
    if recording.store is None:
        return None
    attrs = {
        "subject": str(configuration["model"]["name"]),
        "state": "running",
        "configuration": json.dumps(configuration),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return RunWriter(recording.store, attrs, overwrite=overwrite)


def recorded_configuration(store: Path | str) -> dict[str, Any]:
    """The configuration that a store was made with.

    Raises:
        StoreError: If there is no store, or it holds no training run.
    """
    from workbench.store import open_run

    attrs = open_run(store).attrs
    if "configuration" not in attrs:
        raise StoreError(f"{store} holds no training run; pass the store that wb.train() wrote.")
    return json.loads(attrs["configuration"])


def take_or_say(taker: SpectraTaker, step: int, recorder: RunRecorder) -> xr.Dataset | None:
    """Spectra, or an event that says why there are none."""
    try:
        return taker.take(step)
    except SnapshotError as error:
        recorder.event(step, "no spectra", message=str(error))
        return None


def _table(rows: list[dict[str, Any]], rules: Mapping[str, Any], dim: str) -> xr.Dataset:
    import xarray as xr

    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    variables = {}
    for name, column in columns.items():
        rule = rules.get(name)
        variables[name] = (dim, column, {} if rule is None else rule.attrs)
    return xr.Dataset(variables).set_coords("step" if dim == "step" else [])
