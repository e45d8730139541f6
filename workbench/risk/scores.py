"""Evaluate scores and probabilities: AUROC, calibration, and intervals from a cluster bootstrap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.errors import OptionError, SchemaError

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import ArrayLike

#: Entries of one block of resamples; bounds the memory of a bootstrap for any number of runs.
_BLOCK = 2_000_000


class Auroc(NamedTuple):
    """An area under the ROC curve and its interval; NaN bounds without a bootstrap.

    Example:
        >>> import workbench as wb
        >>> area = wb.risk.auroc([0.1, 0.4, 0.3, 0.9], [False, False, True, True], n_bootstrap=0)
        >>> isinstance(area, wb.risk.Auroc), area.value
        (True, 0.75)
    """

    value: float
    low: float
    high: float


def auroc(
    score: ArrayLike, label: ArrayLike, *, n_bootstrap: int = 1000, seed: int = 0,
    groups: ArrayLike | None = None, level: float = 0.95,
) -> Auroc:  # fmt: skip
    """Probability P(s1 > s0) + P(s1 = s0) / 2 that a run which diverged scores higher (s1) than one which did not (s0).

    Args:
        score: Score of each run, higher for divergence; may be infinite.
        label: Whether it diverged.
        n_bootstrap: Resamples behind the interval; 0: none.
        seed: Seed of the resamples.
        groups: Runs of a group are drawn together (cluster bootstrap); None: every run is a group.
        level: Level of the percentile interval.

    Returns:
        Value and interval. Resamples in which all runs end alike are left out. A perfect score has the interval
        [1, 1], as every resample is perfect too.

    Raises:
        OptionError: If a score is NaN, lengths differ, or an option is out of range.
        SchemaError: If all runs ended alike.

    Example:
        >>> import workbench as wb
        >>> area = wb.risk.auroc([0.1, 0.4, 0.3, 0.9], [False, False, True, True], n_bootstrap=0)
        >>> area.value
        0.75
    """
    return auroc_within(
        score, label, np.zeros(np.size(score), int), n_bootstrap=n_bootstrap, seed=seed, groups=groups, level=level
    )


def roc_curve(
    score: ArrayLike, label: ArrayLike, *, n_bootstrap: int = 1000, seed: int = 0,
    groups: ArrayLike | None = None, level: float = 0.95,
) -> xr.Dataset:  # fmt: skip
    """Compute the ROC curve, true and false positive rates at every threshold on a score; arguments as in `auroc`.

    Returns:
        Dataset with dim ``point``: ``false_positive_rate``, ``true_positive_rate`` and ``threshold`` (at or above it a
        run counts as positive; the first, infinite, gives no positives). Attributes: ``auroc``, ``low``, ``high``,
        ``level``, ``n_runs``, ``n_diverged``.

    Raises:
        OptionError: As in `auroc`.
        SchemaError: If all runs ended alike.

    Example:
        >>> import workbench as wb
        >>> curve = wb.risk.roc_curve([0.1, 0.4, 0.3, 0.9], [False, False, True, True], n_bootstrap=0)
        >>> curve["true_positive_rate"].values, curve.attrs["auroc"]
        (array([0. , 0.5, 0.5, 1. , 1. ]), 0.75)
    """
    import xarray as xr
    from sklearn import metrics

    found = auroc(score, label, n_bootstrap=n_bootstrap, seed=seed, groups=groups, level=level)
    scores, labels = _pair(score, label)
    values, rank = np.unique(scores, return_inverse=True)  # scikit-learn accepts no infinite score
    false_positive_rate, true_positive_rate, _ = metrics.roc_curve(labels, rank, drop_intermediate=False)
    columns = {
        "false_positive_rate": false_positive_rate,
        "true_positive_rate": true_positive_rate,
        "threshold": np.concatenate([[np.inf], values[::-1]]),
    }
    attrs = {"auroc": found.value, "low": found.low, "high": found.high, "level": level}
    attrs |= {"n_runs": len(labels), "n_diverged": int(labels.sum())}
    return xr.Dataset({name: ("point", values) for name, values in columns.items()}, attrs=attrs)


def auroc_within(
    score: ArrayLike, label: ArrayLike, within: ArrayLike, *, n_bootstrap: int = 1000, seed: int = 0,
    groups: ArrayLike | None = None, level: float = 0.95,
) -> Auroc:  # fmt: skip
    """AUROC among runs of one kind: only pairs that share ``within`` are compared, and every such pair counts once.

    Within cells (all settings except learning rate and seed the same) it measures whether a score depends on the
    learning rate. The other arguments are those of `auroc`.

    Raises:
        OptionError: As in `auroc`.
        SchemaError: If all runs ended alike wherever they may be compared.

    Example:
        >>> import workbench as wb
        >>> score, label = [0.1, 0.4, 5.3, 5.9], [False, True, True, False]
        >>> wb.risk.auroc_within(score, label, ["a", "a", "b", "b"], n_bootstrap=0).value
        0.5
    """
    scores, labels = _pair(score, label)
    if n_bootstrap < 0 or not 0 < level < 1:
        raise OptionError("n_bootstrap must not be negative, and level lies between 0 and 1.")
    _, strata = np.unique(np.asarray(within), return_inverse=True)
    members = [np.flatnonzero(strata == i) for i in range(strata.max(initial=-1) + 1)]
    members = [of for of in members if 0 < labels[of].sum() < len(of)]
    if not members:
        raise SchemaError(
            "All runs ended alike, so no AUROC says anything; take some that diverged and some that did not."
        )

    def value(weight: np.ndarray) -> np.ndarray:
        parts = [_concordance(scores[of], labels[of], weight[:, of]) for of in members]
        right, n_pairs = np.sum(parts, axis=0)
        with np.errstate(invalid="ignore"):
            return right / n_pairs

    found = float(value(np.ones((1, len(scores))))[0])
    if not n_bootstrap:
        return Auroc(found, np.nan, np.nan)
    values = np.concatenate([value(weight) for weight in resamples(groups, len(scores), n_bootstrap, seed)])
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Auroc(found, float(low), float(high))


def resamples(
    groups: ArrayLike | None, n_runs: int, n_bootstrap: int, seed: int, *, block: int = _BLOCK
) -> Iterator[np.ndarray]:
    """Draw groups with replacement and count how often each run is drawn.

    Yields:
        Blocks of shape (resample, run).

    Raises:
        OptionError: If there is not one group for each run.
    """
    if groups is not None and np.size(groups) != n_runs:
        raise OptionError(f"There are {np.size(groups)} groups for {n_runs} runs, expected one a run.")
    _, index = np.unique(np.arange(n_runs) if groups is None else np.asarray(groups), return_inverse=True)
    n_groups = int(index.max()) + 1
    random = np.random.default_rng(seed)
    n_block = max(1, block // n_runs)
    for start in range(0, n_bootstrap, n_block):
        n = min(n_block, n_bootstrap - start)
        yield random.multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=n)[:, index].astype(float)


def reliability(probability: ArrayLike, label: ArrayLike, *, n_bins: int = 10, level: float = 0.95) -> xr.Dataset:
    """Compare predicted probabilities with observed rates, in bins of equal width.

    Args:
        probability: Probability of divergence of each run; NaN (refused) is left out and counted.
        label: Whether the run diverged.
        n_bins: Bins of equal width between 0 and 1, each with its lower bound, the last also with 1.
        level: Level of the Wilson score intervals (Wilson 1927).

    Returns:
        Dataset with dim ``bin``: ``mean_probability``, ``rate`` (share that diverged), ``low`` and ``high`` (of the
        rate), ``n_runs``, and the coordinates ``lower`` and ``upper``; NaN where a bin is empty. Attributes: ``ece``,
        the expected calibration error, the mean of |rate - mean_probability| weighted by runs; ``n_runs``,
        ``n_left_out``, ``level``.

    Raises:
        OptionError: If a probability is none, lengths differ, or an option is out of range.
        SchemaError: If no run has a probability.

    Example:
        >>> import workbench as wb
        >>> bins = wb.risk.reliability([0.9, 0.9, 0.1, 0.1], [True, True, False, False], n_bins=2)
        >>> bins["rate"].values, bins["n_runs"].values
        (array([0., 1.]), array([2, 2]))
    """
    import xarray as xr
    from scipy.stats import binomtest

    predicted, labels = _pair(probability, label, allows_nan=True)
    if n_bins < 1 or not 0 < level < 1:
        raise OptionError("n_bins must be at least 1, and level lies between 0 and 1.")
    is_there = ~np.isnan(predicted)
    predicted, labels = predicted[is_there], labels[is_there]
    if not len(predicted):
        raise SchemaError("No run has a probability; take other runs.")
    _require_probabilities(predicted)
    edges = np.linspace(0, 1, n_bins + 1)
    index = np.clip(np.searchsorted(edges, predicted, side="right") - 1, 0, n_bins - 1)
    n_runs = np.bincount(index, minlength=n_bins)
    n_diverged = np.bincount(index, weights=labels, minlength=n_bins).astype(int)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(index, weights=predicted, minlength=n_bins) / n_runs
        rate = n_diverged / n_runs
    intervals = [
        tuple(binomtest(k, n).proportion_ci(level, method="wilson")) if n else (np.nan, np.nan)
        for k, n in zip(n_diverged.tolist(), n_runs.tolist(), strict=True)
    ]
    columns = {
        "mean_probability": (mean, "predicted probability", "mean over the bin; NaN: empty"),
        "rate": (rate, "divergence rate", "share of the bin's runs that diverged; NaN: empty"),
        "low": ([low for low, _ in intervals], "lower bound", "of the Wilson interval of the rate; NaN: empty"),
        "high": ([high for _, high in intervals], "upper bound", "of the Wilson interval of the rate; NaN: empty"),
        "n_runs": (n_runs, "runs", "number of runs"),
    }
    variables = {
        name: ("bin", np.asarray(values), {"long_name": long_name, "units": "1", "meaning": meaning})
        for name, (values, long_name, meaning) in columns.items()
    }
    ece = float(np.nansum(n_runs * np.abs(rate - mean)) / n_runs.sum())
    attrs = {"ece": ece, "n_runs": int(n_runs.sum()), "n_left_out": int((~is_there).sum()), "level": level}
    return xr.Dataset(variables, {"lower": ("bin", edges[:-1]), "upper": ("bin", edges[1:])}, attrs)


def calibration_error(probability: ArrayLike, label: ArrayLike, *, n_bins: int = 10) -> float:
    """Expected calibration error, sum_b n_b |rate_b - mean_probability_b| / n over bins; see `reliability`.

    Example:
        >>> import workbench as wb
        >>> round(wb.risk.calibration_error([0.9, 0.9, 0.1, 0.1], [True, True, False, False]), 3)
        0.1
    """
    return float(reliability(probability, label, n_bins=n_bins).attrs["ece"])


def _concordance(score: np.ndarray, label: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted pairs in the right order (ties half), and all pairs, of each row of weights."""
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], score[order][1:] != score[order][:-1]]))
    weight, label = weight[:, order], label[order]
    n_diverged = np.add.reduceat(weight * label, starts, axis=1)
    n_alive = np.add.reduceat(weight * ~label, starts, axis=1)
    n_below = np.cumsum(n_alive, axis=1) - n_alive
    return (n_diverged * (n_below + n_alive / 2)).sum(axis=1), n_diverged.sum(axis=1) * n_alive.sum(axis=1)


def _pair(score: ArrayLike, label: ArrayLike, *, allows_nan: bool = False) -> tuple[np.ndarray, np.ndarray]:
    scores, labels = np.asarray(score, dtype=float), np.asarray(label).astype(bool)
    if scores.shape != labels.shape or scores.ndim != 1:
        raise OptionError(f"There are {scores.size} scores for {labels.size} runs, expected one a run.")
    if not allows_nan and np.isnan(scores).any():
        raise OptionError(f"{int(np.isnan(scores).sum())} scores are NaN; leave those runs out.")
    return scores, labels


def _require_probabilities(values: np.ndarray) -> None:
    farthest = values[np.argmax(np.abs(values - 0.5))]
    if not 0 <= farthest <= 1:
        raise OptionError(f"A probability is {farthest:g}, expected 0 to 1.")
