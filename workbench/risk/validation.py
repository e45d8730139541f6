"""Validate a risk model on held-out configurations and architectures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.risk.features import as_cases
from workbench.risk.fitting import fit
from workbench.risk.measured_stable_rates import share_within, stable_rate_accuracy
from workbench.risk.predictors import calibrated_score, predictor_scores
from workbench.risk.probability_calibration import group_folds
from workbench.risk.scores import auroc, auroc_within, brier, calibration_error, log_loss

if TYPE_CHECKING:
    import xarray as xr

_RATES = ("largest_stable_rate", "expected_stable_rate", "expected_low", "expected_high", "edge")


def cross_validate(
    sweep: xr.Dataset, *, by: str = "configuration", test: xr.Dataset | None = None, n_folds: int | None = None,
    below: float = 0.20, seed: int = 0, features: str | Sequence[str] = "forward", method: str = "logistic",
    squares: Sequence[str] = (), interactions: Sequence[tuple[str, str]] = (), penalty: float | None = None,
    n_bootstrap: int = 0, level: float = 0.95,
) -> xr.Dataset:  # fmt: skip
    """Predict groups of runs by models that were not fitted to them.

    Every step is repeated in every fold: scales, penalty, calibration and applicability.

    Args:
        sweep: Runs with their outcomes.
        by: Coordinate whose groups are never split: ``"configuration"``, ``"architecture"``, ``"cell"``, or any.
        test: Other runs to predict, each group of them by a model that was fitted on ``sweep`` without it; None: the
            runs of the sweep itself.
        n_folds: Folds of groups; None: ten, and one group at a time for architectures.
        below: Risk at the largest stable rates.
        seed: Seed of the folds, and of each fit.
        features: As in `fit`, like the arguments below.
        method: Method of each fit.
        squares: Squares of each fit.
        interactions: Interactions of each fit.
        penalty: Penalty of each fit.
        n_bootstrap: Resamples of each fit; 0: no intervals of the probability.
        level: Level of each fit.

    Returns:
        Dataset with dim ``run`` in the order of the sweep, or of ``test``: ``probability`` (also where not familiar),
        ``low`` and ``high`` (NaN without a bootstrap), ``distance``, ``is_familiar``, ``farthest_feature``,
        ``starts_diverged``; ``largest_stable_rate``, ``expected_stable_rate``, ``expected_low``, ``expected_high`` and
        ``edge``; ``has_diverged``, ``group``, ``fold``.

    Raises:
        OptionError: If an option is out of range.
        SchemaError: If the sweep has no such coordinate, or too few groups for a fit.

    Example:
        >>> import workbench as wb
        >>> sweep = wb.samples.divergence_sweep("held out").isel(run=slice(None, None, 4))  # to be quick
        >>> predicted = wb.risk.cross_validate(sweep, features=["near_unit_mass mean"], n_folds=2, penalty=1.0)
        >>> predicted["probability"].dims
        ('run',)
    """
    import xarray as xr

    sweep = as_cases(sweep)
    if by not in sweep.variables:
        raise SchemaError(f"The sweep has no {by}; take one from wb.open_sweep().")
    group = sweep[by].values
    n_groups = len(np.unique(group))
    if n_groups < 3:
        raise SchemaError(f"The sweep has {n_groups} different values of {by}, expected at least 3 to hold some out.")
    n_folds = n_folds or (n_groups if by == "architecture" else 10)
    if n_folds < 2:
        raise OptionError(f"n_folds is {n_folds}, expected at least 2.")
    target = sweep if test is None else as_cases(test)
    if test is None:
        folds = list(group_folds(group, min(n_folds, n_groups), seed))
    else:
        folds = list(_folds_of(group, target[by].values))
    parts = []
    for fold, (train, held_out) in enumerate(folds):
        model = fit(
            sweep.isel(run=train), features=features, method=method, squares=squares, interactions=interactions,
            penalty=penalty, n_bootstrap=n_bootstrap, level=level, seed=seed,
        )  # fmt: skip
        cases = target.isel(run=held_out)
        # The outcome of these runs is known, so the quality outside of the applicability can be measured too.
        found = model._extrapolated(cases).drop_vars("is_rate_seen")
        rates = model._extrapolated_rates(cases, below=below)
        found = found.assign({name: rates[name] for name in _RATES})
        parts.append(found.assign(fold=("run", np.full(len(held_out), fold)), place=("run", held_out)))
    joined = xr.concat(parts, dim="run", combine_attrs="drop", coords="different", compat="equals")
    joined = joined.isel(run=np.argsort(joined["place"].values)).drop_vars("place")
    label, groups = target["has_diverged"].values.astype(bool), target[by].values
    joined = joined.assign(has_diverged=("run", label), group=("run", groups))
    return joined.assign_attrs(by=by, below=below, n_folds=len(folds))


def _folds_of(group: np.ndarray, target: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows to fit on and rows to predict: each group by the others, all new groups together."""
    is_new = ~np.isin(target, group)
    if is_new.any():
        yield np.arange(len(group)), np.flatnonzero(is_new)
    for name in np.unique(target[~is_new]):
        yield np.flatnonzero(group != name), np.flatnonzero(target == name)


