"""Optimizers that torch does not have, for ``wb.train(optimizer=)``.

They come from the package pytorch-optimizer. Weight decay is decoupled and 0.01 in all of them, as in torch's AdamW, so
that they differ only in their updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import nn

from workbench.errors import OptionError
from workbench.option_checks import NonNegativeFloat, PositiveFloat, at_least, below, checked
from workbench.training.training_plan import DEFAULT_RATE

WEIGHT_DECAY = 0.01
Decay = Annotated[float, at_least(0), below(1)]


@dataclass(frozen=True)
class OptimizerFactory(ABC):
    """Function that creates an optimizer; ``wb.train(learning_rate=)`` sets its learning rate."""

    @abstractmethod
    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return a new optimizer of parameters, or of groups of them."""


@checked
@dataclass(frozen=True)
class SAM(OptimizerFactory):
    """Sharpness-aware minimization (Foret et al. 2021, arXiv:2010.01412).

    Each step computes the gradient g of the batch at the parameters w, then the gradient of the same batch at
    w + rho g / |g|, and passes the latter to the base optimizer. This takes two forward and backward passes. The loss
    and the gradient norm that `workbench.train` records are those of the first pass; clipping applies to both.

    Attributes:
        rho: Radius, in the norm of all parameters together; the paper uses 0.05.
        base: Class in ``torch.optim`` that performs the update.
        options: Further arguments of that class.

    Raises:
        OptionError: If ``rho`` is not positive, or ``base`` is not a suitable optimizer.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, optimizer=wb.baselines.SAM(rho=0.05))
        >>> [record.step for record in run]
        [0, 1]

    See Also:
        `workbench.train`: Takes it as ``optimizer``.
        `workbench.baselines.controls`: Other stability controls.
    """

    rho: PositiveFloat = 0.05
    base: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = getattr(torch.optim, self.base, None)
        is_optimizer = isinstance(base, type) and issubclass(base, torch.optim.Optimizer)
        if not is_optimizer or base in (torch.optim.Optimizer, torch.optim.LBFGS):
            raise OptionError.of(
                "base",
                self.base,
                "a class of torch.optim with one update per step",
                remedy="choose 'AdamW', for example",
            )

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer, whose ``base_optimizer`` updates the parameters."""
        import pytorch_optimizer

        base = getattr(torch.optim, self.base)
        return pytorch_optimizer.SAM(parameters, base, rho=self.rho, **{"lr": DEFAULT_RATE, **self.options})


@checked
@dataclass(frozen=True)
class Lion(OptimizerFactory):
    """Lion: updates of constant size along the sign of a moving average of the gradient (Chen et al. 2023).

    The paper (arXiv:2302.06675) recommends a learning rate three to ten times smaller than for AdamW, as each update is
    as large as Adam's largest.

    Attributes:
        betas: Decay rates of the direction of the update and of the moving average of the gradient.
        weight_decay: Decoupled weight decay per step, as a multiple of the learning rate.

    Raises:
        OptionError: If an option is out of range.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> settings = {"learning_rate": 1e-4, "optimizer": wb.baselines.Lion()}
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, **settings)
        >>> [record.learning_rate for record in run]
        [0.0001, 0.0001]

    See Also:
        `workbench.train`: Takes it as ``optimizer``.
        `workbench.baselines.controls`: Other stability controls.
    """

    betas: tuple[Decay, Decay] = (0.9, 0.99)
    weight_decay: NonNegativeFloat = WEIGHT_DECAY

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        import pytorch_optimizer

        return pytorch_optimizer.Lion(parameters, lr=DEFAULT_RATE, betas=self.betas, weight_decay=self.weight_decay)


@checked
@dataclass(frozen=True)
class LAMB(OptimizerFactory):
    """LAMB: Adam with the update of each tensor scaled to its norm (You et al. 2020, arXiv:1904.00962).

    A tensor that is zero, such as a bias after initialization, receives an unscaled update.

    Attributes:
        betas: Decay rates of the moving averages of the gradient and of its square.
        eps: Number added to the square root of the second average.
        weight_decay: Decoupled weight decay per step, as a multiple of the learning rate.

    Raises:
        OptionError: If an option is out of range.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> optimizer = wb.baselines.LAMB(weight_decay=0.1)(list(model.parameters()))
        >>> type(optimizer).__name__
        'Lamb'

    See Also:
        `workbench.train`: Takes it as ``optimizer``.
        `workbench.baselines.controls`: Other stability controls.
    """

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = WEIGHT_DECAY

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        import pytorch_optimizer

        # Without adam_debias the library divides the scaled update by 1 - beta1^t, although the scaling already removes
        # the bias; the first update would be ten times that of the paper.
        return pytorch_optimizer.Lamb(
            parameters,
            lr=DEFAULT_RATE,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            adam_debias=True,
        )
