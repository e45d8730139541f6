"""Published figures of the papers as data, for comparison with measured ones.

Example:
    >>> import workbench as wb
    >>> wb.published.depth_thirds()["model"].values.tolist()
    ['GPT-2 124M', 'GPT-2 355M', 'LLaMA-2 7B']

See Also:
    `workbench.compare`: Compares runs with the published figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.koopman.measures import THIRDS
from workbench.option_checks import publish
from workbench.schema.runs import SPECTRA

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["SHARES", "architectures", "depth_thirds", "largest_stable_rates"]


_SOURCE = "RKSP, arXiv:2602.22988"

_OF_DEPTH = ("near_unit_mass", "spectral_radius", "eigenvector_condition", "nonlinearity_ratio")
#: Model -> values of these measures in the early, middle and late third of the layers; None if not published.
_DEPTH: dict[str, tuple[tuple[float | None, ...], ...]] = {
    "GPT-2 124M": ((0.68, 0.62, 0.58), (1.15, 1.23, 1.31), (8.3, 10.1, 11.2), (0.52, 0.61, 0.71)),
    "GPT-2 355M": ((0.72, 0.65, 0.60), (1.12, 1.19, 1.27), (7.5, 9.2, 10.8), (0.48, 0.58, 0.68)),
    "LLaMA-2 7B": ((0.74, 0.68, 0.61), (None, None, None), (8.2, 9.5, 10.8), (0.45, 0.58, 0.72)),
}

#: Variables of `architectures` in addition to the measures of the schema: name -> long name and meaning; unit 1.
SHARES = {
    "reliable_fraction": ("reliable modes", "fraction of modes whose residual is at most the threshold"),
    "divergence_rate": ("divergence rate", "fraction of runs that diverged"),
}


def _norm(rate: float, near: float, expansive: float, radius: float) -> dict[str, float]:
    """Return the figures of a normalization on associative recall (RKSP Table 1); the rate is in percent of runs."""
    return {
        "divergence_rate": rate / 100, "near_unit_mass": near, "expansive_mass": expansive, "spectral_radius": radius,
    }  # fmt: skip


def _of(nonlinearity: float, near: float, radius: float) -> dict[str, float]:
    return {"nonlinearity_ratio": nonlinearity, "near_unit_mass": near, "spectral_radius": radius}


#: Architecture -> figures of Table 1 and of the architecture tables of RKSP, at initialization. "M < 1" is interpreted
#: as the contractive mass, because "M > 1" is the expansive mass. The architecture tables have M = 0.79 for No-Norm,
#: and Table 1 has 0.80.
_ARCHITECTURES = {
    "Pre-LN": _norm(0.0, 0.16, 0.54, 2.29) | {"nonlinearity_ratio": 0.52},
    "Post-LN": _norm(0.0, 0.66, 0.31, 7.48),
    "RMSNorm": _norm(0.0, 0.16, 0.54, 2.28),
    "DeepNorm": _norm(0.0, 0.00, 1.00, 3.94),
    "SubLN": _norm(0.0, 0.13, 0.54, 2.23),
    "No-Norm": _norm(96.4, 0.79, 0.19, 1.11) | {"nonlinearity_ratio": 0.48},
    "MoE top-1": _of(0.68, 0.72, 2.85) | {"divergence_rate": 6 / 24},
    "MoE top-2": _of(0.55, 0.58, 2.12),
    "MoE top-4": _of(0.48, 0.45, 1.78) | {"divergence_rate": 1 / 24},
    "Mamba": _of(0.42, 0.12, 0.95) | {"contractive_mass": 0.85},
    "KAN": _of(0.78, 0.52, 2.15),
    "KAN B=4": {"reliable_fraction": 0.68},
    "KAN B=8": {"reliable_fraction": 0.52},
    "ViT Pre-LN": {"near_unit_mass": 0.42},
    "ViT RMSNorm": {"near_unit_mass": 0.48},
}

#: Normalization -> largest rate at which less than 20 % of the runs diverge, without and with KSS (RKSP).
_STABLE_RATES = {"pre_ln": (0.005, 0.008), "rms_norm": (0.003, 0.005), "none": (0.002, 0.005)}


def architectures() -> xr.Dataset:
    """Return the published spectra of architectures at initialization (RKSP, Table 1 and the architecture tables).

    The rows of the normalizations are those of associative recall in Table 1, completed by the architecture tables;
    "MoE top-2" is top 2 of 8 experts; "KAN B=4" and "KAN B=8" have the fraction of reliable modes only.

    Returns:
        Dataset with dim ``architecture``: near_unit_mass, expansive_mass, contractive_mass, spectral_radius and
        nonlinearity_ratio as in the spectra of the workbench (means over layers), reliable_fraction and divergence_rate
        as fractions; NaN if not published.

    Example:
        >>> import workbench as wb
        >>> table = wb.published.architectures()
        >>> table["near_unit_mass"].sel(architecture=["Pre-LN", "No-Norm"]).values
        array([0.16, 0.79])

    See Also:
        `workbench.compare`: Compares runs with these figures.
        `workbench.samples.open`: Measured spectra at the same sizes.
    """
    import numpy as np
    import xarray as xr

    names = ("near_unit_mass", "expansive_mass", "contractive_mass", "spectral_radius", "nonlinearity_ratio", *SHARES)
    variables = {}
    for name in names:
        long_name, meaning = SHARES.get(name) or (SPECTRA[name].long_name, SPECTRA[name].meaning)
        values = np.array([row.get(name, np.nan) for row in _ARCHITECTURES.values()])
        variables[name] = ("architecture", values, {"long_name": long_name, "units": "1", "meaning": meaning})
    return xr.Dataset(variables, {"architecture": list(_ARCHITECTURES)}, {"source": _SOURCE})


def depth_thirds() -> xr.Dataset:
    """Return the published spectra of pretrained models by depth (RKSP, depth tables).

    Returns:
        Dataset with dims ``model`` and ``third``, with the variable names of `workbench.depth_thirds`; NaN if not
        published.

    Example:
        >>> import workbench as wb
        >>> wb.published.depth_thirds()["model"].values.tolist()
        ['GPT-2 124M', 'GPT-2 355M', 'LLaMA-2 7B']

    See Also:
        `workbench.depth_thirds`: The same averages of measured spectra.
    """
    import numpy as np
    import xarray as xr

    values = np.array([*_DEPTH.values()], dtype=float)  # (model, measure, third)
    variables = {name: (("model", "third"), values[:, i]) for i, name in enumerate(_OF_DEPTH)}
    return xr.Dataset(variables, {"model": list(_DEPTH), "third": list(THIRDS)}, {"source": _SOURCE})


def largest_stable_rates() -> xr.DataArray:
    """Return the published largest stable learning rates, at which less than 20 % of the runs diverge (RKSP).

    Returns:
        The rate by ``norm`` and ``control`` ("none" and "KSS .15, published").

    Example:
        >>> import workbench as wb
        >>> wb.published.largest_stable_rates().sel(norm="none").to_series().to_dict()
        {'none': 0.002, 'KSS .15, published': 0.005}

    See Also:
        `workbench.outcomes.largest_rate_without_explosion`: The same rate of recorded runs.
    """
    import numpy as np
    import xarray as xr

    coords = {"norm": list(_STABLE_RATES), "control": ["none", "KSS .15, published"]}
    about = {"long_name": "largest stable learning rate (RKSP)", "units": "1", "below": 0.20, "source": _SOURCE}
    values = np.array([*_STABLE_RATES.values()])
    return xr.DataArray(values, coords, ["norm", "control"], name="largest_stable_rate", attrs=about)


__dir__ = publish(__name__)
