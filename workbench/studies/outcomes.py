"""Evaluate the outcomes of a sweep: divergence rates with their uncertainty, and fair comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.risk.features import column
from workbench.risk.predictors import predictor_scores
from workbench.risk.scores import Auroc, auroc, auroc_within

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = [
    "RATES",
    "accuracy_where_both_converge",
    "divergence_rates",
    "divergence_where_both_ran",
    "largest_rate_without_explosion",
    "predictor_table",
    "shared_cells",
]


#: Variables that every run needs.
_NEEDED = ("control", "learning_rate", "seed", "has_diverged", "accuracy", "near_unit_mass")
_CELL = ["learning_rate", "seed"]
#: Variables of `divergence_rates`: name -> long name and meaning; unit 1.
RATES = {
    "divergence_rate": ("divergence rate", "share of runs that diverged; NaN: no run"),
    "low": ("lower bound", "of the Wilson interval of the divergence rate; NaN: no run"),
    "high": ("upper bound", "of the Wilson interval of the divergence rate; NaN: no run"),
    "n_runs": ("runs", "number of runs"),
    "n_diverged": ("diverged runs", "number of runs that diverged"),
    "accuracy": ("accuracy", "mean over the runs that converged; NaN: none did"),
    "near_unit_mass": ("near-unit mass M", "at the end, mean over the runs that converged and have one; NaN: none"),
}


def divergence_rates(outcomes: xr.Dataset, *, by_rate: bool = False, level: float = 0.95) -> xr.Dataset:
    """Compute the divergence rate under each control, and the accuracy of the other runs.

    Two controls can be compared directly only where both ran on the same cells (learning rate and seed); see
    `shared_cells`. The accuracies are those of the runs that converged, which under a weak control are only the easy
    ones: `accuracy_where_both_converge` compares them fairly.

    Args:
        outcomes: One row for each run, dim ``run``, as `workbench.samples.shaping` returns them.
        by_rate: Separate the learning rates.
        level: Level of the Wilson score interval (Wilson 1927), between 0 and 1.

    Returns:
        Dataset with dim ``control`` in the order of the runs and, if asked for, ``learning_rate``, ascending: the
        variables of `RATES`. Counts are 0 and everything else is NaN where there is no run.

    Raises:
        SchemaError: If the dataset is no table of outcomes, is empty, or holds a run twice.
        OptionError: If the level is no share.

    Example:
        >>> import workbench as wb
        >>> rates = wb.outcomes.divergence_rates(wb.samples.shaping("controls"))["divergence_rate"]
        >>> bool(rates.sel(control="KSS, best") < rates.sel(control="none"))
        True
    """
    import pandas as pd
    import xarray as xr
    from scipy.stats import binomtest

    if not 0 < level < 1:
        raise OptionError(f"level is {level}, expected a share between 0 and 1.")
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
    """The runs of those cells (learning rate and seed) on which every control ran.

    Raises:
        SchemaError: If the dataset is no table of outcomes, or no cell is shared by all.

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.shaping("controls")
        >>> wb.outcomes.shared_cells(outcomes).sizes["run"] <= outcomes.sizes["run"]
        True
    """
    runs = _table(outcomes)
    n_controls = runs.groupby(_CELL)["control"].transform("nunique")
    is_shared = (n_controls == runs["control"].nunique()).to_numpy()
    if not is_shared.any():
        raise SchemaError(
            "No learning rate and seed was run under every control; leave out controls that ran elsewhere."
        )
    return outcomes.isel(run=is_shared)


def accuracy_where_both_converge(outcomes: xr.Dataset, control: str, reference: str) -> xr.Dataset:
    """Accuracies under two controls on the cells (learning rate and seed) where neither diverged.

    This is the fair comparison: without control only the easy cells converge, and their mean is biased upwards.

    Args:
        outcomes: One row for each run, as `workbench.samples.shaping` returns them.
        control: Name of a control.
        reference: Name of the control to compare with, such as ``"none"``.

    Returns:
        Dataset with dim ``cell`` and its ``learning_rate`` and ``seed``: ``accuracy``, ``reference_accuracy`` and
        ``gain``, their difference; without cells where the two never both converge.

    Raises:
        SchemaError: If the dataset is no table of outcomes.
        OptionError: If it has no such control.

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.shaping("controls")
        >>> cells = wb.outcomes.accuracy_where_both_converge(outcomes, "KSS, best", "none")
        >>> bool((cells["gain"] == cells["accuracy"] - cells["reference_accuracy"]).all())
        True
    """
    import xarray as xr

    ours, other = _two_controls(outcomes, control, reference)
    is_alive = ~ours["has_diverged"] & ~other["has_diverged"]
    cells = ours.index[is_alive]
    own, others = ours["accuracy"][is_alive].to_numpy(), other["accuracy"][is_alive].to_numpy()
    return xr.Dataset(
        {"accuracy": ("cell", own), "reference_accuracy": ("cell", others), "gain": ("cell", own - others)},
        {name: ("cell", cells.get_level_values(name).values) for name in _CELL},
        {"control": control, "reference": reference},
    )


def divergence_where_both_ran(outcomes: xr.Dataset, control: str, reference: str) -> xr.Dataset:
    """Compare the divergence under two controls, cell by cell (learning rate and seed).

    Args:
        outcomes: One row for each run, as `workbench.samples.shaping` returns them.
        control: Name of a control.
        reference: Name of the control to compare with, such as ``"none"``.

    Returns:
        Dataset of numbers: ``n_cells`` that both ran on, ``n_saved`` (the reference diverged, the control did not),
        ``n_lost`` (the other way round) and ``p_value``: the chance of a split at least as uneven if the two were
        equally good (exact, two-sided; McNemar 1947); 1 where nothing was saved or lost.

    Raises:
        SchemaError: If the dataset is no table of outcomes.
        OptionError: If it has no such control.

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.shaping("controls")
        >>> cells = wb.outcomes.divergence_where_both_ran(outcomes, "KSS, best", "none")
        >>> bool(cells["n_saved"] > cells["n_lost"]), bool(cells["p_value"] < 0.05)
        (True, True)
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


