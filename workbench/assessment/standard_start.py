"""A standard initialization, as the change that is tried where the structure of a fresh model is unlike sound ones."""

from __future__ import annotations

import copy
import math
import re

import torch
from torch import Tensor, nn

#: Modules that write into the residual stream, by the last part of their name.
WRITES = re.compile(r"(^|_)(o_proj|down_proj|c_proj|dense_4h_to_h|out_proj|fc2|fc_out|wo|w2|out|down|output)$")
#: Standard deviation of embeddings.
EMBEDDING_STD = 0.02
WORDS = "draw matrices at 1 / sqrt(fan-in), those that write into the stream over sqrt(2 blocks), embeddings at .02"


def with_standard_start(model: nn.Module, n_blocks: int, *, seed: int = 0) -> nn.Module:
    """A copy of a model with its matrices drawn anew: normal, so that every map keeps the size of its input.

    Biases, gains of norms, kernels of convolutions and other parameters are left as they are.

    Args:
        model: The model, which is not changed.
        n_blocks: Number of its residual blocks.
        seed: Seed of the draws; the global random state is untouched.
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
