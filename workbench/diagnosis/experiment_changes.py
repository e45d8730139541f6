"""The changes that an experiment makes: to the schedule of the rate, the batches, the faults, the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.faults import (
    CorruptedData,
    Fault,
    LowPrecisionAttention,
    LowPrecisionReduction,
    NoAuxiliaryLoss,
    SmallBatch,
)
from workbench.errors import OptionError
from workbench.models.anatomy import read_anatomy
from workbench.models.batches import count_rows
from workbench.models.calling import on_device_of
from workbench.models.router_weights import Router, router_weights
from workbench.tasks import Task

#: Setting that an experiment changes -> faults that act on the same setting, which it therefore removes.
ACT_ON: dict[str, tuple[type[Fault], ...]] = {
    "batch": (SmallBatch,),
    "precision": (LowPrecisionAttention, LowPrecisionReduction),
    "routing": (NoAuxiliaryLoss,),
    "data": (CorruptedData,),
}


class Course:
    """The share of the peak rate at each replayed step: as recorded, or as changed."""

    def __init__(self, rates: np.ndarray, from_step: int, peak: float, change: Mapping[str, Any]) -> None:
        self.rates, self.from_step, self.peak, self.change = rates, from_step, peak, change

    def __call__(self, step: int) -> float:
        """Return the share of the peak rate at a step of the replay, counted from 0."""
        at = self.from_step + step
        rate = float(self.rates[min(at, len(self.rates) - 1)])
        setting = self.change.get("setting")
        if setting == "learning_rate":
            rate *= self.change["factor"]
        elif setting == "schedule" and "hold" in self.change:
            rate = self.change["hold"] if at >= self.change["at"] else rate
        elif setting == "schedule":
            # Rise evenly to the largest rate of the run's first third.
            top = float(self.rates[: max(2, len(self.rates) // 3)].max())
            rate = min(rate, top * (at + 1) / self.change["warmup"])
        return rate / self.peak


class ShiftedTask:
    """A task whose stream begins where the replay does; batches may be left out or taken together."""

    def __init__(self, task: Task, from_step: int, change: Mapping[str, Any]) -> None:
        self.task, self.from_step = task, from_step
        self.change = change if change.get("setting") in ("batch", "data") else {}
        for name in ("vocab_size", "n_classes"):
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))

    def stream(self, start: int = 0) -> Iterator[tuple[Any, Tensor]]:
        """Batches from the replay's step ``start`` on."""
        begin = self.from_step + start
        setting = self.change.get("setting")
        if setting == "data":
            yield from self._without(begin)
        elif setting == "batch":
            batches = self.task.stream(begin)
            while len(several := list(islice(batches, self.change["factor"]))) == self.change["factor"]:
                yield _joined([inputs for inputs, _ in several]), torch.cat([targets for _, targets in several])
        else:
            yield from self.task.stream(begin)

    def _without(self, begin: int) -> Iterator[tuple[Any, Tensor]]:
        """Batches outside of the burst; later ones take its place."""
        first, last = self.change["first"], self.change["last"]
        if begin <= last:
            yield from islice(self.task.stream(begin), max(0, first - begin))
            begin = last + 1
        yield from self.task.stream(begin)

    def probe(self, n_tokens: int) -> Any:
        """Return the probe of the task."""
        return self.task.probe(n_tokens)

    def describe(self) -> dict[str, Any]:
        """Describe the task and the step where it begins."""
        return {**self.task.describe(), "from_step": self.from_step}


def _joined(inputs: list[Any]) -> Any:
    """Inputs of several batches as those of one."""
    first = inputs[0]
    if isinstance(first, Tensor):
        return torch.cat(inputs)
    if isinstance(first, Mapping):
        return {
            name: torch.cat([one[name] for one in inputs]) if count_rows(first) else value
            for name, value in first.items()
        }
    return tuple(_joined(list(parts)) for parts in zip(*inputs, strict=True))


def shifted(fault: Fault, from_step: int) -> Fault:
    """The same fault with its steps counted from the begin of the replay."""
    if fault.start is None:
        return fault
    stop = None if fault.stop is None else fault.stop - from_step
    if stop is not None and stop <= 0:
        return replace(fault, start=None, stop=None)
    return replace(fault, start=max(0, fault.start - from_step), stop=stop)


def change_model(model: nn.Module, task: ShiftedTask, change: Mapping[str, Any]) -> list[Callable[[], None]]:
    """Apply the change to a copy of the model; returns functions that remove the hooks."""
    setting = change.get("setting")
    if setting == "architecture":
        anatomy = read_anatomy(model, on_device_of(model, task.probe(2)))
        if change["layer"] >= len(anatomy.sites):
            raise OptionError(
                f"Block {change['layer']} is to be changed, but the model has {len(anatomy.sites)}; pass the run's "
                f"model."
            )
        chosen = anatomy.sites if change["layer"] < 0 else [anatomy.sites[change["layer"]]]
        modules = {id(site.module): site.module for site in chosen}
        return [module.register_forward_hook(Limit(change["limit"])).remove for module in modules.values()]
    if setting == "routing":
        steady_routers(model, task, change)
    return []


class Limit:
    """A hook that limits the update of a block to a multiple of the size of the stream, state by state."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Return the block's output with a limited update."""
        state = output[0] if isinstance(output, tuple) else output
        if not args or not isinstance(args[0], Tensor) or args[0].shape != state.shape:
            raise OptionError(
                f"{type(module).__name__} does not take the stream first, so it cannot be held; try another cause."
            )
        added = state - args[0]
        size = args[0].detach().square().mean(-1, keepdim=True).sqrt() + 1e-6
        own = added.square().mean(-1, keepdim=True).sqrt() + 1e-12
        held = args[0] + added * torch.clamp(self.limit * size / own, max=1.0)
        return (held, *output[1:]) if isinstance(output, tuple) else held


def steady_routers(model: nn.Module, task: ShiftedTask, change: Mapping[str, Any]) -> None:
    """Set small router weights and the usual coefficient of the balance loss, in place."""
    found = [
        router for router in router_weights(model, on_device_of(model, task.probe(2))) if isinstance(router, Router)
    ]
    if not found:
        raise OptionError("The model has no routers that can be read; run the experiment of another cause.")
    with torch.no_grad():
        for name in dict.fromkeys(router.name for router in found):
            weight = model.get_parameter(name)
            weight.mul_(min(1.0, change["router_rms"] / float(weight.square().mean().sqrt() + 1e-12)))
    config = getattr(model, "config", None)
    if is_dataclass(config) and not isinstance(config, type) and hasattr(config, "balance_coefficient"):
        model.config = replace(config, balance_coefficient=change["balance"])  # type: ignore[assignment]
    elif config is not None and hasattr(config, "router_aux_loss_coef"):
        config.router_aux_loss_coef = change["balance"]
