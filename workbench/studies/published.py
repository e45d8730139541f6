"""Published figures of the papers as data, for comparison with measured ones.

Example:
    >>> import workbench as wb
    >>> wb.published.normalization_table()["norm"].values[:3].tolist()
    ['pre_ln', 'post_ln', 'rms_norm']

See Also:
    `workbench.compare`: Compares runs with the published figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from workbench.errors import OptionError
from workbench.koopman.measures import THIRDS
from workbench.option_checks import at_least, publish
from workbench.schema.runs import SPECTRA

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "SHARES",
    "architectures",
    "decision_chart",
    "depth_thirds",
    "largest_stable_rates",
    "normalization_table",
    "predictor_table",
    "shaping_table",
]


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

#: Model -> measure -> values in the early, middle and late third of the layers; None if not published.
_DEPTH: dict[str, dict[str, tuple[float | None, ...]]] = {
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

#: Variables of `architectures` in addition to the measures of the schema: name -> long name and meaning; unit 1.
SHARES = {
    "reliable_fraction": ("reliable modes", "fraction of modes whose residual is at most the threshold"),
    "divergence_rate": ("divergence rate", "fraction of runs that diverged"),
}

#: Architecture -> figures of the architecture tables of RKSP, at initialization. "M < 1" is interpreted as the
#: contractive mass, because "M > 1" is the expansive mass. The figures of No-Norm differ slightly from those of Table 1
#: (M = 0.80).
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

#: Architecture -> its normalization in Table 1, which has figures that the architecture tables lack.
_NORM_OF = {
    "Pre-LN": "pre_ln",
    "Post-LN": "post_ln",
    "RMSNorm": "rms_norm",
    "DeepNorm": "deep_norm",
    "SubLN": "sub_ln",
    "No-Norm": "none",
}

#: Control -> diverged runs of 24, accuracy (percent), M and overhead (percent of the time) on No-Norm, at learning
#: rates from 0.005 to 0.01 (RKSP, tables of KSS); None if not published. Names as in `workbench.samples.shaping`. The
#: radius of SAM in the combination is unknown, and muP's "less than 1 %" is entered as 1 %.
_N_SHAPING_RUNS = 24
_SHAPING = {
    "none": (16, 28.5, 0.85, None),
    "clip 0.5": (12, 32.1, 0.82, None),
    "clip 1.0": (14, 30.8, 0.83, None),
    "KSS .10, published": (6, 42.3, 0.68, 9.5),
    "KSS .15, published": (3, 48.2, 0.58, 10.8),
    "KSS .20, published": (2, 46.5, 0.52, 11.2),
    "KSS .15, unstable term only": (8, 38.5, 0.68, 11.0),
    "KSS .15, near-unit term only": (10, 36.2, 0.72, 11.0),
    "random l2": (13, 31.2, 0.81, 11.0),
    "Jacobian penalty": (11, 33.8, 0.78, 11.0),
    "activation variance": (12, 32.5, 0.80, 11.0),
    "spectral norm": (10, 35.2, None, 5.2),
    "weight norm": (13, 32.8, None, 3.8),
    "gradient penalty 0.1": (11, 33.1, None, 6.4),
    "SAM 0.05": (9, 38.6, None, 100.0),
    "SAM 0.10": (8, 40.2, None, 100.0),
    "Lion": (11, 36.5, None, 15.0),
    "LAMB": (11, 36.2, None, 5.0),
    "muP": (10, 35.8, None, 1.0),
    "SAM 0.05 + KSS .15, published": (2, 45.8, None, None),
    "LAMB + KSS .15, published": (2, 52.8, None, None),
    "muP + KSS .15, published": (2, 51.5, None, None),
}

#: Normalization -> largest rate at which less than 20 % of the runs diverge, without and with KSS (RKSP).
_STABLE_RATES = {"pre_ln": (0.005, 0.008), "rms_norm": (0.003, 0.005), "none": (0.002, 0.005)}

#: Predictor of divergence -> AUROC and its 95 % interval (RKSP Table 2; the interval is published for M alone). M, rho
#: and kappa are those at initialization.
_PREDICTORS = {
    "M": (0.995, 0.986, 1.00),
    "M log10(kappa)": (0.873, None, None),
    "rho": (0.845, None, None),
    "kappa": (0.687, None, None),
    "initial grad norm": (0.621, None, None),
    "grad norm at step 100": (0.685, None, None),
    "grad norm variance": (0.702, None, None),
    "loss spikes": (0.758, None, None),
}
_ECE_OF_MASS = 0.283

#: Near-unit mass below which training may proceed, and above which the risk is high (RKSP, Fig. 7).
_DECISION_MASS = (0.3, 0.5)
DECISION_ZONES = ("proceed", "caution", "high risk")


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
        `workbench.samples.initialization`: Measured spectra at the same sizes.
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

    names = list(next(iter(_DEPTH.values())))
    variables = {
        name: (("model", "third"), np.array([_DEPTH[model][name] for model in _DEPTH], dtype=float)) for name in names
    }
    return xr.Dataset(variables, {"model": list(_DEPTH), "third": list(THIRDS)}, {"source": _SOURCE})


def normalization_table() -> xr.Dataset:
    """Return the published divergence rates and spectra of six normalizations at initialization (RKSP Table 1).

    Returns:
        Dataset with dim ``norm``: divergence_rate (fraction of runs), near_unit_mass, expansive_mass and
        spectral_radius.

    Example:
        >>> import workbench as wb
        >>> table = wb.published.normalization_table()
        >>> round(table["divergence_rate"].sel(norm="none").item(), 3)
        0.964

    See Also:
        `workbench.samples.divergence_table`: Recorded outcomes of the same normalizations.
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


