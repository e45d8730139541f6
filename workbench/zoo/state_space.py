"""Mamba models, which have selective state spaces in place of attention and MLP."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from workbench.zoo.blocks import ResidualBlock
from workbench.zoo.branch_parts import Branch, norm
from workbench.zoo.decoders import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.zoo.architecture_config import ArchitectureConfig


class Mamba(Decoder):
    """Language model of selective state-space blocks (Gu and Dao 2023, arXiv:2312.00752), pre-normalized by RMSNorm.

    It computes the same function as the Mamba of the transformers library. The scan processes one token at a time with
    standard torch operations. It is portable and differentiable to any order, and its cost is linear in the number of
    tokens, forward and backward.
    """

    @staticmethod
    def make_block(config: ArchitectureConfig) -> ResidualBlock:
        """Create one block with a mixer."""
        return MambaBlock(config)


class MambaBlock(ResidualBlock):
    """Residual block x + mixer(norm(x)), without attention or MLP.

    It has about half as many parameters as a block of a transformer.
    """

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.mixer = MambaMixer(config)
        self.mixer_norm = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block, shape (batch, token, feature)."""
        return x + self.mixer(self.mixer_norm(x))

    def branches(self) -> tuple[Branch, ...]:
        """Return the mixer."""
        return (self.mixer,)


class MambaMixer(Branch):
    """Gated selective state space of one block.

    In the notation of the paper, ``time_step`` computes Delta, ``log_decay`` is log(-A), ``skip`` is D, and
    ``selection`` computes B, C and the input of ``time_step``.
    """

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        width = config.expand * config.d_model
        self.rank, self.state_size = math.ceil(config.d_model / 16), config.state_size
        self.expand = nn.Linear(config.d_model, 2 * width, bias=config.has_bias)
        self.convolution = nn.Conv1d(width, width, config.conv_width, groups=width, padding=config.conv_width - 1)
        self.selection = nn.Linear(width, self.rank + 2 * self.state_size, bias=False)
        self.time_step = nn.Linear(self.rank, width)
        self.log_decay = nn.Parameter(torch.empty(width, self.state_size))
        self.skip = nn.Parameter(torch.empty(width))
        self.out = nn.Linear(width, config.d_model, bias=config.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the branch, which is added to the stream, shape (batch, token, feature)."""
        signal, gate = self.expand(x).chunk(2, dim=-1)
        signal = self.convolution(signal.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        signal = functional.silu(signal)
        step, write, read = self.selection(signal).split((self.rank, self.state_size, self.state_size), dim=-1)
        step = functional.softplus(self.time_step(step))
        scanned = selective_scan(signal, step, -self.log_decay.exp(), write, read)
        return self.out((scanned + self.skip * signal) * functional.silu(gate))

    def path(self) -> list[list[Tensor]]:
        """Return the input and output maps of the mixer."""
        return [[self.expand.weight], [self.out.weight]]


def selective_scan(signal: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """Compute the selective scan (arXiv:2312.00752, Algorithm 2).

    h_t = exp(step_t rate) h_(t-1) + step_t write_t signal_t,  y_t = read_t h_t

    Args:
        signal: Inputs, shape (batch, token, channel).
        step: Delta, shape (batch, token, channel).
        rate: A, shape (channel, state).
        write: B, shape (batch, token, state).
        read: C, shape (batch, token, state).

    Returns:
        y, shape (batch, token, channel).
    """
    decay = (step[..., None] * rate).exp()
    added = (step * signal)[..., None] * write[:, :, None]
    state, states = torch.zeros_like(added[:, 0]), []
    # `unbind`, because the backward pass of indexing would allocate a full tensor of zeros for each token.
    for kept, new in zip(decay.unbind(1), added.unbind(1), strict=True):
        state = kept * state + new
        states.append(state)
    return (torch.stack(states, dim=1) @ read[..., None]).squeeze(-1)
