"""Checkpoints of a run in training: parameters as safetensors, and everything else that exact resuming needs."""

from __future__ import annotations

import copy
import json
import pickle
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
from workbench.io.run_writer import RunWriter
from workbench.models.parametrizations import is_parametrized, plain_copy
from workbench.models.run_checkpoints import list_checkpoints

_NAME = re.compile(r"step-(\d{8})")
_STATE = "training.pt"
_FIRST_CALLBACKS = ("kss", "faults", "guard")
#: Parameters of a parametrized model as they are trained; model.safetensors has them as they act.
PARAMETRIZED = "parametrized.safetensors"


@dataclass(frozen=True)
class TrainingState:
    """The state besides the parameters that a run needs to continue as if it had never stopped.

    Attributes:
        step: Number of updates done.
        configuration: Configuration of the run, as nested plain values.
        optimizer: State dict of the optimizer.
        scaler: State dict of the gradient scaler.
        random: State dict of the run's `RandomStream`.
        callbacks: State dict of each callback that has one, by its name.
    """

    step: int
    configuration: Mapping[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    random: dict[str, Any]
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_checkpoint(model: nn.Module, state: TrainingState, folder: Path) -> Path:
    """Write one checkpoint, crash-consistently, as ``folder/step-00000500``.

    The parameters of a zoo model or a Hugging Face model can be opened with `open_checkpoint`.

    Args:
        model: Model whose parameters are saved.
        state: All other state.
        folder: Folder of all checkpoints of the run; one for the same step is replaced.

    Returns:
        The checkpoint's folder.

    Raises:
        StoreError: If the disk is full, or the folder cannot be written.
    """
    place = folder / f"step-{state.step:08d}"
    with replacing(place) as partial, _said(place):
        partial.mkdir()
        _save_weights(model, partial)
        kept = {**vars(state), "configuration": json.dumps(dict(state.configuration))}
        try:
            torch.save(kept, partial / _STATE)
        except RuntimeError as error:  # torch's own error for a write that failed
            raise CheckpointError(str(error)) from error
    return place


def branch_run(store: Path | str, new_store: Path | str, *, step: int) -> Path:
    """Copy a run as of one of its checkpoints; ``train(..., store=new_store, resume=True)`` continues from there.

    The original run is not changed.

    Args:
        store: Store of a run that is not training at this moment, with its checkpoints next to it.
        new_store: Store of the copy; its checkpoint is next to it, and its attribute ``branched_from`` gives the
            origin.
        step: Step of the checkpoint.

    Returns:
        The path of the copy.

    Raises:
        CheckpointError: If there is no checkpoint of that step.
        StoreError: If there is no run, the new place is taken, or the disk is full.
    """
    store, new_store = Path(store), Path(new_store)
    checkpoints, new_checkpoints = store.with_suffix(".checkpoints"), new_store.with_suffix(".checkpoints")
    found = list_checkpoints(checkpoints)
    if step not in found:
        known = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{checkpoints} has no checkpoint of step {step}; there are: {known}.")
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
    """Read what a checkpoint holds besides the parameters, which `load_weights` reads.

    Raises:
        CheckpointError: If it is damaged.
    """
    try:
        # weights_only: a checkpoint is data, and runs no code.
        kept = torch.load(place / _STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"The checkpoint {place} is damaged ({error}); remove it to resume from the one before."
        ) from error
    callbacks = kept.pop("callbacks", {})
    for name in _FIRST_CALLBACKS:  # a checkpoint from before callbacks had names of their own
        if state := kept.pop(name, None):
            callbacks[name] = state
    return TrainingState(**{**kept, "configuration": json.loads(kept["configuration"]), "callbacks": callbacks})


@contextmanager
def _said(place: Path) -> Iterator[None]:
    """Turn write errors of torch and safetensors into a sentence; `replacing` handles those of the system."""
    from safetensors import SafetensorError

    try:
        yield
    except (CheckpointError, SafetensorError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise StoreError(f"{place} cannot be written ({reason}); check its folder and the space left.") from error


def _save_weights(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    from workbench.models.checkpoint import save_checkpoint
    from workbench.zoo import is_zoo_model

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
    """The state with each shared tensor once, under the name that Hugging Face loads it by."""
    hugging_face_drops = getattr(model, "_tied_weights_keys", None) or ()
    state = model.state_dict()
    kept: dict[tuple[int, torch.Size] | str, str] = {}
    for name in sorted(state, key=lambda name: name in hugging_face_drops):
        kept.setdefault((state[name].data_ptr(), state[name].shape) if state[name].numel() else name, name)
    return {name: state[name].contiguous() for name in kept.values()}
