"""A mixture of experts: the transformer with several MLPs in each block, of which a token uses a few."""

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
    """Decoder-only transformer in which the MLP, and nothing else, is a mixture of experts.

    With RMSNorm, rotary positions, SwiGLU experts and no biases (`mixtral_style`) it computes what Mixtral does (Jiang
    et al. 2024, arXiv:2401.04088); by default it differs from the Pre-LN transformer in the MLP alone, so that the two
    can be compared.

    Args:
        config: Configuration, see `ArchitectureConfig`.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.MoeTransformer(wb.zoo.ArchitectureConfig(family="moe", d_model=16, n_layers=2, n_experts=4))
        >>> logits = model(torch.zeros(1, 8, dtype=torch.long))
        >>> sorted(model.auxiliary_losses())
        ['balance', 'z']
    """

    @staticmethod
    def make_block(config: ArchitectureConfig) -> ResidualBlock:
        """One block."""
        return Block(config, MoeMlp(config))

    def auxiliary_losses(self) -> dict[str, Tensor]:
        """The unweighted losses of the routers in the latest forward, as means over the blocks; each 0-dim.

        Returns:
            ``balance``: see `balance_loss`; taken block by block, so that no block makes up for another. ``z``: mean
            squared log-sum-exp of the logits (ST-MoE, Zoph et al. 2022, arXiv:2202.08906). They carry gradients if
            that forward did.

        Raises:
            WorkbenchError: If there was no forward yet.
        """
        mlps = [block.mlp for block in self.blocks if isinstance(block, Block)]
        logits = [mlp.logits for mlp in mlps if isinstance(mlp, MoeMlp) and mlp.logits is not None]
        if len(logits) < len(mlps):
            raise WorkbenchError("The routers have seen no tokens yet; call the model first.")
        balance = [balance_loss(one, self.config.top_k) for one in logits]
        z = [one.logsumexp(-1).square().mean() for one in logits]
        return {"balance": torch.stack(balance).mean(), "z": torch.stack(z).mean()}

    def auxiliary_loss(self) -> Tensor:
        """`auxiliary_losses`, weighted by ``balance_coefficient`` and ``z_coefficient`` and added up; 0-dim."""
        losses = self.auxiliary_losses()
        return self.config.balance_coefficient * losses["balance"] + self.config.z_coefficient * losses["z"]


class MoeMlp(Branch):
    """Experts of which every token uses ``top_k``, weighted by the softmax of the router's logits.

    As in Mixtral the weights of the chosen experts are divided by their sum. With one expert that is 1 whatever the
    router says, so that only the auxiliary losses teach it; there, unless ``normalizes_top_k`` says otherwise, the
    probability itself is the weight, as in the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961). No token is
    dropped: there is no capacity limit.

    Attributes:
        logits: Logits of the latest forward, shape (batch * token, expert); None before. They hold its graph until the
            next forward, and stay behind when the module is copied or pickled.
    """

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.top_k, self.is_normalized = config.top_k, config.normalizes_top_k
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.experts = nn.ModuleList(dense_mlp(config) for _ in range(config.n_experts))
        self.logits: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The output of the branch, which is added to the stream, shape (batch, token, feature) like ``x``."""
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
        """The matrices of all experts, layer by layer."""
        layers = zip(*(expert.path() for expert in self.experts if isinstance(expert, Branch)), strict=True)
        return [[weight for weights in layer for weight in weights] for layer in layers]

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy: not the logits, as tensors with a graph cannot be."""
        return {**self.__dict__, "logits": None}


def balance_loss(logits: Tensor, top_k: int) -> Tensor:
    """Load-balancing loss of one router (Switch Transformer, Fedus et al. 2021, arXiv:2101.03961).

    Args:
        logits: Shape (token, expert).
        top_k: Experts per token.

    Returns:
        n_experts * sum over the experts of (share of the choices) * (mean probability), 0-dim; 1 where all are used
        alike, n_experts where one gets everything. Mixtral's is ``top_k`` times this.
    """
    probability = logits.float().softmax(-1)
    chosen = functional.one_hot(probability.topk(top_k, dim=-1).indices, logits.shape[-1])
    share = chosen.float().mean((0, 1))
    return logits.shape[-1] * (share * probability.mean(0)).sum()
