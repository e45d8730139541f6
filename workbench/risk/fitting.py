"""Fit a risk model to a sweep: its weights, their calibration and their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.risk.applicability import Applicability, ranges_of
from workbench.risk.feature_map import FeatureMap, rounded
from workbench.risk.features import as_cases, counts_as_diverged, features_of
from workbench.risk.probability_calibration import edge_spread, group_folds, platt
from workbench.risk.risk_model import RiskModel
from workbench.risk.scores import log_loss, resamples

if TYPE_CHECKING:
    import xarray as xr

METHODS = ("logistic", "edge")
#: Candidate strengths of the quadratic penalty on the weights of standardised columns.
PENALTIES = tuple(float(f"{10.0**power:.3g}") for power in np.arange(-1, 3.1, 0.5))
#: The rate's column is scaled by this factor, so that the penalty hardly affects its slope.
_FREE = 100.0
#: Rounds of the interval regression; each costs one product of small matrices.
_N_ROUNDS = 200


@dataclass(frozen=True)
class TrainingTable:
    """A sweep as arrays.

    Attributes:
        columns: Shape (run, column).
        log_rate: log10 of the rate; shape (run,).
        label: Whether the run diverged.
        groups: Groups that are never split; integers from 0.
        cells: Cells, equal in all settings except rate and seed; integers from 0.
    """

    columns: np.ndarray
    log_rate: np.ndarray
    label: np.ndarray
    groups: np.ndarray
    cells: np.ndarray


def fit(
    sweep: xr.Dataset, *, features: str | Sequence[str] = "forward", method: str = "logistic",
    squares: Sequence[str] = (), interactions: Sequence[tuple[str, str]] = (), by: str = "configuration",
    penalty: float | None = None, n_bootstrap: int = 200, n_folds: int = 5, level: float = 0.95, seed: int = 0,
) -> RiskModel:  # fmt: skip
    """Fit a model of the risk of divergence to recorded runs.

    log-odds = slope (log10 rate - log10 edge), with the edge linear in the standardised features, so that the risk
    rises with the rate and the rate of a given risk has a closed form. Slope and edge are calibrated on out-of-fold
    predictions (Platt 1999), which makes the slope smaller the more uncertain the edge is.

    Args:
        sweep: Runs with their outcomes; see `wb.open_sweep`.
        features: ``"forward"`` (forward passes alone), ``"gradient"`` (and one batch of gradients), ``"pilot"``
            (and ten updates on a copy), or names out of `FEATURES`.
        method: ``"logistic"``: logistic regression over all runs. ``"edge"``: each cell's edge is known to lie
            between two rates of its grid, and is regressed on the features (squared distance to that interval); then
            the slope.
        squares: Columns whose squares are added.
        interactions: Pairs of columns whose products are added.
        by: Coordinate whose groups are never split in the choice of the penalty, in calibration and resampling.
        penalty: Strength of the quadratic penalty of the edge's weights; None: the best one on held-out groups.
        n_bootstrap: Resamples of the groups behind the intervals; 0: none.
        n_folds: Folds of groups.
        level: Level of the intervals.
        seed: Seed of folds and resamples.

    Raises:
        OptionError: If an option is out of range or a name unknown.
        SchemaError: If the sweep lacks a variable, all runs ended alike, there are fewer than four groups, or larger
            rates do not diverge more often.

    Example:
        >>> import workbench as wb
        >>> sweep = wb.samples.divergence_sweep("held out")
        >>> model = wb.risk.fit(sweep, features=["near_unit_mass mean"], penalty=1.0, n_bootstrap=0)
        >>> slow, fast = (wb.sweeps.replan(sweep.isel(run=[0]), learning_rate=rate) for rate in (1e-3, 1e-2))
        >>> model.predict(slow)["probability"].values < model.predict(fast)["probability"].values
        array([ True])
    """
    names = features_of(features)
    _check_options(method, penalty, n_bootstrap, n_folds, level)
    every_run = _outcomes(sweep, by)
    # Models that count as diverged before the first update do so at any rate, and are no evidence on the edge.
    sweep = _outcomes(every_run.isel(run=~counts_as_diverged(every_run)), by)
    feature_map = FeatureMap.of(sweep, names, squares=squares, interactions=interactions)
    known = feature_map.read(sweep)
    table = TrainingTable(
        feature_map.matrix(known), known.log_rate, sweep["has_diverged"].values.astype(bool), _codes(sweep[by].values),
        _codes(sweep["cell"].values),
    )  # fmt: skip
    folds = _folds(table.groups, min(n_folds, int(table.groups.max()) + 1), seed)
    every = np.ones(len(table.label))
    tried = PENALTIES if penalty is None else (float(penalty),)
    found = {strength: _out_of_fold(table, every, folds, strength, method) for strength in tried}
    losses = {strength: held_out.loss for strength, held_out in found.items() if held_out is not None}
    best = min(losses, key=lambda strength: (losses[strength], -strength), default=tried[0])
    held_out, own = found[best], _calibrated(table, every, folds, best, method)
    if held_out is None or own is None:
        raise SchemaError(
            "In these runs larger learning rates do not diverge more often in groups held out; the rates of each cell "
            "must straddle its edge."
        )
    weights = rounded(np.array([own, *_bootstrap(table, folds, best, method, n_bootstrap, seed)]))
    offset = table.log_rate - weights[0, 1] - table.columns @ weights[0, 2:]
    options = {
        "features": features if isinstance(features, str) else list(names), "method": method, "squares": list(squares),
        "interactions": [list(pair) for pair in interactions], "by": by, "penalty": best,
        "is_penalty_chosen": penalty is None, "n_bootstrap": n_bootstrap, "n_folds": n_folds, "level": level,
        "seed": seed,
    }  # fmt: skip
    applicability = Applicability.of(
        table.columns[:, : feature_map.n_base], sweep["cell"].values, sweep["configuration"].values, ranges_of(sweep)
    )
    about = _about(sweep, options) | {"n_started_diverged": every_run.sizes["run"] - sweep.sizes["run"]}
    spread = edge_spread(held_out.offset, table.label, table.cells)
    log_rate = _two(table.log_rate.mean(), table.log_rate.std())
    return RiskModel(
        feature_map, applicability, weights, _two(offset.min(), offset.max()), log_rate, _two(*spread), about
    )


@dataclass(frozen=True)
class HeldOut:
    """Out-of-fold predictions.

    Attributes:
        offset: log10 of the rate over the predicted edge, not calibrated; shape (run,).
        factor: Factor that, with ``shift``, converts scores to log-odds.
        shift: See above.
        loss: Log loss of the resulting probabilities, in nats.
    """

    offset: np.ndarray
    factor: float
    shift: float
    loss: float


def _out_of_fold(
    table: TrainingTable, weight: np.ndarray, folds: list[np.ndarray], penalty: float, method: str
) -> HeldOut | None:
    """Out-of-fold predictions; None where the risk does not rise with the rate."""
    from scipy.special import expit

    score, offset = np.full((2, len(table.label)), np.nan)
    for held_out in folds:
        raw = _raw(table, np.where(held_out, 0.0, weight), penalty, method)
        if raw is None:
            return None
        score[held_out] = raw[0] * table.log_rate[held_out] + raw[1] + table.columns[held_out] @ raw[2:]
        offset[held_out] = score[held_out] / raw[0]
    is_used = weight > 0
    factor, shift = platt(score[is_used], table.label[is_used], weight[is_used])
    drawn = np.repeat(np.arange(len(weight)), weight.astype(int))
    loss = log_loss(expit(factor * score + shift)[drawn], table.label[drawn])
    return HeldOut(offset, factor, shift, loss) if factor > 0 else None


def _calibrated(
    table: TrainingTable, weight: np.ndarray, folds: list[np.ndarray], penalty: float, method: str
) -> np.ndarray | None:
    """Slope, edge and the edge's weights, calibrated on groups held out; None where the risk does not rise."""
    held_out = _out_of_fold(table, weight, folds, penalty, method)
    raw = _raw(table, weight, penalty, method)
    if held_out is None or raw is None:
        return None
    slope = held_out.factor * raw[0]
    return np.concatenate([[slope, -(held_out.factor * raw[1] + held_out.shift) / slope], -raw[2:] / raw[0]])


