"""Published architectures by name, as options of transformers' configuration classes; nothing is downloaded."""

from __future__ import annotations

from typing import Any

_GPT2 = "GPT2Config"
_PYTHIA = {"vocab_size": 50304, "max_position_embeddings": 2048}
_LLAMA_2 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
#: The initialization of the published training (state-spaces/mamba). The configurations on the hub differ: their
#: initial embeddings are five times as large.
_MAMBA_START = {"initializer_range": 0.02, "rescale_prenorm_residual": True}
_MAMBA = {"vocab_size": 50280, "state_size": 16, "expand": 2, "conv_kernel": 4, **_MAMBA_START}


def _pythia(width: int, depth: int, n_heads: int, **options: Any) -> tuple[str, dict[str, Any]]:
    size = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": n_heads}
    return "GPTNeoXConfig", {**_PYTHIA, **size, "intermediate_size": 4 * width, **options}


def _mamba(width: int, depth: int) -> tuple[str, dict[str, Any]]:
    return "MambaConfig", {**_MAMBA, "hidden_size": width, "num_hidden_layers": depth}


def _mamba_2(width: int, depth: int) -> tuple[str, dict[str, Any]]:
    size = {"hidden_size": width, "num_hidden_layers": depth, "num_heads": width // 32, "head_dim": 64}
    options = {"vocab_size": 50288, "n_groups": 1, "state_size": 128, "tie_word_embeddings": True}
    return "Mamba2Config", {**options, **size, **_MAMBA_START}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


#: Name -> class in transformers, and the options that differ from its defaults. The tests compare the numbers of
#: parameters with the published ones.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (_GPT2, {}),
    "gpt2-medium": (_GPT2, {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": (_GPT2, {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": (_GPT2, {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, vocab_size=50432),
    "pythia-12b": _pythia(5120, 36, 40, vocab_size=50688),
    "llama-2-7b": ("LlamaConfig", _LLAMA_2),
    "llama-2-13b": ("LlamaConfig",
        {**_LLAMA_2, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
         "num_attention_heads": 40, "num_key_value_heads": 40}),
    "llama-2-70b": ("LlamaConfig",
        {**_LLAMA_2, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
         "num_attention_heads": 64, "num_key_value_heads": 8}),
    "llama-3-8b": ("LlamaConfig",
        {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "tinyllama-1.1b": ("LlamaConfig",
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
         "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    "smollm2-135m": ("LlamaConfig",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}),
    "mistral-7b": ("MistralConfig", {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}),
    "mixtral-8x7b": ("MixtralConfig", {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}),
    "qwen2.5-0.5b": ("Qwen2Config",
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "qwen2.5-7b": ("Qwen2Config",
        {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
         "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
         "rope_parameters": _rope(1_000_000.0)}),
    "qwen3-8b": ("Qwen3Config",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
         "rope_parameters": _rope(1_000_000.0)}),
    "qwen3-30b-a3b": ("Qwen3MoeConfig",
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
         "moe_intermediate_size": 768, "norm_topk_prob": True, "max_position_embeddings": 40960,
         "rope_parameters": _rope(1_000_000.0)}),
    "gpt-oss-20b": ("GptOssConfig", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "phi-3-mini": ("Phi3Config",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": 2047}),
    "olmo-2-7b": ("Olmo2Config",
        {"vocab_size": 100352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
         "rope_parameters": _rope(500_000.0), "pad_token_id": 100277, "bos_token_id": None, "eos_token_id": 100257}),
    "gpt-neox-20b": ("GPTNeoXConfig",
        {"hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64}),
    "gemma-2-2b": ("Gemma2Config", {}),
    "deepseek-v2-lite": ("DeepseekV2Config",
        {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
         "num_attention_heads": 16, "num_key_value_heads": 16, "first_k_dense_replace": 1, "q_lora_rank": None,
         "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "max_position_embeddings": 4096}),
    "falcon-7b": ("FalconConfig", {}),
    "mamba-130m": _mamba(768, 24),
    "mamba-370m": _mamba(1024, 48),
    "mamba-790m": _mamba(1536, 48),
    "mamba-1.4b": _mamba(2048, 48),
    "mamba-2.8b": _mamba(2560, 64),
    "mamba2-130m": _mamba_2(768, 24),
    "mamba2-2.7b": _mamba_2(2560, 64),
    "bert-base": ("BertConfig", {"architectures": ["BertForMaskedLM"]}),
    "modernbert-base": ("ModernBertConfig", {}),
    "t5-base": ("T5Config", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
    "vit-b-16": ("ViTConfig", {"num_labels": 1000}),
}  # fmt: skip

#: Other customary names.
ALIASES = {
    "gpt2-small": "gpt2", "gpt-2": "gpt2", "llama2-7b": "llama-2-7b", "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b", "llama3-8b": "llama-3-8b", "meta-llama-3-8b": "llama-3-8b",
    "tinyllama": "tinyllama-1.1b", "mistral-7b-v0.1": "mistral-7b", "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral": "mixtral-8x7b", "qwen3-moe": "qwen3-30b-a3b", "gpt-oss": "gpt-oss-20b",
    "phi-3-mini-4k-instruct": "phi-3-mini", "olmo-2-1124-7b": "olmo-2-7b", "bert-base-uncased": "bert-base",
    "t5": "t5-base", "vit-base-patch16-224": "vit-b-16",
}  # fmt: skip


def known_config(name: str) -> Any | None:
    """Return the configuration in transformers of a published architecture; None if there is none of that name."""
    short = name.lower().rsplit("/", 1)[-1].removesuffix("-hf").replace("_", "-")
    if (found := ALIASES.get(short, short)) not in KNOWN:
        return None
    import transformers

    cls, options = KNOWN[found]
    return getattr(transformers, cls)(**options)
