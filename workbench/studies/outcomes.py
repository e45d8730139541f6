"""Evaluation of the outcomes of a sweep: divergence rates with their uncertainty, and fair comparisons.

Example:
    >>> import workbench as wb
    >>> table = wb.outcomes.divergence_rates(wb.samples.open("shaping", "controls"))
    >>> bool((table["n_diverged"] <= table["n_runs"]).all())
    True

See Also:
    `workbench.samples.open`: A recorded sweep.
    `workbench.rates`: How well the runs learned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError, require_listed
from workbench.option_checks import checked, publish
from workbench.option_kinds import Fraction, Level, NonNegativeInt
from workbench.risk.features import column
from workbench.risk.scores import Auroc, auroc

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = [
    "accuracy_where_both_converge", "divergence_rates", "divergence_where_both_ran", "largest_rate_without_explosion",
    "predictor_table", "shared_cells",
]  # fmt: skip


#: Variables that a table of outcomes must have.
_NEEDED = ("control", "learning_rate", "seed", "has_diverged", "accuracy", "near_unit_mass")
_CELL = ["learning_rate", "seed"]
#: Variables of `divergence_rates`: name -> long name and meaning; unit 1.
RATES = {
    "divergence_rate": ("divergence rate", "fraction of runs that diverged; NaN if there is no run"),
    "low": ("lower bound", "lower end of the Wilson interval of the divergence rate; NaN if there is no run"),
    "high": ("upper bound", "upper end of the Wilson interval of the divergence rate; NaN if there is no run"),
    "n_runs": ("runs", "number of runs"),
    "n_diverged": ("diverged runs", "number of runs that diverged"),
    "accuracy": ("accuracy", "mean over the runs that converged; NaN if none did"),
    "near_unit_mass": ("near-unit mass M", "final M, mean over the runs that converged and have it; NaN if none do"),
}
#: Predictor of divergence -> published AUROC and its 95 % interval (RKSP Table 2; published for M alone).
#: "grad norm variance" is the variance over steps 1 to 100, and "loss spikes" the number of spikes in steps 1 to 500;
#: M, rho, kappa and the initial gradient norm are known before training.
PUBLISHED_AUROC = {
    "M": (0.995, 0.986, 1.00),
    "M log10(kappa)": (0.873, np.nan, np.nan),
    "rho": (0.845, np.nan, np.nan),
    "kappa": (0.687, np.nan, np.nan),
    "initial grad norm": (0.621, np.nan, np.nan),
    "grad norm at step 100": (0.685, np.nan, np.nan),
    "grad norm variance": (0.702, np.nan, np.nan),
    "loss spikes": (0.758, np.nan, np.nan),
}

#: Predictor of divergence -> variables from which it is computed.
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


@checked
def divergence_rates(outcomes: xr.Dataset, *, by_rate: bool = False, level: Level = 0.95) -> xr.Dataset:
    """Compute the divergence rate under each control, and the accuracy of the other runs.

    Two controls can be compared directly only if both ran on the same cells (learning rate and seed); see
    `workbench.outcomes.shared_cells`. The accuracies are those of the runs that converged, which under a weak control
    are only the easy ones; `workbench.outcomes.accuracy_where_both_converge` compares them fairly.

    Args:
        outcomes: Outcomes with dim ``run``, as from `workbench.samples.open`.
        by_rate: Whether to separate the learning rates.
        level: Level of the Wilson score interval (Wilson 1927), between 0 and 1.

    Returns:
        Dataset with dim ``control`` in the order of the runs and, with ``by_rate``, ``learning_rate`` in increasing
        order: ``divergence_rate`` with ``low`` and ``high``, ``n_runs``, ``n_diverged``, ``accuracy`` and
        ``near_unit_mass``. If there is no run, counts are 0 and all other variables are NaN.

    Raises:
        SchemaError: If the dataset is not a table of outcomes, is empty, or contains a run twice.
        OptionError: If the level is not between 0 and 1.

    Example:
        >>> import workbench as wb
        >>> rates = wb.outcomes.divergence_rates(wb.samples.open("shaping", "controls"))["divergence_rate"]
        >>> bool(rates.sel(control="KSS, best") < rates.sel(control="none"))
        True

    See Also:
        `workbench.outcomes.divergence_where_both_ran`: Compares two controls cell by cell.
        `workbench.plots.explosion_edge`: Draws the rates over the learning rate.
    """
    import pandas as pd
    import xarray as xr
    from scipy.stats import binomtest

    runs = _table(outcomes)
    keys = ["control", "learning_rate"] if by_rate else ["control"]
    labels = [runs["control"].unique(), np.sort(runs["learning_rate"].unique())][: len(keys)]
    cells = runs.groupby(keys, sort=False)
    index = pd.MultiIndex.from_product(labels, names=keys) if by_rate else pd.Index(labels[0], name="control")
    n_runs = cells.size().reindex(index, fill_value=0)
    n_diverged = cells["has_diverged"].sum().reindex(index, fill_value=0).astype(int)
    intervals = [
        tuple(binomtest(k, n).proportion_ci(level, method="wilson")) if n else (np.nan, np.nan)
        for k, n in zip(n_diverged, n_runs, strict=True)
    ]
    converged = runs[~runs["has_diverged"]].groupby(keys, sort=False)
    columns = {
        "divergence_rate": n_diverged / n_runs.where(n_runs > 0),
        "low": [low for low, _ in intervals],
        "high": [high for _, high in intervals],
        "n_runs": n_runs,
        "n_diverged": n_diverged,
        **{name: converged[name].mean().reindex(index) for name in ("accuracy", "near_unit_mass")},
    }
    shape = [len(label) for label in labels]
    variables = {}
    for name, values in columns.items():
        long_name, meaning = RATES[name]
        about = {"long_name": long_name, "units": "1", "meaning": meaning}
        variables[name] = (keys, np.asarray(values).reshape(shape), about)
    return xr.Dataset(variables, dict(zip(keys, labels, strict=True)), {"level": level})


def shared_cells(outcomes: xr.Dataset) -> xr.Dataset:
    """Return the runs of those cells (learning rate and seed) on which every control ran.

    Args:
        outcomes: Outcomes with dim ``run``, as from `workbench.samples.open`.

    Raises:
        SchemaError: If the dataset is not a table of outcomes, or no cell is shared by all controls.

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.open("shaping", "controls")
        >>> wb.outcomes.shared_cells(outcomes).sizes["run"] <= outcomes.sizes["run"]
        True

    See Also:
        `workbench.outcomes.divergence_rates`: Compares the controls on these runs.
    """
    runs = _table(outcomes)
    n_controls = runs.groupby(_CELL)["control"].transform("nunique")
    is_shared = (n_controls == runs["control"].nunique()).to_numpy()
    if not is_shared.any():
        raise SchemaError("No learning rate and seed was run under every control; remove controls with other cells.")
    return outcomes.isel(run=is_shared)


def accuracy_where_both_converge(outcomes: xr.Dataset, control: str, reference: str) -> xr.Dataset:
    """Compare accuracies under two controls on the cells (learning rate and seed) on which neither diverged.

    This comparison is fair: without control only the easy cells converge, and their mean is biased upwards.

    Args:
        outcomes: Outcomes with dim ``run``, as from `workbench.samples.open`.
        control: Name of a control.
        reference: Name of the control to compare with, such as ``"none"``.

    Returns:
        Dataset with dim ``cell`` and its ``learning_rate`` and ``seed``: ``accuracy``, ``reference_accuracy`` and
        ``gain``, their difference. It has no cells if the two never both converge.

    Raises:
        SchemaError: If the dataset is not a table of outcomes.
        OptionError: If it has no such control.

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.open("shaping", "controls")
        >>> cells = wb.outcomes.accuracy_where_both_converge(outcomes, "KSS, best", "none")
        >>> bool((cells["gain"] == cells["accuracy"] - cells["reference_accuracy"]).all())
        True

    See Also:
        `workbench.outcomes.divergence_where_both_ran`: Compares how often the runs diverge.
    """
    import xarray as xr

    ours, other = _two_controls(outcomes, control, reference)
    has_converged = ~ours["has_diverged"] & ~other["has_diverged"]
    cells = ours.index[has_converged]
    own, others = ours["accuracy"][has_converged].to_numpy(), other["accuracy"][has_converged].to_numpy()
    return xr.Dataset(
        {"accuracy": ("cell", own), "reference_accuracy": ("cell", others), "gain": ("cell", own - others)},
        {name: ("cell", cells.get_level_values(name).values) for name in _CELL},
        {"control": control, "reference": reference},
    )


def divergence_where_both_ran(outcomes: xr.Dataset, control: str, reference: str) -> xr.Dataset:
    """Compare the divergence under two controls, cell by cell (learning rate and seed).

    Args:
        outcomes: Outcomes with dim ``run``, as from `workbench.samples.open`.
        control: Name of a control.
        reference: Name of the control to compare with, such as ``"none"``.

    Returns:
        Dataset of 0-dim variables: ``n_cells`` on which both ran, ``n_saved`` (the reference diverged, the control did
        not), ``n_lost`` (the reverse) and ``p_value``, the probability of a split at least as uneven if both were
        equally good (exact, two-sided; McNemar 1947), which is 1 if no cell was saved or lost.

    Raises:
        SchemaError: If the dataset is not a table of outcomes.
        OptionError: If it has no such control.

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.open("shaping", "controls")
        >>> cells = wb.outcomes.divergence_where_both_ran(outcomes, "KSS, best", "none")
        >>> bool(cells["n_saved"] > cells["n_lost"]), bool(cells["p_value"] < 0.05)
        (True, True)

    See Also:
        `workbench.outcomes.accuracy_where_both_converge`: Compares the accuracies.
    """
    import xarray as xr
    from scipy.stats import binomtest

    ours, other = _two_controls(outcomes, control, reference)
    n_saved = int((other["has_diverged"] & ~ours["has_diverged"]).sum())
    n_lost = int((ours["has_diverged"] & ~other["has_diverged"]).sum())
    n_split = n_saved + n_lost
    p_value = binomtest(n_saved, n_split).pvalue if n_split else 1.0
    numbers = {"n_cells": len(ours), "n_saved": n_saved, "n_lost": n_lost, "p_value": float(p_value)}
    return xr.Dataset(numbers, attrs={"control": control, "reference": reference})


@checked
def largest_rate_without_explosion(outcomes: xr.Dataset, *, below: Fraction = 0.20) -> xr.DataArray:
    """Find the largest learning rate up to which few runs diverge under each control.

    It says nothing about how well the other runs learn; see `workbench.rates.useful_band` for that.

    Args:
        outcomes: Outcomes with dim ``run``, as from `workbench.samples.open`.
        below: At the returned rate and all smaller ones of the grid, less than this fraction of the runs diverge. The
            paper calls a rate stable by a fraction of 0.20.

    Returns:
        The rate by ``control``, in the order of the runs; NaN if too many runs diverge even at the smallest rate. The
        coordinate ``is_lower_bound`` is true if the rate is the largest one of the grid.

    Raises:
        SchemaError: If the dataset is not a table of outcomes, is empty, or contains a run twice.
        OptionError: If ``below`` is not above 0 and at most 1.

    Example:
        >>> import workbench as wb
        >>> rates = wb.outcomes.largest_rate_without_explosion(wb.samples.open("shaping", "controls"))
        >>> bool(rates.sel(control="KSS, best") > rates.sel(control="none"))
        True

    See Also:
        `workbench.published.largest_stable_rates`: The published rates.
        `workbench.rates.useful_band`: The rates at which a model learns well.
    """
    import xarray as xr

    rates = divergence_rates(outcomes, by_rate=True)
    found, is_bound = [], []
    for control in rates["control"].values:
        fraction = rates["divergence_rate"].sel(control=control).dropna("learning_rate")
        n_below = int((fraction < below).cumprod().sum())
        found.append(float(fraction["learning_rate"][n_below - 1]) if n_below else np.nan)
        is_bound.append(n_below == fraction.size)
    about = {"long_name": "largest rate without explosion", "units": "1", "below": below}
    coords = {"control": rates["control"].values, "is_lower_bound": ("control", is_bound)}
    return xr.DataArray(found, coords, ["control"], name="largest_rate_without_explosion", attrs=about)


def _table(outcomes: xr.Dataset) -> pd.DataFrame:
    """Return the outcomes as a data frame with one row per run."""
    missing = [name for name in _NEEDED if name not in outcomes.variables]
    if missing or "run" not in outcomes.dims:
        lacks = ", ".join(missing) or "the dimension run"
        raise SchemaError(f"The table of outcomes lacks {lacks}; pass one like wb.samples.open('shaping').")
    if not outcomes.sizes["run"]:
        raise SchemaError("The table of outcomes has no run; select at least one.")
    runs = outcomes[list(_NEEDED)].reset_coords().to_dataframe().reset_index(drop=True)
    runs["has_diverged"] = runs["has_diverged"].astype(bool)
    key = ["control", *_CELL]
    if (twice := runs[runs.duplicated(key)]).shape[0]:
        name, rate, seed = twice[key].iloc[0]
        raise SchemaError(f"The table has the run '{name}' at rate {rate:g} with seed {seed} twice; pass each once.")
    return runs


def _two_controls(outcomes: xr.Dataset, control: str, reference: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the runs of two controls on the cells on which both ran, in the same order."""
    runs = _table(outcomes)
    known = runs["control"].unique()
    for argument, name in (("control", control), ("reference", reference)):
        require_listed(argument, [name], known)
    ours, other = (runs[runs["control"] == name].set_index(_CELL) for name in (control, reference))
    cells = ours.index.intersection(other.index).sort_values()
    return ours.loc[cells], other.loc[cells]


