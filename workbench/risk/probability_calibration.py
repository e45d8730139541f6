"""Calibrate out-of-fold scores to probabilities, and estimate the uncertainty of an edge."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: Nodes of the Gauss-Hermite rule over a cell's error.
_N_NODES = 24


def group_folds(groups: np.ndarray, n_folds: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield training and held-out rows; no group is on both sides, and every row is held out once."""
    from sklearn.model_selection import GroupKFold

    yield from GroupKFold(n_folds, shuffle=True, random_state=seed).split(groups, groups=groups)


def platt(score: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None) -> tuple[float, float]:
    """Fit factor and offset that convert a score to the log-odds of a label (Platt 1999); hardly penalised.

    Args:
        score: Scores, shape (run,).
        label: bool; both outcomes have to occur.
        weight: Weight of each run.
    """
    from sklearn.linear_model import LogisticRegression

    scale = float(np.std(score)) or 1.0
    model = LogisticRegression(C=1e4, solver="newton-cholesky", max_iter=1000)
    model.fit(np.asarray(score)[:, None] / scale, label, sample_weight=weight)
    return float(model.coef_[0, 0]) / scale, float(model.intercept_[0])


def edge_spread(offset: np.ndarray, label: np.ndarray, cells: np.ndarray) -> tuple[float, float]:
    """Estimate the sharpness of the edge within a cell, and the spread of the cells' edges around their predictions.

    Logistic regression with a normal intercept for each cell, by maximum likelihood (Gauss-Hermite quadrature). The
    slope within a cell is steeper than that over all cells, whose edges are not known exactly.

    Args:
        offset: log10 of the rate over a predicted edge, out of fold; shape (run,).
        label: Whether the run diverged.
        cells: Cell of each run.

    Returns:
        Slope of the log-odds per factor of ten within a cell, at most 200, and the standard deviation of log10 of the
        edges, at least .001.
    """
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    nodes, weights = np.polynomial.hermite_e.hermegauss(_N_NODES)
    log_weights = np.log(weights / weights.sum())
    _, index = np.unique(cells, return_inverse=True)
    sign = np.where(label, 1.0, -1.0)

    def loss(parameters: np.ndarray) -> float:
        slope, spread = np.exp(parameters[:2])
        log_odds = slope * (offset[:, None] - parameters[2] - spread * nodes)
        of_run = -np.logaddexp(0, -sign[:, None] * log_odds)
        of_cell = np.stack([np.bincount(index, column) for column in of_run.T], axis=1)
        return -float(logsumexp(of_cell + log_weights, axis=1).sum())

    bounds = [(np.log(0.5), np.log(200)), (np.log(1e-3), np.log(5)), (-3, 3)]
    starts = [[np.log(slope), np.log(spread), 0.0] for slope in (10, 40) for spread in (0.1, 0.5)]
    found = min((minimize(loss, start, bounds=bounds, method="L-BFGS-B") for start in starts), key=lambda fit: fit.fun)
    slope, spread = np.exp(found.x[:2])
    return float(slope), float(spread)
