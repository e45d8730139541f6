"""Evaluation of scores and probabilities: AUROC, calibration, and intervals from a cluster bootstrap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.option_checks import checked
from workbench.option_kinds import Level, PositiveInt

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import ArrayLike

#: Entries in one block of resamples, which limits the memory of a bootstrap.
_BLOCK = 2_000_000


class Auroc(NamedTuple):
    """An area under the ROC curve with its interval, which is NaN without a bootstrap."""

    value: float
    low: float
    high: float


def auroc(
    score: ArrayLike, label: ArrayLike, *, within: ArrayLike | None = None, groups: ArrayLike | None = None,
    n_bootstrap: int = 1000, seed: int = 0,
) -> Auroc:  # fmt: skip
    """Compute the area under the ROC curve of a score, P(s1 > s0) + P(s1 = s0) / 2, and its 95 % interval.

    Scores are higher for divergence (label) and may be infinite. Only runs of one kind in ``within``, such as a cell,
    are compared, and each such pair counts once: within cells, whose runs differ only in learning rate and seed, this
    measures how well a score distinguishes rates. Runs of one of the ``groups`` are drawn together (cluster bootstrap,
    percentiles). Resamples with only one outcome are ignored; a perfect score has the interval [1, 1], because every
    resample is perfect too.
    """
    within = np.zeros(np.size(score), int) if within is None else within
    scores, labels = _pair(score, label)
    _, strata = np.unique(np.asarray(within), return_inverse=True)
    members = [np.flatnonzero(strata == i) for i in range(strata.max(initial=-1) + 1)]
    members = [index for index in members if 0 < labels[index].sum() < len(index)]
    if not members:
        raise SchemaError("All runs have the same outcome; pass runs that diverged and runs that converged.")

    def value(weight: np.ndarray) -> np.ndarray:
        parts = [_concordance(scores[index], labels[index], weight[:, index]) for index in members]
        right, n_pairs = np.sum(parts, axis=0)
        with np.errstate(invalid="ignore"):
            return right / n_pairs

    found = float(value(np.ones((1, len(scores))))[0])
    if not n_bootstrap:
        return Auroc(found, np.nan, np.nan)
    values = np.concatenate([value(weight) for weight in resamples(groups, len(scores), n_bootstrap, seed)])
    low, high = np.nanquantile(values, [0.025, 0.975])
    return Auroc(found, float(low), float(high))


def resamples(
    groups: ArrayLike | None, n_runs: int, n_bootstrap: int, seed: int, *, block: int = _BLOCK
) -> Iterator[np.ndarray]:
    """Draw groups with replacement; yield how often each run is drawn, in blocks of shape (resample, run)."""
    if groups is not None and np.size(groups) != n_runs:
        raise OptionError(f"groups must have one entry for each of the {n_runs} runs, got {np.size(groups)}.")
    _, index = np.unique(np.arange(n_runs) if groups is None else np.asarray(groups), return_inverse=True)
    n_groups = int(index.max()) + 1
    random = np.random.default_rng(seed % 2**64)
    n_block = max(1, block // n_runs)
    for start in range(0, n_bootstrap, n_block):
        n = min(n_block, n_bootstrap - start)
        yield random.multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=n)[:, index].astype(float)


@checked
def reliability(
    probability: ArrayLike, label: ArrayLike, *, n_bins: PositiveInt = 10, level: Level = 0.95
) -> xr.Dataset:
    """Compare predicted probabilities with observed frequencies, in bins of equal width.

    Args:
        probability: Predicted probability of divergence of each run. Runs without a prediction (NaN) are ignored and
            counted in ``n_left_out``.
        label: Whether each run diverged.
        n_bins: Number of bins of equal width between 0 and 1. A bin contains its lower bound; the last also contains 1.
        level: Level of the Wilson score intervals (Wilson 1927).

    Returns:
        Dataset with dimension ``bin``: ``mean_probability``, ``rate`` (fraction of the runs that diverged), ``low`` and
        ``high`` (interval of the rate), ``n_runs``, and the coordinates ``lower`` and ``upper``; NaN in an empty bin.
        Attributes: ``ece``, the expected calibration error, the mean of |rate - mean_probability| weighted by runs;
        ``n_runs``, ``n_left_out``, ``level``.

    Raises:
        OptionError: If a probability is not between 0 and 1, lengths differ, or an option is out of range.
        SchemaError: If no run has a probability.

    Example:
        >>> import workbench as wb
        >>> bins = wb.risk.reliability([0.9, 0.9, 0.1, 0.1], [True, True, False, False], n_bins=2)
        >>> bins["rate"].values, bins["n_runs"].values
        (array([0., 1.]), array([2, 2]))

    See Also:
        `workbench.plots.reliability`: Draws the result.
    """
    import xarray as xr
    from scipy.stats import binomtest

    predicted, labels = _pair(probability, label, name="probability", allows_nan=True)
    is_there = ~np.isnan(predicted)
    predicted, labels = predicted[is_there], labels[is_there]
    if not len(predicted):
        raise SchemaError("No run has a probability (all are NaN); pass runs that have one.")
    farthest = float(predicted[np.argmax(np.abs(predicted - 0.5))])
    if not 0 <= farthest <= 1:
        raise OptionError.of("probability", farthest, "between 0 and 1")
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
        "mean_probability": (mean, "predicted probability", "mean over the bin; NaN if empty"),
        "rate": (rate, "divergence rate", "fraction of the runs of the bin that diverged; NaN if empty"),
        "low": ([low for low, _ in intervals], "lower bound", "of the Wilson interval of the rate; NaN if empty"),
        "high": ([high for _, high in intervals], "upper bound", "of the Wilson interval of the rate; NaN if empty"),
        "n_runs": (n_runs, "runs", "number of runs"),
    }
    variables = {
        name: ("bin", np.asarray(values), {"long_name": long_name, "units": "1", "meaning": meaning})
        for name, (values, long_name, meaning) in columns.items()
    }
    ece = float(np.nansum(n_runs * np.abs(rate - mean)) / n_runs.sum())
    attrs = {"ece": ece, "n_runs": int(n_runs.sum()), "n_left_out": int((~is_there).sum()), "level": level}
    return xr.Dataset(variables, {"lower": ("bin", edges[:-1]), "upper": ("bin", edges[1:])}, attrs)


def _concordance(score: np.ndarray, label: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weighted numbers of pairs in the correct order (ties count half) and of all pairs."""
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], score[order][1:] != score[order][:-1]]))
    weight, label = weight[:, order], label[order]
    n_diverged = np.add.reduceat(weight * label, starts, axis=1)
    n_converged = np.add.reduceat(weight * ~label, starts, axis=1)
    n_below = np.cumsum(n_converged, axis=1) - n_converged
    return (n_diverged * (n_below + n_converged / 2)).sum(axis=1), n_diverged.sum(axis=1) * n_converged.sum(axis=1)


def _pair(
    score: ArrayLike, label: ArrayLike, *, name: str = "score", allows_nan: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and labels as arrays of shape (run,)."""
    scores, labels = np.asarray(score, dtype=float), np.asarray(label).astype(bool)
    if scores.shape != labels.shape or scores.ndim != 1:
        raise OptionError(f"{name} must have one entry for each of the {labels.size} labels, got {scores.size}.")
    if not allows_nan and np.isnan(scores).any():
        n_missing = int(np.isnan(scores).sum())
        raise OptionError(f"{name} is NaN for {n_missing} of {scores.size} runs; omit these runs.")
    return scores, labels
