"""Networks whose flow is known in closed form."""

import math

import torch
from torch import nn


class Linear(nn.Module):
    """x -> W x, optionally rectified, optionally added to x; entries of W from N(0, scale^2 / width)."""

    def __init__(self, width, scale, generator, *, is_rectified=False, is_residual=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) * scale / math.sqrt(width))
        self.is_rectified, self.is_residual = is_rectified, is_residual

    def forward(self, x):
        y = x @ self.weight.T
        y = y.relu() if self.is_rectified else y
        return x + y if self.is_residual else y


def deep_net(width, depth, scale, *, seed=0, **options):
    """Return a sequence of blocks of one width."""
    generator = torch.Generator().manual_seed(seed)
    return nn.Sequential(*(Linear(width, scale, generator, **options) for _ in range(depth)))


def pairs(n, width, cosine, *, seed=0):
    """Return sequences of two tokens of norm sqrt(width) with a given cosine, shape (n, 2, width)."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.linalg.qr(torch.randn(n, width, 2, generator=generator))[0].unbind(-1)
    return math.sqrt(width) * torch.stack([x, cosine * x + math.sqrt(1 - cosine**2) * y], dim=1)
