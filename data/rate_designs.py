"""The designs of the study of learning rates: architectures, their families, and the setups they are trained with.

A design consists of all settings of a run except learning rate and seed. Families are divided into three sets before
the first measurement: models and methods are fitted to the training set ("fit") and chosen on the validation set
("choose"), and the test set ("locked") is read once at the end. Families share parts: OLMo 2, Qwen 3-Next and nGPT also
normalize queries and keys, like the family QK-norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import workbench as wb
from workbench.rates.rate_search import rate_of
from workbench.zoo.blocks import rotate

LENGTH = 32
SEED_OF_SETUPS = 18
N_STEPS = 480
BATCH_SIZE = 8


@dataclass(frozen=True)
class Architecture:
    """An architecture of the study.

    Attributes:
        name: Name in tables.
        family: Family with which the architecture is held out.
        options: Options of `wb.zoo.ArchitectureConfig`; of a configuration of transformers with its ``model_type``; or
            of a function of this module under ``make``.
        n_layers: Maximum number of blocks of slow architectures.
        d_model: Maximum width of slow architectures.
    """

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    n_layers: int = 4
    d_model: int = 96


FAMILIES = {
    "fit": (
        "Pre-LN", "Llama", "Post-LN", "No norm", "ReZero", "MoE", "Mamba", "ViT", "Granite", "ALiBi", "Gemma", "Window",
        "Squared ReLU",
    ),
    "choose": ("SubLN", "QK-norm", "Parallel", "Fixup", "KAN", "Sinks", "Convolutions"),
    "locked": ("DeepNorm", "OLMo 2", "MLA", "DyT", "nGPT", "Gated attention", "Differential attention"),
}  # fmt: skip

_LLAMA = {"norm": "rms_norm", "position": "rotary", "mlp": "swiglu", "has_bias": False}
ARCHITECTURES = (
    Architecture("Pre-LN", "Pre-LN", {"norm": "pre_ln"}),
    Architecture("GPT-2", "Pre-LN", {"model_type": "gpt2"}),
    Architecture("Llama-style", "Llama", _LLAMA),
    Architecture("Llama", "Llama", {"model_type": "llama", "num_key_value_heads": 2}),
    Architecture("Post-LN", "Post-LN", {"norm": "post_ln"}),
    Architecture("No norm", "No norm", {"norm": "none"}),
    Architecture("No norm, Xavier", "No norm", {"norm": "none", "initialization": "xavier"}),
    Architecture("ReZero", "ReZero", {"norm": "none", "initialization": "rezero"}),
    Architecture("MoE top-1", "MoE", {"family": "moe", "norm": "pre_ln", "n_experts": 4, "top_k": 1}, 3),
    Architecture("MoE top-2", "MoE", {"family": "moe", **_LLAMA, "n_experts": 4, "top_k": 2}, 3),
    Architecture("Mamba", "Mamba", {"family": "mamba"}, 2),
    Architecture("ViT", "ViT", {"family": "vit", "norm": "pre_ln"}),
    Architecture("Granite", "Granite", {
        "model_type": "granite", "embedding_multiplier": 6.0, "residual_multiplier": 0.4,
        "attention_multiplier": 0.0625, "logits_scaling": 2.0,
    }),
    Architecture("BLOOM", "ALiBi", {"model_type": "bloom"}),
    Architecture("Gemma 2", "Gemma", {"model_type": "gemma2", "query_pre_attn_scalar": 16}),
    Architecture("Gemma 3", "Gemma", {"model_type": "gemma3_text", "query_pre_attn_scalar": 16}),
    Architecture("Window", "Window", {"norm": "pre_ln", "window": 8, "position": "rotary"}),
    Architecture("Nemotron", "Squared ReLU", {"model_type": "nemotron"}),
    Architecture("SubLN", "SubLN", {"norm": "sub_ln"}),
    Architecture("QK-norm", "QK-norm", {"norm": "pre_ln", "qk_norm": True}),
    Architecture("Qwen 3", "QK-norm", {"model_type": "qwen3", "num_key_value_heads": 2}),
    Architecture("Parallel", "Parallel", {"norm": "pre_ln", "is_parallel": True}),
    Architecture("Phi", "Parallel", {"model_type": "phi"}),
    Architecture("Cohere", "Parallel", {"model_type": "cohere", "logit_scale": 0.25}),
    Architecture("Fixup", "Fixup", {"norm": "none", "initialization": "fixup"}),
    Architecture("KAN", "KAN", {"family": "kan", "norm": "pre_ln"}, 2, 32),
    Architecture("gpt-oss", "Sinks", {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128,
    }, 2),
    Architecture("LFM2", "Convolutions", {
        "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }),
    Architecture("DeepNorm", "DeepNorm", {"norm": "deep_norm"}),
    Architecture("DeepNet", "DeepNorm", {"norm": "deep_norm_post"}),
    Architecture("OLMo 2", "OLMo 2", {"model_type": "olmo2"}),
    Architecture("MLA", "MLA", {
        "model_type": "deepseek_v3", "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 99, "head_dim": 8,
    }),
    Architecture("DyT", "DyT", {"make": "rate_designs:dyt"}),
    Architecture("nGPT", "nGPT", {"make": "rate_designs:ngpt"}),
    Architecture("Qwen 3-Next attention", "Gated attention", {
        "model_type": "qwen3_next", "layer_types": ["full_attention"] * 4, "num_experts": 0, "head_dim": 16,
    }),
    Architecture("Diff transformer", "Differential attention", {"model_type": "diffllama"}),
)  # fmt: skip

#: Optimizer, its options, norm at which gradients are clipped, first and last k of the coarse rates, and the
#: probability that a second setup has it.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], float | None, tuple[int, int], float]] = {
    "AdamW": ("AdamW", {"betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True}, 1.0, (-9, 12), 0.2),
    "AdamW, defaults": ("AdamW", {"fused": True}, None, (-9, 12), 0.2),
    "Muon": ("Muon", {"weight_decay": 0.1}, 1.0, (-9, 12), 0.3),
    "SGD": ("SGD", {"momentum": 0.9, "fused": True}, None, (3, 24), 0.3),
}
SCHEDULES = ("constant", "cosine", "wsd")
TASKS = {
    "text": ({"name": "text_bytes", "length": LENGTH, "batch_size": BATCH_SIZE}, 256, 0.7),
    "synthetic": ({"name": "synthetic_lm", "length": LENGTH, "vocab_size": 64, "batch_size": BATCH_SIZE}, 64, 0.3),
}
WARMUPS, WIDTHS, DEPTHS = (10, 30, 90), (48, 64, 96), (2, 3, 4)


@dataclass(frozen=True)
class Design:
    """All settings of a run except rate and seed.

    Attributes:
        architecture: The architecture.
        set: "fit", "choose" or "locked".
        optimizer: Name in ``OPTIMIZERS``.
        model: Options of the model, as in `wb.sweeps.RunSettings`.
        task: The task, as in `wb.sweeps.RunSettings`.
        training: Fields of the training plan except the rate, as in `wb.sweeps.RunSettings`.
    """

    architecture: Architecture
    set: str
    optimizer: str
    model: dict[str, Any]
    task: dict[str, Any]
    training: dict[str, Any]

    @property
    def coarse(self) -> list[int]:
        """Return the indices k of the coarse rates, three apart."""
        first, last = OPTIMIZERS[self.optimizer][3]
        return list(range(first, last + 1, 3))

    def run(self, k: int, seed: int, *, n_steps: int | None = None, **options: Any) -> wb.sweeps.RunSettings:
        """Return the run at a rate, with the design's number of updates unless another is given."""
        training = {**self.training, "learning_rate": rate_of(k)} | ({} if n_steps is None else {"n_steps": n_steps})
        return wb.sweeps.RunSettings(
            architecture=self.architecture.name,
            model=self.model,
            task=self.task,
            training=training,
            seed=seed,
            study=self.set,
            **options,
        )


