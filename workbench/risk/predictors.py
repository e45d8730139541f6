"""The predictors of RKSP's Table 2, each alone, on our runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.risk.features import column

if TYPE_CHECKING:
    import xarray as xr

#: Predictor, named as `workbench.published.predictor_table` names it -> what it is made from.
_NEEDS = {
    "M": ("near_unit_mass",),
    "M log10(kappa)": ("near_unit_mass", "eigenvector_condition"),
    "rho": ("spectral_radius",),
    "kappa": ("eigenvector_condition",),
    "initial grad norm": ("initial_grad_norm",),
    "grad norm at step 100": ("grad_norm_step_100",),
    "grad norm variance": ("grad_norm_variance",),
    "loss spikes": ("n_loss_spikes",),
}


def predictor_scores(sweep: xr.Dataset) -> xr.DataArray:
    """The scores of each run; a higher score predicts divergence.

    Spectral ones are means over the layers of the fresh model; the paper does not state whether the product with kappa
    is taken before or after the mean; here it is taken after.

    Args:
        sweep: Sweep with spectra, and with the baselines' measurements during training.

    Returns:
        Shape (run, predictor); NaN where a run has no such value, infinite where kappa is.

    Raises:
        SchemaError: If a variable is missing.

    Example:
        >>> import workbench as wb
        >>> scores = wb.risk.predictor_scores(wb.samples.divergence_sweep("norms"))
        >>> scores.dims, scores["predictor"].values[:2].tolist()
        (('run', 'predictor'), ['M', 'M log10(kappa)'])
    """
    import xarray as xr

    if missing := sorted({need for needs in _NEEDS.values() for need in needs if need not in sweep.variables}):
        raise SchemaError(f"The sweep lacks {', '.join(missing)}; take one from wb.open_sweep().")
    means = {}
    for name in {need for needs in _NEEDS.values() for need in needs}:
        values = sweep[name]
        means[name] = values.mean("layer").values.astype(float) if "layer" in values.dims else column(sweep, name)
    scores = {name: means[needs[0]].astype(float) for name, needs in _NEEDS.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        product = means["near_unit_mass"] * np.log10(means["eigenvector_condition"])
    scores["M log10(kappa)"] = np.where(means["near_unit_mass"] == 0, 0.0, product)
    return xr.DataArray(
        np.stack([*scores.values()], axis=1), {"predictor": [*scores]}, ["run", "predictor"], name="score"
    )
