"""Weights that DeepSpeed's ZeRO-3 partitioned among ranks, merged as its zero_to_fp32.py does."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import CheckpointError
from workbench.models.lazy_tensor import LazyTensor
from workbench.models.state_files import read_objects

_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
#: Key of the float32 weights of a rank: all its parts, concatenated.
_FLAT = "fp32_flat_groups"


def is_partitioned(folder: Path) -> bool:
    """Return whether a folder contains the files of ranks among which only ZeRO-3 partitioned the weights."""
    is_divided_otherwise = any("mp_rank_00_" not in file.name for file in folder.glob("*mp_rank_*_states.pt"))
    return bool(_files(folder, "model")) and not is_divided_otherwise


def partitioned_state(folder: Path) -> dict[str, LazyTensor]:
    """Return the weights of a folder in float32, each merged from the parts of all ranks when it is read.

    Every rank holds an equal part of each parameter, in the listed order and padded at the end. Frozen parameters and
    buffers are stored separately, in the precision of training.

    Raises:
        CheckpointError: If files are missing or damaged, contain code, or do not agree.
    """
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
    state: dict[str, LazyTensor] = {}
    start = 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            length = math.ceil(math.prod(shape) / len(groups))
            pieces = [piece for tensors in groups for piece in _within(tensors, start, length)]
            state[name] = _joined(pieces, tuple(shape))
            start += length
    if any(sum(map(torch.numel, tensors)) != start for tensors in groups):
        raise ValueError("the lengths of the parts do not match the shapes")
    return state


def _within(tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
    """Return views of a range of elements of tensors that count as concatenated."""
    found = []
    for tensor in tensors:
        if start < len(tensor) and start + length > 0:
            found.append(tensor[max(start, 0) : start + length])
        start -= len(tensor)
    return found


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
