"""Find the learning rate from which training of a fresh model diverges, by trial runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from workbench.scaling.size_ladder import Rung, Workshop

#: Rates are tried on a grid of powers of this.
GRID = 2.0
LOWEST, HIGHEST = GRID**-30, GRID**12
#: Updates of the pilot run, which decides where the search begins.
N_PILOT_UPDATES = 10
_PILOT_STEP = 8.0


@dataclass(frozen=True)
class ExplosionEdge:
    """The two rates between which a run from given initial parameters begins to diverge.

    Attributes:
        low: Largest tried rate without divergence below the first with it; 0: all diverged.
        high: Smallest tried rate with divergence; infinite: none diverged.
        n_runs: Number of runs of the search.

    Example:
        >>> import workbench as wb
        >>> edge = wb.scaling.ExplosionEdge(low=0.01, high=0.04, n_runs=5)
        >>> round(edge.middle, 3)
        0.02
    """

    low: float
    high: float
    n_runs: int

    @property
    def middle(self) -> float:
        """Geometric mean of both rates; 0 or infinite where the edge lies outside of the tried range."""
        return math.sqrt(self.low * self.high) if self.low > 0 else 0.0


def find_edge(
    breaks: Callable[[float], bool],
    start: float,
    *,
    n_halvings: int = 2,
    step: float = GRID,
    lowest: float = LOWEST,
    highest: float = HIGHEST,
) -> ExplosionEdge:
    """Move from a rate up or down to the edge, then bisect the last step.

    This assumes that every rate above one that diverges would diverge too. Near the edge chance decides, so an edge
    should be measured with several seeds.

    Args:
        breaks: Whether a run at a rate diverges.
        start: First rate; rounded to the nearest power of ``step``.
        n_halvings: Bisections of the last step, in logarithms: two leave a factor of 1.19.
        step: Factor between two successive rates.
        lowest: The search stops below this rate.
        highest: The search stops above this rate.

    Example:
        >>> import workbench as wb
        >>> edge = wb.scaling.find_edge(lambda rate: rate > 0.1, start=0.01)
        >>> edge.low <= 0.1 < edge.high
        True
    """
    n_runs = 0

    def is_broken(rate: float) -> bool:
        nonlocal n_runs
        n_runs += 1
        return breaks(rate)

    rate = step ** round(math.log(min(max(start, lowest), highest), step))
    if is_broken(rate):
        low, high = rate / step, rate
        while low >= lowest and is_broken(low):
            low, high = low / step, low
        if low < lowest:
            return ExplosionEdge(0.0, high, n_runs)
    else:
        low, high = rate, rate * step
        while high <= highest and not is_broken(high):
            low, high = high, high * step
        if high > highest:
            return ExplosionEdge(low, math.inf, n_runs)
    for _ in range(n_halvings):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_broken(middle) else (middle, high)
    return ExplosionEdge(low, high, n_runs)


def explosion_edge(
    workshop: Workshop,
    rung: Rung,
    seed: int,
    *,
    n_steps: int,
    start: float | None = None,
    n_halvings: int = 2,
) -> ExplosionEdge:
    """Find the learning rate above which a run of ``n_steps`` updates diverges (RKSP's label).

    Args:
        workshop: Builder and trainer of the models.
        rung: The size.
        seed: Seed of parameters, data and training.
        n_steps: Updates of each run.
        start: First rate of the search, such as the edge of another seed; None: the edge of a pilot run of ten
            updates at a constant rate, found on a grid four times as coarse.
        n_halvings: See `find_edge`.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 16, "n_layers": 2, "n_heads": 2, "max_length": 8})
        >>> workshop = wb.scaling.Workshop(design, wb.tasks.random_tokens(vocab_size=16, length=8, batch_size=4))
        >>> edge = wb.scaling.explosion_edge(workshop, wb.scaling.Rung(8, 2), 0, n_steps=5, start=1.0, n_halvings=0)
        >>> edge.low < edge.high
        True
    """
    if start is None:
        start = pilot_edge(workshop, rung, seed, n_halvings=0).middle
        start = start if 0 < start < math.inf else 1e-2

    def breaks(rate: float) -> bool:
        return bool(workshop.cause_of_divergence(rung, seed, rate, n_steps))

    return find_edge(breaks, start, n_halvings=n_halvings)


def pilot_edge(workshop: Workshop, rung: Rung, seed: int, *, start: float = 1.0, n_halvings: int = 4) -> ExplosionEdge:
    """Find the edge of ten updates at a constant rate: quick, and mostly an upper bound of `explosion_edge`.

    Args:
        workshop: Builder and trainer of the models.
        rung: The size.
        seed: Seed of parameters, data and training.
        start: First rate of the search.
        n_halvings: Bisections of a step of a factor of 8; four leave a factor of 1.14.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 16, "n_layers": 2, "n_heads": 2, "max_length": 8})
        >>> workshop = wb.scaling.Workshop(design, wb.tasks.random_tokens(vocab_size=16, length=8, batch_size=4))
        >>> edge = wb.scaling.pilot_edge(workshop, wb.scaling.Rung(8, 2), seed=0, n_halvings=0)
        >>> edge.low < edge.high
        True
    """

    def breaks(rate: float) -> bool:
        return bool(workshop.cause_of_divergence(rung, seed, rate, N_PILOT_UPDATES, is_plain=True))

    return find_edge(breaks, start, n_halvings=n_halvings, step=_PILOT_STEP)