def figures_of(predicted: xr.Dataset, sweep: xr.Dataset, *, n_bootstrap: int = 1000, seed: int = 0) -> dict[str, Any]:
    """The figures of one cross-validation, as plain numbers; NaN where the runs do not determine one.

    Args:
        predicted: Predictions from `cross_validate`.
        sweep: The predicted runs.
        n_bootstrap: Resamples of the groups held out, for the intervals; 0: none.
        seed: Seed of the resamples.

    Returns:
        ``all`` and ``familiar`` (the runs within the models' applicability), each with ``n_runs``,
        ``n_diverged``, ``auroc`` (value, low, high), ``auroc_within_architecture``, ``auroc_within_cell``, ``ece``,
        ``brier``, ``log_loss`` and ``stable_rates``; ``architectures``: the same, briefly, by architecture.

    Example:
        >>> import workbench as wb
        >>> sweep = wb.samples.divergence_sweep("held out").isel(run=slice(None, None, 4))  # to be quick
        >>> predicted = wb.risk.cross_validate(sweep, features=["near_unit_mass mean"], n_folds=2, penalty=1.0)
        >>> figures = wb.risk.figures_of(predicted, sweep, n_bootstrap=0)
        >>> figures["all"]["auroc"][0] > 0.5
        True
    """
    familiar = np.flatnonzero(predicted["is_familiar"].values)
    everything = {
        "by": predicted.attrs["by"],
        "n_folds": predicted.attrs["n_folds"],
        "below": predicted.attrs["below"],
        "all": _figures(predicted, sweep, n_bootstrap, seed),
        "familiar": _figures(predicted.isel(run=familiar), sweep.isel(run=familiar), n_bootstrap, seed),
    }
    names = sweep["architecture"].values.astype(str)
    everything["architectures"] = {
        name: _brief(predicted.isel(run=names == name), sweep.isel(run=names == name))
        for name in dict.fromkeys(names.tolist())
    }
    return everything