def predictor_table(sweep: xr.Dataset, *, n_bootstrap: NonNegativeInt = 1000, seed: NonNegativeInt = 0) -> xr.Dataset:
    """Compute the AUROC of every predictor of RKSP's Table 2, with the published values.

    Args:
        sweep: Runs with their outcomes.
        n_bootstrap: Number of resamples of the configurations for the intervals; 0 for no intervals.
        seed: Seed of the resamples.

    Returns:
        Dataset with dim ``predictor``: ``auroc``, ``low``, ``high`` (a score is never reversed; below 0.5 it predicts
        the opposite); ``auroc_within_architecture`` and ``auroc_within_cell``, which compare only runs of one
        architecture, or runs that differ in learning rate and seed alone; ``n_runs`` and ``n_diverged``, the numbers of
        runs and of diverged runs that have the score; ``published_auroc``, ``published_low``, ``published_high``. NaN
        where a value is unknown.

    Raises:
        SchemaError: If the sweep lacks a variable, or all or none of its runs diverged.

    Example:
        >>> import workbench as wb
        >>> table = wb.outcomes.predictor_table(wb.samples.open("divergence_sweep", "norms"), n_bootstrap=0)
        >>> table["predictor"].values[:2].tolist(), table["published_auroc"].sel(predictor="M").item()
        (['M', 'M log10(kappa)'], 0.995)

    See Also:
        `workbench.samples.open`: A recorded sweep.
    """
    import xarray as xr

    scores = _predictor_scores(sweep)
    label = sweep["has_diverged"].values.astype(bool)
    if label.all() or not label.any():
        raise SchemaError(
            f"{'All' if len(label) and label.all() else 'None'} of the {len(label)} runs of the sweep diverged, so the "
            "AUROC is undefined; add runs with the other outcome."
        )
    strata = {f"auroc_within_{name}": column(sweep, name) for name in ("architecture", "cell")}
    groups = column(sweep, "configuration")
    rows = []
    for score in scores.T.values:
        has = ~np.isnan(score)
        of = score[has], label[has]
        found = _area(*of, groups=groups[has], n_bootstrap=n_bootstrap, seed=seed)
        within = [_area(*of, within=kind[has], n_bootstrap=0).value for kind in strata.values()]
        rows.append((*found, *within, has.sum(), label[has].sum()))
    names = ("auroc", "low", "high", *strata, "n_runs", "n_diverged")
    about = {
        "auroc": "probability that a diverged run scores higher than a converged run",
        "low": "lower bound, from a bootstrap over configurations",
        "high": "upper bound, from a bootstrap over configurations",
        "auroc_within_architecture": "AUROC among runs of one architecture; NaN if none has both outcomes",
        "auroc_within_cell": "AUROC among runs that differ in rate and seed alone; NaN if none has both outcomes",
        "n_runs": "runs that have the score",
        "n_diverged": "diverged runs that have the score",
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
    for name, values in zip(("auroc", "low", "high"), zip(*PUBLISHED_AUROC.values(), strict=True), strict=True):
        by_predictor = dict(zip(PUBLISHED_AUROC, values, strict=True))
        table[f"published_{name}"] = ("predictor", [by_predictor[each] for each in table["predictor"].values])
    return table


def _area(score: np.ndarray, label: np.ndarray, **options: Any) -> Auroc:
    """Return the AUROC; NaN if all runs with the score have the same outcome."""
    try:
        return auroc(score, label, **options)
    except SchemaError:
        return Auroc(np.nan, np.nan, np.nan)


def _predictor_scores(sweep: xr.Dataset) -> xr.DataArray:
    """Compute the predictors of each run as scores, shape (run, predictor); a higher score predicts divergence.

    Spectral predictors are means over the layers of the untrained model. The paper does not state whether the product
    with kappa is computed before or after the mean; here it is computed after it. NaN where a run has no value,
    infinite where kappa is infinite.
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


__dir__ = publish(__name__)
