"""Language models, which map tokens to logits of the next token by a stack of residual blocks."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import nn

from workbench.errors import OptionError
from workbench.zoo.blocks import Block, ResidualBlock, ZooModel, final_norm
from workbench.zoo.mlps import KanMlp, dense_mlp

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.zoo.architecture_config import ArchitectureConfig


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
        """Return the logits of the next token, shape (batch, token, vocabulary).

        Args:
            tokens: Token ids, shape (batch, token).
        """
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
