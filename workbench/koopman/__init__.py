"""Koopman spectra from snapshots: moments, whitened operator, modes and measures (RKSP, arXiv:2602.22988).

Example:
    >>> import numpy as np
    >>> import workbench as wb
    >>> X = np.random.default_rng(0).normal(size=(64, 4))
    >>> spectra = wb.koopman.whitened_dmd(X, X @ np.diag([0.5, 0.9, 1.0, 1.2]))
    >>> round(spectra["spectral_radius"].item(), 3)
    1.2

See Also:
    `workbench.koopman.whitened_dmd`: Spectrum of one layer from its snapshots.
    `workbench.profile`: Spectra of all layers of a model.
"""

from workbench.koopman.dmd import whitened_operator
from workbench.koopman.measures import mass_fractions, near_unit_mass
from workbench.koopman.modes import eigenmodes
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.sketch import SnapshotSketch
from workbench.koopman.spectra import RankWarning, kreiss_constant, layer_spectra, layer_spectrum, whitened_dmd
from workbench.option_checks import publish

__all__ = [
    "RankWarning", "SnapshotMoments", "SnapshotSketch", "eigenmodes", "kreiss_constant", "layer_spectra",
    "layer_spectrum", "mass_fractions", "near_unit_mass", "whitened_dmd", "whitened_operator",
]  # fmt: skip

__dir__ = publish(__name__)
