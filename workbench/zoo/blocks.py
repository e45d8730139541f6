"""Residual blocks and their branches (attention, MLPs, splines), and the base class of all models of the zoo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.zoo.architecture_config import ArchitectureConfig


class Branch(nn.Module, ABC):
    """Base class of the branches of a residual block, whose outputs are added to the stream."""

    @abstractmethod
    def path(self) -> list[list[Tensor]]:
        """Return the weights on the path of the stream through the branch, layer by layer from first to last."""


class ScalarBias(nn.Module):
    """The map x + b with one scalar b for all features, initially 0 (Fixup)."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + b, shaped like ``x``."""
        return x + self.bias

    def reset_parameters(self) -> None:
        """Reset the parameter to its initial value."""
        nn.init.zeros_(self.bias)


class ScalarScale(nn.Module):
    """The map a x with one scalar a per branch (the multiplier of Fixup, the alpha of ReZero)."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.scale = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return a x, shaped like ``x``."""
        return self.scale * x

    def reset_parameters(self) -> None:
        """Reset the parameter to its initial value."""
        nn.init.constant_(self.scale, self.start)


def norm(config: ArchitectureConfig) -> nn.Module:
    """Create the normalization of the stream that ``config.norm`` names."""
    if config.norm == "none":
        return nn.Identity()
    if config.norm == "rms_norm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return _layer_norm(config, config.d_model)


def inner_norm(config: ArchitectureConfig, width: int) -> nn.Module:
    """Create the second norm of SubLN, inside each branch (Wang et al. 2022, arXiv:2210.06423); else the identity."""
    return _layer_norm(config, width) if config.norm == "sub_ln" else nn.Identity()


def scalar_bias(config: ArchitectureConfig) -> nn.Module:
    """Create the bias that Fixup adds before every linear map and activation; else the identity."""
    return ScalarBias() if config.initialization == "fixup" else nn.Identity()


def branch_scale(config: ArchitectureConfig) -> nn.Module:
    """Create the factor of a branch, initially 1 with Fixup and 0 with ReZero; else the identity."""
    starts = {"fixup": 1.0, "rezero": 0.0}
    return ScalarScale(starts[config.initialization]) if config.initialization in starts else nn.Identity()


def _layer_norm(config: ArchitectureConfig, width: int) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5 if config.norm_eps is None else config.norm_eps)


