"""The runs of a pilot: short trainings at several learning rates, on copies of a model or by a loop of one's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.train import train
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import frequency_loss, token_loss
from workbench.models.probing import undisturbed
from workbench.tasks import Task, as_task

#: Token states of the held-out examples of a task that has some; batches that are set aside of another one.
_N_HELD_OUT, _N_SET_ASIDE = 4096, 8
#: Batches in which targets are counted.
_N_COUNTED = 32
#: Share of the updates of a run that its warm-up takes at most.
_WARMUP_SHARE = 1 / 3
#: Where a run has training losses alone, its loss is their mean over this share of the updates.
_LAST_SHARE = 0.1


class PilotRuns(Protocol):
    """Runs at several rates and seeds.

    Attributes:
        n_updates: Updates made so far, over all runs.
        trivial_loss: Loss of the predictor that knows the frequencies of the targets alone; nat; NaN: not known.
    """

    n_updates: int
    trivial_loss: float

    def losses(self, rate: float, seed: int, steps: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Train a fresh run, and give its loss after each of some rising numbers of updates.

        Losses are infinite where they are not finite, and after a run has ended. A run whose loss is above the limit of
        that number of updates is stopped, and has no further losses.
        """


@dataclass
class ModelRuns:
    """Runs on copies of a model; one of them is in memory at a time.

    Args:
        model: Model that every run begins with, or a function from a seed to one; it is not changed.
        task: What they are trained on.
        settings: Arguments of `workbench.train` without the rate, the number of updates, and the seed. The warm-up
            takes at most a third of the updates of a run.
        n_longest: Updates of the longest run: each seed has its own part of the stream.
        loss: Function from logits and targets to a 0-dim tensor.
        on_update: Called after each update.
    """

    model: nn.Module | Callable[[int], nn.Module]
    task: Any
    settings: dict[str, Any]
    n_longest: int
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss
    on_update: Callable[[], None] = lambda: None
    n_updates: int = 0
    trivial_loss: float = math.nan

    def __post_init__(self) -> None:
        self.task = as_task(self.task)
        own = getattr(self.task, "held_out", None)
        self._n_aside = 0 if callable(own) else _N_SET_ASIDE
        first = list(islice(self.task.stream(0), self._n_aside + _N_COUNTED))
        self._held_out = [own(_N_HELD_OUT)] if callable(own) else first[: self._n_aside]
        targets, known = ([one for _, one in batches] for batches in (self._held_out, first[self._n_aside :]))
        if self.loss is token_loss and known and not targets[0].is_floating_point():
            self.trivial_loss = frequency_loss(*(torch.cat([one.flatten() for one in of]) for of in (known, targets)))

    def losses(self, rate: float, seed: int, steps: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Held-out losses."""
        is_module = isinstance(self.model, nn.Module)
        model: Any = copy.deepcopy(self.model) if is_module else self.model(seed)
        settings = {**self.settings, "warmup": min(self.settings.get("warmup", 0), int(_WARMUP_SHARE * steps[-1]))}
        found: list[float] = []
        for record in train(
            model, _Later(self.task, self._n_aside + seed * self.n_longest), n_steps=steps[-1], learning_rate=rate,
            seed=seed, loss=self.loss, stops_at_divergence=False, **settings,
        ):  # fmt: skip
            self.n_updates += 1
            self.on_update()
            if record.step + 1 == steps[len(found)]:
                found.append(self._measure(model))
                if found[-1] > limits[len(found) - 1] and math.isfinite(found[-1]):
                    return found
        return found + [math.inf] * (len(steps) - len(found))

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
        loop: Function from a rate and a seed to the training losses of the updates, one after the other; a generator is
            closed when it has run far enough.
        on_update: Called after each update.
    """

    loop: Callable[[float, int], Iterable[float]]
    on_update: Callable[[], None] = lambda: None
    n_updates: int = 0
    trivial_loss: float = math.nan

    def losses(self, rate: float, seed: int, steps: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Mean training losses over the last tenth of the updates before each step."""
        losses: list[float] = []
        found: list[float] = []
        running = iter(self.loop(rate, seed))
        try:
            for loss in islice(running, steps[-1]):
                losses.append(float(loss))
                self.n_updates += 1
                self.on_update()
                if not math.isfinite(losses[-1]):
                    break
                if len(losses) == steps[len(found)]:
                    found.append(float(np.mean(losses[-max(1, round(_LAST_SHARE * len(losses))) :])))
                    if found[-1] > limits[len(found) - 1]:
                        return found
        finally:
            if callable(close := getattr(running, "close", None)):
                close()
        return found + [math.inf] * (len(steps) - len(found))


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
