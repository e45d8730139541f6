"""Checkpoints of a training run as folders of weights, which `workbench.training.checkpoints` writes."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from workbench.errors import CheckpointError
from workbench.models.parametrizations import is_parametrized

_NAME = re.compile(r"step-(\d{8})")
#: File with the trained parameters of a parametrized model; model.safetensors holds its effective weights.
PARAMETRIZED = "parametrized.safetensors"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step in increasing order; empty if there are none."""
    places = folder.glob("step-*") if folder.is_dir() else ()
    found = {int(match.group(1)): place for place in places if (match := _NAME.fullmatch(place.name))}
    return dict(sorted(found.items()))


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the largest step; None if there is none."""
    found = list_checkpoints(folder)
    return found[max(found)] if found else None


def load_weights(model: nn.Module, place: Path) -> None:
    """Load the weights of a checkpoint into a model of the same shape."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    file = place / PARAMETRIZED if is_parametrized(model) else place / "model.safetensors"
    try:
        load_model(model, file)
    except (OSError, SafetensorError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"The weights in {place} are damaged or belong to another model ({first}); pass the model of this run."
        ) from error
