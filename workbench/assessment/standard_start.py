"""A standard initialization, which is tried if the structure of an initialized model differs from healthy ones."""

from __future__ import annotations

import copy
import math
import re

import torch
from torch import Tensor, nn

#: Last part of the names of modules that write into the residual stream.
WRITES = re.compile(r"(^|_)(o_proj|down_proj|c_proj|dense_4h_to_h|out_proj|fc2|fc_out|wo|w2|out|down|output)$")
#: Standard deviation of embeddings.
EMBEDDING_STD = 0.02
#: The change as a clause.
WORDS = (
    "initialize matrices with standard deviation 1 / sqrt(fan-in), divided by sqrt(2 x blocks) for those that write "
    "into the residual stream, and embeddings with 0.02"
)


def with_standard_start(model: nn.Module, n_blocks: int, *, seed: int = 0) -> nn.Module:
    """Return a copy of a model whose matrices are redrawn from normal distributions that preserve signal norms.

    Biases, gains of normalizations, convolution kernels and other parameters are unchanged.

    Args:
        model: The model, which is not changed.
        n_blocks: Number of residual blocks of the model.
        seed: Seed of the draws; the global random state is not changed.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in model.named_modules():
            is_transposed = type(module).__name__ == "Conv1D"  # transformers' name for a linear map
            if not (isinstance(module, nn.Embedding | nn.Linear) or is_transposed):
                continue
            weight: Tensor = module.get_parameter("weight")
            std = EMBEDDING_STD
            if not isinstance(module, nn.Embedding):
                writes = WRITES.search(name.rsplit(".", 1)[-1])
                std = 1 / math.sqrt(weight.shape[0 if is_transposed else 1] * (2 * n_blocks if writes else 1))
            weight.copy_(torch.empty(weight.shape).normal_(0, std, generator=generator).to(weight))
    return model
