"""Evidence from checkpoints: the norm of each block's weights, and whether they fit the configuration."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import CheckpointError
from workbench.io.files import as_path
from workbench.models.checkpoint import ZOO_KEY, list_checkpoints
from workbench.models.state_files import CHECKPOINT, read_config
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from torch import nn

    from workbench.models.subject import Subject

_WEIGHTS = "model.safetensors"
#: Name of a tensor such as ``blocks.3.mlp.up.weight``: name of the stack, number of the block, name within the block.
_NUMBERED = re.compile(r"^(.*?)\.?(\d+)\.(.+)$")


@dataclass(frozen=True)
class WeightMeasurement:
    """Frobenius norm of each block's matrices in a checkpoint, shape (block,); its step (0 if unknown) and folder."""

    norm: np.ndarray
    step: int
    place: Path


def find_checkpoints(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Return checkpoints by step: ``step-00000500``, ``checkpoint-500``, and a folder with one weights file."""
    folder = Path(folder)
    found = list_checkpoints(folder)
    if not found and folder.is_dir():
        for place in folder.glob("checkpoint-*"):
            if place.name.removeprefix("checkpoint-").isdigit() and (place / _WEIGHTS).exists():
                found[int(place.name.removeprefix("checkpoint-"))] = place
        if not found and (folder / _WEIGHTS).exists():
            found = {_step_of(folder): folder}
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint; pass a folder with step-*, checkpoint-* or {_WEIGHTS}.")
    return dict(sorted(found.items()))


def checkpoints_of(run: Any, folder: str | os.PathLike[str] | None = None) -> dict[int, Path]:
    """Return the checkpoints in a folder, by default next to the run, by step in increasing order; may be empty."""
    with CHECKPOINT.reading(folder or str(run)):
        if folder is not None:
            return find_checkpoints(folder)
        if isinstance(run, str | os.PathLike):
            default = as_path(run, "run").with_suffix(".checkpoints")
            if default.is_dir() and any(default.glob("step-*")):
                return find_checkpoints(default)
    return {}


def measure_weights(
    place: Path, *, step: int = 0, model: Subject | nn.Module | None = None
) -> WeightMeasurement | None:
    """Measure the blocks' matrix norms in a checkpoint (of a model or config.json); None without numbered blocks."""
    from safetensors import SafetensorError, safe_open

    file = place / _WEIGHTS
    check_fits(place, model=model)
    try:
        with safe_open(file, framework="pt", backend="pread") as weights:
            squares: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
            for name in weights.keys():  # noqa: SIM118  (safetensors has no iterator)
                if (match := _NUMBERED.match(name)) is None:
                    continue
                tensor = weights.get_tensor(name)
                if tensor.ndim > 1:
                    squares[match[1]][int(match[2])] += float(tensor.double().square().sum())
    except (OSError, SafetensorError) as error:
        raise _unreadable(place, error) from error
    stack = max(squares.values(), key=len, default={})
    if len(stack) < 2:
        return None
    return WeightMeasurement(np.sqrt([stack[i] for i in sorted(stack)]), step, place)


def check_fits(place: Path, *, model: Subject | nn.Module | None = None) -> None:
    """Raise CheckpointError for the first weight that does not fit the model or, without one, config.json."""
    from safetensors import SafetensorError, safe_open

    file = place / _WEIGHTS
    if not file.exists():
        raise CheckpointError(f"{place} has no {_WEIGHTS}; pass the folder of a complete checkpoint.")
    expected = _shapes_of(model) if model is not None else _shapes_of_config(place)
    if expected is None:
        return
    try:
        with safe_open(file, framework="pt", backend="pread") as weights:
            found = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(place, error) from error
    whose = "the model" if model is not None else "its config.json"
    remedy = "pass the checkpoint of this model" if model is not None else "pass a checkpoint with its own config.json"
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            raise CheckpointError(
                f"{name} in {place} has shape {_words(found[name])}, but {whose} requires {_words(shape)}; {remedy}."
            )
    # Tied weights are stored once, so a few names may be missing; a missing block means another model.
    if extra := [name for name in found if name not in expected]:
        raise CheckpointError(
            f"{place} holds {extra[0]} of shape {_words(found[extra[0]])}, but {whose} has no such weight; {remedy}."
        )
    sizes = {shape: name for name, shape in found.items()}
    if missing := [name for name, shape in expected.items() if name not in found and shape not in sizes]:
        raise CheckpointError(
            f"{place} lacks {missing[0]} of shape {_words(expected[missing[0]])}, which {whose} requires; {remedy}."
        )


def _unreadable(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"The weights in {place} cannot be read ({error}); write the checkpoint again.")


def _shapes_of(model: Subject | nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module_of(model).state_dict().items()}


def _shapes_of_config(place: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes that the checkpoint's configuration requires; None if no such model can be built."""
    import torch

    from workbench.zoo import ArchitectureConfig, build

    config = dict(_config(place))
    if ZOO_KEY in config:
        return _shapes_of(build(ArchitectureConfig.from_dict({"family": config.pop(ZOO_KEY), **config})))
    names = config.get("architectures") or [""]
    import transformers

    if (kind := getattr(transformers, names[0], None)) is None:
        return None
    with torch.device("meta"):
        return _shapes_of(kind(kind.config_class.from_dict(config)))


def _config(place: Path) -> Mapping[str, Any]:
    try:
        return read_config(place / "config.json")
    except CheckpointError:
        return {}


def _step_of(folder: Path) -> int:
    match = re.search(r"(\d+)$", folder.name)
    return int(match[1]) if match else 0


def _words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
