"""Penalties on the residual stream that are added to the loss, as baselines for KSS.

The KSS paper (arXiv:2602.22988) names them without defining them, and states a coefficient only for the gradient
penalty, 0.1, which is the default of all. Each is a mean, so that it does not grow with batch size, width or depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch

from workbench.option_checks import (
    Fraction,
    NonNegativeFloat,
    PositiveInt,
    check_fields,
    one_of,
)

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = ("half", "all")


@dataclass(frozen=True)
class Stream:
    """The residual stream of one forward pass, with its autograd graph.

    Attributes:
        entering: State entering each block, shape (batch, ..., feature).
        leaving: State leaving each block, of the same shape.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> state = torch.ones(1, 4, 8)
        >>> stream = wb.baselines.Stream(entering=(state,), leaving=(2 * state,))
        >>> stream.n_layers
        1

    See Also:
        `workbench.baselines.Penalty`: Receives it.
    """

    entering: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.leaving)

    @property
    def device(self) -> torch.device:
        """Device of the states."""
        return self.leaving[0].device


@dataclass(frozen=True)
class Penalty(ABC):
    """Base class of penalties: terms of the loss that depend on the residual stream.

    Attributes:
        coefficient: Weight of the penalty in the loss; 0 disables it.
        interval: Steps between two applications, the first of which is at step 0. The weight does not depend on it.
        is_second_order: Whether the penalty contains gradients, so that training needs second derivatives.

    Raises:
        OptionError: If an option is out of range.

    Example:
        >>> import workbench as wb
        >>> class OutputSize(wb.baselines.Penalty):
        ...     def value(self, stream, task_loss, random):
        ...         return stream.leaving[-1].square().mean()
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=1, penalties=[OutputSize(coefficient=0.1)])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True]

    See Also:
        `workbench.train`: Adds penalties to the loss.
        `workbench.baselines.PenaltyTerms`: Adds penalties to the loss in a custom training loop.
    """

    is_second_order: ClassVar[bool] = False

    coefficient: NonNegativeFloat = 0.1
    interval: PositiveInt = 1

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """Return the penalty without its coefficient.

        Args:
            stream: Residual stream of the forward pass that computed the loss.
            task_loss: Loss of the task, 0-dim, a mean over the batch.
            random: Generator for random draws, on the device of the states.

        Returns:
            A 0-dim tensor, at least 0, differentiable in the parameters.
        """

    def describe(self) -> dict[str, Any]:
        """Return the settings of the penalty as plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class GradientPenalty(Penalty):
    """Squared norm of the gradient of the loss in the state entering the first block, averaged over sequences.

    The paper states the coefficient 0.1 and no definition. Double backpropagation (Drucker and LeCun 1992) and gradient
    regularization (Ross and Doshi-Velez 2018, arXiv:1711.09404) use the gradient in the inputs. Tokens are discrete, so
    the closest analogue is the gradient in their embeddings. It takes one further backward pass through the activations
    of all blocks, as a gradient in the parameters would.

    For a loss that is a mean over B independent sequences, B times the squared norm of the gradient of the batch equals
    the mean of the squared norms of the gradients of the sequences. The first dimension of the state must be the
    batch.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.GradientPenalty(coefficient=0.1, interval=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=3, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, False, True]

    See Also:
        `workbench.baselines.JacobianPenalty`: Penalizes the Jacobians of the blocks.
        `workbench.baselines.Penalty`: Describes the arguments.
    """

    is_second_order: ClassVar[bool] = True

    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """Return the penalty, see `Penalty.value`; its unit is (unit of the loss / unit of the stream)^2."""
        first = stream.entering[0]
        (gradient,) = torch.autograd.grad(task_loss, first, create_graph=True)
        return len(first) * _wide(gradient).square().sum()


