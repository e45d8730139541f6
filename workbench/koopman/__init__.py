"""The mathematical core: moments -> whitened operator -> modes -> measures (RKSP, arXiv:2602.22988)."""

from workbench.koopman.dmd import WhitenedOperator, whitened_operator
from workbench.koopman.kreiss import kreiss_constant
from workbench.koopman.measures import mass_fractions, near_unit_mass
from workbench.koopman.modes import eigenmodes
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.sketch import SnapshotSketch
from workbench.koopman.spectra import RankWarning, layer_spectra, layer_spectrum, whitened_dmd

__all__ = [
    "RankWarning",
    "SnapshotMoments",
    "SnapshotSketch",
    "WhitenedOperator",
    "eigenmodes",
    "kreiss_constant",
    "layer_spectra",
    "layer_spectrum",
    "mass_fractions",
    "near_unit_mass",
    "whitened_dmd",
    "whitened_operator",
]


def __dir__() -> list[str]:
    return sorted(__all__)
