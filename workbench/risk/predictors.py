"""The predictors of RKSP's Table 2, each alone, on our runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.risk.features import column
from workbench.risk.probability_calibration import group_folds, platt

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import ArrayLike

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


def calibrated_score(
    score: ArrayLike, label: ArrayLike, groups: ArrayLike, *, n_folds: int = 5, seed: int = 0
) -> np.ndarray:
    """Convert a score to a calibrated probability: logistic in the score, fitted out of fold.

    Args:
        score: Finite scores, shape (run,).
        label: Whether the run diverged.
        groups: Groups that are never split.
        n_folds: Folds of groups.
        seed: Seed of the folds.

    Returns:
        Out-of-fold probabilities, shape (run,). Where the other folds have only one outcome, 0 or 1 accordingly.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> score, groups = np.tile([0.0, 1.0, 2.0, 3.0], 10), np.repeat(np.arange(10), 4)
        >>> probability = wb.risk.calibrated_score(score, score > 1.5, groups)
        >>> bool(probability[3] > probability[0])
        True
    """
    from scipy.special import expit

    scores, labels, names = np.asarray(score, float), np.asarray(label, bool), np.asarray(groups)
    found = np.empty(len(scores))
    for train, held_out in group_folds(names, min(n_folds, len(np.unique(names))), seed):
        if labels[train].all() or not labels[train].any():
            found[held_out] = labels[train].mean()
            continue
        factor, shift = platt(scores[train], labels[train])
        found[held_out] = expit(factor * scores[held_out] + shift)
    return found
