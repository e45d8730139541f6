"""KSS without a gradient: updates are cut so that no block's spectrum leaves its band in one step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.errors import OptionError
from workbench.models.device_numbers import read_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.koopman.moments import SnapshotMoments

MEASURES = ("energy_gain", "spectral_radius")


@dataclass(frozen=True)
class TrustRegion:
    """The rule by which an update is undone and the next ones are cut.

    An update that lifts the measure of a layer above the band, by more than the share that it may rise in one step, is
    taken back, and the following ones are divided by 1 + strength. With every update that is kept they grow again by
    ``recovery``, up to the optimizer's own: the rule by which trust-region methods find their radius (Nocedal & Wright
    2006, chapter 4), with the spectrum in place of the model's error.

    Attributes:
        measure: ``"energy_gain"``, the factor by which a block increases the norm of the states, sqrt(E|y|^2 / E|x|^2)
            about their means, or ``"spectral_radius"``. A block may keep its eigenvalues and yet amplify, as operators
            that are not normal do; the gain includes both.
        highest: Upper edge of the band; inside the band updates are unchanged.
        rise: Largest share by which the measure may rise in one step above the band.
        recovery: Factor of the update's size after each one that is kept.
        smallest: Smallest size of an update, as a share of the optimizer's own.
    """

    measure: str = "energy_gain"
    highest: float = 2.0
    rise: float = 0.25
    recovery: float = 1.02
    smallest: float = 0.01

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise OptionError(f"measure is '{self.measure}', expected one of {', '.join(MEASURES)}.")
        for name, lowest in (("highest", 0.0), ("rise", 0.0), ("recovery", 1.0)):
            if not lowest <= getattr(self, name) < math.inf:
                raise OptionError(f"{name} is {getattr(self, name)}, expected a number of at least {lowest:g}.")
        if not 0 < self.smallest <= 1:
            raise OptionError(f"smallest is {self.smallest}, expected a share above 0, at most 1.")

    def outside(self, measured: Mapping[int, float]) -> list[int]:
        """Layers above the band; one without a finite measure counts."""
        return [layer for layer, value in measured.items() if not value <= self.highest]

    def broken(self, before: Mapping[int, float], after: Mapping[int, float]) -> list[int]:
        """Layers that cause the update to be undone."""

        def limit(layer: int) -> float:
            risen = before[layer] * (1 + self.rise)
            return max(self.highest, risen) if math.isfinite(risen) else self.highest

        return [layer for layer in after if not after[layer] <= limit(layer)]

    def next_size(self, size: float, strength: float, *, is_broken: bool) -> float:
        """Share of the optimizer's own update that the next one takes."""
        return max(self.smallest, size / (1 + strength)) if is_broken else min(1.0, size * self.recovery)


def energy_gain(moments: SnapshotMoments) -> float:
    """The factor by which a block increases the norm of the centred states: sqrt(E|y|^2 / E|x|^2), unit 1."""
    return energy_gains({0: moments})[0]


def energy_gains(moments: Mapping[int, SnapshotMoments]) -> dict[int, float]:
    """`energy_gain` of each layer; the host waits for the device once."""
    return gains_of(moments, read_numbers(gain_terms(moments)))


def gain_terms(moments: Mapping[int, SnapshotMoments]) -> list[Tensor]:
    """What `gains_of` needs of the layers, on the device."""
    before = [layer.c_xx.detach().diagonal().sum() for layer in moments.values()]
    grown = [(2 * layer.c_dx.detach().diagonal() + layer.c_dd.detach().diagonal()).sum() for layer in moments.values()]
    return [*before, *grown]


def gains_of(layers: Collection[int], numbers: Sequence[float]) -> dict[int, float]:
    """The gain of each layer from the values of its terms."""
    gains = {}
    for layer, old, more in zip(layers, numbers[: len(layers)], numbers[len(layers) :], strict=True):
        gains[layer] = math.sqrt(max(old + more, 0.0) / old) if old > 0 else math.nan
    return gains
