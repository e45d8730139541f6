"""Optimizers that torch does not have, for ``wb.train(optimizer=)``, and maximal update parametrization.

The optimizers come from the package pytorch-optimizer. Weight decay is decoupled and 0.01 in all of them, as in torch's
AdamW, so that they differ only in their updates.

muP (Yang et al. 2022, arXiv:2203.03466) is for the transformer of the zoo and for Adam. The package ``mup`` has had no
release since 2022 and requires its own layers in the model. The rules are those of the paper's Table 8, in the
equivalent form with an output multiplier. With the width multiplier m = width / base width:

- embeddings, biases, norms: initial values and learning rate as at the base width,
- matrices in the blocks: initial standard deviation / sqrt(m), learning rate / m (decoupled weight decay x m, so that
  the decay per step is the same),
- output head: initial values and learning rate as at the base width, logits / m,
- attention: logits q.k / d_head instead of q.k / sqrt(d_head), equal at the base width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from workbench.errors import OptionError
from workbench.models.parametrizations import require_unparametrized, unparametrize
from workbench.models.subject import Subject
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, PositiveFloat, PositiveInt, at_least, below, one_of
from workbench.training.training_plan import DEFAULT_RATE
from workbench.zoo.decoders import Transformer
from workbench.zoo.module_of import module_of

WEIGHT_DECAY = 0.01
Decay = Annotated[float, at_least(0), below(1)]


@checked
@dataclass(frozen=True)
class SAM:
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
class Lion:
    """Lion: updates of constant size along the sign of a moving average of the gradient (Chen et al. 2023).

    The paper (arXiv:2302.06675) recommends a learning rate three to ten times smaller than for AdamW, as each update is
    as large as Adam's largest.

    Attributes:
        betas: Decay rates of the direction of the update and of the moving average of the gradient.
        weight_decay: Decoupled weight decay per step, as a multiple of the learning rate.

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
class LAMB:
    """LAMB: Adam with the update of each tensor scaled to its norm (You et al. 2020, arXiv:1904.00962).

    A tensor that is zero, such as a bias after initialization, receives an unscaled update.

    Attributes:
        betas: Decay rates of the moving averages of the gradient and of its square.
        eps: Number added to the square root of the second average.
        weight_decay: Decoupled weight decay per step, as a multiple of the learning rate.

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


OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


@checked
@dataclass(frozen=True)
class MuP:
    """Maximal update parametrization relative to a base width, at which it changes nothing.

    All inner widths are assumed to be proportional to ``d_model``.

    Attributes:
        base_width: ``d_model`` at which ``init_std`` and the learning rate apply.
        base_heads: Number of attention heads at the base width. None for the number of heads of the model, so that the
            heads grow with the width.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=64, n_layers=1)
        >>> mup = wb.baselines.MuP(base_width=16)
        >>> remove = mup.apply(model)
        >>> mup.multiplier(model)
        4.0

    See Also:
        `workbench.baselines.controls`: Other stability controls.
    """

    base_width: PositiveInt = 16
    base_heads: PositiveInt | None = None

    def apply(self, model: Subject | nn.Module) -> Callable[[], None]:
        """Scale the initial values of a new model and add the multipliers, in place.

        This has to be done before the optimizer is created.

        Args:
            model: Transformer of the zoo with normal initialization and without tied embeddings.

        Returns:
            A function that removes the multipliers and keeps the effective parameters.

        Raises:
            OptionError: If the model is of another kind, or parametrized already.
        """
        transformer = _checked(module_of(model))
        config = transformer.config
        require_unparametrized(transformer)
        m = config.d_model / self.base_width
        base_head_dim = self.base_width / (self.base_heads or config.n_heads)
        query_scale = math.sqrt(base_head_dim / config.head_dim)
        with torch.no_grad():
            for weight in hidden_matrices(transformer):
                weight.div_(math.sqrt(m))
        _scale(transformer.head, 1 / m)
        blocks: Iterable[Any] = transformer.blocks
        for block in blocks:
            # Scaling the queries scales the attention logits. A norm of the queries would undo scaling before it.
            _scale(block.attention.query_norm if config.qk_norm else block.attention.query, query_scale)
        return lambda: unparametrize(transformer)

    def multiplier(self, model: Subject | nn.Module) -> float:
        """Return the width multiplier m, the ratio of the width to the base width."""
        return _checked(module_of(model)).config.d_model / self.base_width

    def optimizer(
        self,
        model: Subject | nn.Module,
        rate: PositiveFloat,
        name: Annotated[str, one_of(OPTIMIZERS)] = "AdamW",
        **options: Any,
    ) -> MuPOptimizer:
        """Return the optimizer for ``wb.train(optimizer=)``.

        The argument ``learning_rate`` of `workbench.train` has to be left out, as it would set all rates to one value.

        Args:
            model: Model to train.
            rate: Peak learning rate at the base width.
            name: ``"AdamW"`` or ``"Adam"``.
            **options: Further arguments of the optimizer.

        Raises:
            OptionError: If the rate is not positive, the name is unknown, or muP is not defined for the model.
        """
        return MuPOptimizer(rate, self.multiplier(model), name, dict(options), module_of(model))


@dataclass(frozen=True)
class MuPOptimizer:
    """Function that creates Adam with a lower learning rate for the matrices of the blocks."""

    rate: float
    multiplier: float
    name: str
    options: Mapping[str, Any]
    model: nn.Module = field(repr=False)

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the parameters."""
        hidden = {id(weight) for weight in hidden_matrices(self.model)}
        groups = [
            {"params": [p for p in parameters if id(p) not in hidden], "lr": self.rate},
            {"params": [p for p in parameters if id(p) in hidden], "lr": self.rate / self.multiplier},
        ]
        optimizer = OPTIMIZERS[self.name](groups, **{"lr": self.rate, **self.options})
        if self.name == "AdamW":
            optimizer.param_groups[1]["weight_decay"] *= self.multiplier
        return optimizer


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of the blocks, both dimensions of which grow with the width."""
    blocks: Any = model.blocks
    return [weight for weight in blocks.parameters() if weight.ndim == 2]


class Scaled(nn.Module):
    """A parametrization: a weight multiplied by a constant factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        """Return the effective weight."""
        return self.factor * weight

    def extra_repr(self) -> str:
        """Return the description for the configuration of the run."""
        return f"factor={self.factor:.6g}"


def _scale(module: nn.Module, factor: float) -> None:
    if math.isclose(factor, 1.0):
        return
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        parametrize.register_parametrization(module, name, Scaled(factor))


def _checked(model: nn.Module) -> Transformer:
    """Return the model, or raise `OptionError` if muP is not defined for it."""
    if not isinstance(model, Transformer):
        raise OptionError.of(
            "model", model, "a wb.zoo.transformer(), for which muP is defined here", remedy="choose another control"
        )
    config = model.config
    if config.initialization != "normal":
        raise OptionError.of("initialization", config.initialization, "'normal', as muP scales initial values itself")
    if config.ties_embeddings:
        raise OptionError.of(
            "ties_embeddings", config.ties_embeddings, "False, as muP treats embedding and output head differently"
        )
    return model
