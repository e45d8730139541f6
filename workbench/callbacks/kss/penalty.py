"""The KSS penalty, a function of the moments of one layer that decreases as its spectrum approaches the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from torch.nn.functional import softplus

from workbench.errors import OptionError
from workbench.koopman.dmd import DmdOptions, koopman_matrices
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, PositiveFloat, PositiveInt, one_of

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.koopman.moments import SnapshotMoments

#: Reasons why a layer has no penalty.
NOT_FINITE, ILL_DEFINED = "not finite", "ill-defined"
UNSTABLE_TERMS = ("softplus", "log")


@checked
@dataclass(frozen=True)
class PenaltyShape:
    """The penalty as a function of the moduli a_j = |lambda_j| of one layer.

        P = w sum_j s(a_j)  +  beta (m_soft - gamma)^2,
        m_soft = mean_j sigmoid(T (a_j - tau_l)) sigmoid(T (tau_u - a_j)).

    Attributes:
        upper: Modulus tau_u above which a mode counts as unstable; 1.05 in the paper.
        lower: Lower edge tau_l of the near-unit band; 0.90 in the paper.
        sharpness: Steepness T of the soft bounds; 20 in the paper.
        unstable: Weight w of the first sum; 1 in the paper.
        beta: Weight of the near-unit term. The paper states none. With 1, a layer whose modes are all near-unit (M = 1)
            has about the same penalty as a layer with a single mode of modulus 1.2.
        unstable_term: The function s(a). ``"softplus"`` is the published sigmoid(T (a - tau_u)) softplus(a - tau_u)^2,
            which also acts on modes just below tau_u and grows with the square of the modulus. ``"log"`` is
            relu(log(a / tau_u))^2, which is zero below tau_u and has similar gradients in the parameters for modes of
            modulus 2 and 200.
        rank: Number of leading directions in which the spectrum is taken; 32 in the paper. None takes all of them, at
            several times the cost.
        ridge: Ridge, see `DmdOptions`.
        largest_condition: Largest condition number of an eigenvalue (Wilkinson; 1 for a normal operator), the ratio of
            its change to a change of the operator. It is infinite for the repeated eigenvalues of a defective operator.
            Above this limit the gradient is meaningless, and the layer is skipped.
    """

    upper: PositiveFloat = 1.05
    lower: PositiveFloat = 0.90
    sharpness: PositiveFloat = 20.0
    unstable: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 1.0
    unstable_term: Annotated[str, one_of(UNSTABLE_TERMS)] = "softplus"
    rank: PositiveInt | None = 32
    ridge: NonNegativeFloat = 1e-5
    largest_condition: PositiveFloat = 1e6

    def __post_init__(self) -> None:
        if self.lower >= self.upper:
            raise OptionError.of("upper", self.upper, f"above lower = {self.lower}")

    def of_moduli(self, modulus: Tensor, gamma: float) -> Tensor:
        """Return the penalty of one layer.

        Args:
            modulus: Moduli |lambda|, shape (mode,), unit 1.
            gamma: Target near-unit mass, in [0, 1].

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
        """Return m_soft, the near-unit mass with soft bounds, which has a gradient; 0-dim, in [0, 1]."""
        above = torch.sigmoid(self.sharpness * (modulus - self.lower))
        below = torch.sigmoid(self.sharpness * (self.upper - modulus))
        return (above * below).mean()


@dataclass(frozen=True)
class LayerPenalty:
    """The penalty of one layer and the spectrum behind it.

    Attributes:
        value: The penalty, 0-dim, with a gradient if the moments have one; None if the layer is skipped.
        modulus: Moduli |lambda|, shape (mode,), without gradient; empty if there is no spectrum.
        near_unit_mass: Fraction of the modes between the bounds (RKSP Eq. 12); NaN if there is no spectrum.
        reason: Reason why the layer is skipped; empty if it is not.
    """

    value: Tensor | None
    modulus: Tensor
    near_unit_mass: float = math.nan
    reason: str = ""

    @property
    def spectral_radius(self) -> float:
        """Largest modulus; NaN if there is no spectrum."""
        return float(self.modulus.numpy().max()) if len(self.modulus) else math.nan


def layer_penalties(
    moments: Sequence[SnapshotMoments], shape: PenaltyShape, *, gamma: float, also: Sequence[Tensor] = ()
) -> tuple[list[LayerPenalty], list[float]]:
    """Compute the KSS penalty of layers, differentiable in the tensors behind the moments.

    For an operator A = V diag(lambda) V^-1, the derivative of the penalty with respect to A is
    V^-* diag(dP/dlambda) V^*. It exists where the eigenvalues are simple. The host waits for the device only once.
    """
    matrices, numbers = koopman_matrices(moments, DmdOptions(ridge=shape.ridge, rank=shape.rank), also)
    return [_penalty_of(A, shape, gamma) for A in matrices], numbers


def _penalty_of(A: Tensor | None, shape: PenaltyShape, gamma: float) -> LayerPenalty:
    """Return the penalty of an operator on the host: for a few dozen modes, LAPACK is faster than a GPU solver.

    Values are read as NumPy arrays, which cannot be mistaken for a transfer from the device.
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
    condition = torch.linalg.vector_norm(inverse, dim=1)  # the condition of each eigenvalue, as V has unit columns
    if status.numpy() != 0 or not (condition.numpy() <= shape.largest_condition).all():
        return LayerPenalty(None, modulus, mass, ILL_DEFINED)
    with torch.enable_grad():
        modulus.requires_grad_()
        value = shape.of_moduli(modulus, gamma)
        (slope,) = torch.autograd.grad(value, modulus)
    modulus = modulus.detach()
    # d|lambda| = Re(conj(lambda)/|lambda| dlambda) and dlambda_j = u_j* dA v_j, where u_j* is the j-th row of V^-1.
    phase = torch.where(modulus > 0, eigenvalue.conj() / modulus.clamp(min=torch.finfo(modulus.dtype).tiny), 0)
    gradient = torch.einsum("ji,j,kj->ik", inverse, slope * phase, vectors).real
    if not np.isfinite(gradient.numpy()).all():
        return LayerPenalty(None, modulus, mass, ILL_DEFINED)
    # The second term is zero; its gradient in A is that of the penalty.
    return LayerPenalty(value.detach() + (gradient * (A - A.detach())).sum(), modulus, mass)