def designs() -> list[Design]:
    """Return all designs: each architecture with a common setup (3 blocks of width 64, AdamW, text) and a drawn one."""
    generator = np.random.default_rng(SEED_OF_SETUPS)
    set_of = {family: name for name, families in FAMILIES.items() for family in families}
    found = []
    for i, architecture in enumerate(ARCHITECTURES):
        common = {"optimizer": "AdamW", "task": "text", "schedule": SCHEDULES[i % 3], "warmup": 30, "d_model": 64}
        drawn = {
            "optimizer": str(generator.choice(list(OPTIMIZERS), p=[one[4] for one in OPTIMIZERS.values()])),
            "task": str(generator.choice(list(TASKS), p=[one[2] for one in TASKS.values()])),
            "schedule": str(generator.choice(SCHEDULES)),
            "warmup": int(generator.choice(WARMUPS)),
            "d_model": int(generator.choice(WIDTHS)),
        }
        depths = 3, int(generator.choice(DEPTHS))
        for setup, n_layers in zip((common, drawn), depths, strict=True):
            found.append(
                _design(architecture, set_of[architecture.family], min(n_layers, architecture.n_layers), setup)
            )
    return found


def _design(architecture: Architecture, set_name: str, n_layers: int, setup: dict[str, Any]) -> Design:
    optimizer, options, clip_norm, _, _ = OPTIMIZERS[setup["optimizer"]]
    task, vocabulary, _ = TASKS[setup["task"]]
    sizes = {"d_model": min(setup["d_model"], architecture.d_model), "n_layers": n_layers}
    model = {**architecture.options}
    if model.get("family") == "vit":
        model |= {**sizes, "image_size": 8, "patch_size": 2, "n_channels": 1, "n_classes": 10, "n_heads": 4}
        task = {"name": "digits", "batch_size": 4 * BATCH_SIZE}
    elif "model_type" in model:
        model |= {"make": "rate_designs:from_transformers", "vocab_size": vocabulary, **sizes}
    else:
        model |= {**sizes, "vocab_size": vocabulary}
        if model.get("family") != "mamba":
            model["n_heads"] = 4
        if "make" not in model:
            model["max_length"] = LENGTH
    training = {
        "n_steps": N_STEPS,
        "warmup": setup["warmup"],
        "schedule": setup["schedule"],
        "optimizer": optimizer,
        "optimizer_options": options,
        "clip_norm": clip_norm,
        "stops_at_divergence": False,
    }
    return Design(architecture, set_name, setup["optimizer"], model, dict(task), training)


