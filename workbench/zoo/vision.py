"""Vision transformer: the blocks of the decoder without a causal mask, over patches of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from workbench.errors import OptionError
from workbench.zoo.blocks import Block, ZooModel, final_norm
from workbench.zoo.mlps import dense_mlp

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.zoo.architecture_config import ArchitectureConfig


class VisionTransformer(ZooModel):
    """Vision transformer (ViT, Dosovitskiy et al. 2021, arXiv:2010.11929) that averages its tokens.

    There is no class token: the input of the classifier is the mean of all normalized tokens, so that every state of
    the stream belongs to a patch.

    Args:
        config: Configuration, see `ArchitectureConfig`.
    """

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
        n_patches = (config.image_size // config.patch_size) ** 2
        self.patch_embedding = nn.Linear(config.n_channels * config.patch_size**2, config.d_model)
        has_table = config.position == "learned"
        self.position_embedding = nn.Embedding(n_patches, config.d_model) if has_table else None
        self.blocks = nn.ModuleList(Block(config, dense_mlp(config)) for _ in range(config.n_layers))
        self.final_norm = final_norm(config)
        self.head = nn.Linear(config.d_model, config.n_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes, shape (batch, class).

        Args:
            images: Images, shape (batch, channel, height, width).

        Raises:
            OptionError: If the images have another shape than the configuration states.
        """
        x = self.patch_embedding(self._patches(images))
        if self.position_embedding is not None:
            x = x + self.position_embedding(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x).mean(1))

    def _patches(self, images: Tensor) -> Tensor:
        """Return the pixels of each patch, row by row, shape (batch, patch, channel * height * width)."""
        config = self.config
        expected = (config.n_channels, config.image_size, config.image_size)
        if tuple(images.shape[1:]) != expected:
            raise OptionError(
                f"The images have shape {tuple(images.shape)}, expected (batch, {', '.join(map(str, expected))})."
            )
        size = config.patch_size
        grid = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # batch, channel, row, height, column, width
        return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
