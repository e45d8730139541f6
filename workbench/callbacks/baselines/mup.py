"""Maximal update parametrization (Yang et al. 2022, arXiv:2203.03466).

The package ``mup`` has had no release since 2022 and requires its own layers in the model, so this is written here, for
the zoo's transformer and Adam: the paper's Table 8, in the equivalent form with an output multiplier. With the width
multiplier m = width / base width:

- embeddings, biases, norms: initial size and rate as at the base width,
- matrices in the blocks: initial standard deviation / sqrt(m), rate / m (decoupled weight decay x m, so that decay per
  step is the same),
- output head: initial size and rate as at the base width, logits / m,
- attention: logits q.k / d_head instead of / sqrt(d_head), equal at the base width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from workbench.errors import OptionError
from workbench.models.parametrizations import make_plain, require_plain
from workbench.zoo import Transformer
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from workbench.models.subject import Subject

OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


@dataclass(frozen=True)
class MuP:
    """The parametrization relative to a base width, at which it changes nothing.

    All inner widths are assumed to grow in proportion to ``d_model``.

    Attributes:
        base_width: ``d_model`` at which ``init_std`` and the learning rate are meant.
        base_heads: Attention heads at the base width; None: as many as the model has, so that heads grow wider.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=64, n_layers=1)
        >>> mup = wb.baselines.MuP(base_width=16)
        >>> remove = mup.apply(model)
        >>> mup.multiplier(model)
        4.0
    """

    base_width: int = 16
    base_heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("base_width", "base_heads"):
            value = getattr(self, name)
            if value is None and name == "base_heads":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} is {value}, expected a whole number of at least 1.")

    def apply(self, model: Subject | nn.Module) -> Callable[[], None]:
        """Apply initial sizes and multipliers to a fresh model, in place, before its optimizer is made.

        Args:
            model: A transformer of the zoo with normal initialization and an output head of its own.

        Returns:
            A function that removes the multipliers; the effective parameters stay the same.

        Raises:
            OptionError: If the model is of another kind, or parametrized already.
        """
        transformer = _checked(module_of(model))
        config = transformer.config
        require_plain(transformer)
        m = config.d_model / self.base_width
        base_head_dim = self.base_width / (self.base_heads or config.n_heads)
        query_scale = math.sqrt(base_head_dim / config.head_dim)
        with torch.no_grad():
            for weight in hidden_matrices(transformer):
                weight.div_(math.sqrt(m))
        _scale(transformer.head, 1 / m)
        blocks: Iterable[Any] = transformer.blocks
        for block in blocks:
            # Scaled queries give scaled attention logits; a norm of the queries would undo any scaling before it.
            _scale(block.attention.query_norm if config.qk_norm else block.attention.query, query_scale)
        return lambda: make_plain(transformer)

    def multiplier(self, model: Subject | nn.Module) -> float:
        """m, the width over the base width."""
        return _checked(module_of(model)).config.d_model / self.base_width

    def optimizer(self, model: Subject | nn.Module, rate: float, name: str = "AdamW", **options: Any) -> MuPOptimizer:
        """The optimizer for ``train(optimizer=)``, without ``learning_rate``, which would make all rates equal.

        Args:
            model: Model to train.
            rate: Peak rate at the base width.
            name: ``"AdamW"`` or ``"Adam"``.
            **options: Further arguments of the optimizer.

        Raises:
            OptionError: If rate, name or model do not fit.
        """
        if name not in OPTIMIZERS:
            raise OptionError(f"muP's rates are those of {', '.join(OPTIMIZERS)}, not of '{name}'; choose one.")
        if not 0 < rate < math.inf:
            raise OptionError(f"The learning rate is {rate}, expected a positive number.")
        return MuPOptimizer(rate, self.multiplier(model), name, dict(options), module_of(model))


@dataclass(frozen=True)
class MuPOptimizer:
    """Makes Adam with two groups of parameters: at the full rate, and the blocks' matrices at a share of it.

    Attributes:
        rate: Learning rate of the first group.
        multiplier: Width multiplier m; the second group's rate is ``rate / m``.
        name: Class in ``torch.optim``.
        options: Further arguments of the optimizer.
        model: Model whose parameters it will be given.
    """

    rate: float
    multiplier: float
    name: str
    options: Mapping[str, Any]
    model: nn.Module = field(repr=False)

    def __call__(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over these parameters."""
        hidden = {id(weight) for weight in hidden_matrices(self.model)}
        groups = [
            {"params": [weight for weight in weights if id(weight) not in hidden], "lr": self.rate},
            {"params": [weight for weight in weights if id(weight) in hidden], "lr": self.rate / self.multiplier},
        ]
        optimizer = OPTIMIZERS[self.name](groups, **{"lr": self.rate, **self.options})
        if self.name == "AdamW":
            optimizer.param_groups[1]["weight_decay"] *= self.multiplier
        return optimizer


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices in the blocks both of whose sides grow with the width."""
    blocks: Any = model.blocks
    return [weight for weight in blocks.parameters() if weight.ndim == 2]


class Scaled(nn.Module):
    """A weight times a number that is not trained."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        """The effective weight."""
        return self.factor * weight

    def extra_repr(self) -> str:
        """The description for the run's configuration."""
        return f"factor={self.factor:.6g}"


def _scale(module: nn.Module, factor: float) -> None:
    if math.isclose(factor, 1.0):
        return
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        parametrize.register_parametrization(module, name, Scaled(factor))


def _checked(model: nn.Module) -> Transformer:
    """Return the model after checking that muP is defined for it.

    Raises:
        OptionError: If it is not.
    """
    if not isinstance(model, Transformer):
        raise OptionError(
            f"muP is worked out for wb.zoo.transformer(), but the model is a {type(model).__name__}; choose another "
            "control for it."
        )
    config = model.config
    if config.initialization != "normal":
        raise OptionError(
            f"muP sets the initial sizes itself, but initialization is '{config.initialization}'; choose 'normal'."
        )
    if config.ties_embeddings:
        raise OptionError("muP treats embedding and output head differently; pass ties_embeddings=False.")
    return model
