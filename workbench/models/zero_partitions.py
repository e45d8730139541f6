"""Weights that DeepSpeed's ZeRO-3 divided among ranks, put together as its zero_to_fp32.py does."""

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
#: Key of the weights in float32 that a rank holds: all its parts, one after the other.
_FLAT = "fp32_flat_groups"


def is_partitioned(folder: Path) -> bool:
    """Whether a folder holds the files of ranks that ZeRO-3 divided the weights among, and nothing else did."""
    is_divided_otherwise = any("mp_rank_00_" not in file.name for file in folder.glob("*mp_rank_*_states.pt"))
    return bool(_files(folder, "model")) and not is_divided_otherwise


def partitioned_state(folder: Path) -> dict[str, LazyTensor]:
    """The weights of a folder in float32, each put together from the parts of all ranks when it is read.

    Of each parameter, in the order in which they are listed, every rank holds an equal part, padded at the end. Frozen
    parameters and buffers are kept apart, in the precision of training.

    Raises:
        CheckpointError: If files are missing, damaged, hold code, or do not agree.
    """
    models = [read_objects(file) for file in _files(folder, "model")]
    optimizers = [read_objects(file) for file in _files(folder, "optim")]
    damaged = f"{folder} does not hold all parts of its weights"
    remedy = "fetch the checkpoint again, or run the zero_to_fp32.py beside it and pass the file it makes."
    try:
        held = [optimizer["optimizer_state_dict"] for optimizer in optimizers]
        counts = held[0]["partition_count"] if held else 0
        n_ranks = max(counts) if isinstance(counts, list | tuple) else counts
        if not n_ranks == len(models) == len(optimizers):
            raise CheckpointError(f"{damaged}: there are files of {len(optimizers)} of {n_ranks} ranks; {remedy}")
        state = _divided(models[0], [list(part[_FLAT]) for part in held])
        state |= _frozen(models)
        state |= {name: LazyTensor.of(models[0]["module"][name]) for name in models[0]["buffer_names"]}
        shared = dict(models[0].get("shared_params") or {})
        return state | {name: state[other] for name, other in shared.items() if other in state}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{damaged}, or in another layout; {remedy}") from error


def _files(folder: Path, kind: str) -> list[Path]:
    """Files of a kind in the order of their ranks."""
    found = {int(m[1]): f for f in folder.glob("*_states.pt") if (m := _RANK.fullmatch(f.name)) and m[2] == kind}
    return [found[rank] for rank in sorted(found)]


def _divided(model: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]) -> dict[str, LazyTensor]:
    """The trained parameters; the tensors of a rank, one for each group of parameters, count as one."""
    state: dict[str, LazyTensor] = {}
    start = 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            length = math.ceil(math.prod(shape) / len(groups))
            pieces = [piece for tensors in groups for piece in _within(tensors, start, length)]
            state[name] = _joined(pieces, tuple(shape))
            start += length
    if any(sum(map(torch.numel, tensors)) != start for tensors in groups):
        raise ValueError("the parts have other lengths than the shapes say")
    return state


def _within(tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
    """Views of the elements from a start on, of tensors that count as one."""
    found = []
    for tensor in tensors:
        if start < len(tensor) and start + length > 0:
            found.append(tensor[max(start, 0) : start + length])
        start -= len(tensor)
    return found


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, LazyTensor]:
    shapes = models[0].get("frozen_param_shapes") or {}
    state = {}
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        if sum(map(len, parts)) < math.prod(shape):
            raise ValueError(name)
        state[name] = _joined(parts, tuple(shape))
    return state


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> LazyTensor:
    dtype, n = parts[0].dtype, math.prod(shape)
    return LazyTensor(shape, dtype, lambda: torch.cat(list(parts))[:n].reshape(shape).clone(), n * dtype.itemsize)