def largest_rate_without_explosion(outcomes: xr.Dataset, *, below: float = 0.20) -> xr.DataArray:
    """Find the largest learning rate up to which few runs diverge under each control.

    It says nothing about how well the other runs learn: see `workbench.rates.useful_band` for that.

    Args:
        outcomes: One row for each run, as `workbench.samples.shaping` returns them.
        below: At this rate and all smaller ones of the grid, less than this share of the runs diverge; 0.20 is the
            share by which the paper calls a rate stable.

    Returns:
        By ``control``, in the order of the runs; NaN where too many diverge even at the smallest rate. The
        coordinate ``is_lower_bound`` is true where it is the largest rate of the grid.

    Raises:
        SchemaError: If the dataset is no table of outcomes, is empty, or holds a run twice.
        OptionError: If ``below`` is no share above 0.

    Example:
        >>> import workbench as wb
        >>> rates = wb.outcomes.largest_rate_without_explosion(wb.samples.shaping("controls"))
        >>> bool(rates.sel(control="KSS, best") > rates.sel(control="none"))
        True
    """
    import xarray as xr

    if not 0 < below <= 1:
        raise OptionError(f"below is {below}, expected a share above 0, at most 1.")
    rates = divergence_rates(outcomes, by_rate=True)
    found, is_bound = [], []
    for control in rates["control"].values:
        share = rates["divergence_rate"].sel(control=control).dropna("learning_rate")
        n_below = int((share < below).cumprod().sum())
        found.append(float(share["learning_rate"][n_below - 1]) if n_below else np.nan)
        is_bound.append(n_below == share.size)
    about = {"long_name": "largest rate without explosion", "units": "1", "below": below}
    coords = {"control": rates["control"].values, "is_lower_bound": ("control", is_bound)}
    return xr.DataArray(found, coords, ["control"], name="largest_rate_without_explosion", attrs=about)


