"""Folders of weights: the files that contain them, models of diffusers, and the parts of DeepSpeed's ZeRO-3."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import CheckpointError
from workbench.models.distributed_folders import METADATA, distributed_state, part_files, require_complete_tensors
from workbench.models.state_files import (
    CONFIG,
    STATE_SUFFIXES,
    WEIGHT_FILES,
    LazyTensor,
    index_files,
    is_plain_pickle,
    numbered_shards,
    read_config,
    read_objects,
    read_state,
    safetensors_state,
)

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
    """Return the only checkpoint in a Trainer's output folder; the folder itself if it is or has none."""
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
    """Return whether a folder has weights but no configuration from which transformers or the zoo builds a model."""
    if not (folder / "config.json").exists():
        return has_weights(folder)
    config = _options(folder)
    is_of_module = has_module and bool(config) and not config.keys() & _ARCHITECTURE and has_weights(folder)
    return is_of_module or "_class_name" in diffusers_config(folder)


def diffusers_config(folder: Path) -> dict[str, Any]:
    """Return the configuration that diffusers wrote; empty if the folder is not from diffusers."""
    config = _options(folder)
    return config if isinstance(config.get("_class_name"), str) and "model_type" not in config else {}


def _options(folder: Path) -> dict[str, Any]:
    """Return the options in a config.json; empty if it cannot be read."""
    try:
        return read_config(folder / "config.json")
    except CheckpointError:
        return {}


def weight_places(folder: Path) -> tuple[Path, ...]:
    """Return the files that contain the weights of a folder; the folder itself for a distributed checkpoint."""
    if (folder / METADATA).is_file():
        return (folder,)
    for file, pattern in ((folder / name, pattern) for name, pattern in _LATEST.items()):
        if file.is_file():
            name = CONFIG.text(file).strip()
            place = folder / (pattern.format(name) if name.isdecimal() else name)
            if not name or Path(name).name != name or not place.is_dir():
                raise CheckpointError(
                    f"{file} names '{name[:80]}', but there is no such folder next to it; download that folder too."
                )
            return weight_places(place)
    if is_partitioned(folder):
        return (folder,)
    if states := _model_states(folder):
        if any(file.name.startswith("zero_pp_rank") for file in states):  # with several ranks of model parallelism
            raise CheckpointError(f"{folder} is partitioned by ZeRO-3; run its zero_to_fp32.py and pass the result.")
        if len(states) > 1:
            raise CheckpointError(
                f"{folder} is partitioned among {len(states)} ranks of model parallelism; export it as one."
            )
        return states
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
            raise CheckpointError(f"{folder} has several distributed checkpoints ({names}); pass one of them.")
        return inner
    if files := single_files(folder):
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:3])
            raise CheckpointError(f"{folder} contains several files that may be its weights ({names}); keep one.")
        return files
    raise CheckpointError(f"{folder} contains no weights in a known format; pass the file or folder that has them.")


