"""Folders of weights without an architecture, and the choice of the files that contain the weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError
from workbench.models.distributed_folders import METADATA, distributed_state, part_files, require_complete_tensors
from workbench.models.lazy_tensor import LazyTensor
from workbench.models.state_files import (
    CONFIG,
    STATE_SUFFIXES,
    WEIGHT_FILES,
    index_files,
    numbered_shards,
    read_config,
    read_state,
    safetensors_state,
)
from workbench.models.zero_partitions import is_partitioned, partitioned_state

#: Names of the weight files of diffusers.
_DIFFUSERS_FILES = tuple(
    f"diffusion_pytorch_model.{ending}" for ending in ("safetensors", "safetensors.index.json", "bin", "bin.index.json")
)
#: File with the configuration of an adapter.
ADAPTER_CONFIG = "adapter_config.json"
#: Text files that name the latest checkpoint in a folder, written by DeepSpeed and Megatron.
_LATEST = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:0>7}"}
#: Key in a folder's config.json that names an architecture of the zoo.
ZOO_KEY = "workbench_architecture"
#: Keys from which transformers or the zoo identify the model.
_ARCHITECTURE = {"model_type", "architectures", "auto_map", ZOO_KEY}
#: Files of a training run that contain no weights of the model, or not all of them.
_NO_WEIGHTS = re.compile(r"(optimizer|scheduler|scaler|rng_state|random_states|training_args|adapter_model|ema)", re.I)
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STATES = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")


def own_checkpoint(folder: Path) -> Path:
    """Return the checkpoint in the output folder of a Trainer; the folder itself if it is a checkpoint or has none.

    Raises:
        CheckpointError: If there are several checkpoints; none is preferred silently.
    """
    if (folder / "config.json").exists() or has_weights(folder) or is_adapter(folder):
        return folder
    found = {
        int(match[1]): place
        for place in folder.glob("checkpoint-*")
        if place.is_dir() and (match := _CHECKPOINT.fullmatch(place.name))
    }
    if len(found) > 1:
        raise CheckpointError(f"{folder} contains {len(found)} checkpoints; pass one, such as {found[max(found)]}.")
    return next(iter(found.values()), folder)


def has_weights(folder: Path) -> bool:
    """Return whether `weight_places` finds weights in a folder."""
    return (
        any((folder / name).is_file() for name in (METADATA, *_LATEST, *WEIGHT_FILES, *_DIFFUSERS_FILES))
        or bool(numbered_shards(folder))
        or bool(_model_states(folder) or part_files(folder) or _inner_folders(folder))
    )


def single_files(folder: Path) -> tuple[Path, ...]:
    """Return files of any name next to a config.json that may be the weights: safetensors files, else pickles."""
    if not (folder / "config.json").exists():
        return ()
    files = [f for f in sorted(folder.iterdir()) if f.suffix in STATE_SUFFIXES and not _NO_WEIGHTS.match(f.name)]
    return tuple(file for file in files if file.suffix == ".safetensors") or tuple(files)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder contains an adapter of PEFT and no other weights."""
    return (folder / ADAPTER_CONFIG).is_file() and not has_weights(folder)


def is_without_architecture(folder: Path, *, has_module: bool = False) -> bool:
    """Return whether a folder contains weights but no configuration from which transformers or the zoo builds a model.

    Args:
        folder: The folder.
        has_module: Whether the module of the weights is known. Then a config.json with custom options does not count
            as such a configuration.
    """
    if not (folder / "config.json").exists():
        return has_weights(folder)
    config = _config(folder)
    is_of_module = has_module and bool(config) and not config.keys() & _ARCHITECTURE and has_weights(folder)
    return is_of_module or "_class_name" in diffusers_config(folder)


def diffusers_config(folder: Path) -> dict[str, Any]:
    """Return the configuration that diffusers wrote; empty if the folder is not from diffusers."""
    config = _config(folder)
    return config if isinstance(config.get("_class_name"), str) and "model_type" not in config else {}


def _config(folder: Path) -> dict[str, Any]:
    """Return the options in a config.json; empty if it cannot be read."""
    try:
        return read_config(folder / "config.json")
    except CheckpointError:
        return {}


def weight_places(folder: Path) -> tuple[Path, ...]:
    """Return the files that contain the weights of a folder; the folder itself for a distributed checkpoint.

    Raises:
        CheckpointError: If there are none, some are missing, or they are shards that must be merged first.
    """
    if (folder / METADATA).is_file():
        return (folder,)
    for name, pattern in _LATEST.items():
        if (folder / name).is_file():
            return weight_places(_named_in(folder / name, pattern))
    if is_partitioned(folder):
        return (folder,)
    if states := _model_states(folder):
        return (_complete_states(folder, states),)
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
                f"{folder} contains several distributed checkpoints ({names}); pass one, such as {inner[0]}."
            )
        return inner
    if files := single_files(folder):
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:3])
            raise CheckpointError(f"{folder} contains several files that may be its weights ({names}); keep one.")
        return files
    raise CheckpointError(
        f"{folder} contains no weights in a known format; pass the file or folder that contains them."
    )


def place_state(place: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a weight file (except GGUF) or of a distributed checkpoint without reading their values.

    Raises:
        CheckpointError: If it is damaged or incomplete, or contains code.
    """
    if place.is_dir():
        return partitioned_state(place) if is_partitioned(place) else distributed_state(place)
    if place.suffix == ".safetensors":
        require_complete_tensors(place)
        return safetensors_state(place)
    return {name: LazyTensor.of(tensor) for name, tensor in read_state(place, mmap=True).items()}


def _inner_folders(folder: Path) -> tuple[Path, ...]:
    """Return distributed checkpoints of weights in a folder, which accelerate saves next to that of the optimizer."""
    places = sorted(file.parent for file in folder.glob(f"*/{METADATA}"))
    names = (_NO_WEIGHTS, _CHECKPOINT)
    return tuple(place for place in places if not any(name.match(place.name) for name in names))


def _named_in(file: Path, pattern: str) -> Path:
    """Return the folder that a text file names as the latest checkpoint."""
    name = CONFIG.text(file).strip()
    place = file.parent / (pattern.format(name) if name.isdecimal() else name)
    if not name or Path(name).name != name or not place.is_dir():
        raise CheckpointError(
            f"{file} names '{name[:80]}', but there is no such folder next to it; download that folder too."
        )
    return place


def _model_states(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of DeepSpeed."""
    return tuple(sorted(file for file in folder.glob("*_model_states.pt") if _STATES.fullmatch(file.name)))


def _complete_states(folder: Path, states: tuple[Path, ...]) -> Path:
    """Return the weight file of DeepSpeed that contains all weights.

    Raises:
        CheckpointError: If the weights are partitioned among several files.
    """
    if any(file.name.startswith("zero_pp_rank") for file in states):  # with several ranks of model parallelism
        raise CheckpointError(
            f"{folder} contains weights partitioned by ZeRO-3; run the zero_to_fp32.py next to it and pass the file "
            "that it writes."
        )
    if len(states) > 1:
        raise CheckpointError(
            f"{folder} contains weights partitioned among {len(states)} ranks of model parallelism; "
            "export them as one model and pass that."
        )
    return states[0]
