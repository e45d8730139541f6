"""Ladders of sizes of a design: short training runs on their rungs, and the rate from which the runs diverge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from workbench.callbacks.train import train
from workbench.scaling.designs import Design
from workbench.tasks import Task
from workbench.training.callback import StepRecord

#: Learning rates are tried on a grid of powers of this factor.
GRID = 2.0
LOWEST, HIGHEST = GRID**-30, GRID**12
#: Updates of the pilot run, which determines the start of the search, and the factor between its rates.
N_PILOT_UPDATES, PILOT_STEP = 10, 8.0


@dataclass(frozen=True, order=True)
class Rung:
    """One size of a ladder: width of the residual stream, and number of residual blocks."""

    width: int
    depth: int


def rungs_of(widths: Sequence[int], depths: Sequence[int]) -> list[Rung]:
    """Return the sizes of a ladder: every width at the smallest depth, and every other depth at the largest width."""
    shallow, wide = min(depths), max(widths)
    rungs = [Rung(width, shallow) for width in sorted(widths)]
    return rungs + [Rung(wide, depth) for depth in sorted(depths) if depth != shallow]


@dataclass(frozen=True)
class LadderTrainer:
    """Builder of the models of a design at any rung, and of short training runs from their initial parameters.

    Attributes:
        design: The design.
        task: Function that returns the task of a seed.
        optimizer_options: Options of AdamW.
        parametrization: Width-dependent rules such as `workbench.baselines.MuP`, applied to every model. It creates the
            optimizer, so that rates are those at its base width.
    """

    design: Design
    task: Callable[[int], Task]
    optimizer_options: Mapping[str, Any]
    parametrization: Any = None

    def model(self, rung: Rung, seed: int) -> nn.Module:
        """Build a model with initial parameters."""
        model = self.design.build(rung.width, rung.depth, seed)
        if self.parametrization is not None:
            self.parametrization.apply(model)
        return model

    def runs(self, model: nn.Module, seed: int, rate: float, n_steps: int) -> Iterator[StepRecord]:
        """Train a model at a constant rate and yield a record per update; the seed is that of data and training."""
        options: dict[str, Any] = {"learning_rate": rate, "optimizer_options": dict(self.optimizer_options)}
        if self.parametrization is not None:
            options = {"optimizer": self.parametrization.optimizer(model, rate, "AdamW", **self.optimizer_options)}
        yield from train(model, self.task(seed), n_steps=n_steps, seed=seed, **options)

    def diverges(self, rung: Rung, seed: int, rate: float, n_steps: int) -> bool:
        """Train a new model and return whether it diverged (RKSP)."""
        cause = ""
        for record in self.runs(self.model(rung, seed), seed, rate, n_steps):
            cause = record.cause
        return bool(cause)

    def explosion_edge(self, rung: Rung, seed: int, *, n_steps: int, start: float | None = None) -> ExplosionEdge:
        """Find the learning rate above which a run of ``n_steps`` updates diverges (RKSP).

        The search begins at a given rate, such as the edge of another seed, or at the edge of ten updates.
        """
        if start is None:
            pilot = find_edge(
                lambda rate: self.diverges(rung, seed, rate, N_PILOT_UPDATES), 1.0, n_halvings=0, step=PILOT_STEP
            )
            start = pilot.middle if 0 < pilot.middle < math.inf else 1e-2
        return find_edge(lambda rate: self.diverges(rung, seed, rate, n_steps), start)


@dataclass(frozen=True)
class ExplosionEdge:
    """The two learning rates between which runs from given initial parameters begin to diverge.

    Attributes:
        low: Largest rate tried without divergence below ``high``; 0 if all rates diverged.
        high: Smallest rate tried with divergence; infinite if no rate diverged.
        n_runs: Number of runs of the search.
    """

    low: float
    high: float
    n_runs: int

    @property
    def middle(self) -> float:
        """Geometric mean of both rates; 0 or infinite if the edge lies outside the range that was tried."""
        return math.sqrt(self.low * self.high) if self.low > 0 else 0.0


def find_edge(
    diverges: Callable[[float], bool], start: float, *, n_halvings: int = 2, step: float = GRID
) -> ExplosionEdge:
    """Find the explosion edge: move from a start to the edge in steps of a factor, then bisect the last step.

    This assumes that all rates above a rate that diverges diverge too. Close to the edge the outcome is random, so an
    edge should be measured with several seeds.

    Args:
        diverges: Function that returns whether a run at a learning rate diverges.
        start: First rate; rounded to the nearest power of ``step``.
        n_halvings: Number of bisections of the last step, in the logarithm; two leave a factor of 1.19.
        step: Factor between two successive rates.
    """
    n_runs = 0

    def tried(rate: float) -> bool:
        nonlocal n_runs
        n_runs += 1
        return diverges(rate)

    rate = step ** round(math.log(min(max(start, LOWEST), HIGHEST), step))
    if tried(rate):
        low, high = rate / step, rate
        while low >= LOWEST and tried(low):
            low, high = low / step, low
        if low < LOWEST:
            return ExplosionEdge(0.0, high, n_runs)
    else:
        low, high = rate, rate * step
        while high <= HIGHEST and not tried(high):
            low, high = high, high * step
        if high > HIGHEST:
            return ExplosionEdge(low, math.inf, n_runs)
    for _ in range(n_halvings):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if tried(middle) else (middle, high)
    return ExplosionEdge(low, high, n_runs)
