"""The changes that an experiment makes to the schedule of the learning rate, the batches, the faults or the model."""

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
from workbench.models.batches import count_examples
from workbench.models.calling import on_device_of
from workbench.models.router_weights import Router, router_weights
from workbench.tasks import Task

#: Setting that an experiment changes -> injected faults that act on the same setting, which the experiment removes.
ACT_ON: dict[str, tuple[type[Fault], ...]] = {
    "batch": (SmallBatch,),
    "precision": (LowPrecisionAttention, LowPrecisionReduction),
    "routing": (NoAuxiliaryLoss,),
    "data": (CorruptedData,),
}


class ReplaySchedule:
    """Schedule of a replay: the recorded or changed learning rate, as a fraction of the peak rate."""

    def __init__(self, rates: np.ndarray, from_step: int, peak: float, change: Mapping[str, Any]) -> None:
        self.rates, self.from_step, self.peak, self.change = rates, from_step, peak, change

    def __call__(self, step: int) -> float:
        """Return the fraction of the peak rate at a step of the replay, counted from 0."""
        at = self.from_step + step
        rate = float(self.rates[min(at, len(self.rates) - 1)])
        setting = self.change.get("setting")
        if setting == "learning_rate":
            rate *= self.change["factor"]
        elif setting == "schedule" and "hold" in self.change:
            rate = self.change["hold"] if at >= self.change["at"] else rate
        elif setting == "schedule":
            # The rate rises linearly to the largest rate in the first third of the run.
            top = float(self.rates[: max(2, len(self.rates) // 3)].max())
            rate = min(rate, top * (at + 1) / self.change["warmup"])
        return rate / self.peak


class ShiftedTask:
    """A task whose stream begins at the first step of the replay; batches may be skipped or combined."""

    def __init__(self, task: Task, from_step: int, change: Mapping[str, Any]) -> None:
        self.task, self.from_step = task, from_step
        self.change = change if change.get("setting") in ("batch", "data") else {}
        for name in ("vocab_size", "n_classes"):
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))

    def stream(self, start: int = 0) -> Iterator[tuple[Any, Tensor]]:
        """Yield batches from step ``start`` of the replay on."""
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
        """Yield batches outside of the burst; later batches take its place."""
        first, last = self.change["first"], self.change["last"]
        if begin <= last:
            yield from islice(self.task.stream(begin), max(0, first - begin))
            begin = last + 1
        yield from self.task.stream(begin)

    def probe(self, n_tokens: int) -> Any:
        """Return the probe of the task."""
        return self.task.probe(n_tokens)

    def describe(self) -> dict[str, Any]:
        """Return the description of the task with the step at which the replay begins."""
        return {**self.task.describe(), "from_step": self.from_step}


def _joined(inputs: list[Any]) -> Any:
    """Concatenate the inputs of several batches."""
    first = inputs[0]
    if isinstance(first, Tensor):
        return torch.cat(inputs)
    if isinstance(first, Mapping):
        return {
            name: torch.cat([one[name] for one in inputs]) if count_examples(first) else value
            for name, value in first.items()
        }
    return tuple(_joined(list(parts)) for parts in zip(*inputs, strict=True))


def shifted(fault: Fault, from_step: int) -> Fault:
    """Return the fault with its steps counted from the beginning of the replay."""
    if fault.start is None:
        return fault
    stop = None if fault.stop is None else fault.stop - from_step
    if stop is not None and stop <= 0:
        return replace(fault, start=None, stop=None)
    return replace(fault, start=max(0, fault.start - from_step), stop=stop)


def change_model(model: nn.Module, task: ShiftedTask, change: Mapping[str, Any]) -> list[Callable[[], None]]:
    """Apply the change to a copy of the model, and return functions that remove its hooks."""
    setting = change.get("setting")
    if setting == "architecture":
        anatomy = read_anatomy(model, on_device_of(model, task.probe(2)))
        if change["layer"] >= len(anatomy.sites):
            raise OptionError(
                f"The experiment changes block {change['layer']}, but the model has {len(anatomy.sites)} blocks; pass "
                "the model of the run."
            )
        chosen = anatomy.sites if change["layer"] < 0 else [anatomy.sites[change["layer"]]]
        modules = {id(site.module): site.module for site in chosen}
        return [module.register_forward_hook(UpdateLimit(change["limit"])).remove for module in modules.values()]
    if setting == "routing":
        stabilize_routers(model, task, change)
    return []


class UpdateLimit:
    """Hook that limits the update of each state by a block to a multiple of the norm of the state."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Return the output of the block with a limited update."""
        state = output[0] if isinstance(output, tuple) else output
        if not args or not isinstance(args[0], Tensor) or args[0].shape != state.shape:
            raise OptionError(
                f"The first argument of {type(module).__name__} is not the residual stream, so its update cannot be "
                "limited; run the experiment of another cause."
            )
        update = state - args[0]
        size = args[0].detach().square().mean(-1, keepdim=True).sqrt() + 1e-6
        update_size = update.square().mean(-1, keepdim=True).sqrt() + 1e-12
        limited = args[0] + update * torch.clamp(self.limit * size / update_size, max=1.0)
        return (limited, *output[1:]) if isinstance(output, tuple) else limited


def stabilize_routers(model: nn.Module, task: ShiftedTask, change: Mapping[str, Any]) -> None:
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
