"""Pilot runs with known losses."""

import math
from dataclasses import dataclass


@dataclass
class KnownRuns:
    """Losses that decrease with the updates, and increase with the squared log distance from the best rate.

    With the reference after four fifths of the updates, useful rates lie within ``half_width`` of the best one.
    """

    best: float = 3e-3
    half_width: float = math.log(2.0)
    diverges_above: float = math.inf
    n_updates: int = 0
    trivial_loss: float = math.nan
    longest: int = 0

    def losses(self, rate, seed, steps, limits):
        """Return the losses of a run after the given numbers of updates, up to the first one above its limit."""
        losses = [self.loss_at(rate, seed, step) for step in steps]
        beyond = [i for i, (loss, limit) in enumerate(zip(losses, limits, strict=True)) if limit < loss < math.inf]
        end = beyond[0] + 1 if beyond else len(steps)
        self.n_updates += steps[end - 1]
        self.longest = max(self.longest, steps[end - 1])
        return losses[:end]

    def loss_at(self, rate, seed, n_steps):
        """Return the loss of a run after a number of updates."""
        if rate > self.diverges_above:
            return math.inf
        gain = math.log(1 / 0.8)  # between four fifths of the updates and all of them
        distance = math.log(rate / self.best) / self.half_width
        return 5.0 - math.log(n_steps) + gain * (min(distance**2, 20.0) + 0.01 * abs(distance)) + 0.001 * seed
