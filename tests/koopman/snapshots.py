"""Snapshots with known properties."""

import numpy as np


def snapshots(d, n, log_condition=0.0, kind="linear", seed=0):
    """Generate states entering and leaving, both (snapshot, feature), with about the given covariance condition.

    kind: "linear" (well-scaled operator plus noise), "residual" (x plus a small nonlinear update), "generic"
    (an operator that does not depend on the scales of the states).
    """
    rng = np.random.default_rng(seed)
    scale = 10 ** np.linspace(0, -log_condition / 2, d)
    Q = np.linalg.qr(rng.normal(size=(d, d)))[0]
    Z = rng.normal(size=(n, d))
    X = (Z * scale) @ Q.T + rng.normal(size=d)
    K = rng.normal(size=(d, d)) / np.sqrt(d)
    if kind == "linear":
        Y = ((Z @ (0.5 * K + 0.5 * np.eye(d)) + 0.3 * rng.normal(size=(n, d))) * scale) @ Q.T
    elif kind == "residual":
        Y = X + 0.1 * X @ K + 0.05 * np.tanh(X @ K.T)
    else:
        Y = X @ K + 0.1 * rng.normal(size=(n, d))
    return X, Y
