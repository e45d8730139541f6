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
        step: Number of optimizer steps before this one.
        control: Values of the controls in this step.
        layers: Measured layers; empty in steps without a measurement.
        penalty: Mean penalty of the measured layers; NaN if there is none.
        spectral_radius: Maximum over the measured layers; NaN if no spectrum was taken.
        near_unit_mass: Mean over the measured layers; NaN if no spectrum was taken.
        skipped: Mapping from each layer that was skipped to the reason; None if nothing was measured.
        n_acting: Number of layers whose gradient reached the parameters, or that caused the update to be undone.
        update_size: Size of the update, as a fraction of the optimizer's update; below 1 only in a trust region.
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
        """Return the metrics of the step; names as in ``schema.MONITORS``."""
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
