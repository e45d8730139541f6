"""Models whose pass fails at a known place."""

from __future__ import annotations

import torch
import transformers
from torch import nn

import workbench as wb
from workbench.models.losses import prediction_of, token_loss

TOKENS = torch.randint(16, (4, 9), generator=torch.Generator().manual_seed(0))
SIZE = {"d_model": 16, "n_layers": 4, "vocab_size": 16, "max_length": 8, "seed": 1}
HALF = "an overflow of float16 (at most 65,504)"
SINGLE = "an overflow of float32 (at most 3.4e38)"


def zoo(norm="pre_ln"):
    return wb.zoo.transformer(norm, n_heads=2, **SIZE)


def of_transformers(kind, options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=16, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 16}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16}
MODELS = {
    "pre_ln": zoo,
    "post_ln": lambda: zoo("post_ln"),
    "moe": lambda: wb.zoo.moe(n_heads=2, n_experts=3, **SIZE),
    "mamba": lambda: wb.zoo.mamba(**SIZE),
    "llama": lambda: of_transformers("llama", LLAMA),
    "llama eager": lambda: of_transformers("llama", {**LLAMA, "attn_implementation": "eager"}),
    "gpt2": lambda: of_transformers("gpt2", GPT2),
}


def loss_of(model):
    return token_loss(prediction_of(model(TOKENS[:, :-1])), TOKENS[:, 1:])


def half():
    return torch.autocast("cpu", torch.float16)


def place(bad):
    return bad.pass_, bad.module, bad.tensor


class Do(nn.Module):
    """Module that applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Plant(torch.autograd.Function):
    """Identity, except for the first entry of the gradient."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return planted(gradient, ctx.value), None


def planted(x, value):
    """Replace the first entry of a tensor, with a graph."""
    is_first = torch.zeros_like(x, dtype=torch.bool)
    is_first[(0,) * x.ndim] = True
    return x.masked_fill(is_first, value)


def line(*modules, width=4):
    """Return a chain of modules between two linear maps with trainable parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), *modules, nn.Linear(width, width))


def change(x):
    """Return 0 with a gradient of 1."""
    return (x - x.detach()).sum()


def of_line(model):
    return model(torch.ones(3, 4)).square().sum()