def from_transformers(
    *, model_type: str, d_model: int, n_layers: int, vocab_size: int, seed: int, **options: Any
) -> Any:
    """Return a model of transformers with 4 heads and no dropout, from its configuration."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, vocab_size=vocab_size)
    wanted = {
        "hidden_size": d_model,
        "n_embd": d_model,
        "num_hidden_layers": n_layers,
        "n_layer": n_layers,
        "num_attention_heads": 4,
        "n_head": 4,
        "num_key_value_heads": 4,
        "head_dim": d_model // 4,
        "intermediate_size": 8 * math.ceil(d_model / 3),
        "max_position_embeddings": LENGTH,
        "n_positions": LENGTH,
        "tie_word_embeddings": False,
        **options,
    }
    known = config.to_dict()
    kept = {name: value for name, value in wanted.items() if name in known or name in options}
    kept |= {name: 0.0 for name in known if "drop" in name and isinstance(known[name], float)}
    kept |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if "layer_types" in known and known["layer_types"] is not None:
        kinds = options.get("layer_types") or known["layer_types"]
        kept["layer_types"] = (list(kinds) * n_layers)[:n_layers]
    config = transformers.AutoConfig.for_model(model_type, vocab_size=vocab_size, use_cache=False, **kept)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class DynamicTanh(nn.Module):
    """Dynamic tanh, gamma tanh(alpha x) + beta, in place of a normalization (Zhu et al. 2025, arXiv:2503.10622)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output with the shape of ``x``."""
        return self.gamma * torch.tanh(self.alpha * x) + self.beta


class ScaledEmbedding(nn.Embedding):
    """Embedding with a learned factor that starts at the square root of the width, as in DyT's language models."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(*weight.shape, _weight=weight)
        self.scale = nn.Parameter(torch.tensor(math.sqrt(weight.shape[1])))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scaled embeddings, shape (..., feature)."""
        return self.scale * super().forward(tokens)


def dyt(*, seed: int, **options: Any) -> nn.Module:
    """Return a Pre-LN transformer with `DynamicTanh` in place of each LayerNorm, and a `ScaledEmbedding`."""
    model = wb.zoo.transformer("pre_ln", max_length=LENGTH, seed=seed, **options)
    model.token_embedding = ScaledEmbedding(model.token_embedding.weight.detach())
    for block in model.blocks:
        block.attention_norm, block.mlp_norm = DynamicTanh(options["d_model"]), DynamicTanh(options["d_model"])
    model.final_norm = DynamicTanh(options["d_model"])
    return model


class UnitLinear(nn.Module):
    """Linear map whose weight vectors along the dimension of the stream have norm 1, also after each update."""

    def __init__(self, n_in: int, n_out: int, *, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(functional.normalize(torch.randn(n_out, n_in), dim=dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, shape (..., n_out)."""
        if self.training:  # the paper normalizes after each update, equivalent to before the next forward pass
            with torch.no_grad():
                self.weight.copy_(functional.normalize(self.weight, dim=self.dim))
        return functional.linear(x, functional.normalize(self.weight, dim=self.dim))


