"""The predictors of RKSP's Table 2, computed from the runs of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.risk.features import column

if TYPE_CHECKING:
    import xarray as xr

#: Predictor, with its name in `workbench.published.predictor_table` -> variables from which it is computed.
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
    """Compute the predictors of each run as scores; a higher score predicts divergence.

    Spectral predictors are means over the layers of the untrained model. The paper does not state whether the product
    with kappa is computed before or after the mean; here it is computed after it.

    Args:
        sweep: Sweep with spectra, and with the measurements of the baselines during training.

    Returns:
        Shape (run, predictor); NaN where a run has no value, infinite where kappa is infinite.

    Raises:
        SchemaError: If a variable is missing.

    Example:
        >>> import workbench as wb
        >>> scores = wb.risk.predictor_scores(wb.samples.open("divergence_sweep", "norms"))
        >>> scores.dims, scores["predictor"].values[:2].tolist()
        (('run', 'predictor'), ['M', 'M log10(kappa)'])

    See Also:
        `workbench.risk.auroc`: Evaluates a score.
        `workbench.outcomes.predictor_table`: Computes the AUROC of the predictors.
    """
    import xarray as xr

    if missing := sorted({need for needs in _NEEDS.values() for need in needs if need not in sweep.variables}):
        raise SchemaError(f"The sweep lacks {', '.join(missing)}; pass a sweep from wb.open_sweep().")
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
