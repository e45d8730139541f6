"""Parts shared by the branches of residual blocks: norms, and the scalars of Fixup and ReZero."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

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