def _table(outcomes: xr.Dataset) -> pd.DataFrame:
    """A table with one row for each run.

    Raises:
        SchemaError: If it is no table of outcomes.
    """
    missing = [name for name in _NEEDED if name not in outcomes.variables]
    if missing or "run" not in outcomes.dims:
        lacks = ", ".join(missing) or "the dimension run"
        raise SchemaError(f"The dataset is no table of outcomes: it lacks {lacks}; take one of wb.samples.shaping().")
    if not outcomes.sizes["run"]:
        raise SchemaError("The table of outcomes has no run; select less narrowly.")
    runs = outcomes[list(_NEEDED)].reset_coords().to_dataframe().reset_index(drop=True)
    runs["has_diverged"] = runs["has_diverged"].astype(bool)
    key = ["control", *_CELL]
    if (twice := runs[runs.duplicated(key)]).shape[0]:
        name, rate, seed = twice[key].iloc[0]
        raise SchemaError(f"The run '{name}' at rate {rate:g}, seed {seed} is there twice; take each study once.")
    return runs


def _two_controls(outcomes: xr.Dataset, control: str, reference: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The runs of two controls on the cells that both ran on, in the same order.

    Raises:
        SchemaError: If it is no table of outcomes.
        OptionError: If it has no such control.
    """
    runs = _table(outcomes)
    known = runs["control"].unique()
    for name in (control, reference):
        if name not in known:
            raise OptionError(f"No run has the control '{name}'; choose from {'; '.join(known)}.")
    ours, other = (runs[runs["control"] == name].set_index(_CELL) for name in (control, reference))
    cells = ours.index.intersection(other.index).sort_values()
    return ours.loc[cells], other.loc[cells]


def predictor_table(sweep: xr.Dataset, *, n_bootstrap: int = 1000, seed: int = 0) -> xr.Dataset:
    """AUROC of every predictor of RKSP's Table 2, with the published one.

    Args:
        sweep: Runs with their outcomes.
        n_bootstrap: Resamples of the configurations behind the intervals; 0: none.
        seed: Seed of the resamples.

    Returns:
        Dataset with dim ``predictor``: ``auroc``, ``low``, ``high`` (a score is never reversed: below .5 it predicts
        the opposite); ``auroc_within_architecture`` and ``auroc_within_cell``, which compare only runs of one
        architecture, or runs that differ in learning rate and seed alone; ``n_runs`` and ``n_diverged`` that have
        the score; ``published_auroc``, ``published_low``, ``published_high``. NaN where there is none.

    Raises:
        SchemaError: If the sweep lacks a variable, or all runs ended alike.

    Example:
        >>> import workbench as wb
        >>> table = wb.outcomes.predictor_table(wb.samples.divergence_sweep("norms"), n_bootstrap=0)
        >>> table["predictor"].values[:2].tolist(), table["published_auroc"].sel(predictor="M").item()
        (['M', 'M log10(kappa)'], 0.995)
    """
    import xarray as xr

    from workbench.studies.published import predictor_table as published_table

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


def _auroc(score: np.ndarray, label: np.ndarray, groups: np.ndarray, n_bootstrap: int, seed: int) -> Auroc:
    try:
        return auroc(score.tolist(), label.tolist(), groups=groups.tolist(), n_bootstrap=n_bootstrap, seed=seed)
    except SchemaError:  # all runs with the score ended alike
        return Auroc(np.nan, np.nan, np.nan)


def _auroc_within(score: np.ndarray, label: np.ndarray, within: np.ndarray) -> float:
    try:
        return auroc_within(score.tolist(), label.tolist(), within.tolist(), n_bootstrap=0).value
    except SchemaError:
        return np.nan


def __dir__() -> list[str]:
    return sorted(__all__)
