"""KSS without a gradient: updates are undone and reduced so that no block leaves its band in one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from workbench.option_checks import checked
from workbench.option_kinds import Fraction, NonNegativeFloat, at_least, one_of

MEASURES = ("energy_gain", "spectral_radius")


@checked
@dataclass(frozen=True)
class TrustRegion:
    """The rule by which an update is undone and the following updates are reduced.

    An update is undone if it raises the measure of a layer above the band, and by more than the fraction ``rise``. The
    following updates are divided by 1 + strength. Each update that is kept multiplies the size of the next one by
    ``recovery``, up to the full update of the optimizer. Trust-region methods adapt their radius in the same way
    (Nocedal & Wright 2006, chapter 4), but from the error of a model instead of the spectrum.

    Attributes:
        measure: ``"energy_gain"``, the factor by which a block increases the norm of the centered states,
            sqrt(E|y|^2 / E|x|^2), or ``"spectral_radius"``. The gain also covers the amplification by an operator that
            is not normal, which its eigenvalues do not show.
        highest: Upper edge of the band. Updates that stay within the band are unchanged.
        rise: Largest fraction by which the measure may rise in one step above the band.
        recovery: Factor on the size of the updates after each update that is kept.
        smallest: Smallest size of an update, as a fraction of the optimizer's update.
    """

    measure: Annotated[str, one_of(MEASURES)] = "energy_gain"
    highest: NonNegativeFloat = 2.0
    rise: NonNegativeFloat = 0.25
    recovery: Annotated[float, at_least(1)] = 1.02
    smallest: Fraction = 0.01

    def outside(self, measured: Mapping[int, float]) -> list[int]:
        """Return the layers above the band, including those with a measure that is not finite."""
        return [layer for layer, value in measured.items() if not value <= self.highest]

    def violated(self, before: Mapping[int, float], after: Mapping[int, float]) -> list[int]:
        """Return the layers that cause the update to be undone."""

        def limit(layer: int) -> float:
            risen = before[layer] * (1 + self.rise)
            return max(self.highest, risen) if math.isfinite(risen) else self.highest

        return [layer for layer in after if not after[layer] <= limit(layer)]

    def next_size(self, size: float, strength: float, *, is_undone: bool) -> float:
        """Return the size of the next update, as a fraction of the optimizer's update."""
        return max(self.smallest, size / (1 + strength)) if is_undone else min(1.0, size * self.recovery)
