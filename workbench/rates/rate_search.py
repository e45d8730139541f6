"""Successive halving over learning rates: many rates for few updates, then those near the edge for more updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from workbench.rates.pilot_runs import PilotRuns
from workbench.rates.useful_band import REFERENCE_SHARE, UsefulBand, useful_band

#: Rates are 1e-3 times whole powers of this.
RATIO = 1.5
#: Powers between two rates of the first round, and at most between those on both sides of the edge in the second.
_COARSE, _FINE = 3, 2
#: Rates at most that the second round begins with.
_N_RATES = 5
#: The lower and the upper end of the band are expected to fall with these powers of the number of updates: what is too
#: slow is decided by rate times updates, what is too large hardly by their number.
_DRIFT_OF_SLOW, _DRIFT = 0.75, 0.25
#: Updates of the first round, as a share of the budget.
_FIRST_SHARE = 0.036
#: Runs that the second round is expected to need beyond those it begins with: around the edge, and with another seed.
_N_MORE, _N_REPEATED = 1.2, 2.5
#: A second round is made only if it is this many times as long as the first.
_LONGER = 1.3
_LOWEST, _HIGHEST = 1e-9, 1e6
#: Losses are measured at the end of a round, after four fifths of its updates, after four fifths of those, and so on;
#: the edges of so many of these numbers of updates are averaged.
_N_AVERAGED = 3


class _BudgetSpentError(Exception):
    """The next run would exceed the budget."""


@dataclass(frozen=True)
class Round:
    """What one round of a pilot found.

    Attributes:
        n_updates: Updates of its runs.
        rate: Rates tried, rising, shape (rate,).
        loss: Loss after these updates, shape (rate, seed); nat; infinite: not finite; NaN: not tried.
        best_rate: Best rate; the geometric mean over the last three numbers of updates at which losses were measured.
        slow_edge: Smallest useful rate, likewise; NaN: not within the rates tried.
        useful_edge: Largest useful rate, likewise; NaN: not within the rates tried.
    """

    n_updates: int
    rate: np.ndarray
    loss: np.ndarray
    best_rate: float
    slow_edge: float
    useful_edge: float


@dataclass
class RateSearch:
    """Search for the band of useful learning rates within a budget.

    In the first round rates a factor 3.4 apart are tried for a few updates, from the start outward until both edges of
    the useful band lie between two of them. In the second, rates across this band are tried for as many updates as the
    budget allows, and more until its upper edge lies between two that are at most a factor 2.25 apart: after few
    updates the band is wide, as large rates are the first to learn how often each target occurs. Then the rates that
    decide are repeated with the other seeds.

    Args:
        runs: The runs.
        budget: Updates at most, over all runs.
        n_steps: Updates of a run at most.
        n_seeds: Seeds of the second round.
    """

    runs: PilotRuns
    budget: int
    n_steps: int
    n_seeds: int
    _losses: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def rounds(self, start: float) -> Iterator[Round]:
        """The rounds as they end, beginning around a rate; the second twice, without and with the other seeds.

        A round in which no rate is finite, or that ends without an edge as the budget is spent, is the last.
        """
        center, length = round(power_of(start)), min(round(_FIRST_SHARE * self.budget), self.n_steps)
        self._bracket([center - _COARSE, center, center + _COARSE], length, _COARSE, finds_slow_edge=True)
        if (found := self._round(length)) is None:
            return
        yield found
        if math.isfinite(found.useful_edge) and self.n_steps >= _LONGER * length:
            ks, longer = self._plan(found)
            if longer >= _LONGER * length:
                self._losses.clear()
                self._bracket(ks, longer, _FINE)
                if (found := self._round(longer)) is None:
                    return
                yield found
        if math.isfinite(found.useful_edge) and self.n_seeds > 1:
            self._repeat(self._decisive(found), found.n_updates)
            if (found := self._round(found.n_updates)) is not None:
                yield found

    def _plan(self, before: Round) -> tuple[list[int], int]:
        """The powers that the second round begins with, across the band that is expected then, and its updates."""
        left = self.budget - self.runs.n_updates
        n_more = _N_MORE + _N_REPEATED * (self.n_seeds - 1)
        growth = math.log(left / (_N_RATES + n_more) / before.n_updates) / math.log(RATIO)
        slow = before.slow_edge if math.isfinite(before.slow_edge) else before.rate[0]
        top = math.ceil(power_of(before.useful_edge) - _DRIFT * growth)
        bottom = round(power_of(slow) - _DRIFT_OF_SLOW * growth)
        step = max(_COARSE, math.ceil((top - bottom) / (_N_RATES - 1)))
        ks = sorted(range(top, min(bottom, top - 2 * step) - 1, -step))
        return ks, min(int(left / (len(ks) + n_more)), self.n_steps)

    def _decisive(self, found: Round) -> list[int]:
        """The powers tried that are nearest to the best rate, and on both sides of the edge."""
        ks = np.array(self._losses_at(found.n_updates)[0])
        best, edge = power_of(found.best_rate), power_of(found.useful_edge)
        above = int(np.clip(np.searchsorted(ks, edge), 1, len(ks) - 1))
        return sorted({int(ks[np.argmin(np.abs(ks - best))]), int(ks[above - 1]), int(ks[above])})

    def _bracket(self, ks: Iterable[int], n_updates: int, step: int, *, finds_slow_edge: bool = False) -> None:
        """Try rates, and more of them until the best rate and the edges lie between neighbours."""
        try:
            for k in ks:
                self._try(k, 0, n_updates)
            while (more := self._missing(n_updates, step, finds_slow_edge)) is not None:
                self._try(more, 0, n_updates)
        except _BudgetSpentError:
            pass

    def _repeat(self, ks: Iterable[int], n_updates: int) -> None:
        """Try rates with the other seeds."""
        try:
            for seed in range(1, self.n_seeds):
                for k in ks:
                    self._try(k, seed, n_updates)
        except _BudgetSpentError:
            pass

    def _missing(self, n_updates: int, step: int, finds_slow_edge: bool) -> int | None:
        """The next power to try; None: what is sought is known."""
        ks, band = self._band(n_updates)
        if math.isnan(band.best_rate) or band.best_rate == rate_of(ks[0]):
            more = ks[0] - _COARSE
        elif math.isnan(band.useful_edge):
            more = ks[-1] + step
        elif finds_slow_edge and math.isnan(band.slow_edge):
            more = ks[0] - _COARSE
        else:
            above = next(i for i, k in enumerate(ks) if rate_of(k) >= band.useful_edge)
            if ks[above] - ks[above - 1] <= step:
                return None
            more = (ks[above] + ks[above - 1]) // 2
        return more if _LOWEST < rate_of(more) < _HIGHEST else None

    def _try(self, k: int, seed: int, n_updates: int) -> None:
        """Train a run and note its losses, unless it was trained before in this round."""
        if (n_updates, k, seed) in self._losses:
            return
        if self.runs.n_updates + n_updates > self.budget:
            raise _BudgetSpentError
        steps = _steps(n_updates)[::-1]
        for step, loss in zip(steps, self.runs.losses(rate_of(k), seed, steps), strict=True):
            self._losses[step, k, seed] = loss

    def _losses_at(self, n_updates: int) -> tuple[list[int], np.ndarray]:
        """The powers tried with so many updates, and their losses, shape (rate, seed)."""
        ks = sorted({k for step, k, _ in self._losses if step == n_updates})
        loss = [[self._losses.get((n_updates, k, seed), math.nan) for seed in range(self.n_seeds)] for k in ks]
        return ks, np.array(loss).reshape(len(ks), self.n_seeds)

    def _band(self, n_updates: int) -> tuple[list[int], UsefulBand]:
        """The powers tried with so many updates, and the useful band among them."""
        ks, loss = self._losses_at(n_updates)
        before = _steps(n_updates)[1]
        earlier = np.array(
            [[self._losses.get((before, k, seed), math.nan) for seed in range(self.n_seeds)] for k in ks]
        )
        is_used = ~np.isnan(loss).all(axis=0)
        return ks, useful_band(np.array([rate_of(k) for k in ks]), loss[:, is_used], earlier[:, is_used])

    def _round(self, n_updates: int) -> Round | None:
        """What is known at a number of updates; None: no rate is finite."""
        ks, loss = self._losses_at(n_updates)
        if not np.isfinite(loss).any():
            return None
        bands = [self._band(step)[1] for step in _steps(n_updates)[:-1] if self._losses_at(step)[0]]
        best, slow, edge = (
            _geometric_mean(getattr(band, name) for band in bands) for name in ("best_rate", "slow_edge", "useful_edge")
        )
        return Round(n_updates, np.array([rate_of(k) for k in ks]), loss, best, slow, edge)


def _steps(n_updates: int) -> list[int]:
    """Numbers of updates at which losses are measured, the last first; each is the reference of the one before it."""
    steps = [n_updates]
    for _ in range(_N_AVERAGED):
        steps.append(round(REFERENCE_SHARE * steps[-1]))
    return steps


def _geometric_mean(rates: Iterable[float]) -> float:
    known = [math.log(rate) for rate in rates if math.isfinite(rate)]
    return math.exp(sum(known) / len(known)) if known else math.nan


def rate_of(k: int) -> float:
    """A rate of the lattice, rounded to four digits."""
    return float(f"{1e-3 * RATIO**k:.4g}")


def power_of(rate: float) -> float:
    """The power that gives a rate."""
    return math.log(rate / 1e-3) / math.log(RATIO)
