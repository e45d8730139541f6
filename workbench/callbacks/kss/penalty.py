"""The KSS penalty, a function of the moments of one layer that decreases as its spectrum approaches the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from workbench.errors import OptionError
from workbench.koopman.dmd import DmdOptions
from workbench.koopman.stacked import ProjectedOperator, StackedMoments
from workbench.models.readable_weights import Measurement
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, PositiveFloat, PositiveInt, one_of

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
        """Return the penalty of moduli |lambda|, shape (..., mode), at a target near-unit mass; shape (...)."""
        if self.unstable_term == "softplus":
            excess = modulus - self.upper
            unstable = (torch.sigmoid(self.sharpness * excess) * softplus(excess).square()).sum(-1)
        else:
            unstable = (modulus / self.upper).clamp(min=1.0).log().square().sum(-1)
        return self.unstable * unstable + self.beta * (self.soft_near_unit_mass(modulus) - gamma).square()

    def soft_near_unit_mass(self, modulus: Tensor) -> Tensor:
        """Return m_soft, the near-unit mass with soft bounds, which has a gradient; shape (...), in [0, 1]."""
        above = torch.sigmoid(self.sharpness * (modulus - self.lower))
        below = torch.sigmoid(self.sharpness * (self.upper - modulus))
        return (above * below).mean(-1)


@dataclass(frozen=True)
class LayerPenalty:
    """The penalty of one layer and the spectrum behind it; NaN, None or empty where there is none.

    ``energy_gain``, sqrt(E|y|^2 / E|x|^2), is the factor by which the block increases the norm of the centered states,
    ``reason`` why a layer is skipped, and ``slopes`` are those in the two projections of the moments.
    """

    energy_gain: float
    value: float | None = None
    modulus: np.ndarray = field(default_factory=lambda: np.zeros(0))
    near_unit_mass: float = math.nan
    reason: str = ""
    slopes: np.ndarray | None = None

    @property
    def spectral_radius(self) -> float:
        """Largest modulus; NaN if there is no spectrum."""
        return float(self.modulus.max()) if len(self.modulus) else math.nan


def layer_penalties(
    stacks: Sequence[StackedMoments], shape: PenaltyShape, *, gamma: float, has_spectra: bool = True
) -> Measurement[dict[int, LayerPenalty]]:
    """Measure the KSS penalty of layers with its slopes in the projected moments; without spectra, only the gain."""
    options = DmdOptions(ridge=shape.ridge, rank=shape.rank)
    projections = [stack.project(options) for stack in stacks] if has_spectra else []
    values = yield [*(stack.facts for stack in stacks), *projections]
    found = {}
    for k, stack in enumerate(stacks):
        for i, (layer, states) in enumerate(stack.states.items()):
            facts = values[k][i]
            energy, cross, updates = facts[:3].tolist()
            gain = math.sqrt(max(energy + (2 * cross + updates), 0.0) / energy) if energy > 0 else math.nan
            found[layer] = LayerPenalty(gain)
            if has_spectra:
                operator = ProjectedOperator.of(stack, facts, values[len(stacks) + k][i], options)
                has_gradient = any(state.requires_grad for state in states)
                found[layer] = _penalty_of(operator, shape, gamma, gain, has_gradient=has_gradient)
    return dict(sorted(found.items()))


def _penalty_of(
    operator: ProjectedOperator | None, shape: PenaltyShape, gamma: float, gain: float, *, has_gradient: bool
) -> LayerPenalty:
    """Return the penalty of an operator, with derivative V^-* diag(dP/dlambda) V^* where eigenvalues are simple."""
    try:
        if operator is None or not np.isfinite(operator.matrix).all():
            return LayerPenalty(gain, reason=NOT_FINITE)
        eigenvalue, vectors = np.linalg.eig(operator.matrix)
    except np.linalg.LinAlgError:
        return LayerPenalty(gain, reason=NOT_FINITE)
    modulus = np.abs(eigenvalue)
    mass = float(((modulus >= shape.lower) & (modulus <= shape.upper)).mean())
    with torch.set_grad_enabled(has_gradient):
        leaf = torch.tensor(modulus, requires_grad=has_gradient)
        value = shape.of_moduli(leaf, gamma)
    if not has_gradient:
        return LayerPenalty(gain, float(value.numpy()), modulus, mass)
    ill_defined = LayerPenalty(gain, None, modulus, mass, ILL_DEFINED)
    try:
        inverse = np.linalg.inv(vectors)
    except np.linalg.LinAlgError:
        return ill_defined
    # The condition of each eigenvalue, as V has unit columns.
    if not (np.linalg.norm(inverse, axis=1) <= shape.largest_condition).all():
        return ill_defined
    slope = torch.autograd.grad(value, leaf)[0].numpy()
    # d|lambda| = Re(conj(lambda)/|lambda| dlambda) and dlambda_j = u_j* dA v_j, where u_j* is the j-th row of V^-1.
    phase = np.where(modulus > 0, eigenvalue.conj() / np.maximum(modulus, np.finfo(float).tiny), 0)
    slopes = operator.slopes((inverse.T * (slope * phase) @ vectors.T).real)
    if not np.isfinite(slopes).all():
        return ill_defined
    return LayerPenalty(gain, float(value.detach().numpy()), modulus, mass, slopes=slopes)
