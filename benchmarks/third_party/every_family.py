"""All families of transformers that read text or images, built at a tiny size from their default configurations."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.third_party.families import BY_NAME, VOCABULARY
from workbench.errors import WorkbenchError
from workbench.scaling.design_sources import is_count
from workbench.scaling.transformers_source import TransformersSource

WIDTH, DEPTH, N_EXPERTS, IMAGE_SIZE, PATCH_SIZE = 32, 2, 4, 32, 8
#: Options that hold the number of experts, of experts chosen per token, and of groups of experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_GROUPS = ("n_group", "topk_group")
_STACK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
#: Options of families whose default configuration does not describe a valid model, or has dimensions of its own.
_OPTIONS: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "diffllama": _STACK | {"num_key_value_heads": 2, "vocab_size": VOCABULARY},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": _STACK | {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 3},
    "funnel": {
        "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "vocab_size": VOCABULARY,
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": _STACK | {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8},
    "gemma4_assistant": {
        "text_config": _STACK
        | {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0},
        "backbone_hidden_size": 32,
    },
    "gemma4_unified_text": _STACK | {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "lw_detr_vit": _STACK | {"window_block_indices": [1], "out_indices": [2]},
    "luke": {"entity_vocab_size": 100},
    "ministral": {"head_dim": 128},
    "perceiver": {
        "d_latents": 32, "d_model": 32, "num_latents": 8, "num_self_attends_per_block": 2, "vocab_size": VOCABULARY,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 64,
    },
    "reformer": {
        "is_decoder": True, "axial_pos_embds_dim": [12, 20], "hidden_size": 32, "vocab_size": VOCABULARY,
        "axial_pos_shape": [8, 8], "attn_layers": ["local", "lsh"], "num_attention_heads": 2,
        "attention_head_size": 16, "feed_forward_size": 64, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
        "max_position_embeddings": 64, "num_buckets": 4,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "ngram_vocab_size_base": 100, "ple_embed_dim": 32, "hc_lowrank": 8,
    },
    "roc_bert": {"pronunciation_vocab_size": 100, "shape_vocab_size": 100},
    "videoprism_vision_model": {
        "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_spatial_layers": 1,
        "num_temporal_layers": 1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A family of models with one of its heads.

    Attributes:
        name: transformers ``model_type``.
        auto: Name of the auto class of the head; ``AutoModel`` for a model without a head.
    """

    name: str
    auto: str

    def __str__(self) -> str:
        return f"{self.name}:{self.auto}"


def every_kind() -> list[Kind]:
    """Return the families of text and images of the installed transformers, each with every head it is trained with.

    A family without a head for image classification is built without a head, or as a backbone.
    """
    from transformers.models.auto import modeling_auto as auto

    heads = {
        "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForMaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageClassification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    kinds = [Kind(name, head) for head, names in heads.items() for name in names]
    seen = {kind.name for kind in kinds}
    for head, names in (
        ("AutoModel", auto.MODEL_FOR_IMAGE_MAPPING_NAMES),
        ("AutoBackbone", auto.MODEL_FOR_BACKBONE_MAPPING_NAMES),
    ):
        kinds += [Kind(name, head) for name in names if name not in seen]
        seen.update(names)
    return kinds


def tiny_config(kind: Kind, **options: Any) -> Any:
    """Return the configuration of a family at a tiny size, with further options."""
    import transformers

    if kind.name in BY_NAME:
        config = transformers.AutoConfig.for_model(kind.name, **{**BY_NAME[kind.name].config, **options})
    else:
        found = {**_OPTIONS.get(kind.name, {}), **options}
        parts = getattr(transformers.CONFIG_MAPPING[kind.name], "sub_configs", {})
        for name, part in parts.items():
            own = _OPTIONS.get(getattr(part, "model_type", ""))
            found = found if own is None else {name: own, **found}
        config = _shrunk(transformers.AutoConfig.for_model(kind.name, **found))
    classes = _class_names(kind)
    config.architectures = [classes[0]] if classes else None
    return config


def _class_names(kind: Kind) -> list[str]:
    """Return the names of the classes that an auto class can build for a family."""
    import transformers

    auto = getattr(transformers, kind.auto)
    found = auto._model_mapping._model_mapping.get(kind.name)
    return [found] if isinstance(found, str) else list(found or ())


def build(kind: Kind, config: Any = None) -> nn.Module:
    """Build a model of a family, with the same random parameters on each call."""
    import transformers

    torch.manual_seed(0)
    config = tiny_config(kind) if config is None else config
    return getattr(transformers, kind.auto).from_config(config, dtype=torch.float32)


def _shrunk(config: Any) -> Any:
    """Return a configuration with small images and few experts; one with a single stack also has few, narrow blocks."""
    config = copy.deepcopy(config)
    _few_experts(config)
    _small_images(config)
    for name in getattr(config, "sub_configs", {}):
        if hasattr(part := getattr(config, name, None), "attribute_map"):
            setattr(config, name, _shrunk(part))
    for name, value in list(vars(config).items()):
        if "vocab_size" in name and is_count(value):
            setattr(config, name, min(value, VOCABULARY))
        elif name.endswith("token_id") and is_count(value) and value >= VOCABULARY:
            setattr(config, name, 0)
    if isinstance(depths := getattr(config, "depths", None), list | tuple):
        config.depths = type(depths)(1 for _ in depths)
    try:
        source = TransformersSource(config)
        return source.at(source.nearest_width(WIDTH), min(DEPTH, source.depth), VOCABULARY)
    except WorkbenchError:  # the model has several parts or stages
        return config


def _few_experts(config: Any) -> None:
    """Limit the number of experts in place."""
    options = vars(config)
    if not any(is_count(options.get(name)) and options[name] > N_EXPERTS for name in _EXPERTS):
        return
    for names, most in ((_EXPERTS, N_EXPERTS), (_CHOSEN, 2), (_GROUPS, 1)):
        for name in names:
            if is_count(options.get(name)):
                setattr(config, name, min(most, options[name]))


def _small_images(config: Any) -> None:
    """Limit the sizes of images and patches in place."""
    for name, most in (("image_size", IMAGE_SIZE), ("patch_size", PATCH_SIZE)):
        value = getattr(config, name, None)
        if is_count(value):
            setattr(config, name, min(most, value))
        elif isinstance(value, list | tuple) and value and all(map(is_count, value)):
            setattr(config, name, type(value)(min(most, side) for side in value))
