"""Settings of the record of a run (store, spectra, checkpoints), and its configuration as plain values."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.nn.utils import parametrize

from workbench.errors import OptionError, StoreError
from workbench.io.atomic import check_free
from workbench.io.provenance import versions
from workbench.io.run_writer import RunWriter
from workbench.io.store import open_run
from workbench.models.checkpoint import latest_checkpoint
from workbench.models.subject import Subject
from workbench.option_checks import PositiveInt, checked

if TYPE_CHECKING:
    import xarray as xr
    from torch import nn

    from workbench.tasks import Task
    from workbench.training.callback import Callback
    from workbench.training.training_plan import TrainingPlan


@checked
@dataclass(frozen=True)
class Recording:
    """Settings of the record of a run; the attributes are arguments of `workbench.train`, documented there.

    Example:
        >>> import workbench as wb
        >>> recording = wb.Recording(store="runs/mine.zarr", checkpoint_every=50)
        >>> recording.checkpoint_folder.as_posix()
        'runs/mine.checkpoints'

    See Also:
        `workbench.train`: Documents the settings.
        `workbench.TrainingPlan`: Holds the settings of the training.
    """

    store: Path | str | None = None
    flush_every: PositiveInt = 200
    spectra_every: PositiveInt | None = None
    profile_options: Mapping[str, Any] = field(default_factory=dict)
    probe: Any = None
    checkpoint_every: PositiveInt | None = None
    checkpoints: Path | str | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every and self.checkpoint_folder is None:
            raise OptionError("checkpoint_every needs a folder for the checkpoints; pass store= or checkpoints=.")

    @property
    def checkpoint_folder(self) -> Path | None:
        """Folder of the checkpoints; None without store and checkpoints."""
        if self.checkpoints is not None:
            return Path(self.checkpoints)
        return Path(self.store).with_suffix(".checkpoints") if self.store is not None else None

    @property
    def written_checkpoints(self) -> Path | None:
        """Folder to which this run writes checkpoints; None if it writes none."""
        return self.checkpoint_folder if self.checkpoint_every else None


class SpectraTaker:
    """Repeated measurement of the spectra of one model on the same inputs."""

    def __init__(self, model: nn.Module, inputs: Any, options: Mapping[str, Any]) -> None:
        # Most runs of a pilot or a sweep take no spectra, and need none of this.
        from workbench.models.anatomy import read_anatomy
        from workbench.models.batches import Batches
        from workbench.models.residual_check import require_residuals

        self.subject = Subject(model, type(model).__name__, f"module {type(model).__qualname__}")
        self.inputs = inputs
        self.options = dict(options)
        probe, _ = Batches.of(inputs, self.subject).probe_and_all()
        named = {name: self.options.get(name) for name in ("stack", "batch_first")}
        self._anatomy = read_anatomy(model, probe, **named)
        if named["stack"] is None:
            require_residuals(model, probe, self._anatomy.stack, self._anatomy.sites)
        self._has_warned = False

    def take(self, step: int) -> xr.Dataset:
        """Compute the spectra after ``step`` updates, dims ``step``, ``layer`` and ``mode``, padded to all modes."""
        from workbench.koopman.spectra import RankWarning
        from workbench.models.profile import profile

        options = {"progress": False, **self.options, "anatomy": self._anatomy}
        with warnings.catch_warnings():
            if self._has_warned:  # one warning suffices, as the data have the rank of each layer
                warnings.simplefilter("ignore", RankWarning)
            spectra = profile(self.subject, self.inputs, **options)
        self._has_warned = True
        n_modes = self.options.get("rank") or self._anatomy.width
        spectra = spectra.reindex(mode=np.arange(n_modes), fill_value={"is_reliable": False})
        return spectra.expand_dims(step=[step])


def check_places(recording: Recording, *, overwrite: bool) -> None:
    """Raise if an earlier run exists at the store or in the folder of the checkpoints."""
    if recording.store is not None:
        check_free(Path(recording.store), overwrite=overwrite)
    folder = recording.written_checkpoints
    if folder is not None and not overwrite and latest_checkpoint(folder) is not None:
        raise StoreError(
            f"{folder} holds checkpoints of an earlier run; pass resume=True to continue it, "
            "overwrite=True to replace it, or another checkpoints=."
        )


def check_checkpoint_folder(recording: Recording) -> None:
    """Raise if checkpoints are enabled and their folder cannot be written."""
    folder = recording.written_checkpoints
    if folder is None:
        return
    place = folder.absolute()
    try:
        while not place.exists():  # the folder is created with the first checkpoint
            place = place.parent
        with tempfile.TemporaryDirectory(prefix=".checkpoints.", dir=place):
            pass
    except OSError as error:
        raise StoreError(
            f"Checkpoints cannot be written to {folder} ({error.strerror or error}); pass another checkpoints=."
        ) from error


def open_writer(recording: Recording, configuration: Mapping[str, Any], *, overwrite: bool) -> RunWriter | None:
    """Create the store of a run and remove checkpoints of an earlier one; return None if there is no store."""
    check_checkpoint_folder(recording)
    folder = recording.written_checkpoints
    if folder is not None and overwrite:
        while (old := latest_checkpoint(folder)) is not None:
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
    """Return the configuration of the run in a store."""
    attrs = open_run(store).attrs
    if "configuration" not in attrs:
        raise StoreError(f"{store} does not hold a training run; pass a store written by wb.train().")
    return json.loads(attrs["configuration"])


#: Entries of a Hugging Face config that describe its origin rather than the model.
_PROVENANCE = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")


def describe_run(
    model: nn.Module,
    task: Task,
    plan: TrainingPlan,
    recording: Recording,
    loss: Callable[..., Any],
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Return all settings that affect the results of a run, as values of JSON; functions by their names."""
    training = plan.as_dict() | {"loss": getattr(loss, "__qualname__", None) or str(loss)}
    if callable(plan.schedule) or plan.schedule == "constant":
        del training["n_steps"]  # steps do not depend on the length of the run, which may be extended
    configuration = {
        "model": describe_model(model),
        "task": task.describe(),
        "training": training,
        "spectra": {"every": recording.spectra_every, **recording.profile_options},
    }
    configuration |= {callback.name: dict(about) for callback in callbacks if (about := callback.describe())}
    return json.loads(json.dumps(configuration, default=str))


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return the name, number of parameters and configuration of a model; else a digest of its tensor shapes."""
    config: Any = getattr(model, "config", None)
    about: dict[str, Any] = {"name": type(model).__name__}
    if hasattr(config, "as_dict"):
        about["config"] = config.as_dict()
    elif hasattr(config, "to_dict"):
        about["config"] = {name: value for name, value in config.to_dict().items() if name not in _PROVENANCE}
    else:
        shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
        about["shapes"] = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    if counts := _parametrizations(model):
        about["parametrizations"] = counts
    return about | {"n_weights": sum(parameter.numel() for parameter in model.parameters())}


def _parametrizations(model: nn.Module) -> dict[str, int]:
    """Count the tensors of a model that are computed by each parametrization, such as ``_SpectralNorm()``."""
    tables: list[Any] = [module.parametrizations for module in model.modules() if parametrize.is_parametrized(module)]
    return dict(Counter(repr(item) for table in tables for chain in table.values() for item in chain))


def first_difference(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Find the first difference between two configurations.

    Returns:
        Dotted name, recorded value and current value ("nothing" if one lacks it); None if they are equal.
    """
    old, new = dict(_flat(recorded)), dict(_flat(current))
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name, "nothing") != new.get(name, "nothing"):
            return name, old.get(name, "nothing"), new.get(name, "nothing")
    return None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