class KanLayer(nn.Module):
    """One layer of a Kolmogorov-Arnold network (Liu et al. 2024, arXiv:2404.19756).

    Output j is the sum over inputs i of w_ji silu(x_i) + s_ji sum_b c_jib B_b(x_i), with B-splines B_b of degree
    ``order`` on a uniform grid, -half_range .. half_range. The grid is fixed, not adapted to the inputs as by the
    optional extension of the paper. Outside of it a spline decreases to zero, and only SiLU remains.
    """

    def __init__(self, n_in: int, n_out: int, *, n_grid: int, order: int, half_range: float) -> None:
        super().__init__()
        self.n_grid, self.order, self.half_range = n_grid, order, half_range
        self.base_weight = nn.Parameter(torch.empty(n_out, n_in))
        self.spline_weight = nn.Parameter(torch.empty(n_out, n_in))
        self.coefficient = nn.Parameter(torch.empty(n_out, n_in, n_grid + order))

    @classmethod
    def of(cls, config: ArchitectureConfig, n_in: int, n_out: int) -> KanLayer:
        """Create a layer with the splines of a configuration."""
        return cls(n_in, n_out, n_grid=config.n_grid, order=config.spline_order, half_range=config.spline_range)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, shape (..., n_out), of inputs (..., n_in)."""
        bases = b_spline_bases(x, n_grid=self.n_grid, order=self.order, half_range=self.half_range)
        weight = self.spline_weight[..., None] * self.coefficient
        spline = functional.linear(bases.flatten(-2), weight.flatten(1))
        return functional.linear(functional.silu(x), self.base_weight) + spline

    def extra_repr(self) -> str:
        """Return sizes and grid as text, for printing."""
        n_out, n_in = self.base_weight.shape
        return f"{n_in}, {n_out}, n_grid={self.n_grid}, order={self.order}, half_range={self.half_range}"


def b_spline_bases(x: Tensor, *, n_grid: int, order: int, half_range: float) -> Tensor:
    """Return the values of all B-splines of one degree on a uniform grid, (..., n_grid + order); NaN at NaN.

    The knots extend beyond both ends, so that the functions sum to 1 everywhere on the grid. Only the ``order + 1``
    that are nonzero at a point are computed (Cox and de Boor's recursion), which needs little memory for autograd.
    """
    n_intervals = n_grid + 2 * order
    place = (x + half_range) * (
        n_grid / (2 * half_range)
    ) + order  # in units where the knots are 0, 1, ..., n_intervals
    is_outside = (place < 0) | (place >= n_intervals)
    place = torch.where(is_outside, torch.zeros_like(place), place)  # all basis functions are zero at the first knot
    interval = place.detach().nan_to_num().floor()
    t = place - interval
    zero, values = torch.zeros_like(t), [torch.ones_like(t)]  # values of the nonzero basis functions, in order
    for degree in range(1, order + 1):
        padded = [zero, *values, zero]
        values = [((t + degree - i) * padded[i] + (i + 1 - t) * padded[i + 1]) / degree for i in range(degree + 1)]
    index = interval.long()[..., None] + torch.arange(order + 1, device=x.device)
    dense = torch.zeros(*x.shape, n_intervals + order, dtype=x.dtype, device=x.device).scatter(
        -1, index, torch.stack(values, dim=-1)
    )
    return dense[..., order : order + n_grid + order]


class Mlp(Branch):
    """Two-layer GELU MLP."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.approximation = "tanh" if config.mlp == "gelu_tanh" else "none"
        self.input_bias = scalar_bias(config)
        self.up = nn.Linear(config.d_model, config.hidden_width, bias=config.has_bias)
        self.activation_bias = scalar_bias(config)
        self.inner_norm = inner_norm(config, config.hidden_width)
        self.hidden_bias = scalar_bias(config)
        self.down = nn.Linear(config.hidden_width, config.d_model, bias=config.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the branch, which is added to the stream, shape (batch, token, feature)."""
        hidden = functional.gelu(self.activation_bias(self.up(self.input_bias(x))), approximate=self.approximation)
        return self.down(self.hidden_bias(self.inner_norm(hidden)))

    def path(self) -> list[list[Tensor]]:
        """Return both matrices."""
        return [[self.up.weight], [self.down.weight]]


class GatedMlp(Branch):
    """SwiGLU MLP, down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.hidden_width, bias=config.has_bias)
        self.up = nn.Linear(config.d_model, config.hidden_width, bias=config.has_bias)
        self.inner_norm = inner_norm(config, config.hidden_width)
        self.down = nn.Linear(config.hidden_width, config.d_model, bias=config.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the branch, which is added to the stream, shape (batch, token, feature)."""
        return self.down(self.inner_norm(functional.silu(self.gate(x)) * self.up(x)))

    def path(self) -> list[list[Tensor]]:
        """Return the matrices of the path, without the gate."""
        return [[self.up.weight], [self.down.weight]]


class KanMlp(Branch):
    """MLP of two KAN layers, d_model -> hidden width -> d_model (Liu et al. 2024, arXiv:2404.19756)."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.up = KanLayer.of(config, config.d_model, config.hidden_width)
        self.inner_norm = inner_norm(config, config.hidden_width)
        self.down = KanLayer.of(config, config.hidden_width, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the branch, which is added to the stream, shape (batch, token, feature)."""
        return self.down(self.inner_norm(self.up(x)))

    def path(self) -> list[list[Tensor]]:
        """Return base weights and spline coefficients of both layers."""
        return [[layer.base_weight, layer.coefficient] for layer in (self.up, self.down)]


def dense_mlp(config: ArchitectureConfig) -> Mlp | GatedMlp:
    """Create the MLP that ``config.mlp`` names; in a mixture, it is one expert."""
    return GatedMlp(config) if config.mlp == "swiglu" else Mlp(config)


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
    """Return alpha = (2L)^(1/4) and beta = (8L)^(-1/4) of DeepNorm for decoders, 1 for other norms."""
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
    """Return whether each token (row) attends to each other (column): itself and ``window - 1`` tokens before it."""
    return torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=device).tril().triu(1 - window)


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotate queries or keys, pairs of feature i of both halves, by position (Su et al. 2021, arXiv:2104.09864)."""
    half, dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequency = base ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=dtype)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _heads(x: Tensor, n_heads: int) -> Tensor:
    """Split features into heads: (batch, token, feature) -> (batch, head, token, head_dim)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)
