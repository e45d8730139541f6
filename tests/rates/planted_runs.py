"""Runs of a pilot with planted losses."""

import math
from dataclasses import dataclass, field


@dataclass
class PlantedRuns:
    """Losses that fall with the updates and rise with the squared distance from the best rate in the logarithm.

    With the reference after four fifths of the updates, useful rates lie within ``half_width`` of the best one.
    """

    best: float = 3e-3
    half_width: float = math.log(2.0)
    breaks_at: float = math.inf
    n_updates: int = 0
    _made: dict = field(default_factory=dict)

    def loss_at(self, rate, seed, n_steps):
        """The loss of a run; it is asked for later updates only."""
        made = self._made.get((rate, seed), 0)
        assert n_steps >= made
        self._made[rate, seed] = n_steps
        self.n_updates += n_steps - made
        if rate > self.breaks_at:
            return math.inf
        gain = math.log(1 / 0.8)  # between four fifths of the updates and all of them
        distance = math.log(rate / self.best) / self.half_width
        return 5.0 - math.log(n_steps) + gain * (min(distance**2, 20.0) + 0.01 * abs(distance)) + 0.001 * seed

    def begin_round(self, n_updates):
        """All runs are new from now on."""
        self._made.clear()

    def close(self):
        """Nothing to do."""
