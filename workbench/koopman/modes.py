"""Eigenvalues of the whitened operator, their residuals and their condition (RKSP, arXiv:2602.22988)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workbench.errors import SnapshotError
from workbench.io.memory import give_back
from workbench.koopman.dmd import WhitenedOperator

#: From this width on, the smallest that was measured, cuSOLVER's general eigensolver is at least three times as fast as
#: LAPACK on the host (benchmarks/gpu.md).
CUDA_EIG_MIN_WIDTH = 256
#: Above this condition the inverse of V does not give left eigenvectors to eight digits, so LAPACK computes them.
_INVERTIBLE = 1e7
#: Below this width a full singular value decomposition is as fast as Lanczos iteration.
_SMALL = 64


@dataclass(frozen=True)
class OperatorModes:
    """Eigenvalues and eigenvectors of one operator in order of decreasing modulus.

    Attributes:
        eigenvalue: Shape (m,), complex128.
        residual: r_j, shape (m,).
        eigenvector_condition: kappa(V); inf for a defective operator.
        right: Unit right eigenvectors, shape (m, m).
        left: Rows u_j* of the inverse of ``right``; None where that inverse is not accurate.
    """

    eigenvalue: np.ndarray
    residual: np.ndarray
    eigenvector_condition: float
    right: Tensor
    left: Tensor | None


def eigenmodes(operator: WhitenedOperator) -> OperatorModes:
    """Compute eigenvalues, residuals and eigenvector condition (RKSP: r_j and kappa(V) = |V| |V^-1|).

    The residual r_j = |u_j*(Yw - lambda_j Xw)| / |u_j* Xw| needs no snapshots: u_j* A = lambda_j u_j*, so the
    numerator is |u_j* R| with R = Yw - A Xw, whose second moment follows from those that the operator carries.

    Args:
        operator: Operator from `whitened_operator`.

    Returns:
        The modes; NumPy arrays on the host.

    Raises:
        SnapshotError: If the operator is not finite, or LAPACK finds no eigenvalues.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> moments = wb.koopman.SnapshotMoments(4).update(x, x * torch.tensor([0.5, 0.9, 1.0, 1.2]))
        >>> modes = wb.koopman.eigenmodes(wb.koopman.whitened_operator(moments))
        >>> abs(modes.eigenvalue).round(3)
        array([1.2, 1. , 0.9, 0.5])

    See Also:
        `workbench.koopman.whitened_operator`: Computes the operator.
        `workbench.koopman.layer_spectrum`: Computes all measures of a layer.
    """
    A = operator.matrix.detach()
    if not bool(torch.isfinite(A).all()):
        # LAPACK may crash the process on such input.
        raise SnapshotError("The whitened operator is not finite; scale the states, whose variances differ too much.")
    if A.is_cuda and len(A) < CUDA_EIG_MIN_WIDTH:
        A = A.cpu()
    try:
        eigenvalue, right = torch.linalg.eig(A)
        if not _ConjugatePairs(eigenvalue).is_exact:  # LAPACK returns exact pairs; other solvers may not
            A = A.cpu()
            eigenvalue, right = torch.linalg.eig(A)
    except torch.linalg.LinAlgError as error:
        raise SnapshotError("The eigenvalues of the whitened operator did not converge; pass more states.") from error
    give_back(A.nbytes)
    pairs = _ConjugatePairs(eigenvalue)
    packed = pairs.pack(right)
    left, status = torch.linalg.inv_ex(packed)
    give_back(A.nbytes)
    condition = _condition(packed, left) if int(status) == 0 else float("inf")
    if condition > _INVERTIBLE:
        singular = torch.linalg.svdvals(packed)
        condition = float(singular[0] / singular[-1])
        condition = condition if condition < 1 / torch.finfo(torch.float64).eps else float("inf")
        eigenvalue, right, left = _both_eigenvectors(A)
        pairs = _ConjugatePairs(eigenvalue)
        left = pairs.pack(left).T
    del packed
    give_back(A.nbytes)
    gram = operator.gram.detach().to(A.device)
    leftover = pairs.quadratic_form(left, _unexplained(operator, A)).clamp(min=0)
    residual = (leftover / pairs.mean((left.square() * gram).sum(1))).sqrt()
    give_back(A.nbytes)
    order = torch.argsort(eigenvalue.abs(), descending=True, stable=True)
    right = right[:, order]
    return OperatorModes(
        eigenvalue=eigenvalue[order].cpu().numpy(),
        residual=residual[order].cpu().numpy(),
        eigenvector_condition=condition,
        right=right,
        left=pairs.unpack_rows(left)[order] if condition <= _INVERTIBLE else None,
    )


def _unexplained(operator: WhitenedOperator, A: Tensor) -> Tensor:
    """Compute the second moment of the part of the update that the linear fit does not explain."""
    change = A - torch.eye(len(A), dtype=A.dtype, device=A.device)
    explained = (change * operator.gram.detach().to(A.device)) @ change.T
    return torch.sub(operator.update_gram.detach().to(A.device), explained, out=explained)


def significant_digits(operator: WhitenedOperator, modes: OperatorModes) -> float:
    """Estimate the significant decimal digits of the eigenvalues, relative to the spectral radius.

    Second moments square the condition number of the states, so a rounding error of about 2e-16 in the moments becomes
    about 2e-16 cond(C_xx) in the whitened operator. The condition of the eigenvectors adds to it in the eigenvalues.
    With one digit of margin, the estimate was below the number of digits that agree with a fit on the snapshots in
    every tested case (tests/koopman/test_dmd.py).
    """
    error = 10 * torch.finfo(torch.float64).eps * (operator.covariance_condition + modes.eigenvector_condition)
    return float(np.clip(-np.log10(error), 0.0, 15.0))


class _ConjugatePairs:
    """Complex eigenvectors of a real matrix, packed as real vectors with the same singular values.

    Replacing (v, conj v) by sqrt(2) (Re v, Im v) multiplies V by a unitary matrix, which keeps its condition number, so
    that all computations are real. The order of the pairs does not matter. ``first`` are the eigenvalues with positive
    imaginary part, ``second`` the conjugate of each; among equal conjugates the choice is arbitrary, as their
    eigenvectors are not used. ``is_exact`` if each has a bitwise identical conjugate.
    """

    def __init__(self, eigenvalue: Tensor) -> None:
        values = eigenvalue.cpu().numpy()
        first, second = np.flatnonzero(values.imag > 0), np.flatnonzero(values.imag < 0)
        above, below = (np.lexsort((np.abs(v.imag), v.real)) for v in (values[first], values[second]))
        self.is_exact = np.array_equal(values[first[above]], values[second[below]].conj())
        if self.is_exact:
            second[above] = second[below]
        self.first, self.second = (torch.from_numpy(i).to(eigenvalue.device) for i in (first, second))

    def pack(self, columns: Tensor) -> Tensor:
        packed = columns.real.clone()
        packed[:, self.first] = columns.real[:, self.first] * 2**0.5
        packed[:, self.second] = columns.imag[:, self.first] * 2**0.5
        return packed

    def unpack_rows(self, rows: Tensor) -> Tensor:
        unpacked = rows.to(torch.complex128)
        first = torch.complex(rows[self.first], -rows[self.second]) / 2**0.5
        unpacked[self.first] = first
        unpacked[self.second] = first.conj()
        return unpacked

    def quadratic_form(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """Compute u_j* M u_j for every row, with symmetric M."""
        return self.mean((rows @ matrix).mul_(rows).sum(1))

    def mean(self, values: Tensor) -> Tensor:
        """Replace the values of each pair of rows by their mean, as |u|^2 = (|Re|^2 + |Im|^2) / 2."""
        values = values.clone()
        mean = (values[self.first] + values[self.second]) / 2
        values[self.first] = mean
        values[self.second] = mean
        return values


def _condition(matrix: Tensor, inverse: Tensor) -> float:
    """Compute |matrix| |inverse| in the spectral norm, by Lanczos iteration or, without SciPy, a full decomposition."""
    if len(matrix) < _SMALL or not bool(torch.isfinite(inverse).all()):
        singular = torch.linalg.svdvals(matrix)
        return float(singular[0] / singular[-1]) if float(singular[-1]) > 0 else float("inf")
    try:
        from scipy.sparse.linalg import ArpackError, svds
    except ImportError:
        return float(torch.linalg.cond(matrix))
    start = np.random.default_rng(0).normal(size=len(matrix))
    try:
        largest = [svds(m.cpu().numpy(), k=1, v0=start, return_singular_vectors=False)[0] for m in (matrix, inverse)]
    except ArpackError:
        return float(torch.linalg.cond(matrix))
    return float(largest[0] * largest[1])


def _both_eigenvectors(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute eigenvalues, right and left eigenvectors with LAPACK, for operators that are nearly defective."""
    import scipy.linalg

    def as_tensor(found: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(found, dtype=complex)).to(A.device)

    eigenvalue, left, right = scipy.linalg.eig(A.cpu().numpy(), left=True, right=True)
    return as_tensor(eigenvalue), as_tensor(right), as_tensor(left)