def shaping_table() -> xr.Dataset:
    """Return the published divergence, accuracy and cost of KSS and of other controls on No-Norm (RKSP, tables of KSS).

    It is unknown whether the accuracies include runs that diverged.

    Returns:
        Dataset with dim ``control``, named as in `workbench.samples.shaping`: divergence_rate (of 24 runs), accuracy,
        near_unit_mass and overhead (additional time over the time of a step) as fractions; NaN if not published.

    Example:
        >>> import workbench as wb
        >>> table = wb.published.shaping_table()
        >>> table["control"].values[:3].tolist()
        ['none', 'clip 0.5', 'clip 1.0']

    See Also:
        `workbench.samples.shaping`: Recorded runs under the same controls.
    """
    import numpy as np
    import xarray as xr

    n_diverged, accuracy, mass, overhead = np.array([*_SHAPING.values()], dtype=float).T
    columns = {
        "divergence_rate": (n_diverged / _N_SHAPING_RUNS, "divergence rate", "fraction of runs that diverged"),
        "accuracy": (accuracy / 100, "accuracy", "accuracy of the runs"),
        "near_unit_mass": (mass, "near-unit mass M", "fraction of modes near the unit circle"),
        "overhead": (overhead / 100, "overhead", "additional time over the time of a step without control"),
    }
    variables = {
        name: ("control", values, {"long_name": long_name, "units": "1", "meaning": meaning})
        for name, (values, long_name, meaning) in columns.items()
    }
    return xr.Dataset(variables, {"control": list(_SHAPING)}, {"source": _SOURCE, "n_runs": _N_SHAPING_RUNS})


def predictor_table() -> xr.Dataset:
    """Return the published AUROC of predictors of divergence (RKSP Table 2).

    "grad norm variance" is the variance over steps 1 to 100, and "loss spikes" the number of spikes in steps 1 to 500;
    M, rho, kappa and the initial gradient norm are known before training.

    Returns:
        Dataset with dim ``predictor``: auroc, low and high (of the 95 % interval); NaN if not published. The attribute
        ``ece_of_mass`` is the expected calibration error of M interpreted as a probability.

    Example:
        >>> import workbench as wb
        >>> wb.published.predictor_table()["auroc"].sel(predictor="M").item()
        0.995

    See Also:
        `workbench.outcomes.predictor_table`: The same table of a recorded sweep.
    """
    import numpy as np
    import xarray as xr

    columns = zip(("auroc", "low", "high"), np.array([*_PREDICTORS.values()], dtype=float).T, strict=True)
    meanings = {
        "auroc": ("AUROC", "probability that a diverged run scores higher than a converged run"),
        "low": ("lower bound", "lower end of the 95 % interval; NaN if not published"),
        "high": ("upper bound", "upper end of the 95 % interval; NaN if not published"),
    }
    variables = {
        name: ("predictor", values, {"long_name": meanings[name][0], "units": "1", "meaning": meanings[name][1]})
        for name, values in columns
    }
    attrs = {"source": f"{_SOURCE}, Table 2", "ece_of_mass": _ECE_OF_MASS}
    return xr.Dataset(variables, {"predictor": list(_PREDICTORS)}, attrs)