def place_state(place: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a weight file (except GGUF) or of a distributed checkpoint without reading their values."""
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


def _model_states(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of DeepSpeed."""
    return tuple(sorted(file for file in folder.glob("*_model_states.pt") if _STATES.fullmatch(file.name)))


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a Hugging Face folder, which stay on disk."""

    state: Mapping[str, LazyTensor]
    is_usual: bool = True

    @property
    def n_bytes(self) -> int:
        """Size of all tensors together in the files, in bytes."""
        return sum(tensor.n_bytes for tensor in self.state.values())

    def read(self) -> dict[str, Tensor]:
        """Read all tensors, by name; none of them is a view of a file."""
        return {name: t.read().clone() if t.is_view else t.read() for name, t in self.state.items()}


def folder_weights(folder: Path, *, is_fetched: bool = True) -> FolderWeights | None:
    """Return the weights of a Hugging Face folder, by default as transformers reads them; None if there are none."""
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    is_usual = file is not None and not part_files(folder)
    if file is not None:
        places, has_metadata = index_files(file) if file.suffix == ".json" else ((file,), True)
        is_usual = is_usual and has_metadata and all(is_plain_pickle(place) for place in places)
    elif not (places := numbered_shards(folder)) and is_fetched:
        places = weight_places(folder) if has_weights(folder) or single_files(folder) else ()
    if not places:
        return None
    return FolderWeights({name: tensor for place in places for name, tensor in place_state(place).items()}, is_usual)


def diffusers_model(folder: Path, config: dict[str, Any]) -> nn.Module:
    """Build the model that a config.json of diffusers describes, with random weights."""
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


_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
#: Key of the float32 weights of a rank: all its parts, concatenated.
_FLAT = "fp32_flat_groups"


def is_partitioned(folder: Path) -> bool:
    """Return whether a folder contains the files of ranks among which only ZeRO-3 partitioned the weights."""
    is_divided_otherwise = any("mp_rank_00_" not in file.name for file in folder.glob("*mp_rank_*_states.pt"))
    return bool(_files(folder, "model")) and not is_divided_otherwise


def partitioned_state(folder: Path) -> dict[str, LazyTensor]:
    """Return the float32 weights of a folder, each merged from the parts of all ranks when it is read."""
    models = [read_objects(file) for file in _files(folder, "model")]
    optimizers = [read_objects(file) for file in _files(folder, "optim")]
    damaged = f"{folder} does not contain all parts of its weights"
    remedy = "download the checkpoint again, or run the zero_to_fp32.py next to it and pass the file that it writes."
    try:
        parts = [optimizer["optimizer_state_dict"] for optimizer in optimizers]
        counts = parts[0]["partition_count"] if parts else 0
        n_ranks = max(counts) if isinstance(counts, list | tuple) else counts
        if not n_ranks == len(models) == len(optimizers):
            raise CheckpointError(f"{damaged}: there are files of {len(optimizers)} of {n_ranks} ranks; {remedy}")
        state = _merged(models[0], [list(part[_FLAT]) for part in parts])
        state |= _frozen(models)
        state |= {name: LazyTensor.of(models[0]["module"][name]) for name in models[0]["buffer_names"]}
        shared = dict(models[0].get("shared_params") or {})
        return state | {name: state[other] for name, other in shared.items() if other in state}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{damaged}, or has another layout; {remedy}") from error


def _files(folder: Path, kind: str) -> list[Path]:
    """Return the files of a kind in the order of their ranks."""
    found = {int(m[1]): f for f in folder.glob("*_states.pt") if (m := _RANK.fullmatch(f.name)) and m[2] == kind}
    return [found[rank] for rank in sorted(found)]


def _merged(model: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]) -> dict[str, LazyTensor]:
    """Return the trained parameters; the tensors of a rank, one per group of parameters, count as concatenated."""

    def within(tensors: Sequence[Tensor], start: int, length: int) -> Iterator[Tensor]:
        for tensor in tensors:
            if start < len(tensor) and start + length > 0:
                yield tensor[max(start, 0) : start + length]
            start -= len(tensor)

    state: dict[str, LazyTensor] = {}
    start = 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            length = math.ceil(math.prod(shape) / len(groups))
            pieces = [piece for tensors in groups for piece in within(tensors, start, length)]
            state[name] = _joined(pieces, tuple(shape))
            start += length
    if any(sum(map(torch.numel, tensors)) != start for tensors in groups):
        raise ValueError("the lengths of the parts do not match the shapes")
    return state


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, LazyTensor]:
    """Return the frozen parameters, which each rank stores separately."""
    shapes = models[0].get("frozen_param_shapes") or {}
    state = {}
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        if sum(map(len, parts)) < math.prod(shape):
            raise ValueError(name)
        state[name] = _joined(parts, tuple(shape))
    return state


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> LazyTensor:
    """Return the tensor of a given shape whose parts are concatenated, without padding, when it is read."""
    dtype, n = parts[0].dtype, math.prod(shape)
    return LazyTensor(shape, dtype, lambda: torch.cat(list(parts))[:n].reshape(shape).clone(), n * dtype.itemsize)
