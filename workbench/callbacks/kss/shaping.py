"""The record of KSS in one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.callbacks.kss.control import ControlValues


@dataclass(frozen=True)
class Shaping:
    """The record of KSS in one step.

    Attributes:
        step: Number of optimizer steps done before this one.
        control: The controls that the step used.
        layers: Layers measured; empty where nothing was due.
        penalty: Mean penalty of the layers that took part; NaN if none did.
        spectral_radius: Largest over the layers measured; NaN if there is no spectrum, or none was taken.
        near_unit_mass: Mean over the layers measured; NaN likewise.
        skipped: Layers left out although they were due: layer -> reason.
        n_acting: Number of layers whose gradient reached the parameters, or that caused the update to be undone.
        update_size: Share of the optimizer's own update that was tried; below 1 only in a trust region.
    """

    step: int
    control: ControlValues
    layers: tuple[int, ...] = ()
    penalty: float = math.nan
    spectral_radius: float = math.nan
    near_unit_mass: float = math.nan
    skipped: Mapping[int, str] | None = None
    n_acting: int = 0
    update_size: float = 1.0

    def monitors(self) -> dict[str, float]:
        """The numbers of the step; names as in ``schema.MONITORS``."""
        return {
            "kss_enabled": self.control.enabled,
            "kss_strength": self.control.strength,
            "kss_interval": self.control.interval,
            "kss_gamma": self.control.gamma,
            "kss_penalty": self.penalty,
            "kss_spectral_radius": self.spectral_radius,
            "kss_near_unit_mass": self.near_unit_mass,
            "kss_acting": self.n_acting,
            "kss_skipped": len(self.skipped or ()),
            "kss_update_size": self.update_size,
        }