def decision_chart(
    *,
    modest_condition: Annotated[float, at_least(1)] | None = None,
    large_condition: Annotated[float, at_least(1)] | None = None,
) -> xr.Dataset:
    """Return the published decision chart for a model at initialization (RKSP, Fig. 7).

    If M < 0.3 and kappa is modest, training may proceed. If M > 0.5 or kappa is large, the risk is high, and the paper
    recommends KSS. Between the two, caution is advised. The paper gives no number for a "modest" or "large" kappa;
    without numbers, M alone decides.

    Args:
        modest_condition: Eigenvector condition kappa below which it counts as modest; None for no limit, as published.
        large_condition: Kappa above which it counts as large; None for no limit, as published.

    Returns:
        Dataset with dim ``zone`` ("proceed", "high risk"): near_unit_mass and eigenvector_condition. Both must lie
        below their values to proceed; either above its value is a high risk. NaN means no limit.

    Raises:
        OptionError: If a condition is less than 1 or infinite, or ``modest_condition`` exceeds ``large_condition``.

    Example:
        >>> import workbench as wb
        >>> wb.published.decision_chart()["near_unit_mass"].to_series().to_dict()
        {'proceed': 0.3, 'high risk': 0.5}

    See Also:
        `workbench.plots.decision_chart`: Draws the chart.
    """
    import numpy as np
    import xarray as xr

    condition = np.array([modest_condition, large_condition], dtype=float)
    if condition[0] > condition[1]:
        raise OptionError.of("modest_condition", modest_condition, f"at most large_condition ({condition[1]:g})")
    variables = {
        name: ("zone", np.array(values), {"long_name": SPECTRA[name].long_name, "units": "1"})
        for name, values in (("near_unit_mass", _DECISION_MASS), ("eigenvector_condition", condition))
    }
    note = "the thresholds of the near-unit mass are published; the paper gives none for the eigenvector condition"
    return xr.Dataset(variables, {"zone": ["proceed", "high risk"]}, {"source": f"{_SOURCE}, Fig. 7", "note": note})


def decision_zones(
    near_unit_mass: ArrayLike, eigenvector_condition: ArrayLike, *, chart: xr.Dataset | None = None
) -> NDArray[np.str_]:
    """Return the zones of models in the published decision chart.

    Args:
        near_unit_mass: M of each model at initialization.
        eigenvector_condition: Kappa of each model; may be infinite.
        chart: Chart from `workbench.published.decision_chart`; None for the published chart, in which M alone decides.

    Returns:
        "proceed", "caution" or "high risk", with the broadcast shape of the two arguments; empty if a value that is
        needed for the decision is NaN.
    """
    import numpy as np

    chart = decision_chart() if chart is None else chart
    mass, condition = np.broadcast_arrays(np.asarray(near_unit_mass, float), np.asarray(eigenvector_condition, float))
    (low, high), (modest, large) = chart["near_unit_mass"].values, chart["eigenvector_condition"].values
    is_high = (mass > high) | (condition > large)
    is_modest = condition < modest if np.isfinite(modest) else np.ones(mass.shape, bool)
    uses_condition = np.isfinite([modest, large]).any()
    is_unknown = np.isnan(mass) | (np.isnan(condition) & uses_condition)
    decided = [is_unknown & ~is_high, is_high, (mass < low) & is_modest]
    return np.select(decided, ["", "high risk", "proceed"], default="caution")


__dir__ = publish(__name__)
