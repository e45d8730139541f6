"""Folders of weights without an architecture: which of their files hold the weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError
from workbench.models.distributed_folders import METADATA
from workbench.models.state_files import WEIGHT_FILES, index_files, numbered_shards

#: What diffusers calls its weights.
_DIFFUSERS_FILES = tuple(
    f"diffusion_pytorch_model.{ending}" for ending in ("safetensors", "safetensors.index.json", "bin", "bin.index.json")
)
#: The configuration beside the weights of an adapter.
ADAPTER_CONFIG = "adapter_config.json"
#: Text files that name the newest checkpoint in a folder: DeepSpeed's and Megatron's.
_NEWEST = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:0>7}"}
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
        if place.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", place.name))
    }
    if len(found) > 1:
        raise CheckpointError(f"{folder} holds {len(found)} checkpoints; pass one, such as {found[max(found)]}.")
    return next(iter(found.values()), folder)


def has_weights(folder: Path) -> bool:
    """Whether `weight_places` finds anything in a folder."""
    return (
        any((folder / name).is_file() for name in (METADATA, *_NEWEST, *WEIGHT_FILES, *_DIFFUSERS_FILES))
        or bool(numbered_shards(folder))
        or bool(_model_states(folder))
    )


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT and no weights of its own."""
    return (folder / ADAPTER_CONFIG).is_file() and not has_weights(folder)


def is_without_architecture(folder: Path) -> bool:
    """Whether a folder holds weights but nothing from which transformers or the zoo builds their model."""
    if (folder / "config.json").exists():
        return "_class_name" in diffusers_config(folder)
    return has_weights(folder)


def diffusers_config(folder: Path) -> dict[str, Any]:
    """The configuration that diffusers wrote; empty if the folder is not its."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    is_its = isinstance(config, dict) and isinstance(config.get("_class_name"), str) and "model_type" not in config
    return config if is_its else {}


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
    if states := _model_states(folder):
        return (_whole_states(folder, states),)
    for name in (*WEIGHT_FILES, *_DIFFUSERS_FILES):
        if (folder / name).is_file():
            return index_files(folder / name)[0] if name.endswith(".json") else (folder / name,)
    if shards := numbered_shards(folder):
        return shards
    raise CheckpointError(f"{folder} holds no weights in a form known here; pass the file or folder that has them.")


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
    if any(file.name.startswith("zero_pp_rank") for file in states):
        raise CheckpointError(
            f"{folder} holds weights that ZeRO-3 divided; run the zero_to_fp32.py beside it and pass the file it makes."
        )
    if len(states) > 1:
        raise CheckpointError(
            f"{folder} holds weights divided among {len(states)} ranks of model parallelism; "
            "export them as one model and pass that."
        )
    return states[0]
