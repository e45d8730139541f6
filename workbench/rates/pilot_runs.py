"""The runs of a pilot: short trainings at several learning rates that are continued or stopped one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.train import train
from workbench.errors import OptionError
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import frequency_loss, token_loss
from workbench.models.probing import undisturbed
from workbench.tasks import Task, as_task

#: Token states of the held-out examples of a task that has some; batches that are set aside of another one.
_N_HELD_OUT, _N_SET_ASIDE = 4096, 8
#: Batches in which targets are counted.
_N_COUNTED = 32
#: Share of the updates of a round that the warm-up takes at most.
_WARMUP_SHARE = 1 / 3
#: Where a run has training losses alone, its loss is their mean over this share of the updates.
_LAST_SHARE = 0.1


class PilotRuns(Protocol):
    """Runs at several rates and seeds that can be continued.

    Attributes:
        n_updates: Updates made so far, over all runs.
        trivial_loss: Loss of the predictor that knows the frequencies of the targets alone; nat; NaN: not known.
    """

    n_updates: int
    trivial_loss: float

    def begin_round(self, n_updates: int) -> None:
        """End all runs; those that begin from now on are made for so many updates."""

    def loss_at(self, rate: float, seed: int, n_steps: int) -> float:
        """The loss of a run after some updates, continued as far as needed; infinite: it ended before."""

    def close(self) -> None:
        """End all runs and free their models."""


@dataclass
class ModelRuns:
    """Runs on copies of a model.

    Args:
        model: Model that every run begins with, or a function from a seed to one; it is not changed.
        task: What they are trained on.
        settings: Arguments of `workbench.train` without the rate, the number of updates, and the seed. The warm-up
            takes at most a third of the updates of a round.
        n_steps: Updates of the longest run.
        loss: Function from logits and targets to a 0-dim tensor.
        on_update: Called after each update.
    """

    model: nn.Module | Callable[[int], nn.Module]
    task: Any
    settings: dict[str, Any]
    n_steps: int
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss
    on_update: Callable[[], None] = lambda: None
    n_updates: int = 0
    trivial_loss: float = math.nan
    _runs: dict[tuple[float, int], _Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._warmup = self.settings.get("warmup", 0)
        self.task = as_task(self.task)
        own = getattr(self.task, "held_out", None)
        self._n_aside = 0 if callable(own) else _N_SET_ASIDE
        first = list(islice(self.task.stream(0), self._n_aside + _N_COUNTED))
        self._held_out = [own(_N_HELD_OUT)] if callable(own) else first[: self._n_aside]
        targets, known = ([one for _, one in batches] for batches in (self._held_out, first[self._n_aside :]))
        if self.loss is token_loss and known and not targets[0].is_floating_point():
            self.trivial_loss = frequency_loss(*(torch.cat([one.flatten() for one in of]) for of in (known, targets)))

    def loss_at(self, rate: float, seed: int, n_steps: int) -> float:
        """Held-out loss; infinite where the run has diverged to values that are not finite."""
        run = self._runs.get((rate, seed))
        if run is None:
            run = self._runs[rate, seed] = self._begin(rate, seed)
        if n_steps not in run.losses:
            if n_steps < run.n_steps:
                raise OptionError(f"The run at {rate:.3g} is {run.n_steps} updates on, beyond {n_steps}.")
            for _ in islice(run.records, n_steps - run.n_steps):
                run.n_steps += 1
                self.n_updates += 1
                self.on_update()
            run.losses[n_steps] = math.inf if run.n_steps < n_steps else self._measure(run.model)
        return run.losses[n_steps]

    def begin_round(self, n_updates: int) -> None:
        """End all runs; those that begin from now on warm up for at most a third of so many updates."""
        self.close()
        self._warmup = min(self.settings.get("warmup", 0), int(_WARMUP_SHARE * n_updates))

    def close(self) -> None:
        """End all runs and free their models."""
        for run in self._runs.values():
            run.records.close()
        self._runs.clear()

    def _begin(self, rate: float, seed: int) -> _Run:
        is_module = isinstance(self.model, nn.Module)
        model: Any = copy.deepcopy(self.model) if is_module else self.model(seed)
        # Each seed has its own part of the stream, behind what is set aside.
        task = _Later(self.task, self._n_aside + seed * self.n_steps)
        records: Any = train(
            model, task, n_steps=self.n_steps, learning_rate=rate, seed=seed, loss=self.loss,
            stops_at_divergence=False, **{**self.settings, "warmup": self._warmup},
        )  # fmt: skip
        return _Run(model, records)

    @torch.no_grad()
    def _measure(self, model: nn.Module) -> float:
        losses = []
        with undisturbed(model):
            for inputs, targets in self._held_out:
                inputs, targets = on_device_of(model, inputs), on_device_of(model, targets)
                output = call_model(model, inputs)
                losses.append(float(self.loss(output if isinstance(output, Tensor) else output.logits, targets)))
        mean = float(np.mean(losses))
        return mean if math.isfinite(mean) else math.inf


@dataclass
class LoopRuns:
    """Runs of a user's own training loop.

    Args:
        loop: Function from a rate and a seed to the training losses of the updates, one after the other. A generator is
            continued where it stopped.
        on_update: Called after each update.
    """

    loop: Callable[[float, int], Iterable[float]]
    on_update: Callable[[], None] = lambda: None
    n_updates: int = 0
    trivial_loss: float = math.nan
    _losses: dict[tuple[float, int], list[float]] = field(default_factory=dict)
    _loops: dict[tuple[float, int], Iterator[float]] = field(default_factory=dict)

    def loss_at(self, rate: float, seed: int, n_steps: int) -> float:
        """Mean training loss over the last tenth of the updates; infinite: one was not finite, or there are fewer."""
        if (rate, seed) not in self._loops:
            self._loops[rate, seed], self._losses[rate, seed] = iter(self.loop(rate, seed)), []
        losses = self._losses[rate, seed]
        for loss in islice(self._loops[rate, seed], max(0, n_steps - len(losses))):
            losses.append(float(loss))
            self.n_updates += 1
            self.on_update()
            if not math.isfinite(losses[-1]):
                break
        if len(losses) < n_steps:
            return math.inf
        last = losses[n_steps - max(1, round(_LAST_SHARE * n_steps)) : n_steps]
        return float(np.mean(last)) if np.isfinite(last).all() else math.inf

    def begin_round(self, n_updates: int) -> None:
        """End all loops."""
        self.close()

    def close(self) -> None:
        """End all loops that can be ended."""
        for loop in self._loops.values():
            if callable(close := getattr(loop, "close", None)):
                close()
        self._loops.clear()
        self._losses.clear()


@dataclass
class _Run:
    model: nn.Module
    records: Any
    n_steps: int = 0
    losses: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Later:
    """A task from a later batch on."""

    task: Task
    first: int

    def stream(self, start: int = 0) -> Iterator[Any]:
        return self.task.stream(self.first + start)

    def probe(self, n_tokens: int) -> Any:
        return self.task.probe(n_tokens)

    def describe(self) -> dict[str, Any]:
        return {**self.task.describe(), "first_batch_number": self.first}
