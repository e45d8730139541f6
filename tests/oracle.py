"""Literal, slow implementations of the formulas of RKSP (arXiv:2602.22988) and the monitors (arXiv:2606.28116)."""

import mpmath
import numpy as np
import scipy.linalg

TINY = 1e-300


def oracle(X, Y, eps):
    """Compute the spectrum of one layer.

    X, Y: d x N, whose columns are pairs of one sample; eps: absolute ridge. The moduli decrease.
    """
    d, N = X.shape
    X = X - X.mean(axis=1, keepdims=True)
    Y = Y - Y.mean(axis=1, keepdims=True)
    S = X @ X.T / (N - 1) + eps * np.eye(d)
    w, Q = np.linalg.eigh(S)
    S_inv_half = Q @ np.diag(w**-0.5) @ Q.T
    Xw, Yw = S_inv_half @ X, S_inv_half @ Y
    A = Yw @ np.linalg.pinv(Xw, rcond=1e-10)
    eigenvalue, U, V = scipy.linalg.eig(A, left=True, right=True)
    numerator = np.linalg.norm(U.conj().T @ Yw - eigenvalue[:, None] * (U.conj().T @ Xw), axis=1)
    residual = numerator / (np.linalg.norm(U.conj().T @ Xw, axis=1) + TINY)
    order = np.argsort(-np.abs(eigenvalue), kind="stable")
    return {
        "operator": A,
        "eigenvalue": eigenvalue[order],
        "residual": residual[order],
        "spectral_radius": np.abs(eigenvalue).max(),
        "eigenvector_condition": np.linalg.norm(V, 2) * np.linalg.norm(np.linalg.pinv(V, rcond=1e-15), 2),
        "nonlinearity_ratio": np.linalg.norm(Yw - A @ Xw) / (np.linalg.norm(Yw - Xw) + TINY),
        "update_norm": np.linalg.norm(Yw - Xw) / np.sqrt(N * d),
        "energy_gain": np.linalg.norm(Yw) ** 2 / np.linalg.norm(Xw) ** 2,
    }


def masses(modulus, near=(0.90, 1.05), contractive=0.80):
    """Mass fractions, one eigenvalue after the other."""
    count = dict.fromkeys(("near_unit_mass", "expansive_mass", "contractive_mass", "intermediate_mass"), 0)
    for a in modulus:
        if a > near[1]:
            count["expansive_mass"] += 1
        elif a >= near[0]:
            count["near_unit_mass"] += 1
        elif a < contractive:
            count["contractive_mass"] += 1
        else:
            count["intermediate_mass"] += 1
    return {name: n / len(modulus) for name, n in count.items()}


def kreiss_grid(A, n_angles=181, n_distances=80):
    """Compute the Kreiss constant on a dense grid of z outside the unit circle."""
    best, identity = 1.0, np.eye(len(A))
    for angle in np.linspace(0, np.pi, n_angles):
        for distance in np.geomspace(1e-6, 5, n_distances):
            z = (1 + distance) * np.exp(1j * angle)
            best = max(best, distance / np.linalg.svd(z * identity - A, compute_uv=False)[-1])
    return best


def kss_of_moduli(modulus, *, T, gamma, beta, term="softplus", upper=1.05, lower=0.90, unstable=1.0, functions=np):
    """Compute the published penalty of one layer (KSS); the term "log" for unstable modes is not in the paper.

    functions: module with exp and log of these numbers.
    """

    def sigmoid(z):
        return 1 / (1 + functions.exp(-z))

    above = 0
    for a in modulus:
        if term == "softplus":
            above += sigmoid(T * (a - upper)) * functions.log(1 + functions.exp(a - upper)) ** 2
        elif a > upper:
            above += functions.log(a / upper) ** 2
    m_soft = sum(sigmoid(T * (a - lower)) * sigmoid(T * (upper - a)) for a in modulus) / len(modulus)
    return unstable * above + beta * (m_soft - gamma) ** 2


def kss_penalty(X, Y, *, rank=None, basis=None, **shape):
    """Compute the penalty of one layer.

    X, Y: d x N. rank: number of leading principal directions of X; basis: other directions instead, d x rank.
    """
    X = X - X.mean(axis=1, keepdims=True)
    Y = Y - Y.mean(axis=1, keepdims=True)
    if basis is None and rank is not None:
        basis = np.linalg.svd(X)[0][:, :rank]
    if basis is not None:
        X, Y = basis.T @ X, basis.T @ Y
    return kss_of_moduli(np.abs(np.linalg.eigvals(Y @ np.linalg.pinv(X))), **shape)


def kss_penalty_precisely(X, Y, *, digits, **shape):
    """Compute the same penalty at full rank with many digits; X, Y: d x N, mpmath matrices."""
    with mpmath.workdps(digits):
        centering = mpmath.eye(X.cols) - mpmath.ones(X.cols) / X.cols
        X, Y = X * centering, Y * centering
        A = (Y * X.T) * mpmath.inverse(X * X.T)
        modulus = [abs(a) for a in mpmath.eig(A, left=False, right=False)]
        return kss_of_moduli(modulus, functions=mpmath, **shape)


def effective_rank(M, alpha):
    """Compute exp of the entropy of p_i = s_i^alpha / sum s^alpha, without singular values that are rounding errors."""
    s = np.linalg.svd(M, compute_uv=False)
    s = s[s > max(M.shape) * np.finfo(float).eps * s[0]]
    p = s**alpha / (s**alpha).sum()
    return np.exp(-sum(x * np.log(x) for x in p))


def qk_terms(wq0, wk0, wq1, wk1):
    """Compute the d x d products of one head from its factors, d x d_k."""
    dq, dk = wq1 - wq0, wk1 - wk0
    return {"D2": dq @ wk0.T + wq0 @ dk.T, "D3": dq @ dk.T, "dWq": dq, "dWk": dk, "W": wq1 @ wk1.T}


def attention_rows(q, k, scale, visible):
    """Compute the largest logit, the entropy in nats and the number of visible tokens of each row of one head."""
    rows = []
    for i in range(len(q)):
        logits = [scale * (q[i] @ k[j]) for j in range(len(k)) if visible[i, j]]
        if logits:
            weight = np.exp(np.array(logits) - max(logits))
            p = weight / weight.sum()
            rows.append((max(logits), -sum(x * np.log(x) for x in p if x > 0), len(logits)))
    return rows


def router_similarity(W):
    """Compute the mean cosine over pairs of rows."""
    cosines = [
        W[i] @ W[j] / (np.linalg.norm(W[i]) * np.linalg.norm(W[j]))
        for i in range(len(W))
        for j in range(len(W))
        if i != j
    ]
    return np.mean(cosines)


def spike_score(values, window, n_sigma, n_least):
    """Compute the fraction of values at least n_sigma standard deviations from the mean of the previous finite ones."""
    is_outlier = []
    for i, value in enumerate(values):
        before = [x for x in values[:i] if np.isfinite(x)][-window:]
        if not np.isfinite(value):
            is_outlier.append(True)
        elif len(before) >= n_least:
            distance = abs(value - np.mean(before))
            is_outlier.append(distance > 0 and distance >= n_sigma * np.std(before))
    return np.mean(is_outlier) if is_outlier else np.nan
