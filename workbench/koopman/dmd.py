"""The whitened operator, computed from snapshot moments (RKSP, arXiv:2602.22988)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import SnapshotError
from workbench.koopman.moments import SnapshotMoments, not_finite
from workbench.koopman.sketch import SnapshotSketch
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, PositiveInt, above, below, one_of

#: Number of power iterations in the search for the leading directions.
N_POWERS = 4


@checked
@dataclass(frozen=True)
class DmdOptions:
    """Options of the dynamic mode decomposition (DMD) that computes an operator.

    Attributes:
        ridge: eps of S = C_xx + eps I. The paper's 1e-5 is absolute; because the scale of the residual stream varies
            over five orders of magnitude, it is relative here by default. At full rank the eigenvalues and residuals
            do not depend on it; the eigenvector condition, the nonlinearity ratio and the Kreiss constant do.
        ridge_kind: ``"relative"`` to the mean variance trace(C_xx) / d, or ``"absolute"`` as published.
        rank: Number of leading principal components, found by a randomized range finder; None uses all.
        rank_tolerance: Directions with less than this fraction of the largest variance are dropped (numerical rank).
        seed: Seed of the randomized range finder; used only with ``rank``.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> states = np.random.default_rng(0).normal(size=(64, 6))
        >>> wb.koopman.whitened_dmd(states, 0.9 * states, options=wb.DmdOptions(rank=2)).sizes["mode"]
        2

    See Also:
        `workbench.koopman.whitened_operator`: Computes an operator with these options.
        `workbench.profile`: Computes the spectra of a model with these options.
    """

    ridge: NonNegativeFloat = 1e-5
    ridge_kind: Annotated[str, one_of(("relative", "absolute"))] = "relative"
    rank: PositiveInt | None = None
    rank_tolerance: Annotated[float, above(0), below(1)] = 1e-12
    seed: int = 0


@dataclass(frozen=True)
class WhitenedOperator:
    """The operator A = Yw pinv(Xw) in the m principal directions of the states, with the moments of its measures.

    The whitened coordinates are those of PCA. They are a rotation of the paper's ZCA coordinates, which changes no
    eigenvalue, residual, condition number or norm.

    Attributes:
        matrix: A, shape (m, m).
        gram: Diagonal of Xw Xw' / (N-1), shape (m,); 1 where the ridge is negligible.
        update_gram: Dw Dw' / (N-1) with Dw = Yw - Xw, shape (m, m).
        unexplained: Fraction of |Yw - Xw|_F^2 that no linear map of Xw explains, in [0, 1]; over all d directions, as
            in the paper's formula, unless a rank was requested.
        covariance_condition: Ratio of the largest to the smallest eigenvalue of C_xx in use.
        n_snapshots: N.
    """

    matrix: Tensor
    gram: Tensor
    update_gram: Tensor
    unexplained: Tensor
    covariance_condition: float
    n_snapshots: int

    @property
    def rank(self) -> int:
        """Number of modes, m."""
        return len(self.gram)

    @property
    def update_norm(self) -> float:
        """Size of the update relative to the spread of the states, |Yw - Xw|_F / sqrt(N m), unit 1."""
        energy = float(self.update_gram.diagonal().sum()) * (self.n_snapshots - 1)
        return float(np.sqrt(max(energy, 0.0) / (self.n_snapshots * self.rank)))

    @property
    def energy_gain(self) -> float:
        """Growth of the whitened energy, E|Yw|^2 / E|Xw|^2, unit 1."""
        before = self.gram.sum()
        cross = ((self.matrix.diagonal() - 1) * self.gram).sum()
        return float((before + 2 * cross + self.update_gram.diagonal().sum()) / before)


def whitened_operator(moments: SnapshotMoments | SnapshotSketch, options: DmdOptions | None = None) -> WhitenedOperator:
    """Compute the operator that maps whitened states entering a layer to those leaving it (RKSP: A = Yw pinv(Xw)).

    The result is differentiable in the moments; a `SnapshotSketch` carries no gradient.

    Args:
        moments: Moments of at least three snapshots, or their sketch.
        options: Options, see `DmdOptions`.

    Returns:
        The operator on the span of the states, on the device of the moments.

    Raises:
        SnapshotError: If there are fewer than three snapshots, or the states do not vary.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> operator = wb.koopman.whitened_operator(wb.koopman.SnapshotMoments(4).update(x, 0.5 * x))
        >>> torch.allclose(operator.matrix, 0.5 * torch.eye(4, dtype=torch.float64), atol=1e-4)
        True

    See Also:
        `workbench.koopman.SnapshotMoments`: Collects the moments.
        `workbench.koopman.eigenmodes`: Computes the modes of the operator.
    """
    options = options or DmdOptions()
    trace = _total_variance(moments)
    if isinstance(moments, SnapshotSketch):
        return _operator_of_sketch(moments, options, trace)
    c_xx = moments.c_xx
    basis, variance, condition = _principal_directions(c_xx, options)
    ridge = ridge_of(options, trace, moments.n_features)
    whiten = (variance + ridge).rsqrt()
    n_null = basis.shape[1] - len(whiten) if options.rank is None and ridge > 0 else 0
    used = basis[:, n_null:]
    # Rows: all directions kept in `basis`. Columns: the directions in which the states vary.
    rows = torch.cat([torch.full((n_null,), ridge, dtype=whiten.dtype, device=whiten.device).rsqrt(), whiten])
    gram = variance * whiten.square()
    cross = (basis.T @ moments.c_dx @ used) * rows[:, None] * whiten
    change = cross / gram
    update_gram = (used.T @ moments.c_dd @ used) * whiten[:, None] * whiten
    null_energy = ((basis[:, :n_null].T @ moments.c_dd) * basis[:, :n_null].T).sum(1) * rows[:n_null].square()
    total = torch.cat([null_energy, update_gram.diagonal()])
    unexplained = (total - (change * cross).sum(1)).clamp(min=0).sum() / total.sum().clamp(
        min=torch.finfo(torch.float64).tiny
    )
    matrix = change[n_null:] + torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return WhitenedOperator(matrix, gram, update_gram, unexplained, condition, moments.n_snapshots)


def _operator_of_sketch(sketch: SnapshotSketch, options: DmdOptions, trace: float) -> WhitenedOperator:
    """Compute `whitened_operator` of a sketch, whose moments of the states are diagonal already."""
    found = sketch.principal_moments(options.rank, options.rank_tolerance)
    ridge = ridge_of(options, trace, sketch.n_features)
    whiten = (found.variance + ridge).rsqrt()
    gram = found.variance * whiten.square()
    cross = found.c_dx * whiten[:, None] * whiten
    change = cross / gram
    update_gram = found.c_dd * whiten[:, None] * whiten
    total = update_gram.diagonal()
    unexplained, energy = (total - (change * cross).sum(1)).clamp(min=0).sum(), total.sum()
    if options.rank is None and ridge > 0 and found.n_outside:
        unexplained = unexplained + (found.update_outside - found.explained_outside).clamp(min=0) / ridge
        energy = energy + found.update_outside / ridge
    fraction = unexplained / energy.clamp(min=torch.finfo(torch.float64).tiny)
    matrix = change + torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    condition = float(found.variance[-1] / found.variance[0])
    return WhitenedOperator(matrix, gram, update_gram, fraction, condition, sketch.n_snapshots)


def ridge_of(options: DmdOptions, trace: Any, n_features: int) -> Any:
    """Return the ridge: a tensor if the trace is one, else a number."""
    return options.ridge * (trace / n_features if options.ridge_kind == "relative" else 1.0)


def _total_variance(moments: SnapshotMoments | SnapshotSketch) -> float:
    """Return the trace of C_xx; raise if the moments have no spectrum."""
    if moments.n_snapshots < 3:
        raise SnapshotError(f"A spectrum needs 3 snapshots, but {moments.name} has {moments.n_snapshots}; pass more.")
    if isinstance(moments, SnapshotSketch):
        traces = moments.total_variance()
    else:
        traces = (
            moments.c_xx.detach().diagonal().sum(),
            moments.c_dd.detach().diagonal().sum(),
            moments.mean_x.detach().square().sum(),
        )
    trace, updates, squared_mean = (float(each) for each in traces)
    # A covariance is finite where its diagonal is. LAPACK may hang or crash the process on other values.
    if not (np.isfinite(trace) and np.isfinite(updates)):
        if not bool(moments.is_finite):
            raise not_finite(moments.name)
        raise SnapshotError(f"The states passing {moments.name} have squares beyond float64; scale them down.")
    # States that are all the same still vary by the rounding of the dtype they came in.
    if not trace > moments.resolution**2 * squared_mean:
        raise SnapshotError(f"The states entering {moments.name} are all the same; pass inputs that differ.")
    return trace


def _principal_directions(c_xx: Tensor, options: DmdOptions) -> tuple[Tensor, Tensor, float]:
    """Compute the principal directions (all, or the leading ones of a rank), by increasing variance.

    Returns the basis (feature, k), the variances (m,) of its last m columns, and the condition of the covariance in
    these.
    """
    if options.rank is None or options.rank >= len(c_xx):
        variance, basis = torch.linalg.eigh(c_xx)
    else:
        # Power iterations (Halko, Martinsson & Tropp 2011, Algorithm 4.4).
        sketch = first_sketch(len(c_xx), options.rank, options.seed).to(c_xx.device)
        for _ in range(N_POWERS):
            sketch = torch.linalg.qr(c_xx @ sketch).Q
        variance, rotation = torch.linalg.eigh(sketch.T @ c_xx @ sketch)
        variance, basis = variance[-options.rank :], (sketch @ rotation)[:, -options.rank :]
    is_used = variance > options.rank_tolerance * variance[-1]
    variance = variance[is_used]
    if options.rank is not None:
        basis = basis[:, is_used][:, -options.rank :]
        variance = variance[-options.rank :]
    return basis, variance, float(variance[-1] / variance[0])


def first_sketch(n_features: int, rank: int, seed: int) -> Tensor:
    """Draw the matrix with which the search for the leading directions begins, shape (feature, column), on the host."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_features, min(rank + 10, n_features), dtype=torch.float64, generator=generator)
