"""Models of diffusers folders; they need the optional package diffusers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from workbench.errors import CheckpointError


def diffusers_model(folder: Path, config: dict[str, Any]) -> nn.Module:
    """Build the model that a config.json of diffusers describes, with random weights.

    Raises:
        CheckpointError: If diffusers is not installed, does not have the class, or cannot build it.
    """
    name = config["_class_name"]
    try:
        diffusers = importlib.import_module("diffusers")
    except ImportError as error:
        raise CheckpointError(
            f"{folder} holds a {name} of diffusers, which is not installed; "
            "install diffusers, or pass the model to wb.open_checkpoint(..., module=)."
        ) from error
    cls = getattr(diffusers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise CheckpointError(
            f"{folder} holds a {name}, which the installed version of diffusers does not have; update diffusers, or "
            "pass wb.open_checkpoint(..., module=)."
        )
    try:
        model: nn.Module = cls.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:  # an option of a wrong type or size fails wherever it is used first
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise CheckpointError(
            f"{folder / 'config.json'} does not describe a {name} ({reason}); download the checkpoint again."
        ) from error
    return model
