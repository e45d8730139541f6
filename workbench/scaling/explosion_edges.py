"""Search for the learning rate from which training of a new model diverges, by trial runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from workbench.option_checks import NonNegativeInt, PositiveFloat, PositiveInt, above
from workbench.scaling.size_ladder import LadderTrainer, Rung

#: Learning rates are tried on a grid of powers of this factor.
GRID = 2.0
LOWEST, HIGHEST = GRID**-30, GRID**12
#: Updates of the pilot run, which determines the start of the search.
N_PILOT_UPDATES = 10
_PILOT_STEP = 8.0


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
    diverges: Callable[[float], bool],
    start: PositiveFloat,
    *,
    n_halvings: NonNegativeInt = 2,
    step: Annotated[float, above(1)] = GRID,
    lowest: PositiveFloat = LOWEST,
    highest: PositiveFloat = HIGHEST,
) -> ExplosionEdge:
    """Find the explosion edge: move from a start to the edge in steps of a factor, then bisect the last step.

    This assumes that all rates above a rate that diverges diverge too. Close to the edge the outcome is random, so an
    edge should be measured with several seeds.

    Args:
        diverges: Function that returns whether a run at a learning rate diverges.
        start: First rate; rounded to the nearest power of ``step``.
        n_halvings: Number of bisections of the last step, in the logarithm; two leave a factor of 1.19.
        step: Factor between two successive rates.
        lowest: The search stops below this rate.
        highest: The search stops above this rate.
    """
    n_runs = 0

    def tried(rate: float) -> bool:
        nonlocal n_runs
        n_runs += 1
        return diverges(rate)

    rate = step ** round(math.log(min(max(start, lowest), highest), step))
    if tried(rate):
        low, high = rate / step, rate
        while low >= lowest and tried(low):
            low, high = low / step, low
        if low < lowest:
            return ExplosionEdge(0.0, high, n_runs)
    else:
        low, high = rate, rate * step
        while high <= highest and not tried(high):
            low, high = high, high * step
        if high > highest:
            return ExplosionEdge(low, math.inf, n_runs)
    for _ in range(n_halvings):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if tried(middle) else (middle, high)
    return ExplosionEdge(low, high, n_runs)


def explosion_edge(
    trainer: LadderTrainer,
    rung: Rung,
    seed: int,
    *,
    n_steps: PositiveInt,
    start: PositiveFloat | None = None,
    n_halvings: NonNegativeInt = 2,
) -> ExplosionEdge:
    """Find the learning rate above which a run of ``n_steps`` updates diverges (RKSP).

    Args:
        trainer: Builder and trainer of the models.
        rung: The size.
        seed: Seed of parameters, data and training.
        n_steps: Updates of each run.
        start: First rate of the search, such as the edge of another seed; None uses `pilot_edge`.
        n_halvings: As in `find_edge`.
    """
    if start is None:
        start = pilot_edge(trainer, rung, seed, n_halvings=0).middle
        start = start if 0 < start < math.inf else 1e-2

    def diverges(rate: float) -> bool:
        return bool(trainer.cause_of_divergence(rung, seed, rate, n_steps))

    return find_edge(diverges, start, n_halvings=n_halvings)


def pilot_edge(
    trainer: LadderTrainer, rung: Rung, seed: int, *, start: PositiveFloat = 1.0, n_halvings: NonNegativeInt = 4
) -> ExplosionEdge:
    """Find the explosion edge of ten updates at a constant rate: fast, and usually an upper bound of `explosion_edge`.

    Args:
        trainer: Builder and trainer of the models.
        rung: The size.
        seed: Seed of parameters, data and training.
        start: First rate of the search.
        n_halvings: Number of bisections of a step of a factor of 8; four leave a factor of 1.14.
    """

    def diverges(rate: float) -> bool:
        return bool(trainer.cause_of_divergence(rung, seed, rate, N_PILOT_UPDATES, is_rate_constant=True))

    return find_edge(diverges, start, n_halvings=n_halvings, step=_PILOT_STEP)