def validate(
    sweep: xr.Dataset, *, by: Sequence[str] = ("configuration", "architecture"), test: xr.Dataset | None = None,
    below: float = 0.20, n_bootstrap: int = 1000, n_folds: int | None = None, seed: int = 0,
    features: str | Sequence[str] = "forward", method: str = "logistic", squares: Sequence[str] = (),
    interactions: Sequence[tuple[str, str]] = (), penalty: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compute all quality figures of a model's card, as `RiskModel.with_validation` takes them.

    Args:
        sweep: Runs with their outcomes.
        by: Coordinates to hold out, one cross-validation each.
        test: As in `cross_validate`.
        below: Risk at the largest stable rates.
        n_bootstrap: As in `figures_of`.
        n_folds: As in `cross_validate`.
        seed: Seed of folds and resamples.
        features: As in `fit`, like the arguments below.
        method: Method of each fit.
        squares: Squares of each fit.
        interactions: Interactions of each fit.
        penalty: Penalty of each fit.

    Returns:
        The result of `figures_of` under each name of ``by``, and ``near_unit_mass``: the paper's score alone, read as a
        probability and calibrated on other configurations.

    Raises:
        OptionError: As `cross_validate`.
        SchemaError: As `cross_validate`.

    Example:
        >>> import workbench as wb
        >>> sweep = wb.samples.divergence_sweep("held out").isel(run=slice(None, None, 4))  # to be quick
        >>> options = {"features": ["near_unit_mass mean"], "penalty": 1.0, "n_folds": 2, "n_bootstrap": 0}
        >>> sorted(wb.risk.validate(sweep, by=["configuration"], **options))
        ['configuration', 'near_unit_mass']
    """
    target = sweep if test is None else test
    found = {}
    for name in by:
        predicted = cross_validate(
            sweep, by=name, test=test, n_folds=n_folds, below=below, seed=seed, features=features, method=method,
            squares=squares, interactions=interactions, penalty=penalty,
        )  # fmt: skip
        found[name] = figures_of(predicted, target, n_bootstrap=n_bootstrap, seed=seed)
    return found | {"near_unit_mass": mass_figures(target, n_bootstrap=n_bootstrap, seed=seed)}


def mass_figures(sweep: xr.Dataset, *, n_bootstrap: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Figures of the paper's score, the near-unit mass M, alone.

    Returns:
        ``n_runs``; ``auroc`` (value, low, high), ``auroc_within_architecture``, ``auroc_within_cell``;
        ``ece_as_probability`` (M read as the probability, the paper's .283), ``ece`` and ``log_loss`` of M calibrated
        on other configurations.

    Raises:
        SchemaError: If the sweep lacks a variable, or all runs ended alike.

    Example:
        >>> import workbench as wb
        >>> figures = wb.risk.mass_figures(wb.samples.divergence_sweep("norms"), n_bootstrap=0)
        >>> 0 <= figures["ece_as_probability"] <= 1
        True
    """
    score = predictor_scores(sweep).sel(predictor="M").values
    has = ~np.isnan(score)
    score, label = score[has], sweep["has_diverged"].values.astype(bool)[has]
    groups = sweep["configuration"].values[has]
    probability = calibrated_score(score, label, groups, seed=seed)
    return {
        "n_runs": int(has.sum()),
        "auroc": list(auroc(score, label, groups=groups, n_bootstrap=n_bootstrap, seed=seed)),
        **_within(score, label, sweep.isel(run=has)),
        "ece_as_probability": calibration_error(np.clip(score, 0, 1), label),
        "ece": calibration_error(probability, label),
        "log_loss": log_loss(probability, label),
    }


def boosted_probability(
    sweep: xr.Dataset, *, by: str = "configuration", seed: int = 0, features: str | Sequence[str] = "forward"
) -> np.ndarray:
    """Out-of-fold predictions of gradient-boosted trees, monotone in the rate, to compare with the linear edge.

    They are only for comparison, and are neither calibrated nor kept.

    Args:
        sweep: Runs with their outcomes.
        by: As in `cross_validate`.
        seed: Seed of the folds.
        features: As in `fit`.

    Returns:
        Probabilities, shape (run,).

    Example:
        >>> import workbench as wb
        >>> sweep = wb.samples.divergence_sweep("norms")
        >>> probability = wb.risk.boosted_probability(sweep, features=["near_unit_mass mean"])
        >>> probability.shape
        (180,)
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    from workbench.risk.feature_map import FeatureMap
    from workbench.risk.features import features_of

    sweep = as_cases(sweep)
    names, label, group = features_of(features), sweep["has_diverged"].values, sweep[by].values
    n_groups = len(np.unique(group))
    found = np.empty(len(label))
    for train, held_out in group_folds(group, n_groups if by == "architecture" else min(10, n_groups), seed):
        feature_map = FeatureMap.of(sweep.isel(run=train), names)
        inputs = [
            np.column_stack([known.log_rate, feature_map.matrix(known)])
            for known in (feature_map.read(sweep.isel(run=rows)) for rows in (train, held_out))
        ]
        model = HistGradientBoostingClassifier(
            learning_rate=0.05, max_iter=200, max_leaf_nodes=8, min_samples_leaf=10, l2_regularization=1.0,
            monotonic_cst=[1] + [0] * (inputs[0].shape[1] - 1), random_state=seed,
        )  # fmt: skip
        found[held_out] = model.fit(inputs[0], label[train]).predict_proba(inputs[1])[:, 1]
    return found


def _figures(predicted: xr.Dataset, sweep: xr.Dataset, n_bootstrap: int, seed: int) -> dict[str, Any]:
    label, probability = predicted["has_diverged"].values, predicted["probability"].values
    found: dict[str, Any] = {"n_runs": len(label), "n_diverged": int(label.sum())}
    if label.all() or not label.any():
        return found
    groups = predicted["group"].values
    return found | {
        "n_groups": len(np.unique(groups)),
        "auroc": list(auroc(probability, label, groups=groups, n_bootstrap=n_bootstrap, seed=seed)),
        **_within(probability, label, sweep),
        "ece": calibration_error(probability, label),
        "brier": brier(probability, label),
        "log_loss": log_loss(probability, label),
        "stable_rates": _stable(predicted, sweep),
    }


def _brief(predicted: xr.Dataset, sweep: xr.Dataset) -> dict[str, Any]:
    label, probability = predicted["has_diverged"].values, predicted["probability"].values
    has_both = 0 < label.sum() < len(label)
    return {
        "n_runs": len(label),
        "n_diverged": int(label.sum()),
        "mean_probability": float(probability.mean()),
        "auroc": auroc(probability, label, n_bootstrap=0).value if has_both else np.nan,
        "share_familiar": float(predicted["is_familiar"].mean()),
        "stable_rates": _stable(predicted, sweep),
    }


def _within(score: np.ndarray, label: np.ndarray, sweep: xr.Dataset) -> dict[str, float]:
    found = {}
    for name in ("architecture", "cell"):
        try:
            value = auroc_within(score, label, sweep[name].values, n_bootstrap=0).value
        except SchemaError:  # no architecture or cell has both outcomes
            value = np.nan
        found[f"auroc_within_{name}"] = value
    return found


def _stable(predicted: xr.Dataset, sweep: xr.Dataset) -> dict[str, Any]:
    """Compare predicted and measured largest stable rates."""
    below = predicted.attrs["below"]
    found = stable_rate_accuracy(sweep, predicted["expected_stable_rate"], below=below)
    low, high, cautious = (
        stable_rate_accuracy(sweep, predicted[name], below=below)
        for name in ("expected_low", "expected_high", "largest_stable_rate")
    )
    has = ~np.isnan(found["ratio"].values)
    is_bound = (found["is_lower_bound"] | found["is_upper_bound"]).values
    n_measured = int(has.sum())

    def share(holds: np.ndarray) -> float:
        return float(holds[has].mean()) if n_measured else np.nan

    return {
        "n_cells": int(found.sizes["cell"]),
        "n_measured": n_measured,
        "n_bounds": int(is_bound.sum()),
        "n_bounds_kept": int((found["is_consistent"].values & is_bound).sum()),
        "median_ratio": float(np.median(found["ratio"].values[has])) if n_measured else np.nan,
        "share_within_1.5": share_within(found["ratio"], 1.5),
        "share_within_2": share_within(found["ratio"], 2.0),
        "share_in_interval": share(((low["ratio"] <= 1) & (high["ratio"] >= 1)).values),
        "median_cautious_ratio": float(np.median(cautious["ratio"].values[has])) if n_measured else np.nan,
        "share_cautious_is_stable": share((cautious["ratio"] <= 1).values),
    }
