"""Mixtures of experts: transformers with several MLPs in each block, of which each token uses a few."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.errors import WorkbenchError
from workbench.zoo.blocks import Block, ResidualBlock
from workbench.zoo.branch_parts import Branch
from workbench.zoo.decoders import Decoder
from workbench.zoo.mlps import dense_mlp

if TYPE_CHECKING:
    from workbench.zoo.architecture_config import ArchitectureConfig


class MoeTransformer(Decoder):
    """Decoder-only transformer whose MLPs are mixtures of experts.

    With RMSNorm, rotary positions, SwiGLU experts and no biases (`mixtral_style`) it computes the same function as
    Mixtral (Jiang et al. 2024, arXiv:2401.04088). By default it differs from the Pre-LN transformer only in the MLP, so
    that the two can be compared.
    """

    @staticmethod
    def make_block(config: ArchitectureConfig) -> ResidualBlock:
        """Create one block with a mixture of experts."""
        return Block(config, MoeMlp(config))

    def auxiliary_losses(self) -> dict[str, Tensor]:
        """Return the unweighted losses of the routers in the latest forward pass, as means over the blocks.

        Returns:
            0-dim tensors. ``balance``: see `balance_loss`; computed per block, so that blocks do not compensate each
            other. ``z``: mean squared log-sum-exp of the logits (ST-MoE, Zoph et al. 2022, arXiv:2202.08906). They have
            gradients if the forward pass had.
        """
        mlps = [block.mlp for block in self.blocks if isinstance(block, Block)]
        logits = [mlp.logits for mlp in mlps if isinstance(mlp, MoeMlp) and mlp.logits is not None]
        if len(logits) < len(mlps):
            raise WorkbenchError("The routers have received no tokens yet; call the model first.")
        balance = [balance_loss(one, self.config.top_k) for one in logits]
        z = [one.logsumexp(-1).square().mean() for one in logits]
        return {"balance": torch.stack(balance).mean(), "z": torch.stack(z).mean()}

    def auxiliary_loss(self) -> Tensor:
        """Return the sum of `auxiliary_losses`, weighted by ``balance_coefficient`` and ``z_coefficient``; 0-dim."""
        losses = self.auxiliary_losses()
        return self.config.balance_coefficient * losses["balance"] + self.config.z_coefficient * losses["z"]


class MoeMlp(Branch):
    """Mixture of experts, of which every token uses ``top_k``, weighted by the softmax of the router's logits.

    As in Mixtral the weights of the chosen experts are divided by their sum. With ``top_k=1`` such a weight would
    always be 1, and only the auxiliary losses would train the router. Therefore the weight is then the probability
    itself, as in the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961), unless ``normalizes_top_k`` is True.
    There is no capacity limit, so no token is dropped.

    Attributes:
        logits: Logits of the latest forward pass, shape (batch * token, expert); None before the first. They hold its
            autograd graph until the next forward pass, and are omitted from copies and pickles of the module.
    """

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.top_k, self.is_normalized = config.top_k, config.normalizes_top_k
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.experts = nn.ModuleList(dense_mlp(config) for _ in range(config.n_experts))
        self.logits: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the branch, which is added to the stream, shape (batch, token, feature)."""
        states = x.flatten(0, -2)
        self.logits = self.router(states)
        weights, chosen = self.logits.float().softmax(-1).topk(self.top_k, dim=-1)
        if self.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        weights, mixed = weights.to(x.dtype), torch.zeros_like(states)
        for i, expert in enumerate(self.experts):
            token, place = (chosen == i).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, token, weights[token, place, None] * expert(states[token]))
        return mixed.view_as(x)

    def path(self) -> list[list[Tensor]]:
        """Return the matrices of all experts, layer by layer."""
        layers = zip(*(expert.path() for expert in self.experts if isinstance(expert, Branch)), strict=True)
        return [[weight for weights in layer for weight in weights] for layer in layers]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy, without the logits, because tensors with a graph cannot be copied."""
        return {**self.__dict__, "logits": None}


def balance_loss(logits: Tensor, top_k: int) -> Tensor:
    """Return the load-balancing loss of one router (Switch Transformer, Fedus et al. 2021, arXiv:2101.03961).

    Args:
        logits: Logits of the router, shape (token, expert).
        top_k: Number of experts per token.

    Returns:
        n_experts * sum over the experts of (fraction of the choices) * (mean probability), 0-dim. It is 1 if all
        experts are used equally, and n_experts if all tokens use one expert. The loss of Mixtral is ``top_k`` times
        this.
    """
    probability = logits.float().softmax(-1)
    chosen = functional.one_hot(probability.topk(top_k, dim=-1).indices, logits.shape[-1])
    fraction = chosen.float().mean((0, 1))
    return logits.shape[-1] * (fraction * probability.mean(0)).sum()
