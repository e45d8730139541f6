"""Designs that are known to have trained: published configurations, initializations, peak learning rates and sources.

Rates are the published peak rates of AdamW or Adam; None if not published, or for another optimizer. Initializations
are the published ones if a paper or the code of the training states them, otherwise those of transformers. Families are
divided into three sets before any fit: bands are fitted to the training set ("fit"), measurements and margins are
chosen on the validation set ("choose"), and the test set ("locked") is read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import workbench as wb
from workbench.models.model_sizes import model_sizes

#: Last part of the names of modules that write into the residual stream.
_OUTPUTS = ("o_proj", "down_proj", "c_proj", "dense_4h_to_h", "out_proj", "fc2", "fc_out", "wo", "w2")


@dataclass(frozen=True)
class Initialization:
    """Standard deviations of the matrices of a published initialization.

    Attributes:
        name: "config" (that of transformers), "normal" (``std``), "small" (sqrt(2 / (5 width)), and 2 / (blocks
            sqrt(width)) for matrices that write into the stream), "mitchell" (1 / sqrt(fan-in), and 1 / sqrt(2 fan-in
            blocks) for those), or "mamba" (torch's default for linear layers, divided by sqrt(blocks) for those;
            embeddings with 0.02).
        std: Standard deviation.
        scales_outputs: Whether matrices that write into the stream are divided by sqrt(2 blocks).
    """

    name: str = "config"
    std: float = 0.02
    scales_outputs: bool = False


CONFIG, SCALED = Initialization(), Initialization("normal", 0.02, True)
SMALL, MAMBA = Initialization("small"), Initialization("mamba")
MITCHELL = Initialization("mitchell")


@dataclass(frozen=True)
class Trained:
    """A design that trained.

    Attributes:
        name: Name of the design, which is a name of `wb.design` if it is known there.
        family: Family with which the design is held out.
        source: Publication of the design.
        rate: Peak learning rate.
        options: Options of transformers with its ``model_type``; empty for a known design.
        initialization: Initialization of its matrices.
    """

    name: str
    family: str
    source: str
    rate: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    initialization: Initialization = CONFIG


def _size(width: int, depth: int, heads: int, **options: Any) -> dict[str, Any]:
    return {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads, **options}


_GPT3 = "Brown et al. 2020 (arXiv:2005.14165), table 2.1, for GPT-3 of the same size"
_PYTHIA = "Biderman et al. 2023 (arXiv:2304.01373), table 6; initialization: GPT-NeoX, small_init and wang_init"
_OPT = "Zhang et al. 2022 (arXiv:2205.01068), table 1 and section 2.2"
_BLOOM = "BigScience 2022 (arXiv:2211.05100), table 3"
_LLAMA2 = "Touvron et al. 2023 (arXiv:2307.09288), section 2.2"
_MAMBA = "Gu, Dao 2023 (arXiv:2312.00752), appendix E.2; initialization: state-spaces/mamba"
_MAMBA2 = "Dao, Gu 2024 (arXiv:2405.21060), appendix D"
_NEO = "EleutherAI/gpt-neo, its training configuration"

TRAINED = (
    Trained("gpt2", "GPT-2", _GPT3, 6e-4),
    Trained("gpt2-medium", "GPT-2", _GPT3, 3e-4),
    Trained("gpt2-large", "GPT-2", _GPT3, 2.5e-4),
    Trained("gpt2-xl", "GPT-2", _GPT3, 2e-4),
    Trained("openai-gpt", "GPT", "Radford et al. 2018, section 4.1", 2.5e-4, {"model_type": "openai-gpt"}),
    Trained("pythia-70m", "GPT-NeoX", _PYTHIA, 1e-3, initialization=SMALL),
    Trained("pythia-160m", "GPT-NeoX", _PYTHIA, 6e-4, initialization=SMALL),
    Trained("pythia-410m", "GPT-NeoX", _PYTHIA, 3e-4, initialization=SMALL),
    Trained("pythia-1.4b", "GPT-NeoX", _PYTHIA, 2e-4, initialization=SMALL),
    Trained("pythia-12b", "GPT-NeoX", _PYTHIA, 1.2e-4, initialization=SMALL),
    Trained("gpt-neox-20b", "GPT-NeoX", "Black et al. 2022 (arXiv:2204.06745), section 2", 9.7e-5,
        initialization=SMALL),
    Trained("gpt-j-6b", "GPT-J", "kingoflolz/mesh-transformer-jax, 6B_roto_256.json", 1.2e-4, {
        "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
    }),
    Trained("gpt-neo-125m", "GPT-Neo", _NEO, 6e-4, {
        "model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12,
        "attention_types": [[["global", "local"], 6]],
    }),
    Trained("gpt-neo-2.7b", "GPT-Neo", _NEO, 1.6e-4, {
        "model_type": "gpt_neo", "hidden_size": 2560, "num_layers": 32, "num_heads": 20,
        "attention_types": [[["global", "local"], 16]],
    }),
    Trained("opt-125m", "OPT", _OPT, 6e-4, {"model_type": "opt", **_size(768, 12, 12, ffn_dim=3072)},
            Initialization("normal", 0.006, True)),
    Trained("opt-1.3b", "OPT", _OPT, 2e-4, {"model_type": "opt", **_size(2048, 24, 32, ffn_dim=8192)},
            Initialization("normal", 0.006, True)),
    Trained("opt-6.7b", "OPT", _OPT, 1.2e-4, {"model_type": "opt", **_size(4096, 32, 32, ffn_dim=16384)},
            Initialization("normal", 0.006, True)),
    Trained("bloom-560m", "BLOOM", _BLOOM, 3e-4, {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24,
        "n_head": 16}),
    Trained("bloom-7b1", "BLOOM", _BLOOM, 1.2e-4, {"model_type": "bloom", "hidden_size": 4096, "n_layer": 30,
        "n_head": 32}),
    Trained("llama-2-7b", "Llama", _LLAMA2, 3e-4),
    Trained("llama-2-13b", "Llama", _LLAMA2, 3e-4),
    Trained("llama-2-70b", "Llama", _LLAMA2, 1.5e-4),
    Trained("llama-3-8b", "Llama", "Grattafiori et al. 2024 (arXiv:2407.21783), table 3", 3e-4),
    Trained("tinyllama-1.1b", "Llama", "Zhang et al. 2024 (arXiv:2401.02385), section 2.4", 4e-4),
    Trained("smollm2-135m", "Llama", "Allal et al. 2025 (arXiv:2502.02737), section 6", 3e-3, {
        "model_type": "llama", "vocab_size": 49152, "initializer_range": 0.041666666666666664,
        **_size(576, 30, 9, intermediate_size=1536, num_key_value_heads=3, tie_word_embeddings=True),
    }),
    Trained("deepseek-llm-7b", "Llama", "DeepSeek-AI 2024 (arXiv:2401.02954), table 2 and section 2.3", 4.2e-4, {
        "model_type": "llama", **_size(4096, 30, 32, intermediate_size=11008, vocab_size=102400),
    }, Initialization("normal", 0.006)),
    Trained("smollm3-3b", "SmolLM3", "huggingface/smollm, the configuration of its training", 2e-4, {
        "model_type": "smollm3", **_size(2048, 36, 16, intermediate_size=11008, num_key_value_heads=4,
        tie_word_embeddings=True),
    }),
    Trained("mistral-7b", "Mistral", "mistralai/Mistral-7B-v0.1"),
    Trained("mixtral-8x7b", "Mistral", "mistralai/Mixtral-8x7B-v0.1"),
    Trained("qwen2.5-0.5b", "Qwen", "Qwen/Qwen2.5-0.5B"),
    Trained("qwen2.5-7b", "Qwen", "Qwen/Qwen2.5-7B"),
    Trained("qwen1.5-moe-a2.7b", "Qwen", "Qwen/Qwen1.5-MoE-A2.7B", None, {
        "model_type": "qwen2_moe", **_size(2048, 24, 16, intermediate_size=5632, num_key_value_heads=16, num_experts=60,
                                           num_experts_per_tok=4, moe_intermediate_size=1408,
                                           shared_expert_intermediate_size=5632),
    }),
    Trained("qwen3-0.6b", "Qwen 3", "Qwen/Qwen3-0.6B", None, {
        "model_type": "qwen3", **_size(1024, 28, 16, intermediate_size=3072, num_key_value_heads=8, head_dim=128,
                                       tie_word_embeddings=True),
    }),
    Trained("qwen3-8b", "Qwen 3", "Qwen/Qwen3-8B"),
    Trained("qwen3-30b-a3b", "Qwen 3", "Qwen/Qwen3-30B-A3B"),
    Trained("gemma-2b", "Gemma", "google/gemma-2b", None, {
        "model_type": "gemma", **_size(2048, 18, 8, intermediate_size=16384, num_key_value_heads=1, head_dim=256),
    }),
    Trained("gemma-2-2b", "Gemma", "google/gemma-2-2b"),
    Trained("gemma-2-9b", "Gemma", "google/gemma-2-9b", None, {
        "model_type": "gemma2", **_size(3584, 42, 16, intermediate_size=14336, num_key_value_heads=8, head_dim=256),
    }),
    Trained("gemma-3-1b", "Gemma", "google/gemma-3-1b-pt", None, {
        "model_type": "gemma3_text", **_size(1152, 26, 4, intermediate_size=6912, num_key_value_heads=1, head_dim=256),
    }),
    Trained("phi-1.5", "Phi", "Li et al. 2023 (arXiv:2309.05463), section 2.3", 2e-4, {
        "model_type": "phi", **_size(2048, 24, 32, intermediate_size=8192),
    }),
    Trained("phi-3-mini", "Phi 3", "microsoft/Phi-3-mini-4k-instruct"),
    Trained("olmo-1b", "OLMo", "Groeneveld et al. 2024 (arXiv:2402.00838), table 3", 4e-4, {
        "model_type": "olmo", **_size(2048, 16, 16, intermediate_size=8192, tie_word_embeddings=True),
    }, MITCHELL),
    Trained("olmo-7b", "OLMo", "Groeneveld et al. 2024 (arXiv:2402.00838), table 3", 3e-4, {
        "model_type": "olmo", **_size(4096, 32, 32, intermediate_size=11008),
    }, MITCHELL),
    Trained("olmo-2-7b", "OLMo 2", "OLMo et al. 2025 (arXiv:2501.00656), table 3", 3e-4),
    Trained("olmo-2-13b", "OLMo 2", "OLMo et al. 2025 (arXiv:2501.00656), table 3", 9e-4, {
        "model_type": "olmo2", **_size(5120, 40, 40, intermediate_size=13824, vocab_size=100352),
    }),
    Trained("olmoe-1b-7b", "OLMoE", "Muennighoff et al. 2024 (arXiv:2409.02060), table 10", 4e-4, {
        "model_type": "olmoe", **_size(2048, 16, 16, intermediate_size=1024, num_experts=64, num_experts_per_tok=8),
    }),
    Trained("falcon-7b", "Falcon", "Almazrouei et al. 2023 (arXiv:2311.16867), table 16", 6e-4),
    Trained("stablelm-3b", "StableLM", "stabilityai/stablelm-3b-4e1t, its technical report", 3.2e-4, {
        "model_type": "stablelm", **_size(2560, 32, 32, intermediate_size=6912, num_key_value_heads=32,
        partial_rotary_factor=0.25),
    }),
    Trained("command-r", "Cohere", "CohereForAI/c4ai-command-r-v01", None, {
        "model_type": "cohere", **_size(8192, 40, 64, intermediate_size=22528, logit_scale=0.0625, vocab_size=256000),
    }),
    Trained("starcoder2-3b", "StarCoder", "Lozhkov et al. 2024 (arXiv:2402.19173), table 8", 3e-4, {
        "model_type": "starcoder2", **_size(3072, 30, 24, intermediate_size=12288, num_key_value_heads=2,
                                            initializer_range=0.018042),
    }),
    Trained("santacoder", "StarCoder", "Ben Allal et al. 2023 (arXiv:2301.03988), section 5.2", 2e-4, {
        "model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24, "n_head": 16,
    }, SCALED),
    Trained("codegen-350m", "CodeGen", "Nijkamp et al. 2022 (arXiv:2203.13474), table 6", 3e-4, {
        "model_type": "codegen", "n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim": 32,
    }),
    Trained("granite-3-2b", "Granite", "ibm-granite/granite-3.0-2b-base", None, {
        "model_type": "granite", **_size(2048, 40, 32, intermediate_size=8192, num_key_value_heads=8,
                                         tie_word_embeddings=True, embedding_multiplier=12.0, residual_multiplier=0.22,
                                         attention_multiplier=0.015625, logits_scaling=8.0, initializer_range=0.1),
    }),
    Trained("xglm-564m", "XGLM", "Lin et al. 2021 (arXiv:2112.10668), section 2.2", 1.5e-3, {
        "model_type": "xglm", "d_model": 1024, "num_layers": 24, "attention_heads": 16, "ffn_dim": 4096,
    }),
    Trained("nemotron-4-15b", "Nemotron", "Parmar et al. 2024 (arXiv:2402.16819), section 2", None, {
        "model_type": "nemotron", **_size(6144, 32, 48, intermediate_size=24576, num_key_value_heads=8,
                                          initializer_range=0.0134),
    }),
    Trained("deepseek-v2-lite", "DeepSeek", "DeepSeek-AI 2024 (arXiv:2405.04434), appendix B and section 3.1.2", 4.2e-4,
            initialization=Initialization("normal", 0.006)),
    Trained("deepseek-v3", "DeepSeek", "DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2", 2.2e-4, {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_experts_per_tok": 8, "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
    }, Initialization("normal", 0.006)),
    Trained("gpt-oss-20b", "gpt-oss", "openai/gpt-oss-20b"),
    Trained("mamba-130m", "Mamba", _MAMBA, 3e-3, initialization=MAMBA),
    Trained("mamba-370m", "Mamba", _MAMBA, 1.5e-3, initialization=MAMBA),
    Trained("mamba-1.4b", "Mamba", _MAMBA, 1e-3, initialization=MAMBA),
    Trained("mamba2-130m", "Mamba", _MAMBA2, 3e-3, initialization=MAMBA),
    Trained("mamba2-2.7b", "Mamba", _MAMBA2, 8e-4, initialization=MAMBA),
    Trained("rwkv-4-169m", "RWKV", "Peng et al. 2023 (arXiv:2305.13048), table 2", 6e-4, {
        "model_type": "rwkv", "hidden_size": 768, "num_hidden_layers": 12,
    }),
    Trained("recurrentgemma-2b", "RecurrentGemma", "google/recurrentgemma-2b", None, {"model_type": "recurrent_gemma"}),
    Trained("jamba-mini", "Jamba", "ai21labs/Jamba-v0.1", None, {"model_type": "jamba"}),
    Trained("bert-base", "BERT", "Devlin et al. 2018 (arXiv:1810.04805), appendix A.2", 1e-4),
    Trained("bert-large", "BERT", "Devlin et al. 2018 (arXiv:1810.04805), appendix A.2", 1e-4, {
        "model_type": "bert", **_size(1024, 24, 16, intermediate_size=4096), "architectures": ["BertForMaskedLM"],
    }),
    Trained("roberta-base", "BERT", "Liu et al. 2019 (arXiv:1907.11692), table 9", 6e-4, {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"],
    }),
    Trained("distilbert", "DistilBERT", "Sanh et al. 2019 (arXiv:1910.01108), its training script", 5e-4, {
        "model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"],
    }),
    Trained("electra-base", "ELECTRA", "Clark et al. 2020 (arXiv:2003.10555), table 6", 2e-4, {
        "model_type": "electra", "embedding_size": 768, "architectures": ["ElectraForMaskedLM"],
        **_size(768, 12, 12, intermediate_size=3072),
    }),
    Trained("deberta-base", "DeBERTa", "He et al. 2020 (arXiv:2006.03654), table 8", 2e-4, {
        "model_type": "deberta", "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
        "architectures": ["DebertaForMaskedLM"],
    }),
    Trained("modernbert-base", "ModernBERT", "Warner et al. 2024 (arXiv:2412.13663), appendix", 8e-4),
    Trained("t5-base", "T5", "Raffel et al. 2019 (arXiv:1910.10683), section 3.1.2"),
    Trained("bart-base", "BART", "facebook/bart-base", None, {
        "model_type": "bart", "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
    }),
    Trained("vit-b-16", "ViT", "Dosovitskiy et al. 2020 (arXiv:2010.11929), table 3", 3e-3),
    Trained("deit-b", "DeiT", "Touvron et al. 2020 (arXiv:2012.12877), table 9", 1e-3, {"model_type": "deit",
        "num_labels": 1000}),
    Trained("beit-b", "BEiT", "Bao et al. 2021 (arXiv:2106.08254), appendix H", 1.5e-3, {"model_type": "beit",
        "num_labels": 1000,
            "use_relative_position_bias": True, "use_absolute_position_embeddings": False}),
    Trained("dinov2-b", "DINOv2", "Oquab et al. 2023 (arXiv:2304.07193), table 16", 1e-3, {"model_type": "dinov2",
        "num_labels": 1000,
            **_size(768, 12, 12)}),
)  # fmt: skip
FAMILIES = tuple(dict.fromkeys(each.family for each in TRAINED))


def design_of(each: Trained) -> wb.scaling.Design:
    """Return the design at its published size."""
    return wb.design(each.options or each.name, name=each.name)


def initialize(model: nn.Module, each: Trained, width: int, depth: int, seed: int) -> None:
    """Redraw the matrices of a narrow model so that its gains are those of the published initialization at full width.

    Args:
        model: Model from `wb.scaling.matched_width`.
        each: The design.
        width: Full width of the design.
        depth: Number of blocks.
        seed: Seed of the draws.
    """
    how = each.initialization
    if how.name == "config":
        return
    generator = torch.Generator().manual_seed(seed)
    ratio = width / int(model_sizes(model).width or width)
    with torch.no_grad():
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Embedding):
                weight.normal_(0, {"mamba": 0.02, "normal": how.std}.get(how.name, 0.02), generator=generator)
            elif (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and weight.ndim == 2:
                is_output = name.rsplit(".", 1)[-1] in _OUTPUTS
                inputs = weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
                std = _std(how, is_output, round(inputs * ratio), width, depth) * math.sqrt(ratio)
                weight.normal_(0, std, generator=generator)


def _std(how: Initialization, is_output: bool, inputs: int, width: int, depth: int) -> float:
    if how.name == "normal":
        return how.std / (math.sqrt(2 * depth) if is_output and how.scales_outputs else 1.0)
    if how.name == "small":
        return 2 / (depth * math.sqrt(width)) if is_output else math.sqrt(2 / (5 * width))
    if how.name == "mitchell":
        return 1 / math.sqrt(inputs * (2 * depth if is_output else 1))
    return 1 / math.sqrt(3 * inputs * (depth if is_output else 1))
