"""Initial parameters of the models of the zoo.

Every matrix and embedding is drawn from N(0, init_std^2), biases are 0 and norms 1. A separate generator draws them in
the order of the modules. The exceptions are:

- xavier: matrices uniform with variance 2 / (n_in + n_out) (Glorot and Bengio 2010); embeddings as above.
- rezero: each branch has a factor alpha, initially 0, so that every block begins as the identity (Bachlechner et al.
  2020, arXiv:2003.04887). Attention and MLP have one each.
- fixup (Zhang et al. 2019, arXiv:1901.09321): each branch has scalar biases before every linear map and activation, and
  a factor of 1 on its output. The last matrix of each branch and the output head are 0. The other matrices on the path
  of the branch are scaled by n^(-1/(2m - 2)) with n branches of m matrices, where N(0, init_std^2) is the "standard
  method" of the paper. Queries and keys are not on the path, because they only determine how values are mixed.
- KAN layers (Liu et al. 2024, arXiv:2404.19756): spline coefficients N(0, spline_std^2), their factors 1; base weights
  like any matrix. The paper draws base weights by xavier.
- Mamba mixers (Gu and Dao 2023, arXiv:2312.00752, and its code): A = -1, ..., -state_size in every channel, D = 1; time
  steps log-uniform from 0.001 to 0.1, their weights uniform within rank^(-1/2); the convolution and the output map of
  the mixer uniform within n_in^(-1/2).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from workbench.zoo.blocks import ResidualBlock, deep_norm_constants
from workbench.zoo.branch_parts import ScalarBias, ScalarScale
from workbench.zoo.splines import KanLayer
from workbench.zoo.state_space import MambaMixer

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.zoo.architecture_config import ArchitectureConfig
    from workbench.zoo.blocks import ZooModel


@torch.no_grad()
def initialize(model: ZooModel) -> None:
    """Initialize the parameters of a model as the docstring of this module describes.

    Args:
        model: Model, whose embeddings are already tied if the configuration ties them.
    """
    config = model.config
    generator = torch.Generator().manual_seed(config.seed)
    is_filled: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if id(weight) in is_filled:  # a head that is tied to the embedding
            continue
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | ScalarBias | ScalarScale):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.init_std, generator=generator)
            is_filled.add(id(weight))
        elif isinstance(module, nn.Linear):
            _fill_matrix(module.weight, config, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, KanLayer):
            _fill_matrix(module.base_weight, config, generator)
            nn.init.ones_(module.spline_weight)
            nn.init.normal_(module.coefficient, std=config.spline_std, generator=generator)
    branches = [branch for block in model.blocks if isinstance(block, ResidualBlock) for branch in block.branches()]
    for branch in branches:
        if isinstance(branch, MambaMixer):
            _fill_mixer(branch, generator)
        _rescale(branch.path(), len(branches), config)
    if config.initialization == "fixup":
        nn.init.zeros_(model.head.weight)


def _fill_matrix(weight: Tensor, config: ArchitectureConfig, generator: torch.Generator) -> None:
    if config.initialization == "xavier":
        nn.init.xavier_uniform_(weight, generator=generator)
    else:
        nn.init.normal_(weight, std=config.init_std, generator=generator)


def _fill_mixer(mixer: MambaMixer, generator: torch.Generator) -> None:
    """Initialize the parameters of a mixer that are not drawn from a normal distribution."""
    mixer.log_decay.copy_(torch.arange(1, mixer.state_size + 1).log().expand_as(mixer.log_decay))
    nn.init.ones_(mixer.skip)
    for layer in (mixer.convolution, mixer.time_step, mixer.out):
        bound = layer.weight[0].numel() ** -0.5
        nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    if mixer.convolution.bias is not None:
        nn.init.zeros_(mixer.convolution.bias)
    step = torch.empty_like(mixer.time_step.bias).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
    mixer.time_step.bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def _rescale(path: list[list[Tensor]], n_branches: int, config: ArchitectureConfig) -> None:
    """Apply the factors of DeepNorm, GPT-2 and Fixup to the matrices of a branch."""
    _, beta = deep_norm_constants(config)
    if not math.isclose(beta, 1.0):
        for weights in path:
            for weight in weights:
                weight.mul_(beta)
    if config.scales_residual_init:
        for weight in path[-1]:
            weight.div_(math.sqrt(n_branches))
    if config.initialization == "fixup":
        for weights in path[:-1]:
            for weight in weights:
                weight.mul_(n_branches ** (-1 / (2 * len(path) - 2)))
        for weight in path[-1]:
            weight.zero_()
