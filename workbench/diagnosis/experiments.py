"""Deciding experiments: one change for each cause, its expected outcome, and how it acts on a replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from itertools import islice
from pathlib import Path
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
from workbench.diagnosis.causes import CAUSES
from workbench.diagnosis.failed_run import Failure, Record
from workbench.diagnosis.ranking import Rules
from workbench.errors import OptionError
from workbench.models.anatomy import read_anatomy
from workbench.models.batches import count_examples
from workbench.models.calling import on_device_of
from workbench.models.router_weights import Router, router_weights
from workbench.schema.statuses import FailureKind
from workbench.tasks import Task

#: Fixed cost of a replay, which is added to that of its steps when experiments are ordered.
FIXED_COST = 0.05
#: No experiment is proposed for causes with a smaller probability.
_LEAST_PROBABILITY = 0.01
#: Steps replayed after the step at which the record shows the failure.
_MARGIN = 15
#: Fraction of a stalled run that is replayed, and the minimum and maximum number of steps.
_STALLED_SHARE, _FEWEST, _MOST = 0.3, 30, 200
#: Proposed warm-up, as a fraction of the run.
_WARM_UP = 0.15
#: The rate jumps if it rises by this factor from one step to the next.
_JUMP = 1.5


@dataclass(frozen=True)
class Experiment:
    """A replay of a part of the run with one change, compared with an unchanged replay.

    ``change`` are plain values for `workbench.run_experiment`; ``from_step`` is that of a checkpoint, 0 for the initial
    parameters; ``if_right`` and ``if_wrong`` are the outcomes expected if it is this cause or another; ``cost`` is in
    steps of the run, ``information`` in bits, with the frequencies of outcomes in replays of recorded runs.
    """

    cause: str
    title: str
    change: Mapping[str, Any]
    n_steps: int
    from_step: int
    if_right: str
    if_wrong: str
    cost: float
    information: float


def propose(
    record: Record,
    failure: Failure,
    probability: Mapping[str, float],
    layers: Mapping[str, int],
    *,
    rules: Rules,
    checkpoints: Mapping[int, Path],
) -> list[Experiment]:
    """Propose deciding experiments, in order of information per cost."""
    n_all = int(record.steps[-1] - record.steps[0]) + 1
    found = []
    for cause, p in probability.items():
        if p < _LEAST_PROBABILITY or cause not in CAUSES or cause == "nothing":
            continue
        title, change, begins_anew = _change(cause, record, failure, layers.get(cause, -1))
        if cause == "optimizer_eps" and _eps(record) <= change["value"]:
            continue  # the change would have no effect
        from_step = 0 if begins_anew else max((step for step in checkpoints if step <= failure.step), default=0)
        n_steps = _length(record, failure, from_step, acts_at=int(change.get("at", 0)))
        if failure.is_stalled:
            if_right = "the loss of the changed replay decreases faster than that of the unchanged replay"
            if_wrong = "both replays end at about the same loss"
        else:
            if_right = "the loss of the changed replay remains low, while the unchanged replay fails again"
            if_wrong = "the changed replay fails like the unchanged replay"
        information = rules.information(probability, cause)
        cost = 2 * n_steps * (change.get("factor", 1) if cause == "batch" else 1) / n_all
        found.append(Experiment(cause, title, change, n_steps, from_step, if_right, if_wrong, cost, information))
    return sorted(found, key=lambda e: -e.information / (e.cost + FIXED_COST))


def _eps(record: Record) -> float:
    """Return the eps of the run's optimizer; infinite if it is not an Adam optimizer."""
    known = str(record.setting("training", "optimizer", default="")).lower()
    if not known.startswith("adam"):
        return math.inf
    return float(record.setting("training", "optimizer_options", "eps", default=1e-8))


