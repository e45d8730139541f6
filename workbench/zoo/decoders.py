"""Language models of the zoo: transformers, mixtures of experts, KANs and Mamba, from tokens to logits."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.errors import OptionError, WorkbenchError
from workbench.zoo.architecture_config import ArchitectureConfig
from workbench.zoo.blocks import Block, Branch, KanMlp, ResidualBlock, ZooModel, dense_mlp, final_norm, norm


class Decoder(ZooModel):
    """Base class of language models: token (and position) embedding, residual blocks, last norm and output head."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        has_table = config.position == "learned"
        self.position_embedding = nn.Embedding(config.max_length, config.d_model) if has_table else None
        self.blocks = nn.ModuleList(self.make_block(config) for _ in range(config.n_layers))
        self.final_norm = final_norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, shape (batch, token, vocabulary)."""
        if tokens.shape[-1] > self.config.max_length:
            raise OptionError(
                f"The sequences have {tokens.shape[-1]} tokens, but max_length is {self.config.max_length}; shorten "
                "them, or build the model with a larger max_length."
            )
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))

    @staticmethod
    @abstractmethod
    def make_block(config: ArchitectureConfig) -> ResidualBlock:
        """Create one residual block of the family."""

    def tie(self) -> None:
        """Let the head share the weight of the token embedding if the configuration ties them."""
        if self.config.ties_embeddings:
            self.head.weight = self.token_embedding.weight


class Transformer(Decoder):
    """Decoder-only transformer; by default with learned positions, a GELU MLP and an untied output head."""

    @staticmethod
    def make_block(config: ArchitectureConfig) -> ResidualBlock:
        """Create one block with an MLP."""
        return Block(config, dense_mlp(config))


class KanTransformer(Decoder):
    """Decoder-only transformer whose MLPs are Kolmogorov-Arnold networks (Liu et al. 2024, arXiv:2404.19756)."""

    @staticmethod
    def make_block(config: ArchitectureConfig) -> ResidualBlock:
        """Create one block with a KAN."""
        return Block(config, KanMlp(config))


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
    """Return a router's load-balancing loss (Switch Transformer, Fedus et al. 2021, arXiv:2101.03961).

    It is n_experts * sum over experts of (fraction of the choices) * (mean probability), 1 if all experts are used
    equally, n_experts if all tokens use one. The loss of Mixtral is ``top_k`` times this.
    """
    probability = logits.float().softmax(-1)
    chosen = functional.one_hot(probability.topk(top_k, dim=-1).indices, logits.shape[-1])
    fraction = chosen.float().mean((0, 1))
    return logits.shape[-1] * (fraction * probability.mean(0)).sum()


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
    """Residual block x + mixer(norm(x)), without attention or MLP, of half the parameters of a transformer's."""

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
    """Compute the selective scan (arXiv:2312.00752, Algorithm 2); in and out, shape (batch, token, channel).

    It is h_t = exp(step_t rate) h_(t-1) + step_t write_t signal_t, y_t = read_t h_t. In the paper's notation step is
    Delta, rate A (channel, state), write B and read C, both (batch, token, state).
    """
    decay = (step[..., None] * rate).exp()
    added = (step * signal)[..., None] * write[:, :, None]
    state, states = torch.zeros_like(added[:, 0]), []
    # `unbind`, because the backward pass of indexing would allocate a full tensor of zeros for each token.
    for kept, new in zip(decay.unbind(1), added.unbind(1), strict=True):
        state = kept * state + new
        states.append(state)
    return (torch.stack(states, dim=1) @ read[..., None]).squeeze(-1)
