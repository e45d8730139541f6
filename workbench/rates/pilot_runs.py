"""Pilot runs: short training runs at several learning rates, of copies of a model or by a custom training loop."""

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

#: Token states of the held-out examples of a task; batches held out from a task without such examples, at most a fifth.
_N_HELD_OUT, _N_SET_ASIDE = 4096, 8
#: Largest fraction of the updates of a run for its warm-up.
_WARMUP_FRACTION = 1 / 3
#: The loss of a run that has only training losses is their mean over this last fraction of the updates.
_LAST_FRACTION = 0.1


class PilotRuns(Protocol):
    """Runs at several learning rates and seeds.

    Attributes:
        n_updates: Updates so far, over all runs.
        trivial_loss: Loss of the predictor that knows only the frequencies of the targets; nat; NaN if unknown.
    """

    n_updates: int
    trivial_loss: float

    def losses(self, rate: float, seed: int, steps: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Train a new run and return its loss after each of the given numbers of updates.

        The numbers are increasing, each 1.25 times the previous one. From the first loss that is not finite, all losses
        are infinite. A run whose loss exceeds the limit at a step is stopped; its later losses are omitted.

        Args:
            rate: Learning rate.
            seed: Seed.
            steps: Numbers of updates.
            limits: Limit of the loss at each of them.

        Raises:
            OptionError: If the data or the loop end too early.
        """


@dataclass
class ModelRuns:
    """Pilot runs of copies of a model at constant learning rates; one copy is in memory at a time.

    Args:
        model: Model with the initial parameters of every run, or a function that creates one from a seed; it is not
            changed.
        task: The task.
        settings: Arguments of `workbench.train` except the learning rate, the number of updates and the seed. The
            warm-up is limited to a third of the updates of a run.
        n_longest: Updates of the longest run. Each seed reads a different part of the data stream.
        n_seeds: Maximum number of seeds.
        averages_parameters: Whether the loss is that of the parameters averaged over the last fifth of the updates,
            which is close to the loss after a decay of the learning rate (Haegele et al. 2024, arXiv:2405.18392).
        loss: Function of logits and targets that returns a 0-dim tensor.
        on_update: Called after each update.
    """

    model: HoldsModel | nn.Module | Callable[[int], nn.Module]
    task: Any
    settings: dict[str, Any]
    n_longest: int
    n_seeds: int
    averages_parameters: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss
    on_update: Callable[[], object] = lambda: None
    n_updates: int = 0
    trivial_loss: float = math.nan

    def __post_init__(self) -> None:
        task = as_task(self.task)
        if task.describe().get("is_one_shot"):
            raise OptionError(
                "The data can be read only once, but every pilot run reads them; pass a DataLoader or a list of "
                "batches."
            )
        if callable(read_held_out := getattr(task, "held_out", None)):
            held_out, self._data = [read_held_out(_N_HELD_OUT)], task
        else:
            held_out, self._data = _set_aside(task, self.n_seeds * self.n_longest)
        self._held_out = held_out
        targets = torch.cat([one.flatten() for _, one in held_out])
        if self.loss is token_loss and not targets.is_floating_point():
            self.trivial_loss = frequency_loss(self._data, targets)

    def losses(self, rate: float, seed: int, steps: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Train a new run and return its held-out losses; see `PilotRuns.losses`."""
        model = self._new_model(seed)
        mean = AveragedModel(model) if self.averages_parameters else None
        settings = {**self.settings, "warmup": min(self.settings.get("warmup", 0), int(_WARMUP_FRACTION * steps[-1]))}
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
                    mean.n_averaged.zero_()  # The next update starts a new average.
                if limits[len(found) - 1] < found[-1] < math.inf:
                    return found
        if is_finite and n_done < steps[-1]:
            raise OptionError(f"The data end after {n_done:,} batches, but a pilot run needs {steps[-1]:,}.")
        return found + [math.inf] * (len(steps) - len(found))

    def _new_model(self, seed: int) -> nn.Module:
        """Return a copy of the model, or create one with the random numbers of the seed."""
        if isinstance(self.model, nn.Module) or not callable(self.model):
            return copy.deepcopy(module_of(self.model))
        with RandomStream(seed).active():
            return module_of(self.model(seed))

    def _measure(self, model: nn.Module) -> float:
        """Return the mean held-out loss; infinite if it is not finite."""
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
    """Pilot runs of a user-supplied training loop.

    Args:
        loop: Function of a learning rate and a seed that yields the training loss of each update; a generator is closed
            when it is no longer needed.
        on_update: Called after each update.
    """

    loop: Callable[[float, int], Iterable[float]]
    on_update: Callable[[], object] = lambda: None
    n_updates: int = 0
    trivial_loss: float = math.nan

    def losses(self, rate: float, seed: int, steps: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Return the mean training loss over the last tenth of the updates before each step; see `PilotRuns.losses`."""
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
                    found.append(float(np.mean(losses[-max(1, round(_LAST_FRACTION * len(losses))) :])))
                    if found[-1] > limits[len(found) - 1]:
                        return found
            else:
                if len(losses) < steps[-1]:
                    raise OptionError(
                        f"The loop ended after {counted(len(losses), 'update')}, but a pilot run needs {steps[-1]:,}; "
                        "let it continue until it is closed, also at large losses."
                    )
        finally:
            if callable(close := getattr(running, "close", None)):
                close()
        return found + [math.inf] * (len(steps) - len(found))


def _set_aside(task: Task, n_needed: int) -> tuple[list[Any], Task]:
    """Return held-out batches of a task that has no held-out examples, and the task without these batches."""
    n_batches = task.describe().get("n_batches")
    if not isinstance(n_batches, int) or n_batches >= _N_SET_ASIDE + n_needed:
        return list(islice(task.stream(0), _N_SET_ASIDE)), LaterBatches(task, _N_SET_ASIDE)
    if n_batches < 2:
        raise OptionError("The data have a single batch, but the pilot holds out at least one; pass two or more.")
    # Kept in a list, because shuffling in the next epoch would mix held-out and training examples.
    batches = list(islice(task.stream(0), n_batches))
    n_aside = min(_N_SET_ASIDE, max(1, n_batches // 5))
    return batches[:n_aside], as_task(batches[n_aside:])
