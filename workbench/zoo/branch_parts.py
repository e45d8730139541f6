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
    """A branch of a residual block: what it returns is added to the stream."""

    @abstractmethod
    def path(self) -> list[list[Tensor]]:
        """Weights that the stream passes on its way through the branch, layer by layer, the last one last."""


class ScalarBias(nn.Module):
    """x + b with one number b for all features, 0 at first (Fixup)."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        """The shifted input, shaped like it."""
        return x + self.bias

    def reset_parameters(self) -> None:
        """Back to the start."""
        nn.init.zeros_(self.bias)


class ScalarScale(nn.Module):
    """a x with one number a for the whole branch (the multiplier of Fixup, the alpha of ReZero).

    Args:
        start: Initial a.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.scale = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        """The scaled input, shaped like it."""
        return self.scale * x

    def reset_parameters(self) -> None:
        """Back to the start."""
        nn.init.constant_(self.scale, self.start)


def norm(config: ArchitectureConfig) -> nn.Module:
    """The normalization of the stream that ``config.norm`` asks for."""
    if config.norm == "none":
        return nn.Identity()
    if config.norm == "rms_norm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return _layer_norm(config, config.d_model)


def inner_norm(config: ArchitectureConfig, width: int) -> nn.Module:
    """SubLN's second norm, inside each branch (Wang et al. 2022, arXiv:2210.06423)."""
    return _layer_norm(config, width) if config.norm == "sub_ln" else nn.Identity()


def scalar_bias(config: ArchitectureConfig) -> nn.Module:
    """The bias that Fixup puts before every linear map and activation; nothing otherwise."""
    return ScalarBias() if config.initialization == "fixup" else nn.Identity()


def branch_scale(config: ArchitectureConfig) -> nn.Module:
    """The factor of a whole branch: 1 at first with Fixup, 0 with ReZero, nothing otherwise."""
    starts = {"fixup": 1.0, "rezero": 0.0}
    return ScalarScale(starts[config.initialization]) if config.initialization in starts else nn.Identity()


def _layer_norm(config: ArchitectureConfig, width: int) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5 if config.norm_eps is None else config.norm_eps)
