"""Pilot runs, and the search for useful rates among them: many rates for few updates, then few rates for many."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from workbench.errors import OptionError
from workbench.formatting import counted
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import prediction_of, token_loss
from workbench.models.probing import undisturbed
from workbench.models.streaming import require_in_memory
from workbench.rates.outcomes import REFERENCE_SHARE, RESOLUTION, UsefulBand, useful_band
from workbench.tasks import Task, as_task
from workbench.tasks.random_stream import RandomStream
from workbench.tasks.task import LaterBatches, frequency_loss
from workbench.training.loop import Training
from workbench.training.recording import Recording
from workbench.training.training_plan import TrainingPlan
from workbench.zoo.module_of import HoldsModel, module_of

#: Token states of the held-out examples of a task; batches held out from a task without such examples, at most a fifth.
_N_HELD_OUT, _N_SET_ASIDE = 4096, 8
#: Largest fraction of the updates of a run for its warm-up.
_WARMUP_FRACTION = 1 / 3
#: The loss of a run that has only training losses is their mean over this last fraction of the updates.
_LAST_FRACTION = 0.1


class PilotRuns(Protocol):
    """Runs at several learning rates and seeds; ``trivial_loss`` is that of the targets' frequencies, in nat."""

    n_updates: int
    trivial_loss: float

    def losses(self, rate: float, seed: int, steps: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Train a new run and return its loss after each of the given numbers of updates.

        The numbers are increasing, each 1.25 times the previous one. From the first loss that is not finite, all losses
        are infinite. A run whose loss exceeds the limit at a step is stopped; its later losses are omitted.
        """


@dataclass
class ModelRuns:
    """Pilot runs of copies of a model at constant learning rates; one copy is in memory at a time.

    ``model`` has the initial parameters of every run, or creates them from a seed. The plan's rate, updates and seed
    are not used, and its warm-up is at most a third of a run. Each seed reads a different part of the data. With
    ``averages_parameters`` the loss is that of the mean of the last fifth of the updates, which is close to the loss
    after a decay of the learning rate (Haegele et al. 2024, arXiv:2405.18392).
    """

    model: HoldsModel | nn.Module | Callable[[int], nn.Module]
    task: Any
    plan: TrainingPlan
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
            raise OptionError("The data can be read only once, but each pilot run reads them; pass a list of batches.")
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
        require_in_memory(model, "Training")
        plan = replace(
            self.plan, n_steps=steps[-1], learning_rate=rate, seed=seed, stops_at_divergence=False,
            warmup=min(self.plan.warmup, int(_WARMUP_FRACTION * steps[-1])),
        )  # fmt: skip
        batches = LaterBatches(self._data, seed * self.n_longest)
        found: list[float] = []
        n_done, is_finite = 0, True
        for record in Training(model, batches, plan, Recording(), self.loss, ()).steps():
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
    """Pilot runs of a user-supplied training loop."""

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


#: Learning rates are 1e-3 times integer powers of this ratio.
RATIO = 1.5
#: Difference between the powers of neighboring rates in the first round.
_COARSE = 3
#: The same in the second round: below the best rate, above it, and largest final difference at the useful edge.
_DOWN, _UP, _FINE = 3, 2, 1
#: Updates of each run of the two rounds, as fractions of the budget.
_SHORT_SHARE, LONGEST_SHARE = 0.036, 0.2
#: Losses are measured at the end of a run, after four fifths of its updates, after four fifths of those, and so on; the
#: edges at the last ``_N_AVERAGED`` of them are averaged. Runs that may be stopped are measured ``_N_MEASURED`` times.
_N_AVERAGED, _N_MEASURED = 3, 7
#: A run of the second round is stopped if its loss exceeds that of the best run, at a smaller rate, by this; nat.
_MARGIN = 0.25
#: Limits of the rates that are tried.
LOWEST, HIGHEST = 1e-9, 1e6


@dataclass(frozen=True)
class Round:
    """Result of one round of a pilot: losses in nat, (rate, seed), infinite if not finite, NaN if not tried.

    A run that was stopped has its last loss plus the later change of the best run's. Best rate and useful edge are
    geometric means over the last three numbers of updates; the edge is NaN outside the rates tried.
    """

    is_coarse: bool
    n_updates: int
    rate: np.ndarray
    loss: np.ndarray
    best_rate: float
    useful_edge: float


@dataclass
class RateSearch:
    """Search for the largest useful learning rate within a budget.

    The first round tries rates a factor of 3.4 apart for a few updates, from the start outward until the best rate and
    the useful edge lie between two of them. The second round starts in the middle between these two, with a fifth of
    the budget for each run. It tries smaller rates until one is worse, and as long as none has learned more than the
    frequencies of the targets: large rates learn these first, and then make no progress. It continues with larger rates
    until one is too large, and stops that run as soon as this is clear, then with rates between the two next to the
    edge. These two and the best rate are repeated with another seed if the budget allows all of them.
    """

    runs: PilotRuns
    budget: int
    n_steps: int
    n_seeds: int
    _losses: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def rounds(self, start: float) -> Iterator[Round]:
        """Yield each round when it ends; the second one twice if rates are repeated with other seeds."""
        short, long = (min(round(share * self.budget), self.n_steps) for share in (_SHORT_SHARE, LONGEST_SHARE))
        center = round(power_of(start))
        self._complete(short, [center - _COARSE, center, center + _COARSE], self._next_of_first)
        found = self._round(short, is_coarse=True)
        if found is None:
            return
        yield found
        if math.isfinite(found.useful_edge) and long > short:
            middle = round((power_of(found.best_rate) + power_of(found.useful_edge)) / 2)
            self._losses.clear()
            self._complete(long, [middle], self._next_of_second, stops=True)
            found = self._round(long)
            if found is None:
                return
            yield found
        if math.isfinite(found.useful_edge) and self._repeat(found):
            repeated = self._round(found.n_updates, is_coarse=found.is_coarse)
            assert repeated is not None  # The round without the other seeds was not None either.
            yield repeated

    def _complete(
        self, n_updates: int, first: list[int], following: Callable[[int], int | None], *, stops: bool = False
    ) -> None:
        """Try the first powers, then the following ones until there is none or the budget is spent."""
        if not all(self._try(k, 0, n_updates, stops=stops) for k in first):
            return
        while (k := following(n_updates)) is not None and LOWEST < rate_of(k) < HIGHEST:
            if not self._try(k, 0, n_updates, stops=stops):
                return

    def _next_of_first(self, n_updates: int) -> int | None:
        ks, band = self._band(n_updates)
        if math.isnan(band.best_rate) or band.best_rate == rate_of(ks[0]):
            return ks[0] - _COARSE
        return ks[-1] + _COARSE if math.isnan(band.useful_edge) else None

    def _next_of_second(self, n_updates: int) -> int | None:
        ks, band = self._band(n_updates)
        has_learned = has_learned_more(self._losses_at(n_updates)[1], self.runs.trivial_loss)
        if not has_learned or band.best_rate == rate_of(ks[0]):
            return ks[0] - _DOWN
        if math.isnan(band.useful_edge):
            return ks[-1] + _UP
        below, above = _around_edge(ks, band)
        return (below + above) // 2 if above - below > _FINE else None

    def _repeat(self, found: Round) -> bool:
        """Repeat the decisive rates with each other seed if the budget allows all; return whether any was repeated."""
        ks, band = self._band(found.n_updates)
        if math.isnan(band.useful_edge):
            return False
        decisive = dict.fromkeys([*_around_edge(ks, band), round(power_of(band.best_rate))])
        repeated = 0
        for seed in range(1, self.n_seeds):
            if self.runs.n_updates + len(decisive) * found.n_updates <= self.budget:
                repeated += sum(self._try(k, seed, found.n_updates) for k in decisive)
        return repeated > 0

    def _try(self, k: int, seed: int, n_updates: int, *, stops: bool = False) -> bool:
        """Train a run and store its losses; return whether the budget allowed it."""
        if self.runs.n_updates + n_updates > self.budget:
            return False
        steps = _steps(n_updates, _N_MEASURED if stops else _N_AVERAGED + 1)
        best = self._best_run_below(k, n_updates) if stops else None
        limits = [math.inf] * len(steps) if best is None else [best[step] + _MARGIN for step in steps]
        losses = self.runs.losses(rate_of(k), seed, steps, limits)
        last = losses[-1]
        for i, step in enumerate(steps):
            if i >= len(losses):
                assert best is not None  # Otherwise the limits are infinite.
                losses.append(last + best[step] - best[steps[i - 1]])
                last = losses[-1]
            self._losses[step, k, seed] = losses[i]
        return True

    def _best_run_below(self, power: int, n_updates: int) -> dict[int, float] | None:
        """Return the losses of the best run so far by number of updates; None if its rate is not smaller."""
        ends = {key: loss for key, loss in self._losses.items() if key[0] == n_updates and math.isfinite(loss)}
        if not ends:
            return None
        _, k, seed = min(ends, key=lambda key: ends[key])
        return {step: self._losses[step, k, seed] for step in _steps(n_updates, _N_MEASURED)} if k < power else None

    def _losses_at(self, n_updates: int) -> tuple[list[int], np.ndarray]:
        """Return the powers tried with this number of updates, and their losses, shape (rate, seed)."""
        ks = sorted({k for step, k, _ in self._losses if step == n_updates})
        loss = [[self._losses.get((n_updates, k, seed), math.nan) for seed in range(self.n_seeds)] for k in ks]
        return ks, np.array(loss).reshape(len(ks), self.n_seeds)

    def _band(self, n_updates: int) -> tuple[list[int], UsefulBand]:
        """Return the powers tried with this number of updates, and the band of useful rates."""
        ks, loss = self._losses_at(n_updates)
        _, earlier = self._losses_at(round(REFERENCE_SHARE * n_updates))
        is_used = ~np.isnan(loss).all(axis=0)
        return ks, useful_band(np.array([rate_of(k) for k in ks]), loss[:, is_used], earlier[:, is_used])

    def _round(self, n_updates: int, *, is_coarse: bool = False) -> Round | None:
        """Return the results at a number of updates; None if no loss is finite."""
        ks, loss = self._losses_at(n_updates)
        if not np.isfinite(loss).any():
            return None
        bands = [self._band(step)[1] for step in reversed(_steps(n_updates, _N_AVERAGED))]
        best, edge = (_of_last([getattr(band, name) for band in bands]) for name in ("best_rate", "useful_edge"))
        return Round(is_coarse, n_updates, np.array([rate_of(k) for k in ks]), loss, best, edge)


def has_learned_more(loss: np.ndarray, trivial_loss: float) -> bool:
    """Return whether some loss is below the trivial loss; if that is unknown, whether some loss is finite."""
    lowest = np.min(loss, initial=math.inf, where=np.isfinite(loss))
    return bool(lowest < (trivial_loss - RESOLUTION if math.isfinite(trivial_loss) else math.inf))


def _around_edge(ks: list[int], band: UsefulBand) -> tuple[int, int]:
    """Return the two powers tried next to the useful edge, below and above it."""
    best = next(i for i, k in enumerate(ks) if rate_of(k) == band.best_rate)
    above = next(i for i in range(best + 1, len(ks)) if band.excess[i] > 0)
    return ks[above - 1], ks[above]


def _steps(n_updates: int, n_measured: int) -> list[int]:
    """Return the numbers of updates at which losses are measured, increasing; each is the reference of the next."""
    steps = [n_updates]
    for _ in range(n_measured - 1):
        steps.insert(0, max(1, round(REFERENCE_SHARE * steps[0])))
    return list(dict.fromkeys(steps))


def _of_last(rates: list[float]) -> float:
    """Return the geometric mean of the known rates; NaN if the first, of the last number of updates, is unknown."""
    known = [math.log(rate) for rate in rates if math.isfinite(rate)]
    return math.exp(sum(known) / len(known)) if math.isfinite(rates[0]) else math.nan


def rate_of(k: int) -> float:
    """Return the learning rate of a power, rounded to four digits."""
    return float(f"{1e-3 * RATIO**k:.4g}")


def power_of(rate: float) -> float:
    """Return the power of a learning rate, which need not be an integer."""
    return math.log(rate / 1e-3) / math.log(RATIO)
