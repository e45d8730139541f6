"""A small decoder-only transformer in which only the normalization changes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from workbench.errors import ThresholdError

if TYPE_CHECKING:
    from torch import Tensor

Norm = Literal["pre_ln", "post_ln", "rms_norm", "deep_norm", "deep_norm_post", "sub_ln", "none"]
NORMS: tuple[str, ...] = get_args(Norm)


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that defines the model.

    Attributes:
        norm: Where the normalization sits. ``deep_norm`` is the form that the figures of RKSP Table 1 imply,
            alpha x + f(LN x); ``deep_norm_post`` is DeepNet's own, LN(alpha x + f(x)) with branch weights scaled by
            beta (Wang et al. 2022, arXiv:2203.00555).
        d_model: Width of the residual stream.
        n_layers: Blocks, each attention + MLP.
        n_heads: Attention heads; divides ``d_model``.
        vocab_size: Tokens.
        max_length: Longest sequence.
        mlp_ratio: Hidden width of the MLP over ``d_model``.
        init_std: Standard deviation of every weight matrix and embedding.
        seed: Of the initialization.
    """

    norm: Norm = "pre_ln"
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    vocab_size: int = 256
    max_length: int = 64
    mlp_ratio: int = 4
    init_std: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ThresholdError(f"norm is '{self.norm}', expected one of {', '.join(NORMS)}.")
        for name in ("d_model", "n_layers", "n_heads", "vocab_size", "max_length", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ThresholdError(f"{name} is {getattr(self, name)}, expected at least 1.")
        if self.d_model % self.n_heads:
            raise ThresholdError(
                f"n_heads ({self.n_heads}) does not divide d_model ({self.d_model}); choose a divisor of the width."
            )
        if not self.init_std > 0:
            raise ThresholdError(f"init_std is {self.init_std}, expected a positive number.")

    def as_dict(self) -> dict[str, Any]:
        """The configuration as plain values, for a JSON file."""
        return asdict(self)


class Transformer(nn.Module):
    """Decoder-only transformer: learned positions, causal attention, GELU MLP, untied output head.

    Args:
        config: See `TransformerConfig`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.max_length, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = _norm(config) if config.norm not in ("none", "post_ln", "deep_norm_post") else nn.Identity()
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, shape (batch, token, vocabulary), from token ids (batch, token)."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(position)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


class Block(nn.Module):
    """One residual block: an attention and an MLP branch, joined as ``config.norm`` says."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = config.norm
        self.alpha, _ = deep_norm_constants(config)
        self.attention = Attention(config)
        self.mlp = Mlp(config)
        self.attention_norm = _norm(config)
        self.mlp_norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the block, shape (batch, token, feature) like ``x``."""
        for branch, norm in ((self.attention, self.attention_norm), (self.mlp, self.mlp_norm)):
            if self.norm in ("post_ln", "deep_norm_post"):
                x = norm(self.alpha * x + branch(x))
            else:
                x = self.alpha * x + branch(norm(x))
        return x


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.inner_norm = _inner_norm(config, config.d_model)
        self.out = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """What the branch adds to the stream, shape (batch, token, feature) like ``x``."""
        q, k, v = (self._heads(projection(x)) for projection in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.inner_norm(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    """Two-layer GELU MLP."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.mlp_ratio * config.d_model
        self.up = nn.Linear(config.d_model, width)
        self.inner_norm = _inner_norm(config, width)
        self.down = nn.Linear(width, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """What the branch adds to the stream, shape (batch, token, feature) like ``x``."""
        return self.down(self.inner_norm(functional.gelu(self.up(x))))


def transformer(norm: Norm = "pre_ln", **options: Any) -> Transformer:
    """A transformer with fresh weights.

    Args:
        norm: See `TransformerConfig`.
        **options: Any other field of `TransformerConfig`.

    Returns:
        The model in training mode, on the CPU; the global random state is untouched.

    Raises:
        ThresholdError: If the configuration is impossible; nothing is allocated then.
    """
    config = TransformerConfig(norm=norm, **options)
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    _initialize(model, config)
    return model


def deep_norm_constants(config: TransformerConfig) -> tuple[float, float]:
    """Constants alpha and beta of DeepNorm for decoders, (2L)^(1/4) and (8L)^(-1/4); (1, 1) for other norms."""
    if config.norm not in ("deep_norm", "deep_norm_post"):
        return 1.0, 1.0
    beta = (8 * config.n_layers) ** -0.25 if config.norm == "deep_norm_post" else 1.0
    return (2 * config.n_layers) ** 0.25, beta


def _norm(config: TransformerConfig) -> nn.Module:
    if config.norm == "none":
        return nn.Identity()
    return nn.RMSNorm(config.d_model) if config.norm == "rms_norm" else nn.LayerNorm(config.d_model)


def _inner_norm(config: TransformerConfig, width: int) -> nn.Module:
    """SubLN's second norm, inside each branch (Wang et al. 2022, arXiv:2210.06423)."""
    return nn.LayerNorm(width) if config.norm == "sub_ln" else nn.Identity()


def _initialize(model: Transformer, config: TransformerConfig) -> None:
    generator = torch.Generator().manual_seed(config.seed)
    _, beta = deep_norm_constants(config)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=config.init_std, generator=generator)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    if not math.isclose(beta, 1.0):
        with torch.no_grad():
            for block in model.blocks:
                for linear in (block.attention.value, block.attention.out, block.mlp.up, block.mlp.down):
                    linear.weight.mul_(beta)
