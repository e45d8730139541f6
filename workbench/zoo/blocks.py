"""Residual blocks of transformers, and the base class of all models of the zoo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from workbench.zoo.attention import Attention
from workbench.zoo.branch_parts import Branch, branch_scale, norm

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.zoo.architecture_config import ArchitectureConfig

_POST_NORMS = ("post_ln", "deep_norm_post")


class ZooModel(nn.Module, ABC):
    """Base class of models that an `ArchitectureConfig` fully determines.

    Called with token ids (batch, token), int64, a model returns logits (batch, token, vocabulary); called with images
    (batch, channel, height, width), logits (batch, class). Models with auxiliary losses have ``auxiliary_loss()``.

    Attributes:
        config: Configuration of the model.
        blocks: Residual blocks.
        head: Output head.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.mamba(d_model=16, n_layers=2)
        >>> isinstance(model, wb.zoo.ZooModel), len(model.blocks), model.config.family
        (True, 2, 'mamba')

    See Also:
        `workbench.zoo.build`: Builds a model from a configuration.
        `workbench.zoo.is_zoo_model`: Tests for this class.
    """

    blocks: nn.ModuleList
    head: nn.Linear

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.config = config

    def tie(self) -> None:
        """Tie the weights that the configuration ties: let their modules share one parameter."""


class ResidualBlock(nn.Module, ABC):
    """Base class of residual blocks, which map a state to a state of the same shape."""

    @abstractmethod
    def branches(self) -> tuple[Branch, ...]:
        """Return the branches whose outputs are added to the stream, in order."""


class Block(ResidualBlock):
    """Residual block of a transformer, with an attention and an MLP branch that are normalized as by ``config.norm``.

    Args:
        config: Configuration, see `ArchitectureConfig`.
        mlp: MLP branch.
    """

    def __init__(self, config: ArchitectureConfig, mlp: Branch) -> None:
        super().__init__()
        self.norm, self.is_parallel = config.norm, config.is_parallel
        self.alpha, _ = deep_norm_constants(config)
        self.attention = Attention(config)
        self.mlp = mlp
        self.attention_norm = norm(config)
        self.mlp_norm = nn.Identity() if self.is_parallel else norm(config)
        self.attention_scale = branch_scale(config)
        self.mlp_scale = branch_scale(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block, shape (batch, token, feature)."""
        if self.is_parallel:
            return self._join(x, self.attention_norm, self._attend, self._transform)
        x = self._join(x, self.attention_norm, self._attend)
        return self._join(x, self.mlp_norm, self._transform)

    def branches(self) -> tuple[Branch, ...]:
        """Return attention and MLP."""
        return self.attention, self.mlp

    def _attend(self, x: Tensor) -> Tensor:
        return self.attention_scale(self.attention(x))

    def _transform(self, x: Tensor) -> Tensor:
        return self.mlp_scale(self.mlp(x))

    def _join(self, x: Tensor, norm: nn.Module, *branches: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm in _POST_NORMS:
            return norm(sum((branch(x) for branch in branches), self.alpha * x))
        normed = norm(x)
        return sum((branch(normed) for branch in branches), self.alpha * x)


def final_norm(config: ArchitectureConfig) -> nn.Module:
    """Return the normalization after the last block; the identity if the blocks end with one."""
    return nn.Identity() if config.norm in _POST_NORMS else norm(config)


def deep_norm_constants(config: ArchitectureConfig) -> tuple[float, float]:
    """Return alpha = (2L)^(1/4) and beta = (8L)^(-1/4) of DeepNorm for decoders.

    Beta is 1 for ``deep_norm``; both are 1 for other norms.
    """
    if config.norm not in ("deep_norm", "deep_norm_post"):
        return 1.0, 1.0
    beta = (8 * config.n_layers) ** -0.25 if config.norm == "deep_norm_post" else 1.0
    return (2 * config.n_layers) ** 0.25, beta