@dataclass(frozen=True)
class LayerwisePenalty(Penalty):
    """A penalty that is a mean over layers.

    Attributes:
        layers: Layers to average over: ``"half"``, drawn in each step as in KSS, or ``"all"``.
    """

    layers: Annotated[str, one_of(LAYERS)] = "half"

    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """Return the mean of `of_layer` over the layers, see `Penalty.value`."""
        n_layers = stream.n_layers
        layers: Sequence[int] = range(n_layers)
        if self.layers == "half":
            drawn = torch.randperm(n_layers, generator=random, device=random.device)[: max(1, n_layers // 2)]
            layers = sorted(drawn.tolist())
        return torch.stack([self.of_layer(stream.entering[i], stream.leaving[i], random) for i in layers]).mean()

    @abstractmethod
    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Return the penalty of one layer, 0-dim.

        Args:
            entering: State entering the block, shape (batch, ..., feature).
            leaving: State leaving the block, of the same shape.
            random: Generator for random draws.
        """


@dataclass(frozen=True)
class RandomL2(LayerwisePenalty):
    """Mean square of the entries of the residual stream, over random layers and tokens; it ignores spectra.

    Attributes:
        layers: ``"half"``, drawn in each step, or ``"all"``.
        token_share: Fraction of the tokens that are drawn in each layer, in (0, 1]; at least one is drawn.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.RandomL2(coefficient=0.1, token_share=0.25)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]

    See Also:
        `workbench.baselines.ActivationVariance`: Does not penalize the mean.
        `workbench.baselines.Penalty`: Describes the other arguments.
    """

    token_share: Fraction = 0.5

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Return the mean square of the entries of the state leaving the block."""
        states = leaving.flatten(0, -2)
        if self.token_share < 1:
            n_drawn = max(1, round(self.token_share * len(states)))
            states = states[torch.randperm(len(states), generator=random, device=random.device)[:n_drawn]]
        return _wide(states).square().mean()


@dataclass(frozen=True)
class JacobianPenalty(LayerwisePenalty):
    """Mean squared singular value of the Jacobian of each block, |J|_F^2 / n.

    J = dy/dx is the Jacobian of the entire block, between all tokens of a sequence, where x is the state entering the
    block and y, with n entries, the state leaving it. The penalty is 1 for the identity. The squared norm of J is
    estimated without bias as |J^T v|^2 with random signs v (Hutchinson 1990; used by Hoffman et al. 2019,
    arXiv:1908.02729, for the Jacobian of the logits). Each draw takes a backward pass through the activations of the
    block.

    Attributes:
        layers: ``"half"``, drawn in each step, or ``"all"``.
        n_projections: Number of draws of v.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.JacobianPenalty(coefficient=0.1)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]

    See Also:
        `workbench.baselines.GradientPenalty`: Penalizes the gradient of the loss.
        `workbench.baselines.Penalty`: Describes the other arguments.
    """

    is_second_order: ClassVar[bool] = True

    n_projections: PositiveInt = 1

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Return the estimate of |J|_F^2 / n, unit 1."""
        squares = []
        for _ in range(self.n_projections):
            bits = torch.randint(2, leaving.shape, generator=random, device=random.device)
            squares.append(pulled_back_square(entering, leaving, (2 * bits - 1).to(leaving.dtype)))
        return torch.stack(squares).mean() / leaving.numel()


@dataclass(frozen=True)
class ActivationVariance(LayerwisePenalty):
    """Variance of each feature of the residual stream over the tokens of the batch, averaged over features.

    Littwin and Wolf (2018, arXiv:1811.09764) also regularize by the variance of activations. Unlike `RandomL2`, this
    penalty does not act on the mean.

    Attributes:
        layers: ``"half"``, drawn in each step, or ``"all"``.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.ActivationVariance(coefficient=0.1)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]

    See Also:
        `workbench.baselines.RandomL2`: Penalizes the mean, too.
        `workbench.baselines.Penalty`: Describes the other arguments.
    """

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Return the mean variance (over n, not n - 1) of the features of the state leaving the block."""
        return _wide(leaving.flatten(0, -2)).var(dim=0, correction=0).mean()


def pulled_back_square(entering: Tensor, leaving: Tensor, direction: Tensor) -> Tensor:
    """Return |J^T v|^2 of a block with the Jacobian J = dy/dx, 0-dim, differentiable in the parameters.

    Args:
        entering: State x entering the block, part of the autograd graph.
        leaving: State y leaving the block.
        direction: Vector v, of the shape of y.
    """
    (pulled,) = torch.autograd.grad(leaving, entering, direction, create_graph=True)
    return _wide(pulled).square().sum()


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in at least float32, as squares in half precision overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
