"""Successive halving over learning rates: many rates for few updates, then fewer rates for more updates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from workbench.rates.pilot_runs import PilotRuns
from workbench.rates.useful_band import REFERENCE_SHARE, UsefulBand, useful_band

#: Rates are LOWEST_POWER.. powers of this.
RATIO = 1.5
#: Powers between two rates of the first round.
_COARSE = 3
#: By which power of the number of updates the useful edge is expected to fall from one round to the next.
_DRIFT = 0.5
#: Updates of the first round, and factor to the number of the second.
_FIRST, _GROWTH = 24, 3
#: Rates that are not tried.
_LOWEST, _HIGHEST = 1e-9, 1e6


class BudgetSpent(Exception):
    """A run would exceed the budget."""


@dataclass
class RateSearch:
    """The losses of a pilot by number of updates, rate and seed, as they are measured.

    Args:
        runs: The runs.
        budget: Updates at most, over all runs.
        n_seeds: Seeds of the last round.
    """

    runs: PilotRuns
    budget: int
    n_seeds: int
    losses: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _made: dict[tuple[int, int], int] = field(default_factory=dict)

    def loss_at(self, k: int, seed: int, n_steps: int) -> float:
        """Loss of the run at RATIO ** k, also measured at the reference's share of the updates."""
        if (n_steps, k, seed) not in self.losses:
            made = self._made.get((k, seed), 0)
            if self.runs.n_updates + n_steps - made > self.budget:
                raise BudgetSpent
            for step in (self.reference_step(n_steps), n_steps):
                if step >= made:
                    self.losses[step, k, seed] = self.runs.loss_at(rate_of(k), seed, step)
            self._made[k, seed] = n_steps
        return self.losses[n_steps, k, seed]

    @staticmethod
    def reference_step(n_steps: int) -> int:
        """Number of updates after which the best run sets the largest useful loss."""
        return round(REFERENCE_SHARE * n_steps)

    def band_at(self, n_steps: int) -> tuple[list[int], UsefulBand]:
        """The powers tried with so many updates, and the useful band among them."""
        ks = sorted({k for step, k, _ in self.losses if step == n_steps})
        loss, earlier = (
            np.array([[self.losses.get((step, k, seed), math.nan) for seed in range(self.n_seeds)] for k in ks])
            for step in (n_steps, self.reference_step(n_steps))
        )
        kept = ~np.isnan(loss).all(axis=0)
        return ks, useful_band(np.array([rate_of(k) for k in ks]), loss[:, kept], earlier[:, kept])

    def bracket(self, ks: Iterable[int], n_steps: int, step: int, seed: int = 0) -> UsefulBand:
        """Try rates, and more of them until the best and the useful edge lie between two."""
        for k in ks:
            self.loss_at(k, seed, n_steps)
        while True:
            tried, band = self.band_at(n_steps)
            if math.isnan(band.best_rate) or band.best_rate == rate_of(tried[0]):
                more = tried[0] - step
            elif math.isnan(band.useful_edge):
                more = tried[-1] + step
            else:
                return band
            if not _LOWEST < rate_of(more) < _HIGHEST:
                return band
            self.loss_at(more, seed, n_steps)


def rate_of(k: int) -> float:
    """A rate of the lattice, rounded to four digits."""
    return float(f"{1e-3 * RATIO**k:.4g}")
