"""Penalties on the residual stream, added to the loss: baselines that KSS is compared with.

The KSS paper (arXiv:2602.22988) names them, gives a coefficient of .1 for the gradient penalty alone, and defines none;
.1 is the default of all. Each is a mean, so that its size does not grow with batch, width or depth.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from workbench.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = ("half", "all")


@dataclass(frozen=True)
class Stream:
    """The residual stream of one forward pass; every state is part of its autograd graph.

    Attributes:
        entering: States entering each block, shape (batch, ..., feature).
        leaving: States leaving each block, of the same shapes.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> state = torch.ones(1, 4, 8)
        >>> stream = wb.baselines.Stream(entering=(state,), leaving=(2 * state,))
        >>> stream.n_layers
        1
    """

    entering: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]

    @property
    def n_layers(self) -> int:
        """The number of blocks that the stream passes."""
        return len(self.leaving)

    @property
    def device(self) -> torch.device:
        """The device of the states."""
        return self.leaving[0].device


@dataclass(frozen=True)
class Penalty(ABC):
    """A term of the loss that depends on the residual stream.

    Attributes:
        coefficient: Its weight in the loss; 0: off.
        interval: Steps between two applications, the first at step 0; its weight does not grow with it.

    Example:
        >>> import workbench as wb
        >>> class LastSize(wb.baselines.Penalty):
        ...     def value(self, stream, task_loss, random):
        ...         return stream.leaving[-1].square().mean()
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=1, penalties=[LastSize(coefficient=0.1)])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True]
    """

    #: Whether the value is made of gradients, so that training needs second derivatives.
    is_second_order: ClassVar[bool] = False

    coefficient: float = 0.1
    interval: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.coefficient, str) or not 0 <= self.coefficient < math.inf:
            raise OptionError(f"coefficient is {self.coefficient}, expected a number of at least 0.")
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise OptionError(f"interval is {self.interval}, expected a whole number of steps, at least 1.")

    @abstractmethod
    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """The penalty before its coefficient.

        Args:
            stream: Residual stream of the forward pass that gave the loss.
            task_loss: Loss of the task, 0-dim, a mean over the batch.
            random: Generator to draw from, on the device of the states.

        Returns:
            A 0-dim tensor, at least 0, differentiable in the parameters.
        """

    def describe(self) -> dict[str, Any]:
        """The settings that define it, as plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class GradientPenalty(Penalty):
    """Squared norm of the loss's gradient in the residual stream entering the first block, a mean over sequences.

    The paper gives .1 and no definition. Tokens are discrete, so the closest analogue of the input gradient of double
    backpropagation (Drucker and LeCun 1992) and of gradient regularization (Ross and Doshi-Velez 2018,
    arXiv:1711.09404) is the gradient in their embeddings; it passes every block, and needs one more backward pass
    through activations only, which a gradient with respect to the parameters would need as well.

    For a loss that is a mean over B sequences, B times the squared norm of the batch's gradient is the mean over
    sequences of the squared norm of each one's own, if the sequences are independent. The state's first
    dimension must be the batch.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.GradientPenalty(coefficient=0.1, interval=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=3, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, False, True]
    """

    is_second_order: ClassVar[bool] = True

    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """See `Penalty.value`; unit: that of the loss, squared, per squared unit of the stream."""
        first = stream.entering[0]
        (gradient,) = torch.autograd.grad(task_loss, first, create_graph=True)
        return len(first) * _wide(gradient).square().sum()


@dataclass(frozen=True)
class LayerwisePenalty(Penalty):
    """A penalty that is a mean over layers.

    Attributes:
        layers: ``"half"``, drawn in each step as in KSS, or ``"all"``.
    """

    layers: str = "half"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers not in LAYERS:
            raise OptionError(f"layers is {self.layers!r}, expected one of {', '.join(LAYERS)}.")

    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """See `Penalty.value`."""
        n_layers = stream.n_layers
        layers: Sequence[int] = range(n_layers)
        if self.layers == "half":
            drawn = torch.randperm(n_layers, generator=random, device=random.device)[: max(1, n_layers // 2)]
            layers = sorted(drawn.tolist())
        return torch.stack([self.of_layer(stream.entering[i], stream.leaving[i], random) for i in layers]).mean()

    @abstractmethod
    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """The penalty of one layer, 0-dim.

        Args:
            entering: State entering the block, shape (batch, ..., feature).
            leaving: State leaving it, shaped like it.
            random: Generator to draw from.
        """


@dataclass(frozen=True)
class RandomL2(LayerwisePenalty):
    """Mean square of the residual stream's entries, over random layers and tokens: it ignores spectra.

    Attributes:
        token_share: Share of the tokens drawn in each layer, in (0, 1]; at least one is.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.RandomL2(coefficient=0.1, token_share=0.25)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]
    """

    token_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.token_share, str) or not 0 < self.token_share <= 1:
            raise OptionError(f"token_share is {self.token_share}, expected a share above 0 and up to 1.")

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Mean square of the entries of what leaves the block."""
        states = leaving.flatten(0, -2)
        if self.token_share < 1:
            n_drawn = max(1, round(self.token_share * len(states)))
            states = states[torch.randperm(len(states), generator=random, device=random.device)[:n_drawn]]
        return _wide(states).square().mean()


@dataclass(frozen=True)
class JacobianPenalty(LayerwisePenalty):
    """Squared Frobenius norm of each block's Jacobian over its size, |J|_F^2 / n: the mean squared singular value.

    J = dy/dx, x the state that enters a block and y, of n entries, the one that leaves it, is that of the entire block,
    all tokens of a sequence with all others; the penalty is 1 for the identity. The squared norm of
    J is estimated as |J^T v|^2 with random signs v (Hutchinson 1990; Hoffman et al. 2019, arXiv:1908.02729, do so for
    the Jacobian of the logits), without bias; one draw costs a backward pass through the block's activations.

    Attributes:
        n_projections: Number of draws of v.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.JacobianPenalty(coefficient=0.1)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]
    """

    is_second_order: ClassVar[bool] = True

    n_projections: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        n = self.n_projections
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError(f"n_projections is {n}, expected a whole number of at least 1.")

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """The estimate, unit 1."""
        squares = []
        for _ in range(self.n_projections):
            bits = torch.randint(2, leaving.shape, generator=random, device=random.device)
            squares.append(pulled_back_square(entering, leaving, (2 * bits - 1).to(leaving.dtype)))
        return torch.stack(squares).mean() / leaving.numel()


@dataclass(frozen=True)
class ActivationVariance(LayerwisePenalty):
    """Variance of each feature of the stream over the batch's tokens, a mean over features.

    In the spirit of Littwin and Wolf (2018, arXiv:1811.09764), who regularize by the variance of activations; unlike
    `RandomL2` it does not penalize the mean.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.ActivationVariance(coefficient=0.1)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]
    """

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Variance (over n, not n - 1) of what leaves the block."""
        return _wide(leaving.flatten(0, -2)).var(dim=0, correction=0).mean()


def pulled_back_square(entering: Tensor, leaving: Tensor, direction: Tensor) -> Tensor:
    """|J^T v|^2 of a block, 0-dim, differentiable in the parameters.

    Args:
        entering: State x entering the block, part of the graph.
        leaving: State y leaving it, J = dy/dx.
        direction: Vector v, shaped like y.
    """
    (pulled,) = torch.autograd.grad(leaving, entering, direction, create_graph=True)
    return _wide(pulled).square().sum()


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: squares of half precision overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
