"""Figures of the papers, as data, to be shown beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.schema import SPECTRA
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

#: What `architectures` says beside the measures of the schema: name -> long name and meaning; unit 1.
SHARES = {
    "reliable_fraction": ("reliable modes", "share of modes whose residual is at most the threshold"),
    "divergence_rate": ("divergence rate", "share of runs that diverged"),
}

#: Architecture -> what the architecture tables of RKSP give, at initialization. M < 1 is read as the contractive mass,
#: as M > 1 is the expansive one. The figures of No-Norm differ a little from those of Table 1 (M .80).
_ARCHITECTURES = {
    "Pre-LN": {"nonlinearity_ratio": 0.52, "near_unit_mass": 0.16, "spectral_radius": 2.29},
    "Post-LN": {},
    "RMSNorm": {},
    "DeepNorm": {},
    "SubLN": {},
    "No-Norm": {"nonlinearity_ratio": 0.48, "near_unit_mass": 0.79, "spectral_radius": 1.11},
    "MoE top-1": {
        "nonlinearity_ratio": 0.68,
        "near_unit_mass": 0.72,
        "spectral_radius": 2.85,
        "divergence_rate": 6 / 24,
    },
    "MoE top-2": {"nonlinearity_ratio": 0.55, "near_unit_mass": 0.58, "spectral_radius": 2.12},
    "MoE top-4": {
        "nonlinearity_ratio": 0.48,
        "near_unit_mass": 0.45,
        "spectral_radius": 1.78,
        "divergence_rate": 1 / 24,
    },
    "Mamba": {
        "nonlinearity_ratio": 0.42,
        "near_unit_mass": 0.12,
        "spectral_radius": 0.95,
        "contractive_mass": 0.85,
    },
    "KAN": {"nonlinearity_ratio": 0.78, "near_unit_mass": 0.52, "spectral_radius": 2.15},
    "KAN B=4": {"reliable_fraction": 0.68},
    "KAN B=8": {"reliable_fraction": 0.52},
    "ViT Pre-LN": {"near_unit_mass": 0.42},
    "ViT RMSNorm": {"near_unit_mass": 0.48},
}

#: Architecture -> its norm in Table 1, which fills what the architecture tables leave open.
_NORM_OF = {
    "Pre-LN": "pre_ln",
    "Post-LN": "post_ln",
    "RMSNorm": "rms_norm",
    "DeepNorm": "deep_norm",
    "SubLN": "sub_ln",
    "No-Norm": "none",
}


def architectures() -> xr.Dataset:
    """Published spectra of architectures at initialization (RKSP, Table 1 and the architecture tables).

    The rows of the norms are the associative recall of Table 1, with what the architecture tables add; "MoE top-2" is
    top 2 of 8 experts; "KAN B=4" and "KAN B=8" have the share of reliable modes only.

    Returns:
        Dataset with dim ``architecture``: near_unit_mass, expansive_mass, contractive_mass, spectral_radius and
        nonlinearity_ratio as in our spectra (means over layers), reliable_fraction and divergence_rate as fractions;
        NaN where nothing is published.
    """
    import numpy as np
    import xarray as xr

    table = normalization_table()
    rows = {
        name: (
            {key: float(v) for key, v in table.sel(norm=_NORM_OF[name]).data_vars.items()} if name in _NORM_OF else {}
        )
        | row
        for name, row in _ARCHITECTURES.items()
    }
    names = ("near_unit_mass", "expansive_mass", "contractive_mass", "spectral_radius", "nonlinearity_ratio", *SHARES)
    variables = {}
    for name in names:
        long_name, meaning = SHARES.get(name) or (SPECTRA[name].long_name, SPECTRA[name].meaning)
        values = np.array([row.get(name, np.nan) for row in rows.values()])
        variables[name] = ("architecture", values, {"long_name": long_name, "units": "1", "meaning": meaning})
    return xr.Dataset(variables, {"architecture": list(rows)}, {"source": _SOURCE})


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
