"""Residual blocks of transformers, and the base class of all models of the zoo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from workbench.zoo.branch_parts import Branch, branch_scale, inner_norm, norm, scalar_bias

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
    """Residual block of a transformer, with an attention and an MLP branch normalized as by ``config.norm``."""

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


class Attention(Branch):
    """Attention branch of a block; causal except for images."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        width, head_dim = config.d_model, config.head_dim
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_key_value_heads
        self.is_causal, self.window = config.family != "vit", config.window
        self.rotary_base = config.rotary_base
        self.input_bias = scalar_bias(config)
        self.query = nn.Linear(width, width, bias=config.has_bias)
        self.key = nn.Linear(width, self.n_kv_heads * head_dim, bias=config.has_bias)
        self.value = nn.Linear(width, self.n_kv_heads * head_dim, bias=config.has_bias)
        self.query_norm = nn.RMSNorm(head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.inner_norm = inner_norm(config, width)
        self.mixed_bias = scalar_bias(config)
        self.out = nn.Linear(width, width, bias=config.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the branch, which is added to the stream, shape (batch, token, feature)."""
        x = self.input_bias(x)
        q = self.query_norm(_heads(self.query(x), self.n_heads))
        k = self.key_norm(_heads(self.key(x), self.n_kv_heads))
        v = _heads(self.value(x), self.n_kv_heads)
        if self.rotary_base is not None:
            q, k = rotate(q, self.rotary_base), rotate(k, self.rotary_base)
        if self.n_kv_heads < self.n_heads:
            k, v = (shared.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for shared in (k, v))
        if self.window is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        else:
            mask = window_mask(x.shape[1], self.window, x.device)
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(self.mixed_bias(self.inner_norm(mixed.transpose(1, 2).flatten(2))))

    def path(self) -> list[list[Tensor]]:
        """Return the weights of the values and of the output; queries and keys only determine how values are mixed."""
        return [[self.value.weight], [self.out.weight]]


def window_mask(n_tokens: int, window: int, device: torch.device | None = None) -> Tensor:
    """Return whether each token (row) attends to each other (column): itself and the ``window - 1`` tokens before it.

    The mask is bool, shape (token, token).
    """
    return torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=device).tril().triu(1 - window)


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotate queries or keys by their positions (Su et al. 2021, arXiv:2104.09864).

    Feature i of the first half and feature i of the second half form a pair that is rotated.

    Args:
        x: Queries or keys, shape (batch, head, token, feature), an even number of features.
        base: Base of the frequencies, base^(-2i / n_features) radians per token.

    Returns:
        The rotated tensor, shaped like ``x``; position 0 is unchanged.
    """
    half, dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequency = base ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=dtype)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _heads(x: Tensor, n_heads: int) -> Tensor:
    """Split features into heads: (batch, token, feature) -> (batch, head, token, head_dim)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)
