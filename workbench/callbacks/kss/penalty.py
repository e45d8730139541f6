"""The KSS penalty: a function of one layer's moments that decreases as its spectrum approaches the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import softplus

from workbench.errors import OptionError, SnapshotError
from workbench.koopman.dmd import DmdOptions, koopman_matrices, koopman_matrix
from workbench.models.device_numbers import read_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.koopman.moments import SnapshotMoments

#: Why a layer gave no penalty.
NOT_FINITE, ILL_DEFINED = "not finite", "ill-defined"
UNSTABLE_TERMS = ("softplus", "log")


@dataclass(frozen=True)
class PenaltyShape:
    """The penalty as a function of the moduli a_j = |lambda_j| of one layer.

        sum_j s(a_j)  +  beta (m_soft - gamma)^2,
        m_soft = mean_j sigmoid(T (a_j - tau_l)) sigmoid(T (tau_u - a_j)).

    Attributes:
        upper: Modulus tau_u above which a mode counts as unstable; the paper's 1.05.
        lower: tau_l, the lower edge of the near-unit band; the paper's 0.90.
        sharpness: Steepness T of the soft bounds; the paper's 20.
        unstable: Weight of the first sum; the paper's 1.
        beta: Weight of the near-unit term. The paper gives none; 1 makes a layer whose modes are all near-unit (M = 1)
            cost about as much as a single mode of modulus 1.2.
        unstable_term: s(a). ``"softplus"`` is the published sigmoid(T (a - tau_u)) softplus(a - tau_u)^2, which also
            pulls on modes just inside the bound and grows with the square of the modulus. ``"log"`` is
            relu(log(a / tau_u))^2: zero inside, with a similar pull on the parameters for a mode at 2 or at 200.
        rank: Number of leading directions in which the spectrum is taken; the paper's 32. None: all, several times the
            cost.
        ridge: Ridge, see `DmdOptions`.
        largest_condition: Largest sensitivity: where an eigenvalue changes by more than this many times a change of the
            operator size (Wilkinson's condition number, 1 for a normal operator), as repeated eigenvalues of a
            defective one do without bound, its gradient is meaningless and the layer is left out.
        has_basis_gradient: Whether the leading directions follow the parameters. Off: they are the frame in which the
            spectrum is read, and a frame that moves lets the penalty fall by turning away from the unstable modes.
    """

    upper: float = 1.05
    lower: float = 0.90
    sharpness: float = 20.0
    unstable: float = 1.0
    beta: float = 1.0
    unstable_term: str = "softplus"
    rank: int | None = 32
    ridge: float = 1e-5
    largest_condition: float = 1e6
    has_basis_gradient: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.lower < self.upper < math.inf:
            raise OptionError(f"The bounds are {self.lower} and {self.upper}, expected 0 < lower < upper.")
        for name in ("sharpness", "largest_condition"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name} is {getattr(self, name)}, expected a positive number.")
        for name in ("unstable", "beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise OptionError(f"{name} is {getattr(self, name)}, expected a number of at least 0.")
        if self.unstable_term not in UNSTABLE_TERMS:
            raise OptionError(f"unstable_term is '{self.unstable_term}', expected one of {', '.join(UNSTABLE_TERMS)}.")
        DmdOptions(ridge=self.ridge, rank=self.rank)

    def of_moduli(self, modulus: Tensor, gamma: float) -> Tensor:
        """The penalty of one layer.

        Args:
            modulus: Moduli |lambda|, shape (mode,), unit 1.
            gamma: Near-unit mass to aim at, in [0, 1].

        Returns:
            A 0-dim tensor, at least 0.
        """
        if self.unstable_term == "softplus":
            excess = modulus - self.upper
            unstable = (torch.sigmoid(self.sharpness * excess) * softplus(excess).square()).sum()
        else:
            unstable = (modulus / self.upper).clamp(min=1.0).log().square().sum()
        return self.unstable * unstable + self.beta * (self.soft_near_unit_mass(modulus) - gamma).square()

    def soft_near_unit_mass(self, modulus: Tensor) -> Tensor:
        """m_soft: the near-unit mass with soft bounds, so that it has a gradient; 0-dim, in [0, 1]."""
        above = torch.sigmoid(self.sharpness * (modulus - self.lower))
        below = torch.sigmoid(self.sharpness * (self.upper - modulus))
        return (above * below).mean()


@dataclass(frozen=True)
class LayerPenalty:
    """The contribution of one layer.

    Attributes:
        value: The penalty, 0-dim, with a gradient where the moments carry one; None if the layer is left out.
        modulus: |lambda|, shape (mode,), without gradient; empty where there is no spectrum.
        near_unit_mass: Share of the modes between the bounds (RKSP Eq. 12); NaN where there is no spectrum.
        reason: Why there is no value; empty otherwise.
    """

    value: Tensor | None
    modulus: Tensor
    near_unit_mass: float = math.nan
    reason: str = ""

    @property
    def spectral_radius(self) -> float:
        """Largest modulus; NaN where there is no spectrum."""
        return float(self.modulus.numpy().max()) if len(self.modulus) else math.nan


def layer_penalty(moments: SnapshotMoments, shape: PenaltyShape, *, gamma: float) -> LayerPenalty:
    """The KSS penalty of one layer, differentiable in the tensors behind the moments.

    With X = V diag(lambda) V^-1 the derivative of the penalty in the operator is V^-* diag(dP/dlambda) V^*; it exists
    where eigenvalues are simple.

    Args:
        moments: Moments of the layer.
        shape: The penalty as a function of the moduli.
        gamma: Near-unit mass to aim at.

    Returns:
        The contribution; a layer whose states are not finite or do not vary, or whose eigenvalues have no gradient, has
        no value but a reason.
    """
    return layer_penalties([moments], shape, gamma=gamma)[0][0]


def layer_penalties(
    moments: Sequence[SnapshotMoments], shape: PenaltyShape, *, gamma: float, also: Sequence[Tensor] = ()
) -> tuple[list[LayerPenalty], list[float]]:
    """`layer_penalty` of several layers, for which the host waits for the device once.

    Args:
        moments: Moments of each layer.
        shape: The penalty as a function of the moduli.
        gamma: Near-unit mass to aim at.
        also: Further tensors of one number, read with the rest.

    Returns:
        The contribution of each layer, and the numbers of ``also``.
    """
    options = DmdOptions(ridge=shape.ridge, rank=shape.rank)
    if shape.has_basis_gradient:
        matrices, numbers = [_with_basis_gradient(layer, options) for layer in moments], read_numbers(also)
    else:
        matrices, numbers = koopman_matrices(moments, options, also)
    return [_penalty_of(A, shape, gamma) for A in matrices], numbers


def _with_basis_gradient(moments: SnapshotMoments, options: DmdOptions) -> Tensor | None:
    try:
        return koopman_matrix(moments, options, has_basis_gradient=True).cpu()
    except (SnapshotError, torch.linalg.LinAlgError):
        return None


def _penalty_of(A: Tensor | None, shape: PenaltyShape, gamma: float) -> LayerPenalty:
    """The penalty of an operator on the host: of a few dozen modes, LAPACK is done before a GPU's solver has begun.

    What is on the host is looked at as arrays, so that no reading of it is taken for one of a device's memory.
    """
    nothing = torch.empty(0, dtype=torch.float64)
    if A is None or not np.isfinite(A.detach().numpy()).all():
        return LayerPenalty(None, nothing, reason=NOT_FINITE)
    try:
        eigenvalue, vectors = torch.linalg.eig(A.detach())
    except torch.linalg.LinAlgError:
        return LayerPenalty(None, nothing, reason=NOT_FINITE)
    modulus = eigenvalue.abs()
    mass = float(((modulus >= shape.lower) & (modulus <= shape.upper)).double().mean().numpy())
    if not A.requires_grad:
        return LayerPenalty(shape.of_moduli(modulus, gamma), modulus, mass)
    inverse, status = torch.linalg.inv_ex(vectors)
    condition = torch.linalg.vector_norm(inverse, dim=1)  # the columns of V have norm 1
    if status.numpy() != 0 or not (condition.numpy() <= shape.largest_condition).all():
        return LayerPenalty(None, modulus, mass, ILL_DEFINED)
    with torch.enable_grad():
        free = modulus.requires_grad_()
        value = shape.of_moduli(free, gamma)
        (slope,) = torch.autograd.grad(value, free)
    modulus = modulus.detach()
    # d|lambda| = Re(conj(lambda)/|lambda| dlambda), and dlambda_j = u_j* dA v_j with u_j* the j-th row of V^-1.
    phase = torch.where(modulus > 0, eigenvalue.conj() / modulus.clamp(min=torch.finfo(modulus.dtype).tiny), 0)
    gradient = torch.einsum("ji,j,kj->ik", inverse, slope * phase, vectors).real
    if not np.isfinite(gradient.numpy()).all():
        return LayerPenalty(None, modulus, mass, ILL_DEFINED)
    # The value, and a gradient in A that autograd carries on to the parameters.
    return LayerPenalty(value.detach() + (gradient * (A - A.detach())).sum(), modulus, mass)
