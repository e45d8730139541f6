"""Search for useful learning rates within a budget: first many rates for few updates, then few rates for many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from workbench.rates.pilot_runs import PilotRuns
from workbench.rates.useful_band import REFERENCE_SHARE, RESOLUTION, UsefulBand, useful_band

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
    """Result of one round of a pilot.

    Attributes:
        is_coarse: Whether it is the first round.
        n_updates: Updates of each run.
        rate: Learning rates tried, increasing, shape (rate,).
        loss: Loss after these updates, shape (rate, seed); nat; infinite if not finite, NaN if not tried. For a run
            that was stopped: its last loss plus the later change of the loss of the best run.
        best_rate: Best rate; the geometric mean over the last three numbers of updates at which losses were measured.
        useful_edge: Largest useful rate, averaged in the same way; NaN if it lies outside the rates tried.
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

    Args:
        runs: The runs.
        budget: Maximum number of updates, over all runs.
        n_steps: Maximum number of updates of a run.
        n_seeds: Maximum number of seeds of the second round.
    """

    runs: PilotRuns
    budget: int
    n_steps: int
    n_seeds: int
    _losses: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def rounds(self, start: float) -> Iterator[Round]:
        """Yield each round when it ends; the second one twice if some rates are repeated with other seeds.

        A round without a finite loss, or one that ends without an edge because the budget is spent, is the last.

        Args:
            start: Learning rate at which the search begins.
        """
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
