"""The runs of a pilot: short trainings at several learning rates, on copies of a model or by a loop of one's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from workbench.callbacks.train import train
from workbench.errors import OptionError
from workbench.formatting import counted
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import prediction_of, token_loss
from workbench.models.probing import undisturbed
from workbench.rates.useful_band import REFERENCE_SHARE
from workbench.tasks import Task, as_task
from workbench.tasks.later_batches import LaterBatches
from workbench.tasks.random_stream import RandomStream
from workbench.tasks.target_frequencies import frequency_loss
from workbench.zoo.module_of import HoldsModel, module_of

#: Token states of the held-out examples of a task that has some; batches that are set aside of another one, at most a
#: fifth of them.
_N_HELD_OUT, _N_SET_ASIDE = 4096, 8
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
        """Train a fresh run, and give its loss after each of some rising numbers of updates, each 1.25 times the last.

        Losses are infinite from where they are not finite. A run whose loss is above the limit of that number of
        updates is stopped, and has no further losses.

        Raises:
            OptionError: If the data or the loop end before.
        """


@dataclass
class ModelRuns:
    """Runs on copies of a model, at a constant rate; one of them is in memory at a time.

    Args:
        model: Model that every run begins with, or a function from a seed to one; it is not changed.
        task: What they are trained on.
        settings: Arguments of `workbench.train` without the rate, the number of updates, and the seed. The warm-up
            takes at most a third of the updates of a run.
        n_longest: Updates of the longest run: each seed has its own part of the stream.
        n_seeds: Seeds at most.
        has_mean_weights: Whether a loss is that of the mean weights over the last fifth of the updates, which is near
            the loss after a decay of the rate (Haegele et al. 2024, arXiv:2405.18392).
        loss: Function from logits and targets to a 0-dim tensor.
        on_update: Called after each update.
    """

    model: HoldsModel | nn.Module | Callable[[int], nn.Module]
    task: Any
    settings: dict[str, Any]
    n_longest: int
    n_seeds: int
    has_mean_weights: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss
    on_update: Callable[[], object] = lambda: None
    n_updates: int = 0
    trivial_loss: float = math.nan

    def __post_init__(self) -> None:
        task = as_task(self.task)
        if task.describe().get("is_one_shot"):
            raise OptionError(
                "The data can be read only once, but each run of a pilot reads them; pass a DataLoader or a list of "
                "batches."
            )
        if callable(own := getattr(task, "held_out", None)):
            held_out, self._data = [own(_N_HELD_OUT)], task
        else:
            held_out, self._data = _set_aside(task, self.n_seeds * self.n_longest)
        self._held_out = held_out
        targets = torch.cat([one.flatten() for _, one in held_out])
        if self.loss is token_loss and not targets.is_floating_point():
            self.trivial_loss = frequency_loss(self._data, targets)

    def losses(self, rate: float, seed: int, steps: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Held-out losses."""
        model = self._fresh(seed)
        mean = AveragedModel(model) if self.has_mean_weights else None
        settings = {**self.settings, "warmup": min(self.settings.get("warmup", 0), int(_WARMUP_SHARE * steps[-1]))}
        found: list[float] = []
        n_done, is_finite = 0, True
        for record in train(
            model, LaterBatches(self._data, seed * self.n_longest), n_steps=steps[-1], learning_rate=rate, seed=seed,
            loss=self.loss, stops_at_divergence=False, **settings,
        ):  # fmt: skip
            self.n_updates += 1
            n_done, is_finite = record.step + 1, math.isfinite(record.loss) and math.isfinite(record.grad_norm)
            self.on_update()
            if mean is not None and n_done > REFERENCE_SHARE * steps[0]:
                mean.update_parameters(model)
            if n_done == steps[len(found)]:
                found.append(self._measure(model if mean is None else mean.module) if is_finite else math.inf)
                if mean is not None:
                    mean.n_averaged.zero_()  # the next update is the first of a new mean
                if limits[len(found) - 1] < found[-1] < math.inf:
                    return found
        if is_finite and n_done < steps[-1]:
            raise OptionError(f"The data end after {n_done:,} batches, but a run of the pilot needs {steps[-1]:,}.")
        return found + [math.inf] * (len(steps) - len(found))

    def _fresh(self, seed: int) -> nn.Module:
        """A copy of the model, or a new one, whose random numbers are those of the seed."""
        if isinstance(self.model, nn.Module) or not callable(self.model):
            return copy.deepcopy(module_of(self.model))
        with RandomStream(seed).active():
            return module_of(self.model(seed))

    def _measure(self, model: nn.Module) -> float:
        losses = []
        with undisturbed(model):
            for inputs, targets in self._held_out:
                inputs, targets = on_device_of(model, inputs), on_device_of(model, targets)
                output = call_model(model, inputs)
                losses.append(float(self.loss(prediction_of(output), targets)))
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
    on_update: Callable[[], object] = lambda: None
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
            else:
                if len(losses) < steps[-1]:
                    raise OptionError(
                        f"The loop ended after {counted(len(losses), 'update')}, but a run of the pilot needs "
                        f"{steps[-1]:,}; let it go on until it is closed, large losses or not."
                    )
        finally:
            if callable(close := getattr(running, "close", None)):
                close()
        return found + [math.inf] * (len(steps) - len(found))


def _set_aside(task: Task, n_needed: int) -> tuple[list[Any], Task]:
    """Held-out batches of a task that has no examples of its own for that, and the task without them."""
    n_batches = task.describe().get("n_batches")
    if not isinstance(n_batches, int) or n_batches >= _N_SET_ASIDE + n_needed:
        return list(islice(task.stream(0), _N_SET_ASIDE)), LaterBatches(task, _N_SET_ASIDE)
    if n_batches < 2:
        raise OptionError("The data have a single batch, but the pilot holds out at least one; pass two or more.")
    # Shuffled anew, the next epoch would mix them in.
    batches = list(islice(task.stream(0), n_batches))
    n_aside = min(_N_SET_ASIDE, max(1, n_batches // 5))
    return batches[:n_aside], as_task(batches[n_aside:])