def _length(record: Record, failure: Failure, from_step: int, *, acts_at: int) -> int:
    """Return the number of steps to replay, shortly beyond the failure; for a stalled run, a fraction of the run."""
    last = int(record.steps[-1])
    if failure.is_stalled:
        n_steps = int(np.clip(_STALLED_SHARE * (last + 1), _FEWEST, _MOST))
        return min(max(acts_at - from_step, 0) + n_steps, max(last + 1 - from_step, n_steps))
    if failure.kind is FailureKind.DIVERGED:
        end = record.diverged_at if record.diverged_at is not None else last
        return max(end - from_step + _MARGIN, _MARGIN)
    rises = failure.smooth - np.minimum.accumulate(failure.smooth)
    peak = int(record.steps[int(np.argmax(rises))])
    return max(peak - from_step + _MARGIN, _MARGIN)


def _change(cause: str, record: Record, failure: Failure, layer: int) -> tuple[str, dict[str, Any], bool]:
    """Return the change as text and as plain values, and whether it must act from the initial parameters on."""
    if cause == "learning_rate":
        rate = record.monitor("learning_rate")
        is_known = rate is not None and bool(np.isfinite(rate).any())
        lower = f" ({np.nanmax(rate) / 4:.2g} at its peak)" if rate is not None and is_known else ""
        return f"a quarter of the learning rate{lower}", {"setting": "learning_rate", "factor": 0.25}, False
    if cause == "schedule":
        return _schedule_change(record, failure)
    if cause == "batch":
        return "four batches combined into one", {"setting": "batch", "factor": 4}, False
    if cause == "optimizer_eps":
        return "the optimizer's eps set to 1e-8", {"setting": "optimizer_eps", "value": 1e-8}, False
    if cause == "architecture":
        which = f"block {layer}" if layer >= 0 else "every block"
        return (
            f"the update of {which} limited to the norm of the residual stream",
            {"setting": "architecture", "layer": layer, "limit": 1.0}, False,
        )  # fmt: skip
    if cause == "precision":
        return ("attention, reductions and parameters in float32", {"setting": "precision", "value": "float32"}, False)
    if cause == "routing":
        return (
            "small router weights and a balance loss with the usual coefficient",
            {"setting": "routing", "balance": 0.01, "router_rms": 0.05}, False,
        )  # fmt: skip
    first = failure.step - 5
    last = max(_end_of_burst(record, failure), failure.step + 5)
    return (
        f"batches {max(first, 0)} to {last} skipped",
        {"setting": "data", "first": max(first, 0), "last": last},
        False,
    )


def _schedule_change(record: Record, failure: Failure) -> tuple[str, dict[str, Any], bool]:
    rate = record.monitor("learning_rate")
    recorded = int(record.setting("training", "warmup", default=0) or 0)
    n_warm = max(20, 3 * recorded, round(_WARM_UP * len(record.steps)))
    if rate is not None:
        near = slice(max(1, failure.row - 40), failure.row + 20) if not failure.is_stalled else slice(4, None)
        before, after = rate[near.start - 1 : near.stop][:-1] if near.stop else rate[near.start - 1 : -1], rate[near]
        n = min(len(before), len(after))
        factors = after[:n] / np.maximum(before[:n], 1e-30)
        if n and near.start >= 4 and np.nanmax(factors) >= _JUMP:
            at = near.start + int(np.nanargmax(factors))
            value = float(np.nanmax(rate[max(0, at - 40) : at]))
            return (
                f"the learning rate held at {value:.3g} instead of jumping",
                {"setting": "schedule", "hold": value, "at": int(record.steps[at])},
                False,
            )
        if failure.is_stalled and rate[-1] < 0.1 * np.nanmax(rate):
            value = float(np.nanmax(rate)) / 2
            return (
                f"the learning rate held at {value:.3g} instead of decaying",
                {"setting": "schedule", "hold": value, "at": 0},
                False,
            )
    return f"a warm-up of {n_warm} steps", {"setting": "schedule", "warmup": n_warm}, True


def _end_of_burst(record: Record, failure: Failure) -> int:
    """Return the last batch of the burst: the step at which 70 % of the rise was recovered, or the end of the run."""
    rises = failure.smooth - np.minimum.accumulate(failure.smooth)
    peak = int(np.argmax(rises))
    back = np.flatnonzero(rises[peak:] < 0.3 * rises[peak])
    row = peak + int(back[0]) if len(back) else len(rises) - 1
    return int(record.steps[row])


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
                f"The experiment changes block {change['layer']} of {len(anatomy.sites)}; pass the model of the run."
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
