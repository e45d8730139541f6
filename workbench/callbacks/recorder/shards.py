"""Parts of parameters and gradients that this rank holds, and their weights in sums over all ranks."""

from __future__ import annotations

import gc
import math
import sys
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.models.calling import bare, is_shared, message_device
from workbench.models.readable_weights import local_part, parameters_of_shards


class HeldParts:
    """Parts of the parameters of an optimizer on this rank."""

    def __init__(self, optimizer: JointOptimizer) -> None:
        self.optimizer = optimizer
        self._settled: dict[int, Tensor] = {}
        self._samples: dict[int, tuple[tuple[int, ...], Tensor]] = {}

    @cached_property
    def are_split(self) -> bool:
        """Whether ranks hold different parts, so that what is measured is summed over them; the same on all ranks."""
        return is_shared() and any(map(_is_part, self.optimizer.parameters))

    def weight_of(self, parameter: Any) -> float:
        """Return 1 over the number of ranks that hold the same part of a parameter, for sums over all ranks."""
        if not self.are_split or hasattr(parameter, "_fsdp_flattened"):  # FSDP1 gives each entry to one rank
            return 1.0
        n_parts = 1
        if hasattr(parameter, "placements"):
            mesh = parameter.device_mesh
            n_parts = math.prod(mesh.size(dim) for dim, kind in enumerate(parameter.placements) if _is_shard(kind))
        return n_parts / distributed.get_world_size()

    def settle(self) -> None:
        """Lay out gradients as their parameters are, before `gradient_of`; every rank must call this.

        Those of parameters that tensor parallelism does not split may be summands on each rank until the update.
        """
        self._settled = {}
        for each in self.optimizer.parameters:
            gradient, placements = each.grad, getattr(each, "placements", None)
            if placements is not None and getattr(gradient, "placements", placements) != placements:
                split: Any = gradient
                self._settled[id(each)] = local_part(split.redistribute(placements=placements))

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of this rank's part of a parameter; None without one."""
        if parameter.grad is None:
            return None
        return self._settled[id(parameter)] if id(parameter) in self._settled else local_part(parameter.grad)

    def sample(self, parameter: Tensor, n: int) -> Tensor:
        """Return this rank's entries among ``n`` neighboring ones in the middle of a parameter."""
        own, size = local_part(parameter.detach()), parameter.numel()
        n, start = min(n, size), (size - min(n, size)) // 2
        if not hasattr(parameter, "placements"):
            return own.view(-1).narrow(0, start, n)
        shape, places = self._samples.get(id(parameter), ((), torch.zeros(0)))
        if shape != own.shape:
            places = _places_in_part(parameter, own.shape, start, n).to(own.device)
            self._samples[id(parameter)] = own.shape, places
        return own.reshape(-1)[places]


class PipelineStage(NamedTuple):
    """Stage of a pipeline: its place, and the number of stages."""

    number: int
    n_stages: int

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.number == self.n_stages - 1


def stages_of(model: nn.Module, optimizer: JointOptimizer) -> list[PipelineStage]:
    """Return the stages of pipelines of PyTorch to which modules of a model or parameters of its optimizer belong."""
    inner, trained = {id(each) for each in model.modules()}, {id(each) for each in optimizer.parameters}
    found: dict[int, PipelineStage] = {}
    for each in _instances("stage", "_PipelineStageBase"):
        is_trained = any(id(weight) in trained for weight in each.submod.parameters())
        if each.num_stages > 1 and (is_trained or id(bare(each.submod)) in inner):
            found[id(bare(each.submod))] = PipelineStage(each.stage_index, each.num_stages)
    return [*found.values()]


def divides_gradients(model: nn.Module) -> bool:
    """Return whether the schedule of a stage divides the gradients by the number of micro-batches."""
    return any(
        schedule.scale_grads
        for schedule in _instances("schedules", "_PipelineSchedule")
        for stage in (*getattr(schedule, "_stages", ()), getattr(schedule, "_stage", None))
        if stage is not None and bare(stage.submod) is bare(model)
    )


def _instances(module: str, name: str) -> list[Any]:
    """Return the objects of a class of PyTorch's pipelines."""
    kind = getattr(sys.modules.get(f"torch.distributed.pipelining.{module}"), name, None)
    return [] if kind is None else [each for each in gc.get_objects() if issubclass(type(each), kind)]


def splits_tensors(model: nn.Module) -> bool:
    """Return whether ranks compute parts of one pass, as in tensor parallelism, and may read the same examples."""
    shards = parameters_of_shards(model)
    split: list[Any] = [each for each in model.parameters() if hasattr(each, "placements")]
    n_apart = [shards[id(each)].mesh_info.mesh.size() if id(each) in shards else 1 for each in split]
    return any(each.device_mesh.size() > n for each, n in zip(split, n_apart, strict=True))


def summed(numbers: list[Tensor]) -> Tensor:
    """Return 0-dim tensors summed over all ranks, in float64 and without waiting for a device."""
    device = message_device()
    message = torch.stack([each.to(device, torch.float64) for each in numbers])
    distributed.all_reduce(message)
    return message


def _is_part(parameter: Any) -> bool:
    return hasattr(parameter, "to_local") or hasattr(parameter, "_fsdp_flattened")


def _is_shard(placement: Any) -> bool:
    return hasattr(placement, "dim") and not placement.is_partial()


def _places_in_part(parameter: Any, shape: tuple[int, ...], start: int, n: int) -> Tensor:
    """Return the flat indices, in this rank's part of a parameter, of entries ``start`` to ``start + n`` of all."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if not math.prod(shape):
        return torch.zeros(0, dtype=torch.long)
    coords = torch.unravel_index(torch.arange(start, start + n), parameter.shape)
    inside = [each - first for each, first in zip(coords, offset, strict=True)]
    is_here = torch.stack([(each >= 0) & (each < m) for each, m in zip(inside, shape, strict=True)]).all(0)
    found = torch.zeros(int(is_here.sum()), dtype=torch.long)
    for each, m in zip(inside, shape, strict=True):
        found = found * m + each[is_here]
    return found
