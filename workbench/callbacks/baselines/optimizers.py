"""Optimizers that torch lacks, for ``train(optimizer=)``: functions of the parameters that describe themselves.

They come from the package pytorch-optimizer. Weight decay is decoupled and .01 in all of them, as in torch's AdamW, so
that they differ only in their update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from workbench.errors import OptionError
from workbench.training.training_plan import DEFAULT_RATE

WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class OptimizerFactory(ABC):
    """Makes an optimizer over given parameters; ``train(learning_rate=)`` sets its rate."""

    @abstractmethod
    def __call__(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """A fresh optimizer over the parameters, or groups of them."""


@dataclass(frozen=True)
class SAM(OptimizerFactory):
    """Sharpness-aware minimization (Foret et al. 2021, arXiv:2010.01412): the gradient at the worst point nearby.

    A step moves up by ``rho`` along the gradient g, to w + rho g / |g|, takes the gradient of the same batch there,
    returns and passes it to the base optimizer: two forward and backward passes. Loss and gradient norm that
    `train` records are those of the first pass; clipping applies to both.

    Attributes:
        rho: Radius, in the norm of all parameters together; the paper uses .05.
        base: Class in ``torch.optim`` that makes the update.
        options: Further arguments of that class.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, optimizer=wb.baselines.SAM(rho=0.05))
        >>> [record.step for record in run]
        [0, 1]
    """

    rho: float = 0.05
    base: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.rho, str) or not 0 < self.rho < math.inf:
            raise OptionError(f"rho is {self.rho}, expected a positive radius.")
        base = getattr(torch.optim, self.base, None)
        is_optimizer = isinstance(base, type) and issubclass(base, torch.optim.Optimizer)
        if not is_optimizer or base in (torch.optim.Optimizer, torch.optim.LBFGS):
            raise OptionError(
                f"base is '{self.base}', expected a class of torch.optim that makes one update a step, such as 'AdamW'."
            )

    def __call__(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer; its ``base_optimizer`` moves the parameters."""
        import pytorch_optimizer

        base = getattr(torch.optim, self.base)
        return pytorch_optimizer.SAM(weights, base, rho=self.rho, **{"lr": DEFAULT_RATE, **self.options})


@dataclass(frozen=True)
class Lion(OptimizerFactory):
    """Steps of one size, along the sign of a running gradient (Chen et al. 2023, arXiv:2302.06675).

    Its authors advise a rate three to ten times below AdamW's, as each of its steps is as long as Adam's longest.

    Attributes:
        betas: Decay rates of the update's direction and of the running gradient.
        weight_decay: Decoupled weight decay per step, times the rate.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> settings = {"learning_rate": 1e-4, "optimizer": wb.baselines.Lion()}
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, **settings)
        >>> [record.learning_rate for record in run]
        [0.0001, 0.0001]
    """

    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = WEIGHT_DECAY

    def __post_init__(self) -> None:
        _check(self.betas, self.weight_decay)

    def __call__(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer."""
        import pytorch_optimizer

        return pytorch_optimizer.Lion(weights, lr=DEFAULT_RATE, betas=self.betas, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class LAMB(OptimizerFactory):
    """Adam with the step of each tensor scaled to a share of its size (You et al. 2020, arXiv:1904.00962).

    A tensor that is zero, as a fresh bias, has no size and takes one plain step.

    Attributes:
        betas: Decay rates of the running gradient and its square.
        eps: Number added to the root of the running square.
        weight_decay: Decoupled weight decay per step, times the rate.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> optimizer = wb.baselines.LAMB(weight_decay=0.1)(list(model.parameters()))
        >>> type(optimizer).__name__
        'Lamb'
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = WEIGHT_DECAY

    def __post_init__(self) -> None:
        _check(self.betas, self.weight_decay)
        if isinstance(self.eps, str) or not 0 < self.eps < math.inf:
            raise OptionError(f"eps is {self.eps}, expected a positive number.")

    def __call__(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer."""
        import pytorch_optimizer

        # adam_debias: otherwise the library divides the scaled step by 1 - beta1^t, which makes the first one ten times
        # as long as the paper's; the scaling has taken the bias out already.
        return pytorch_optimizer.Lamb(
            weights,
            lr=DEFAULT_RATE,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            adam_debias=True,
        )


def _check(betas: tuple[float, float], weight_decay: float) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise OptionError(f"betas is {betas}, expected two numbers of at least 0 and below 1.")
    if isinstance(weight_decay, str) or not 0 <= weight_decay < math.inf:
        raise OptionError(f"weight_decay is {weight_decay}, expected a number of at least 0.")
