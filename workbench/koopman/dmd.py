"""The whitened operator, computed from snapshot moments (RKSP, arXiv:2602.22988)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from workbench.errors import SnapshotError
from workbench.koopman.moments import not_finite
from workbench.koopman.sketch import SnapshotSketch
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, PositiveInt, above, below, one_of

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.koopman.moments import SnapshotMoments


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
    ridge = _ridge(options, trace, moments.n_features)
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
    ridge = _ridge(options, trace, sketch.n_features)
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


def _ridge(options: DmdOptions, trace: Any, n_features: int) -> Any:
    """Return the ridge: a tensor if the trace is one, else a number."""
    return options.ridge * (trace / n_features if options.ridge_kind == "relative" else 1.0)


def koopman_matrix(moments: SnapshotMoments, options: DmdOptions | None = None) -> Tensor:
    """Compute only the matrix of `whitened_operator`, for gradients.

    The eigenvalues do not change when the directions are scaled or rotated within their span, so the whitening carries
    no gradient. Where a rank omits some directions, the span is taken as constant.

    Returns:
        A, shape (m, m), on the device of the moments.
    """
    options = options or DmdOptions()
    trace = _total_variance(moments)
    c_xx, constant = moments.c_xx, moments.c_xx.detach()
    basis, variance, _ = _principal_directions(constant, options)
    basis = basis[:, -len(variance) :]
    ridge = _ridge(options, trace, moments.n_features)
    whiten = basis * (variance + ridge).rsqrt()
    change = torch.linalg.solve(whiten.T @ c_xx @ whiten, whiten.T @ moments.c_dx @ whiten, left=False)
    return change + torch.eye(len(variance), dtype=change.dtype, device=change.device)


def koopman_matrices(
    moments: Sequence[SnapshotMoments], options: DmdOptions, also: Sequence[Tensor] = ()
) -> tuple[list[Tensor | None], list[float]]:
    """Compute `koopman_matrix` of several layers, with one transfer to the host for all layers of a device.

    The results are bitwise identical to those of `koopman_matrix`. Each layer is computed before it is known whether it
    has a spectrum and whether all requested directions vary; if not, the layer is recomputed.

    Returns:
        The operator of each layer on the host, None where `koopman_matrix` raises; and the numbers of ``also``.
    """
    begun = [_begun_matrix(layer, options) for layer in moments]
    facts = [found[0] for found in begun]
    read = _on_host([*facts, *(found[1] for found in begun), *also])
    matrices: list[Tensor | None] = []
    for layer, fact, matrix in zip(moments, read, read[len(facts) :], strict=False):
        trace, updates, squared, has_all, is_singular = fact.detach().numpy().tolist()
        try:
            if layer.n_snapshots >= 3:
                _check_variance(layer, trace, updates, squared)
            is_done = layer.n_snapshots >= 3 and has_all and not is_singular
            matrices.append(matrix if is_done else koopman_matrix(layer, options).cpu())
        except (SnapshotError, torch.linalg.LinAlgError):
            matrices.append(None)
    return matrices, [float(number.detach().numpy()) for number in read[2 * len(facts) :]]


def _begun_matrix(moments: SnapshotMoments, options: DmdOptions) -> tuple[Tensor, Tensor]:
    """Compute the operator of a layer without a transfer, and the facts that show whether it is valid."""
    c_xx, constant = moments.c_xx, moments.c_xx.detach()
    trace, updates = constant.diagonal().sum(), moments.c_dd.detach().diagonal().sum()
    squared = moments.mean_x.detach().square().sum()
    # LAPACK may hang or crash the process on values that are not finite.
    is_sound = torch.isfinite(trace) & torch.isfinite(updates)
    eye = torch.eye(len(constant), dtype=constant.dtype, device=constant.device)
    facts = [trace, updates, squared]
    try:
        basis, variance = _directions(torch.where(is_sound, constant, eye), options)
        has_all = (variance > options.rank_tolerance * variance[-1]).all()
        if options.rank is not None:
            # Indexed as in `_principal_directions`, so that memory layout and rounding are the same.
            every = torch.arange(len(variance), device=basis.device)
            basis, variance = basis[:, every][:, -options.rank :], variance[-options.rank :]
        whiten = basis * (variance + _ridge(options, trace, moments.n_features)).rsqrt()
        left, right = whiten.T @ c_xx @ whiten, whiten.T @ moments.c_dx @ whiten
        change, status = torch.linalg.solve_ex(left, right, left=False)
    except torch.linalg.LinAlgError:
        return torch.stack([*facts, torch.zeros_like(trace), torch.zeros_like(trace)]), trace
    matrix = change + torch.eye(len(variance), dtype=change.dtype, device=change.device)
    return torch.stack([*facts, has_all.to(trace.dtype), status.to(trace.dtype)]), matrix


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors to the host with their gradient, by one transfer for each device."""
    found = list(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        message = torch.cat([tensors[i].detach().flatten() for i in here]).cpu()
        parts = message.split([tensors[i].numel() for i in here])
        for i, part in zip(here, parts, strict=True):
            found[i] = _Moved.apply(tensors[i], part.view(tensors[i].shape))
    return found


class _Moved(torch.autograd.Function):
    """Values of a tensor that were transferred together with others; the gradient flows back to that tensor alone.

    If the gradient passed through the concatenation, one layer that is not finite would make the gradients of all
    layers NaN.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor) -> Tensor:
        ctx.device = tensor.device
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.device), None


def _total_variance(moments: SnapshotMoments | SnapshotSketch) -> float:
    """Return the trace of C_xx; raise if the moments have no spectrum."""
    if moments.n_snapshots < 3:
        raise SnapshotError(
            f"A spectrum needs at least 3 snapshots, but {moments.name} has {moments.n_snapshots}; pass more tokens."
        )
    if isinstance(moments, SnapshotSketch):
        states, updates, squared_mean = moments.total_variance()
    else:
        states, updates = moments.c_xx.detach().diagonal().sum(), moments.c_dd.detach().diagonal().sum()
        squared_mean = moments.mean_x.detach().square().sum()
    _check_variance(moments, float(states), float(updates), float(squared_mean))
    return float(states)


def _check_variance(moments: SnapshotMoments | SnapshotSketch, trace: float, updates: float, squared: float) -> None:
    """Raise if moments have no spectrum, given the traces of C_xx and C_dd and the squared mean of the states."""
    # A covariance is finite where its diagonal is. LAPACK may hang or crash the process on other values.
    if not (np.isfinite(trace) and np.isfinite(updates)):
        if not bool(moments.is_finite):
            raise not_finite(moments.name)
        raise SnapshotError(
            f"The states passing {moments.name} are so large that their squares overflow float64; scale them down."
        )
    # States that are all the same still vary by the rounding of the dtype they came in.
    noise = moments.resolution**2 * squared
    if not trace > noise:
        raise SnapshotError(
            f"The states entering {moments.name} are all the same, so there is no spectrum; pass inputs that differ."
        )


def _principal_directions(c_xx: Tensor, options: DmdOptions) -> tuple[Tensor, Tensor, float]:
    """Compute the principal directions of the states in order of increasing variance.

    Returns:
        basis (feature, k): all directions, those without variance first, or the leading ones if a rank is requested;
        variance (m,) of its last m columns; the condition number of the covariance in these.
    """
    basis, variance = _directions(c_xx, options)
    is_used = variance > options.rank_tolerance * variance[-1]
    variance = variance[is_used]
    if options.rank is not None:
        basis = basis[:, is_used][:, -options.rank :]
        variance = variance[-options.rank :]
    return basis, variance, float(variance[-1] / variance[0])


def _directions(c_xx: Tensor, options: DmdOptions) -> tuple[Tensor, Tensor]:
    """Compute all or the ``rank`` leading principal directions, and their variances in increasing order."""
    if options.rank is None or options.rank >= len(c_xx):
        variance, basis = torch.linalg.eigh(c_xx)
    else:
        variance, basis = _leading_directions(c_xx, options.rank, options.seed)
    return basis, variance


def _leading_directions(c_xx: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Find the leading directions with power iterations (Halko, Martinsson & Tropp 2011, Algorithm 4.4)."""
    generator = torch.Generator().manual_seed(seed)
    width = min(rank + 10, len(c_xx))
    sketch = torch.randn(len(c_xx), width, dtype=c_xx.dtype, generator=generator).to(c_xx.device)
    for _ in range(4):
        sketch = torch.linalg.qr(c_xx @ sketch).Q
    variance, rotation = torch.linalg.eigh(sketch.T @ c_xx @ sketch)
    return variance[-rank:], (sketch @ rotation)[:, -rank:]