class UnitBlock(nn.Module):
    """Block of nGPT, whose branches move a unit vector along the hypersphere (Loshchilov et al. 2024, Eq. 10, 11)."""

    def __init__(self, width: int, n_heads: int, n_layers: int) -> None:
        super().__init__()
        self.n_heads, self.scale = n_heads, width**-0.5
        self.query, self.key, self.value = (UnitLinear(width, width, dim=1) for _ in range(3))
        self.out = UnitLinear(width, width, dim=0)
        self.up, self.gate = UnitLinear(width, 4 * width, dim=1), UnitLinear(width, 4 * width, dim=1)
        self.down = UnitLinear(4 * width, width, dim=0)
        self.query_scale = nn.Parameter(torch.full((width,), self.scale))
        self.up_scale, self.gate_scale = nn.Parameter(torch.ones(4 * width)), nn.Parameter(torch.ones(4 * width))
        # As in the paper, steps start at 1 / n_layers; steps and query scales are stored multiplied by width ** -0.5.
        self.attention_step = nn.Parameter(torch.full((width,), self.scale))
        self.mlp_step = nn.Parameter(torch.full((width,), self.scale))
        self.start = 1 / (n_layers * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return states on the unit sphere with the shape of ``x``."""
        unit = functional.normalize
        q, k, v = (
            part(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scale = (self.query_scale / self.scale).unflatten(-1, (self.n_heads, 1, -1))
        q, k = (unit(rotate(part, 10_000.0), dim=-1) * scale for part in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q.shape[-1] ** 0.5)
        branch = unit(self.out(mixed.transpose(1, 2).flatten(2)), dim=-1)
        x = unit(x + self.attention_step.abs() * self.start * (branch - x), dim=-1)
        gate = functional.silu(self.gate(x) * self.gate_scale * x.shape[-1] ** 0.5)
        branch = unit(self.down(self.up(x) * self.up_scale * gate), dim=-1)
        return unit(x + self.mlp_step.abs() * self.start * (branch - x), dim=-1)


class NormalizedTransformer(nn.Module):
    """nGPT, with all representations on the unit sphere (Loshchilov et al. 2024, arXiv:2410.01131)."""

    def __init__(self, vocab_size: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(UnitBlock(d_model, n_heads, n_layers) for _ in range(n_layers))
        self.head = UnitLinear(d_model, vocab_size, dim=1)
        self.logit_scale = nn.Parameter(torch.full((vocab_size,), d_model**-0.5))
        self.start = d_model**0.5

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, token, vocabulary)."""
        x = functional.normalize(self.embedding(tokens), dim=-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.logit_scale * self.start


def ngpt(*, vocab_size: int, d_model: int, n_layers: int, n_heads: int, seed: int) -> nn.Module:
    """Return an initialized nGPT."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NormalizedTransformer(vocab_size, d_model, n_layers, n_heads)
