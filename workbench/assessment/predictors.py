"""The predictors of RKSP's Table 2 on our runs: what each says about divergence, alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.assessment.calibration import group_folds, platt
from workbench.assessment.features import column
from workbench.assessment.scores import Auroc, auroc, auroc_within
from workbench.errors import SchemaError

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
    """The scores of each run; higher is meant to be more dangerous.

    Spectral ones are means over the layers of the fresh model; the paper does not say whether the product with kappa is
    taken before or after the mean, and it is taken after.

    Args:
        sweep: With spectra, and with what the baselines saw during training.

    Returns:
        Shape (run, predictor); NaN where a run has no such value, infinite where kappa is.

    Raises:
        SchemaError: If a variable is missing.
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


def predictor_table(sweep: xr.Dataset, *, n_bootstrap: int = 1000, seed: int = 0) -> xr.Dataset:
    """AUROC of every predictor of RKSP's Table 2, beside the published one.

    Args:
        sweep: Runs with their outcomes.
        n_bootstrap: Resamples of the configurations behind the intervals; 0: none.
        seed: Of the resamples.

    Returns:
        Dataset with dim ``predictor``: ``auroc``, ``low``, ``high`` (a score is never turned round: below .5 it says
        the opposite); ``auroc_within_architecture`` and ``auroc_within_cell``, which compare only runs of one
        architecture, or runs that differ in learning rate and seed alone; ``n_runs`` and ``n_diverged`` that have
        the score; ``published_auroc``, ``published_low``, ``published_high``. NaN where there is none.

    Raises:
        SchemaError: If the sweep lacks a variable, or all runs ended alike.
    """
    import xarray as xr

    from workbench.published import predictor_table as published_table

    scores = predictor_scores(sweep)
    label = sweep["has_diverged"].values.astype(bool)
    if label.all() or not label.any():
        raise SchemaError(f"All {len(label)} runs of the sweep ended alike, so no AUROC says anything.")
    strata = {f"auroc_within_{name}": column(sweep, name) for name in ("architecture", "cell")}
    groups = column(sweep, "configuration")
    rows = []
    for score in scores.T.values:
        has = ~np.isnan(score)
        found = _auroc(score[has], label[has], groups[has], n_bootstrap, seed)
        within = [_auroc_within(score[has], label[has], kind[has]) for kind in strata.values()]
        rows.append((*found, *within, has.sum(), label[has].sum()))
    names = ("auroc", "low", "high", *strata, "n_runs", "n_diverged")
    about = {
        "auroc": "chance that a run which diverged scores higher",
        "low": "lower bound, from a bootstrap over configurations",
        "high": "upper bound, from a bootstrap over configurations",
        "auroc_within_architecture": "the same among runs of one architecture; NaN: none has both outcomes",
        "auroc_within_cell": "the same among runs that differ in rate and seed alone; NaN: none has both outcomes",
        "n_runs": "runs that have the score",
        "n_diverged": "of these, those that diverged",
    }
    variables = {
        name: (
            "predictor",
            np.array(values),
            {"long_name": name.replace("_", " "), "units": "1", "meaning": about[name]},
        )
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
    table = xr.Dataset(variables, {"predictor": scores["predictor"].values})
    published = published_table().sel(predictor=table["predictor"])
    return table.assign({f"published_{name}": published[name] for name in ("auroc", "low", "high")})


def calibrated_score(
    score: Sequence[float], label: Sequence[bool], groups: Sequence[str], *, n_folds: int = 5, seed: int = 0
) -> np.ndarray:
    """A score as an honest probability: logistic in the score, fitted on other groups than those it is given for.

    Args:
        score: Finite, shape (run,).
        label: Whether the run diverged.
        groups: What is never split.
        n_folds: Folds of groups.
        seed: Of the folds.

    Returns:
        Probabilities out of fold, shape (run,). Where the other folds have one outcome alone, their share of it.
    """
    from scipy.special import expit

    score, label, groups = np.asarray(score, float), np.asarray(label, bool), np.asarray(groups)
    found = np.empty(len(score))
    for train, held_out in group_folds(groups, min(n_folds, len(np.unique(groups))), seed):
        if label[train].all() or not label[train].any():
            found[held_out] = label[train].mean()
            continue
        factor, shift = platt(score[train], label[train])
        found[held_out] = expit(factor * score[held_out] + shift)
    return found


def _auroc(score: np.ndarray, label: np.ndarray, groups: np.ndarray, n_bootstrap: int, seed: int) -> Auroc:
    try:
        return auroc(score, label, groups=groups, n_bootstrap=n_bootstrap, seed=seed)
    except SchemaError:  # those that have the score ended alike
        return Auroc(np.nan, np.nan, np.nan)


def _auroc_within(score: np.ndarray, label: np.ndarray, within: np.ndarray) -> float:
    try:
        return auroc_within(score, label, within, n_bootstrap=0).value
    except SchemaError:
        return np.nan
