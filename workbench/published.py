"""Figures of the papers, as data, to be shown beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.spectral.measures import THIRDS

if TYPE_CHECKING:
    import xarray as xr

_SOURCE = "RKSP, arXiv:2602.22988"

#: Norm -> divergence rate (percent of runs), M, expansive mass, rho on associative recall (RKSP Table 1).
_NORMS = {
    "pre_ln": (0.0, 0.16, 0.54, 2.29),
    "post_ln": (0.0, 0.66, 0.31, 7.48),
    "rms_norm": (0.0, 0.16, 0.54, 2.28),
    "deep_norm": (0.0, 0.00, 1.00, 3.94),
    "sub_ln": (0.0, 0.13, 0.54, 2.23),
    "none": (96.4, 0.80, 0.19, 1.11),
}

#: Model -> measure -> values in the early, middle and late third of the layers; None where none is published.
_DEPTH = {
    "GPT-2 124M": {
        "near_unit_mass": (0.68, 0.62, 0.58),
        "spectral_radius": (1.15, 1.23, 1.31),
        "eigenvector_condition": (8.3, 10.1, 11.2),
        "nonlinearity_ratio": (0.52, 0.61, 0.71),
    },
    "GPT-2 355M": {
        "near_unit_mass": (0.72, 0.65, 0.60),
        "spectral_radius": (1.12, 1.19, 1.27),
        "eigenvector_condition": (7.5, 9.2, 10.8),
        "nonlinearity_ratio": (0.48, 0.58, 0.68),
    },
    "LLaMA-2 7B": {
        "near_unit_mass": (0.74, 0.68, 0.61),
        "spectral_radius": (None, None, None),
        "eigenvector_condition": (8.2, 9.5, 10.8),
        "nonlinearity_ratio": (0.45, 0.58, 0.72),
    },
}


def depth_thirds() -> xr.Dataset:
    """Published spectra of pretrained models by depth (RKSP, depth tables).

    Returns:
        Dataset with dims ``model`` and ``third``, the names of our spectra; NaN where nothing is published.
    """
    import numpy as np
    import xarray as xr

    names = list(next(iter(_DEPTH.values())))
    variables = {
        name: (("model", "third"), np.array([_DEPTH[model][name] for model in _DEPTH], dtype=float)) for name in names
    }
    return xr.Dataset(variables, {"model": list(_DEPTH), "third": list(THIRDS)}, {"source": _SOURCE})


def normalization_table() -> xr.Dataset:
    """Published divergence rate and spectra of the six normalizations at initialization (RKSP Table 1).

    Returns:
        Dataset with dim ``norm``: divergence_rate (fraction of runs), near_unit_mass, expansive_mass, spectral_radius.
    """
    import numpy as np
    import xarray as xr

    rate, near, expansive, radius = np.array(list(_NORMS.values())).T
    variables = {
        "divergence_rate": ("norm", rate / 100),
        "near_unit_mass": ("norm", near),
        "expansive_mass": ("norm", expansive),
        "spectral_radius": ("norm", radius),
    }
    return xr.Dataset(variables, {"norm": list(_NORMS)}, {"source": f"{_SOURCE}, Table 1"})
