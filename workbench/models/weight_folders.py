"""Folders of weights without an architecture: which of their files hold the weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError
from workbench.models.distributed_folders import METADATA, distributed_state, part_files, refuse_part
from workbench.models.lazy_tensor import LazyTensor
from workbench.models.state_files import (
    STATE_SUFFIXES,
    WEIGHT_FILES,
    index_files,
    numbered_shards,
    read_state,
    safetensors_state,
)
from workbench.models.zero_partitions import is_partitioned, partitioned_state

#: What diffusers calls its weights.
_DIFFUSERS_FILES = tuple(
    f"diffusion_pytorch_model.{ending}" for ending in ("safetensors", "safetensors.index.json", "bin", "bin.index.json")
)
#: The configuration beside the weights of an adapter.
ADAPTER_CONFIG = "adapter_config.json"
#: Text files that name the newest checkpoint in a folder: DeepSpeed's and Megatron's.
_NEWEST = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:0>7}"}
#: The key in a folder's config.json that names one of our own architectures.
ZOO_KEY = "workbench_architecture"
#: The keys from which transformers or the zoo know the model.
_ARCHITECTURE = {"model_type", "architectures", "auto_map", ZOO_KEY}
#: Files of a training that hold no weights of the model, or not all of them.
_NO_WEIGHTS = re.compile(r"(optimizer|scheduler|scaler|rng_state|random_states|training_args|adapter_model|ema)", re.I)
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STATES = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")


def own_checkpoint(folder: Path) -> Path:
    """The checkpoint that a Trainer's folder holds; the folder itself if it is one, or something else.

    Raises:
        CheckpointError: If it holds several, of which none is preferred silently.
    """
    if (folder / "config.json").exists() or has_weights(folder) or is_adapter(folder):
        return folder
    found = {
        int(match[1]): place
        for place in folder.glob("checkpoint-*")
        if place.is_dir() and (match := _CHECKPOINT.fullmatch(place.name))
    }
    if len(found) > 1:
        raise CheckpointError(f"{folder} holds {len(found)} checkpoints; pass one, such as {found[max(found)]}.")
    return next(iter(found.values()), folder)


def has_weights(folder: Path) -> bool:
    """Whether `weight_places` finds anything in a folder."""
    return (
        any((folder / name).is_file() for name in (METADATA, *_NEWEST, *WEIGHT_FILES, *_DIFFUSERS_FILES))
        or bool(numbered_shards(folder))
        or bool(_model_states(folder) or part_files(folder) or _inner_folders(folder))
    )


def single_files(folder: Path) -> tuple[Path, ...]:
    """Files beside a config.json, of any names, of which one may be the weights: those of safetensors, else pickles."""
    if not (folder / "config.json").exists():
        return ()
    files = [f for f in sorted(folder.iterdir()) if f.suffix in STATE_SUFFIXES and not _NO_WEIGHTS.match(f.name)]
    return tuple(file for file in files if file.suffix == ".safetensors") or tuple(files)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT and no weights of its own."""
    return (folder / ADAPTER_CONFIG).is_file() and not has_weights(folder)


def is_without_architecture(folder: Path, *, has_module: bool = False) -> bool:
    """Whether a folder holds weights but nothing from which transformers or the zoo builds their model.

    Args:
        folder: The folder.
        has_module: Whether the module of the weights is known, so that a config.json with options of its own is enough.
    """
    if not (folder / "config.json").exists():
        return has_weights(folder)
    config = _config(folder)
    is_of_module = has_module and bool(config) and not config.keys() & _ARCHITECTURE and has_weights(folder)
    return is_of_module or "_class_name" in diffusers_config(folder)


def diffusers_config(folder: Path) -> dict[str, Any]:
    """The configuration that diffusers wrote; empty if the folder is not its."""
    config = _config(folder)
    return config if isinstance(config.get("_class_name"), str) and "model_type" not in config else {}


def _config(folder: Path) -> dict[str, Any]:
    """The options in a config.json; empty if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def weight_places(folder: Path) -> tuple[Path, ...]:
    """The files that hold the weights of a folder; or a folder, if it is a distributed checkpoint.

    Raises:
        CheckpointError: If there are none, some are missing, or they are parts that must be merged first.
    """
    if (folder / METADATA).is_file():
        return (folder,)
    for name, pattern in _NEWEST.items():
        if (folder / name).is_file():
            return weight_places(_named_in(folder / name, pattern))
    if is_partitioned(folder):
        return (folder,)
    if states := _model_states(folder):
        return (_whole_states(folder, states),)
    for name in (*WEIGHT_FILES, *_DIFFUSERS_FILES):
        if (folder / name).is_file():
            return index_files(folder / name)[0] if name.endswith(".json") else (folder / name,)
    if shards := numbered_shards(folder):
        return shards
    if part_files(folder):
        return (folder,)
    if inner := _inner_folders(folder):
        if len(inner) > 1:
            names = ", ".join(place.name for place in inner)
            raise CheckpointError(
                f"{folder} holds several distributed checkpoints ({names}); pass one, such as {inner[0]}."
            )
        return inner
    if files := single_files(folder):
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:3])
            raise CheckpointError(f"{folder} holds several files that may be its weights ({names}); leave one.")
        return files
    raise CheckpointError(f"{folder} holds no weights in a form known here; pass the file or folder that has them.")


def place_state(place: Path) -> dict[str, LazyTensor]:
    """The tensors of a file of weights, GGUF excepted, or of a distributed checkpoint, without their values.

    Raises:
        CheckpointError: If it is damaged or incomplete, or holds code.
    """
    if place.is_dir():
        return partitioned_state(place) if is_partitioned(place) else distributed_state(place)
    if place.suffix == ".safetensors":
        refuse_part(place)
        return safetensors_state(place)
    return {name: LazyTensor.of(tensor) for name, tensor in read_state(place, mmap=True).items()}


def _inner_folders(folder: Path) -> tuple[Path, ...]:
    """Distributed checkpoints of weights in a folder, as accelerate saves them beside that of the optimizer."""
    places = sorted(file.parent for file in folder.glob(f"*/{METADATA}"))
    names = (_NO_WEIGHTS, _CHECKPOINT)
    return tuple(place for place in places if not any(name.match(place.name) for name in names))


def _named_in(file: Path, pattern: str) -> Path:
    """The folder that a text file names as the newest."""
    try:
        name = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        name = ""
    place = file.parent / (pattern.format(name) if name.isdecimal() else name)
    if not name or Path(name).name != name or not place.is_dir():
        raise CheckpointError(f"{file} names '{name[:80]}', which is no folder beside it; fetch that too.")
    return place


def _model_states(folder: Path) -> tuple[Path, ...]:
    """DeepSpeed's files of weights."""
    return tuple(sorted(file for file in folder.glob("*_model_states.pt") if _STATES.fullmatch(file.name)))


def _whole_states(folder: Path, states: tuple[Path, ...]) -> Path:
    """DeepSpeed's file of weights, if one has them all.

    Raises:
        CheckpointError: If they are divided among several.
    """
    if any(file.name.startswith("zero_pp_rank") for file in states):  # with several ranks of model parallelism
        raise CheckpointError(
            f"{folder} holds weights that ZeRO-3 divided; run the zero_to_fp32.py beside it and pass the file it makes."
        )
    if len(states) > 1:
        raise CheckpointError(
            f"{folder} holds weights divided among {len(states)} ranks of model parallelism; "
            "export them as one model and pass that."
        )
    return states[0]