def _raw(table: TrainingTable, weight: np.ndarray, penalty: float, method: str) -> np.ndarray | None:
    """Slope in the log rate, intercept, weights of the columns; None where one outcome is missing or nothing rises."""
    is_used = weight > 0
    if np.unique(table.label[is_used]).size < 2:
        return None
    raw = (_logistic if method == "logistic" else _edge)(table, weight, penalty)
    return raw if raw[0] > 0 else None


def _logistic(table: TrainingTable, weight: np.ndarray, penalty: float) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression

    is_used = weight > 0
    center = table.log_rate[is_used].mean()
    inputs = np.column_stack([_FREE * (table.log_rate - center), table.columns])
    model = LogisticRegression(C=1 / penalty, solver="newton-cholesky", max_iter=200)
    model.fit(inputs[is_used], table.label[is_used], sample_weight=weight[is_used])
    slope = _FREE * model.coef_[0, 0]
    return np.concatenate([[slope, model.intercept_[0] - slope * center], model.coef_[0, 1:]])


def _edge(table: TrainingTable, weight: np.ndarray, penalty: float) -> np.ndarray:
    """Ridge regression of each cell's edge, known to lie between two rates, on the mean of its columns.

    The squared distance to the interval is convex; projecting the prediction onto the interval and regressing on that
    lowers it every time.
    """
    cells, low, high, size = _intervals(table, weight)
    center = np.average(cells, axis=0, weights=size)
    inputs = cells - center
    gram = inputs.T @ (size[:, None] * inputs) + penalty * np.eye(inputs.shape[1])
    middle = np.where(np.isinf(low), high, np.where(np.isinf(high), low, (low + high) / 2))
    intercept, weights, target = np.average(middle, weights=size), np.zeros(inputs.shape[1]), middle
    for _ in range(_N_ROUNDS):
        intercept = np.average(target, weights=size)
        weights = np.linalg.solve(gram, inputs.T @ (size * (target - intercept)))
        target = np.clip(intercept + inputs @ weights, low, high)
    return np.concatenate([[1.0, -(intercept - center @ weights)], -weights])


