"""MLP branches: two layers, gated, or of splines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

from workbench.zoo.branch_parts import Branch, inner_norm, scalar_bias
from workbench.zoo.splines import KanLayer

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.zoo.architecture_config import ArchitectureConfig


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
