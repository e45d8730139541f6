"""Tiny models of many families of transformers, built from configurations alone, with the expected anatomy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

N_TOKENS = 7
VOCABULARY = 97


@dataclass(frozen=True)
class Family:
    """A family of models and its expected anatomy.

    Attributes:
        name: transformers ``model_type``.
        config: Options of the configuration.
        stack: Expected ``Anatomy.stack``.
        auto: Auto class that builds the model.
        inputs: Kind of inputs: "tokens", "pixels" or "audio".
        n_blocks: Expected number of blocks.
        width: Expected width.
        others: Expected ``Anatomy.other_stacks``.
    """

    name: str
    config: dict[str, Any]
    stack: str
    auto: str = "AutoModelForCausalLM"
    inputs: str = "tokens"
    n_blocks: int = 3
    width: int = 24
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHA = {**LLAMA, "num_key_value_heads": 4}
#: Half of the features of a head are rotated, so the width of a head must be a multiple of 4.
THREE_HEADS = {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
VIT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
MOE = {**LLAMA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAYERS = "model.layers"


def _family(name: str, base: dict[str, Any], stack: str = LAYERS, **options: Any) -> Family:
    fields = {key: options.pop(key) for key in ("auto", "inputs", "n_blocks", "width", "others") if key in options}
    return Family(name, {**base, **options}, stack, **fields)


def _encoder(name: str, base: dict[str, Any], stack: str = "encoder.layer", **options: Any) -> Family:
    return _family(name, base, stack, auto="AutoModel", **options)


FAMILIES: tuple[Family, ...] = (
    # decoders with separate projections
    _family("llama", LLAMA),
    _family("mistral", LLAMA),
    _family("qwen2", LLAMA),
    _family("qwen3", LLAMA, head_dim=10),
    _family("gemma", LLAMA, head_dim=10),
    _family("gemma2", LLAMA, head_dim=10),
    _family("gemma3_text", LLAMA, head_dim=10),
    _family("olmo", MHA),
    _family("olmo2", MHA),
    _family("cohere", LLAMA),
    _family("cohere2", LLAMA),
    _family("granite", LLAMA, residual_multiplier=0.5),
    _family("starcoder2", LLAMA),
    _family("stablelm", THREE_HEADS, partial_rotary_factor=0.5),
    _family("smollm3", LLAMA),
    _family("nemotron", LLAMA),
    _family("glm", LLAMA, head_dim=6),
    _family("glm4", LLAMA, head_dim=6),
    _family("exaone4", LLAMA),
    _family("helium", LLAMA, head_dim=6),
    _family("seed_oss", LLAMA, head_dim=6),
    _family("phi", THREE_HEADS),
    _family("persimmon", THREE_HEADS),
    _family("opt", BERT, "model.decoder.layers", ffn_dim=40, word_embed_proj_dim=24),
    _family("gptj", GPT2, "transformer.h", rotary_dim=4),
    _family("codegen", GPT2, "transformer.h", rotary_dim=4),
    _family("gpt_neo", BERT, "transformer.h", num_layers=3, num_heads=4, attention_types=[[["global"], 3]]),
    _family("biogpt", BERT, "biogpt.layers"),
    _family(
        "xglm",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "ffn_dim": 40,
            "num_layers": 3,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    # fused projections
    _family("gpt2", GPT2, "transformer.h"),
    _family("openai-gpt", GPT2, "transformer.h"),
    _family("gpt_bigcode", GPT2, "transformer.h", multi_query=True),
    _family("gpt_neox", MHA, "gpt_neox.layers"),
    _family("bloom", {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 3, "n_head": 4}, "transformer.h"),
    _family("falcon", MHA, "transformer.h", multi_query=True, new_decoder_architecture=False),
    _family("phi3", LLAMA),
    _family(
        "mpt",
        {"vocab_size": VOCABULARY, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
        "transformer.blocks",
    ),
    _family("modernbert", BERT, "layers", auto="AutoModel", global_attn_every_n_layers=2, local_attention=8),
    # mixtures of experts
    _family("mixtral", LLAMA, num_local_experts=6, num_experts_per_tok=2),
    _family("qwen2_moe", MOE, shared_expert_intermediate_size=16),
    _family("qwen3_moe", MOE, head_dim=10),
    _family("olmoe", {**MOE, "num_key_value_heads": 4}),
    _family("gpt_oss", LLAMA, num_local_experts=6, num_experts_per_tok=2, head_dim=6),
    _family("granitemoe", LLAMA, num_local_experts=6, num_experts_per_tok=2),
    _family("phimoe", LLAMA, num_local_experts=6, num_experts_per_tok=2),
    _family(
        "jamba",
        LLAMA,
        num_experts=6,
        num_experts_per_tok=2,
        n_mamba_heads=2,
        use_mamba_kernels=False,
        mamba_dt_rank=4,
        mamba_d_state=4,
        attn_layer_period=2,
        attn_layer_offset=1,
    ),
    _family(
        "deepseek_v3",
        MHA,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=6,
    ),
    _family(
        "llama4_text",
        LLAMA,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=40,
        head_dim=6,
    ),
    # state-space and hybrid
    _family(
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 4},
        "backbone.layers",
    ),
    _family(
        "mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 12,
            "n_groups": 1,
            "chunk_size": 4,
        },
        "backbone.layers",
    ),
    _family(
        "rwkv",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "attention_hidden_size": 24,
            "rescale_every": 2,
        },
        "rwkv.blocks",
    ),
    _family(
        "bamba",
        LLAMA,
        mamba_n_heads=4,
        mamba_d_head=12,
        mamba_n_groups=1,
        mamba_d_state=4,
        mamba_chunk_size=4,
        attn_layer_indices=[1],
    ),
    _family("recurrent_gemma", LLAMA, lru_width=24, attention_window_size=8, head_dim=6),
    _family(
        "zamba2",
        {**MHA, "num_hidden_layers": 4},
        n_blocks=4,
        mamba_d_state=4,
        mamba_headdim=12,
        n_mamba_heads=4,
        mamba_ngroups=1,
        chunk_size=4,
        hybrid_layer_ids=[1, 3],
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        use_mamba_kernels=False,
    ),
    _family(
        "nemotron_h",
        LLAMA,
        n_blocks=3,
        head_dim=6,
        layers_block_type=["mamba", "attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=12,
        n_groups=1,
        ssm_state_size=4,
        chunk_size=4,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        use_mamba_kernels=False,
    ),
    _family(
        "qwen3_next",
        MOE,
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=6,
        linear_value_head_dim=6,
        shared_expert_intermediate_size=16,
    ),
    # encoders
    _encoder("bert", BERT),
    _encoder("roberta", BERT, pad_token_id=1),
    _encoder("electra", BERT, embedding_size=24),
    _encoder("deberta-v2", BERT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _encoder("esm", BERT, position_embedding_type="rotary"),
    _encoder("albert", BERT, "encoder.albert_layer_groups", embedding_size=12),
    _encoder(
        "distilbert",
        {
            "vocab_size": VOCABULARY,
            "dim": 24,
            "hidden_dim": 40,
            "n_layers": 3,
            "n_heads": 4,
            "max_position_embeddings": 64,
        },
        "transformer.layer",
    ),
    # encoder-decoder
    _family(
        "t5",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "d_ff": 40,
            "d_kv": 6,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "decoder.block",
        auto="AutoModelForSeq2SeqLM",
        others=("encoder.block",),
    ),
    _family(
        "bart",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        "model.decoder.layers",
        auto="AutoModelForSeq2SeqLM",
        others=("model.encoder.layers",),
    ),
    _family(
        "whisper",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "model.decoder.layers",
        auto="AutoModelForSpeechSeq2Seq",
        inputs="audio",
        others=("model.encoder.layers",),
    ),
    # vision
    _family("vit", VIT, "layers", auto="AutoModel", inputs="pixels"),
    _family("deit", VIT, "layers", auto="AutoModel", inputs="pixels"),
    _encoder("dinov2", VIT, inputs="pixels"),
    _family("beit", VIT, "layers", auto="AutoModel", inputs="pixels"),
)
BY_NAME = {family.name: family for family in FAMILIES}


def build(family: Family, **options: Any) -> nn.Module:
    """Build the model in eval mode, with the same random parameters on each call."""
    import transformers

    config = transformers.AutoConfig.for_model(family.name, **{**family.config, **options})
    torch.manual_seed(0)
    model = getattr(transformers, family.auto).from_config(config)
    # With noise, norms are not all ones, biases not all zeros, and weights large enough to have an effect.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim < 2 else 0.02))
    return model.eval()


def make_inputs(family: Family, *, n_rows: int = 2) -> Any:
    """Return inputs of a family: ids of shape (row, token), images, or log-mel frames with decoder tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (n_rows, N_TOKENS), generator=generator)
    if family.inputs == "tokens":
        return tokens
    if family.inputs == "pixels":
        return torch.randn(n_rows, 3, 16, 16, generator=generator)
    return {"input_features": torch.randn(n_rows, 8, 20, generator=generator), "decoder_input_ids": tokens}
