"""Designs with an injected fault, each compared with the same design without it.

Every design is small enough to be trained at full size, so that its failure is measured rather than assumed. It fails
if it diverges, or if at the end it has not reached the loss of the healthy design after four fifths of the updates (it
is then not useful in the sense of `workbench.rates`). Base designs belong to families of `trained_designs` and are held
out with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import workbench as wb

LENGTH, BATCH_SIZE, N_STEPS, WARMUP = 64, 8, 480, 30
_TEXT = {"vocab_size": 256, "max_length": LENGTH}
_PRE_LN = {"d_model": 64, "n_heads": 4, **_TEXT, "norm": "pre_ln"}
_LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 192, "vocab_size": 256, "max_position_embeddings": LENGTH}  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A healthy design, and the peak learning rate of AdamW at which it learns well.

    Attributes:
        name: Name of the design.
        family: Family with which the design is held out.
        options: Source for `wb.design`.
        rate: Peak learning rate.
    """

    name: str
    family: str
    options: dict[str, Any]
    rate: float = 2e-3


BASES = (
    Base("Pre-LN, 8 blocks", "GPT-2", {**_PRE_LN, "n_layers": 8}),
    Base("Pre-LN, 24 blocks", "GPT-2", {**_PRE_LN, "n_layers": 24}),
    Base("Llama, 8 blocks", "Llama", {**_LLAMA, "num_hidden_layers": 8}),
    Base("Llama, 24 blocks", "Llama", {**_LLAMA, "num_hidden_layers": 24}),
    Base("GPT-NeoX, 12 blocks", "GPT-NeoX", {
        "model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
        "intermediate_size": 256, "vocab_size": 256, "max_position_embeddings": LENGTH,
    }),
    Base("BERT-style Post-LN, 6 blocks", "BERT", {**_PRE_LN, "norm": "post_ln", "n_layers": 6}, 1e-3),
    Base("Gemma 2, 8 blocks", "Gemma", {
        "model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 256, "query_pre_attn_scalar": 16,
    }, 2e-2),
    Base("OLMo 2, 12 blocks", "OLMo 2", {
        "model_type": "olmo2", "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
        "intermediate_size": 192, "vocab_size": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }, 8e-3),
    Base("Granite, 8 blocks", "Granite", {
        "model_type": "granite", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 256, "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4, "attention_multiplier": 0.0625, "logits_scaling": 2.0,
    }),
    Base("Mixtral, 6 blocks", "Mistral", {
        "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "num_local_experts": 8, "vocab_size": 256,
    }),
    Base("Qwen 3, 12 blocks", "Qwen 3", {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 256,
    }),
    Base("OPT, 8 blocks", "OPT", {
        "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "ffn_dim": 256,
        "vocab_size": 256, "max_position_embeddings": LENGTH, "word_embed_proj_dim": 64, "dropout": 0.0,
    }),
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: Name of the fault.
        plant: Function that changes an initialized model in place; None if the model is healthy.
        rate: Factor of the planned learning rate.
        training: Other changes to the training.
        needs: Part of a module's class name that a base design must have; empty if the fault applies to all.
    """

    name: str
    plant: Callable[[nn.Module], None] | None = None
    rate: float = 1.0
    training: dict[str, Any] = field(default_factory=dict)
    needs: str = ""


#: Parts of the names of matrices that write into the residual stream.
_OUTPUTS = ("o_proj", "down_proj", "out", "dense_4h_to_h", "attention.dense", "fc2", "w2")


def _matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [(n, p) for n, p in model.named_parameters() if p.ndim >= 2 and id(p) not in tables and "embed" not in n]


def large_initialization(model: nn.Module) -> None:
    """Draw all matrices forty times as large."""
    for _, weight in _matrices(model):
        weight.mul_(40)


def tiny_initialization(model: nn.Module) -> None:
    """Draw all matrices and embeddings a thousand times as small."""
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.mul_(1e-3)


def no_norm(model: nn.Module) -> None:
    """Replace every normalization by the identity, and draw matrices with a gain of about one."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "Norm" in type(child).__name__:
                setattr(module, name, nn.Identity())
    for _, weight in _matrices(model):
        weight.mul_(5)


def one_large_block(model: nn.Module) -> None:
    """Draw the matrices of one block in the middle a hundred times as large."""
    names = [name for name, _ in _matrices(model)]
    numbers = sorted({int(part) for name in names for part in name.split(".") if part.isdigit()})
    middle = str(numbers[len(numbers) // 2])
    for name, weight in _matrices(model):
        if f".{middle}." in f".{name}":
            weight.mul_(100)


def sharp_attention(model: nn.Module) -> None:
    """Draw queries and keys thirty times as large, so that softmax is saturated."""
    for name, weight in _matrices(model):
        if any(part in name for part in ("q_proj", "k_proj", "query", "key", "qkv")):
            weight.mul_(30)


def embedding_multiplier(model: nn.Module) -> None:
    """Draw embeddings a thousand times as large, so that the branches are negligible."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.mul_(1000)


def residual_multiplier(model: nn.Module) -> None:
    """Scale the output of every branch by 1e-4."""
    for name, weight in _matrices(model):
        if any(part in name for part in _OUTPUTS):
            weight.mul_(1e-4)


def tied_at_unit_scale(model: nn.Module) -> None:
    """Tie the head to an embedding with unit standard deviation."""
    table = next(each for each in model.modules() if isinstance(each, nn.Embedding) and len(each.weight) == 256)
    table.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))
    heads = [each for each in model.modules() if isinstance(each, nn.Linear) and len(each.weight) == 256]
    heads[-1].weight = table.weight


def saturated_router(model: nn.Module) -> None:
    """Draw large routers with a common direction, so that one expert receives all tokens."""
    for name, weight in model.named_parameters():
        if "gate.weight" in name or "router" in name:
            weight.mul_(300)


def unconstrained_stream(model: nn.Module) -> None:
    """Mix the channels of the stream before every block by a matrix without a constraint to a gain of one."""
    for i, block in enumerate(_blocks(model)):
        width = next(p.shape[-1] for n, p in block.named_parameters() if p.ndim >= 2)
        mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(i)) / width**0.5 * 1.6

        def mix(_: nn.Module, inputs: tuple[Any, ...], mixing: torch.Tensor = mixing) -> tuple[Any, ...]:
            return (inputs[0] @ mixing.to(inputs[0]), *inputs[1:])

        block.register_forward_pre_hook(mix)


def large_epsilon(model: nn.Module) -> None:
    """Set the eps of every normalization to 1e6, which removes its effect."""
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if "Norm" in type(module).__name__ and hasattr(module, name):
                setattr(module, name, 1e6)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len))


FAULTS = (
    Fault("matrices 40 times as large", large_initialization),
    Fault("weights a thousandth", tiny_initialization),
    Fault("no normalization", no_norm),
    Fault("one block 100 times as large", one_large_block),
    Fault("saturated attention", sharp_attention),
    Fault("embeddings 1,000 times as large", embedding_multiplier),
    Fault("branches at 1e-4", residual_multiplier),
    Fault("tied at unit scale", tied_at_unit_scale),
    Fault("saturated routers", saturated_router, needs="Expert"),
    Fault("unconstrained mixing of the stream", unconstrained_stream),
    Fault("epsilon of the norms 1e6", large_epsilon),
    Fault("ten times the rate", rate=10.0),
    Fault("thirty times the rate", rate=30.0),
    Fault("no warm-up, five times the rate", rate=5.0, training={"warmup": 0}),
)


def base_of(name: str) -> Base:
    """Return the base design of a name."""
    return next(each for each in BASES if each.name == name)


def build(base: Base, fault: Fault | None, seed: int) -> nn.Module:
    """Return an initialized model with the injected fault."""
    model = wb.design(base.options).build(seed=seed)
    if fault is not None and fault.plant is not None:
        with torch.no_grad():
            fault.plant(model)
    return model


def applies(base: Base, fault: Fault) -> bool:
    """Return whether a base design has the part that the fault changes."""
    if not fault.needs:
        return True
    return any(fault.needs in type(module).__name__ for module in build(base, None, 0).modules())
