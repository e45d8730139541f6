"""The mathematical core: moments -> whitened operator -> modes -> measures (RKSP, arXiv:2602.22988)."""

from workbench.spectral.dmd import DmdOptions, WhitenedOperator, eigenmodes, whitened_operator
from workbench.spectral.kreiss import kreiss_constant
from workbench.spectral.measures import (
    Thresholds,
    depth_thirds,
    mass_fractions,
    near_unit_mass,
    remeasure,
    summarize,
)
from workbench.spectral.moments import SnapshotMoments
from workbench.spectral.spectra import RankWarning, layer_spectra, layer_spectrum, whitened_dmd

__all__ = [
    "DmdOptions",
    "RankWarning",
    "SnapshotMoments",
    "Thresholds",
    "WhitenedOperator",
    "depth_thirds",
    "eigenmodes",
    "kreiss_constant",
    "layer_spectra",
    "layer_spectrum",
    "mass_fractions",
    "near_unit_mass",
    "remeasure",
    "summarize",
    "whitened_dmd",
    "whitened_operator",
]