def _intervals(table: TrainingTable, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each cell drawn: mean columns, the last rate at which fewer than half diverge, the first after it, size."""
    rows = []
    for cell in np.unique(table.cells[weight > 0]):
        of = (table.cells == cell) & (weight > 0)
        rates, at = np.unique(table.log_rate[of], return_inverse=True)
        share = np.bincount(at, table.label[of]) / np.bincount(at)
        n_stable = int((share < 0.5).cumprod().sum())
        low = rates[n_stable - 1] if n_stable else -np.inf
        high = rates[n_stable] if n_stable < len(rates) else np.inf
        rows.append((table.columns[of].mean(axis=0), low, high, weight[of].mean()))
    columns, low, high, size = zip(*rows, strict=True)
    return np.array(columns), np.array(low), np.array(high), np.array(size)


def _bootstrap(
    table: TrainingTable, folds: list[np.ndarray], penalty: float, method: str, n_bootstrap: int, seed: int
) -> list[np.ndarray]:
    """Repeat the fit on resampled groups, calibration included; resamples without a fit are drawn again."""
    found: list[np.ndarray] = []
    draws = (row for block in resamples(table.groups, len(table.label), 3 * n_bootstrap, seed) for row in block)
    while len(found) < n_bootstrap:
        weight = next(draws, None)
        if weight is None:
            raise SchemaError("Most resamples of the groups give no model; the sweep has too few groups that diverge.")
        if (fitted := _calibrated(table, weight, folds, penalty, method)) is not None:
            found.append(fitted)
    return found


def _folds(groups: np.ndarray, n_folds: int, seed: int) -> list[np.ndarray]:
    """Masks of the held-out rows."""
    masks = []
    for _, held_out in group_folds(groups, n_folds, seed):
        mask = np.zeros(len(groups), dtype=bool)
        mask[held_out] = True
        masks.append(mask)
    return masks


def _two(low: float, high: float) -> tuple[float, float]:
    """Two numbers, rounded as in a file."""
    first, second = rounded(np.array([low, high])).tolist()
    return first, second


def _codes(names: np.ndarray) -> np.ndarray:
    return np.unique(names, return_inverse=True)[1]


def _check_options(method: str, penalty: float | None, n_bootstrap: int, n_folds: int, level: float) -> None:
    if method not in METHODS:
        raise OptionError(f"method is '{method}', expected {' or '.join(METHODS)}.")
    if penalty is not None and not (np.isfinite(penalty) and penalty > 0):
        raise OptionError(f"penalty is {penalty}, expected a positive number.")
    if n_bootstrap < 0:
        raise OptionError(f"n_bootstrap is {n_bootstrap}, expected at least 0.")
    if n_folds < 2:
        raise OptionError(f"n_folds is {n_folds}, expected at least 2.")
    if not 0 < level < 1:
        raise OptionError(f"level is {level}, expected a share between 0 and 1.")


def _outcomes(sweep: xr.Dataset, by: str) -> xr.Dataset:
    """Check that a model can be fitted to the sweep, and return it.

    Raises:
        SchemaError: If it cannot.
    """
    sweep = as_cases(sweep)
    missing = [name for name in ("has_diverged", "configuration", "cell", by) if name not in sweep.variables]
    if missing:
        raise SchemaError(f"The sweep has no {', '.join(dict.fromkeys(missing))}; take one from wb.open_sweep().")
    label = sweep["has_diverged"].values.astype(bool)
    if label.all() or not label.any():
        raise SchemaError(f"All {len(label)} runs of the sweep ended alike; add rates at which they do not.")
    for name in dict.fromkeys((by, "configuration")):
        if (n_groups := len(np.unique(sweep[name].values))) < 4:
            raise SchemaError(
                f"The sweep has {n_groups} different values of {name}, expected at least 4 to learn from."
            )
    return sweep


def _about(sweep: xr.Dataset, options: dict[str, Any]) -> dict[str, Any]:
    """Data and options of the fit, for the model's card."""
    import sklearn

    def names(of: str) -> list[str]:
        return list(dict.fromkeys(map(str, sweep[of].values.tolist()))) if of in sweep.variables else []

    rates = sweep["learning_rate"].values
    return {
        "n_runs": sweep.sizes["run"],
        "n_diverged": int(sweep["has_diverged"].sum()),
        "n_cells": len(np.unique(sweep["cell"].values)),
        "n_configurations": len(np.unique(sweep["configuration"].values)),
        "architectures": names("architecture"),
        "tasks": names("task"),
        "optimizers": names("optimizer"),
        "rates": [float(rates.min()), float(rates.max())],
        "n_steps": int(sweep["n_steps"].values.max()) if "n_steps" in sweep.variables else None,
        "options": options,
        "versions": f"scikit-learn {sklearn.__version__}, numpy {np.__version__}",
    }
