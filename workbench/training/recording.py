"""The record of a run: its settings (store, spectra, checkpoints), its configuration, and its checkpoints."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from workbench.errors import CheckpointError, OptionError, StoreError
from workbench.io.atomic import check_free, replacing
from workbench.io.far_places import is_url
from workbench.io.files import FileKind
from workbench.io.provenance import versions
from workbench.io.run_copy import store_path
from workbench.io.run_writer import RunWriter
from workbench.io.store import open_run
from workbench.koopman.spectra import RankWarning
from workbench.models.anatomy import read_anatomy
from workbench.models.batches import Batches
from workbench.models.checkpoint import latest_checkpoint, list_checkpoints, save_checkpoint
from workbench.models.parametrizations import is_parametrized, plain_copy
from workbench.models.profile import profile
from workbench.models.residual_check import require_residuals
from workbench.models.subject import Subject
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt
from workbench.tasks import Task
from workbench.training.callback import Callback
from workbench.training.training_plan import TrainingPlan
from workbench.zoo.constructors import is_zoo_model

if TYPE_CHECKING:
    import xarray as xr


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
        if is_url(self.store):
            object.__setattr__(self, "store", store_path(str(self.store)))
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
        raise StoreError(f"{folder} holds an earlier run; pass resume=True, overwrite=True, or another checkpoints=.")


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
    return new_run(recording.store, configuration, overwrite=overwrite)


def new_run(store: Path | str, configuration: Mapping[str, Any], *, overwrite: bool) -> RunWriter:
    """Create the store of a run."""
    attrs = {
        "subject": str(configuration["model"]["name"]),
        "state": "running",
        "configuration": json.dumps(configuration),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return RunWriter(store, attrs, overwrite=overwrite)


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
    tables: list[Any] = [module.parametrizations for module in model.modules() if parametrize.is_parametrized(module)]
    if counts := Counter(repr(item) for table in tables for chain in table.values() for item in chain):
        about["parametrizations"] = dict(counts)
    return about | {"n_weights": sum(parameter.numel() for parameter in model.parameters())}


def first_difference(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Find the first difference of two configurations: dotted name, recorded and current value; None if equal."""
    old, new = dict(_flat(recorded)), dict(_flat(current))
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name, "nothing") != new.get(name, "nothing"):
            return name, old.get(name, "nothing"), new.get(name, "nothing")
    return None


def require_same(
    recorded: Mapping[str, Any], current: Mapping[str, Any], *, where: str, of: str = "", now: str, remedy: str
) -> None:
    """Raise `StoreError` with the first difference between two configurations, if there is one."""
    if (difference := first_difference(recorded, current)) is not None:
        name, before, after = difference
        raise StoreError(f"{where} {name} = {before}{of}, but {now} has {after}; {remedy}.")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_NAME = re.compile(r"step-(\d{8})")
_STATE = "training.pt"
_SAVED = FileKind("a checkpoint", "remove it to resume from the previous one", CheckpointError, "checkpoints", 1 << 50)
_FIRST_CALLBACKS = ("kss", "faults", "guard")
#: Trained tensors of a parametrized model; model.safetensors has the tensors computed from them.
PARAMETRIZED = "parametrized.safetensors"


@dataclass(frozen=True)
class TrainingState:
    """State in addition to the parameters that a run needs to continue exactly."""

    step: int
    configuration: Mapping[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    random: dict[str, Any]
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_checkpoint(
    model: nn.Module, state: TrainingState, folder: Path, weights: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a checkpoint atomically, as ``folder/step-00000500``; ``weights`` replace those of a sharded model."""
    place = folder / f"step-{state.step:08d}"
    with replacing(place) as partial, _as_store_error(place):
        partial.mkdir()
        _save_weights(model, partial, weights)
        kept = {**vars(state), "configuration": json.dumps(dict(state.configuration))}
        try:
            torch.save(kept, partial / _STATE)
        except RuntimeError as error:  # raised by torch if a write fails
            raise _write_error(place, error) from error
    return place


def branch_run(store: Path | str, new_store: Path | str, *, step: int) -> Path:
    """Copy a run up to one of its checkpoints; ``train(..., store=new_store, resume=True)`` continues from there.

    The original run is not changed.
    """
    store, new_store = Path(store), Path(new_store)
    checkpoints, new_checkpoints = store.with_suffix(".checkpoints"), new_store.with_suffix(".checkpoints")
    found = list_checkpoints(checkpoints)
    if step not in found:
        known = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{checkpoints} has no checkpoint of step {step}; the existing ones are: {known}.")
    if not store.exists():
        raise StoreError(f"There is no run at {store}; check the path.")
    for place in (new_store, new_checkpoints):
        check_free(place, overwrite=False)
    with replacing(new_checkpoints) as partial:
        shutil.copytree(found[step], partial / found[step].name)
    with replacing(new_store) as partial:
        shutil.copytree(store, partial)
        writer = RunWriter.reopen(partial, before_step=step)
        writer.commit(branched_from=f"{store}, step {step}", state="stopped")
    return new_store


def read_checkpoint(place: Path) -> TrainingState:
    """Read the state of a checkpoint except the parameters, which `load_weights` reads."""
    with _SAVED.reading(place):
        # weights_only, so that no code in the checkpoint is run.
        kept = torch.load(_SAVED.check(place / _STATE), map_location="cpu", weights_only=True)
    try:
        callbacks = dict(kept.pop("callbacks", {}))
        for name in _FIRST_CALLBACKS:  # format of the first version, without a table of callbacks
            if state := kept.pop(name, None):
                callbacks[name] = state
        return TrainingState(**{**kept, "configuration": json.loads(kept["configuration"]), "callbacks": callbacks})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(place, error) from error


def damaged(place: Path, error: Exception) -> CheckpointError:
    """Return the exception for a checkpoint whose state does not fit the run."""
    return CheckpointError(f"The checkpoint {place} is damaged ({error}); remove it to resume from the previous one.")


@contextmanager
def _as_store_error(place: Path) -> Iterator[None]:
    """Convert write errors of safetensors to a `StoreError`; `replacing` converts those of the operating system."""
    from safetensors import SafetensorError

    try:
        yield
    except (CheckpointError, SafetensorError) as error:
        raise _write_error(place, error.__cause__ or error) from error


def _write_error(place: Path, error: BaseException) -> StoreError:
    reason = str(error).splitlines()[0]
    return StoreError(f"{place} cannot be written ({reason}); check its folder and the free space.")


def _save_weights(model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
    from safetensors.torch import save_file

    if is_parametrized(model):
        save_file(_untied(model), folder / PARAMETRIZED)
        model = plain_copy(model)
    if is_zoo_model(model):
        save_checkpoint(model, folder, _state=weights)
        return
    save_file(_untied(model, weights), folder / "model.safetensors")
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)


def _untied(model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state dict with each shared tensor once, under the name by which Hugging Face loads it."""
    hugging_face_drops = getattr(model, "_tied_weights_keys", None) or ()
    state = model.state_dict() if weights is None else weights
    kept: dict[tuple[int, torch.Size] | str, str] = {}
    for name in sorted(state, key=lambda name: name in hugging_face_drops):
        kept.setdefault((state[name].data_ptr(), state[name].shape) if state[name].numel() else name, name)
    return {name: state[name].contiguous() for name in kept.values()}
