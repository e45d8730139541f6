"""Checkpoints of a run: parameters as safetensors, and all other state that exact resuming needs."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import CheckpointError, StoreError
from workbench.io.atomic import check_free, replacing
from workbench.io.files import FileKind
from workbench.io.run_writer import RunWriter
from workbench.models.checkpoint import list_checkpoints
from workbench.models.parametrizations import is_parametrized, plain_copy

_NAME = re.compile(r"step-(\d{8})")
_STATE = "training.pt"
_SAVED = FileKind("a checkpoint", "remove it to resume from the previous one", CheckpointError, "checkpoints", 1 << 50)
_FIRST_CALLBACKS = ("kss", "faults", "guard")
#: Trained tensors of a parametrized model; model.safetensors has the tensors computed from them.
PARAMETRIZED = "parametrized.safetensors"


@dataclass(frozen=True)
class TrainingState:
    """State in addition to the parameters that a run needs to continue exactly.

    Attributes:
        step: Number of updates so far.
        configuration: Configuration of the run, as nested plain values.
        optimizer: State dict of the optimizer.
        scaler: State dict of the gradient scaler.
        random: State dict of the `RandomStream` of the run.
        callbacks: State dict of each callback that has one, by its name.
    """

    step: int
    configuration: Mapping[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    random: dict[str, Any]
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_checkpoint(model: nn.Module, state: TrainingState, folder: Path) -> Path:
    """Write a checkpoint atomically, as ``folder/step-00000500``.

    The parameters of a zoo model or a Hugging Face model can be opened with `open_checkpoint`.
    """
    place = folder / f"step-{state.step:08d}"
    with replacing(place) as partial, _as_store_error(place):
        partial.mkdir()
        _save_weights(model, partial)
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


def _save_weights(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    from workbench.models.checkpoint import save_checkpoint
    from workbench.zoo.constructors import is_zoo_model

    if is_parametrized(model):
        save_file(_untied(model), folder / PARAMETRIZED)
        model = plain_copy(model)
    if is_zoo_model(model):
        save_checkpoint(model, folder)
        return
    save_file(_untied(model), folder / "model.safetensors")
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)


def _untied(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with each shared tensor once, under the name by which Hugging Face loads it."""
    hugging_face_drops = getattr(model, "_tied_weights_keys", None) or ()
    state = model.state_dict()
    kept: dict[tuple[int, torch.Size] | str, str] = {}
    for name in sorted(state, key=lambda name: name in hugging_face_drops):
        kept.setdefault((state[name].data_ptr(), state[name].shape) if state[name].numel() else name, name)
    return {name: state[name].contiguous() for name in kept.values()}
