"""The Kreiss constant, a measure of the transient growth of an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from workbench.errors import SnapshotError
from workbench.option_checks import PositiveFloat, checked

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.koopman.modes import OperatorModes

#: Distances |z| - 1 of the initial scan.
_DISTANCES = (0.003, 0.02, 0.1, 0.4, 1.5)
_AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
_N_PEAKS = 6
_N_CLIMBS = 10
#: Largest eigenvector condition at which products with V and its inverse replace solving with zI - A.
_TRUSTED_CONDITION = 1e7


@checked
def kreiss_constant(operator: np.ndarray | Tensor, *, tolerance: PositiveFloat = 1e-6) -> float:
    """Compute a lower bound of K(A) = sup over |z| > 1 of (|z| - 1) |(zI - A)^-1|_2 (RKSP).

    At any z and for any vector w, |(zI - A)^-1| >= |w| / |(zI - A) w|, so each value evaluated is at most K(A); the
    largest one is returned. The search scans the angles of the outer eigenvalues and equally spaced angles, then climbs
    from the best points. On small matrices the result is within 1 % of a dense grid search
    (tests/koopman/test_kreiss.py); where many peaks are close, the error may be larger.

    Args:
        operator: A, real, shape (mode, mode).
        tolerance: The search covers |z| >= 1 + tolerance; K is infinite if an eigenvalue has a modulus above
            1 + tolerance.

    Returns:
        At least 1; inf if the spectral radius exceeds 1 + tolerance.

    Raises:
        SnapshotError: If the operator is not a square, finite matrix.
        OptionError: If the tolerance is not positive.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> round(wb.koopman.kreiss_constant(np.diag([0.5, 0.9])), 3)
        1.0
        >>> wb.koopman.kreiss_constant(np.array([[0.9, 5.0], [0.0, 0.9]])) > 10
        True
        >>> wb.koopman.kreiss_constant(np.diag([0.5, 1.1]))
        inf

    See Also:
        `workbench.koopman.eigenmodes`: Computes the eigenvalues and their condition.
        `workbench.koopman.layer_spectrum`: Computes all measures of a layer.
    """
    A = torch.as_tensor(operator, dtype=torch.float64)
    if A.ndim != 2 or A.shape[0] != A.shape[1] or not bool(torch.isfinite(A).all()):
        raise SnapshotError.of("operator", A, "a square matrix of finite numbers")
    eigenvalue, right = torch.linalg.eig(A)
    condition = float(torch.linalg.cond(right))
    left = torch.linalg.inv(right) if condition < _TRUSTED_CONDITION else None
    return _search(A, eigenvalue, right, left, tolerance)


def kreiss_from_modes(operator: Tensor, modes: OperatorModes, *, tolerance: float = 1e-6) -> float:
    """Compute `kreiss_constant` of an operator whose modes are known."""
    A = operator.detach().to(modes.right.device)
    return _search(A, torch.from_numpy(modes.eigenvalue).to(A.device), modes.right, modes.left, tolerance)


def _search(A: Tensor, eigenvalue: Tensor, right: Tensor, left: Tensor | None, tolerance: float) -> float:
    modulus = eigenvalue.abs().cpu().numpy()
    if modulus.max() > 1 + tolerance:
        return float("inf")
    resolvent = _Resolvent(A, eigenvalue, right, left)
    gap = np.clip(1 - modulus.max(), tolerance, 1.0)
    distance = np.unique(np.concatenate([np.maximum(_DISTANCES, tolerance), [gap, tolerance]]))
    angle = _angles(eigenvalue.cpu().numpy())
    grid = np.stack(np.meshgrid(np.log(distance), angle, indexing="ij"), axis=-1)
    value, vector = resolvent.lower_bound(_point(grid.reshape(-1, 2)), n_iterations=3)
    start = _peaks(value.reshape(grid.shape[:2]))[:_N_PEAKS]
    position, best, vector = grid.reshape(-1, 2)[start], value[start], vector[:, start]
    highest = max(1.0, float(value.max()))
    compass = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
    step = np.tile([0.6, np.pi / 36], (len(position), 1))
    for _ in range(_N_CLIMBS):
        trial = position[:, None] + compass * step[:, None]
        trial[..., 0] = np.maximum(trial[..., 0], np.log(tolerance))
        found, vector = resolvent.lower_bound(
            _point(trial.reshape(-1, 2)), n_iterations=2, start=vector.repeat_interleave(len(compass), dim=1)
        )
        found = found.reshape(-1, len(compass))
        choice, row = found.argmax(1), np.arange(len(position))
        position, best = trial[row, choice], found[row, choice]
        vector = vector[:, row * len(compass) + choice]
        highest = max(highest, float(best.max()))
        step[choice == 0] /= 2
    return highest


def _peaks(value: np.ndarray) -> np.ndarray:
    """Return the flat indices of the local maxima of a grid (distance, angle), highest first."""
    padded = np.pad(value, 1, constant_values=-np.inf)
    neighbors = [padded[1 + i : padded.shape[0] - 1 + i, 1 + j : padded.shape[1] - 1 + j] for i, j in _AROUND]
    index = np.flatnonzero(value >= np.max(neighbors, axis=0))
    return index[np.argsort(-value.ravel()[index])]


def _point(position: np.ndarray) -> np.ndarray:
    """Return the points z at positions (log(|z| - 1), angle), shape (point, 2)."""
    return (1 + np.exp(position[:, 0])) * np.exp(1j * position[:, 1])


def _angles(eigenvalue: np.ndarray, n_spaced: int = 25, n_outer: int = 12) -> np.ndarray:
    """Return the angles in [0, pi] to scan; the resolvent of a real operator is symmetric about the real axis."""
    outer = eigenvalue[np.argsort(-np.abs(eigenvalue))]
    outer = outer[outer.imag >= 0][:n_outer]
    return np.unique(np.round(np.concatenate([np.angle(outer), np.linspace(0, np.pi, n_spaced)]), 6))


class _Resolvent:
    """Power iteration on (zI - A)^-1 for many z at once.

    The iteration runs in single precision where V is well-conditioned. Its final vector w gives a valid bound in any
    case, because the bound is evaluated with A in double precision.
    """

    def __init__(self, A: Tensor, eigenvalue: Tensor, right: Tensor, left: Tensor | None) -> None:
        self.A = A
        is_benign = left is not None and float(torch.linalg.norm(right) * torch.linalg.norm(left)) < 1e4 * len(A)
        working = torch.complex64 if is_benign else torch.complex128
        self.eigenvalue, self.right = eigenvalue[:, None], right.to(working)
        self.left = None if left is None else left.to(working)
        generator = torch.Generator().manual_seed(0)
        self.first = torch.randn(len(A), 1, dtype=A.dtype, generator=generator).to(A.device)

    def lower_bound(self, z: np.ndarray, n_iterations: int, start: Tensor | None = None) -> tuple[np.ndarray, Tensor]:
        """Compute (|z| - 1) |w| / |(zI - A) w|, shape (point,), and w by power iteration, shape (mode, point)."""
        points = torch.from_numpy(z).to(self.A.device)
        inverse = (1 / (points - self.eigenvalue)).to(self.right.dtype)
        w = (self.first.expand(-1, len(z)) if start is None else start).to(self.right.dtype)
        if start is None:
            w = self._solve(points, inverse, w)
        for _ in range(n_iterations - 1):
            x = self._solve_adjoint(points, inverse, w / torch.linalg.norm(w, dim=0))
            w = self._solve(points, inverse, x / torch.linalg.norm(x, dim=0))
        exact = (w / torch.linalg.norm(w, dim=0)).to(torch.complex128)
        image = points * exact - torch.complex(self.A @ exact.real, self.A @ exact.imag)
        value = (points.abs() - 1) * torch.linalg.norm(exact, dim=0) / torch.linalg.norm(image, dim=0)
        return torch.nan_to_num(value, nan=0.0, posinf=0.0).cpu().numpy(), w

    def _solve(self, z: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
        if self.left is not None:
            return self.right @ (inverse * (self.left @ x))
        return torch.linalg.solve(self._shifted(z), x.T.unsqueeze(-1)).squeeze(-1).T

    def _solve_adjoint(self, z: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
        if self.left is not None:
            return self.left.mH @ (inverse.conj() * (self.right.mH @ x))
        return torch.linalg.solve(self._shifted(z).mH, x.T.unsqueeze(-1)).squeeze(-1).T

    def _shifted(self, z: Tensor) -> Tensor:
        identity = torch.eye(len(self.A), dtype=self.right.dtype, device=self.A.device)
        return z[:, None, None] * identity - self.A.to(self.right.dtype)
