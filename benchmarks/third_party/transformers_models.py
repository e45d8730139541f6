"""Trials of models of transformers: the families of the tests (`KNOWN`) and further families (`FURTHER`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.third_party.families import (
    BERT,
    FAMILIES,
    LLAMA,
    MHA,
    MOE,
    N_TOKENS,
    VIT,
    VOCABULARY,
    Family,
    build,
    make_inputs,
)
from benchmarks.third_party.trial import Pairs, Trial, hooked

N_ROWS = 24
STAGES = "the width of its stream changes between stages; one stage can be selected with stack="
ENCODER = "encoder.layer.*"
DECODER_LAYERS = {
    "vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 24, "d_ff": 40, "d_kv": 6, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
WAVES = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "conv_dim": [16, 16],
    "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "vocab_size": 32,
}  # fmt: skip


def make(auto: str, name: str, config: dict[str, Any]) -> nn.Module:
    """Build a model with random parameters; noise ensures that norms are not all ones and biases not all zeros."""
    import transformers

    config = (
        getattr(transformers, name)(**config)
        if name.endswith("Config")
        else transformers.AutoConfig.for_model(name, **config)
    )
    model = getattr(transformers, auto)
    model = model.from_config(config) if auto.startswith("Auto") else model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim < 2 else 0.02))
    return model.eval()


def tokens(n_rows: int = N_ROWS, n_tokens: int = N_TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (n_rows, n_tokens))


def hidden_states(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the states that the model itself returns."""
    return list(model(inputs, output_hidden_states=True).hidden_states)


def pixels(size: int = 16, n_rows: int = N_ROWS) -> torch.Tensor:
    return torch.randn(n_rows, 3, size, size)


def waves() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(12, 600)}


def text_and_pixels() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "pixel_values": pixels()}


def text_with_images() -> dict[str, torch.Tensor]:
    """Return texts with four placeholders for the patches of an image."""
    ids = tokens(8, 12)
    ids[:, 2:6] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": pixels(n_rows=8)}


def model_trial(
    name: str, config: dict[str, Any], states: Any = "model.layers.*", *, auto: str = "AutoModelForCausalLM", inputs: Any = tokens,
    title: str = "", n_blocks: int = 3, width: int = 24, rejection: str = "", axis: int = -1, **options: Any,
) -> Trial:  # fmt: skip
    """Create the trial of a model type or configuration class of transformers."""
    return Trial(
        title or name,
        lambda: (make(auto, name, config), inputs()),
        states,
        n_blocks,
        width,
        rejection,
        options,
        axis=axis,
    )


def encoder(name: str, config: dict[str, Any], states: Any = ENCODER, **options: Any) -> Trial:
    return model_trial(name, config, states, auto="AutoModel", **options)


def seq2seq(name: str, config: dict[str, Any], states: Any = "model.decoder.layers.*", **options: Any) -> Trial:
    return model_trial(name, config, states, auto="AutoModelForSeq2SeqLM", **options)


vision = partial(model_trial, auto="AutoModel", inputs=pixels)


def audio(name: str, config: dict[str, Any], states: Any = "encoder.layers.*", **options: Any) -> Trial:
    return model_trial(name, config, states, auto="AutoModel", **{"inputs": waves, **options})


def known(family: Family) -> Trial:
    """Create the trial of a family of the tests."""
    states = unscaled if family.name == "rwkv" else f"{family.stack}.*"
    make_all = lambda: (build(family), make_inputs(family, n_rows=N_ROWS))  # noqa: E731
    return Trial(family.name, make_all, states, family.n_blocks, family.width)


def unscaled(model: nn.Module, inputs: torch.Tensor) -> Pairs:
    """Return the states of RWKV without the rescaling that it applies in eval mode to states and weights."""
    every, model.config.rescale_every = model.config.rescale_every, 0
    try:
        return hooked(model, inputs, "rwkv.blocks.*", 24)
    finally:
        model.config.rescale_every = every


KNOWN = tuple(known(family) for family in FAMILIES)
FURTHER = (
    model_trial("olmo3", LLAMA),
    model_trial("arcee", LLAMA),
    model_trial("apertus", LLAMA),
    model_trial("ernie4_5", LLAMA),
    model_trial("hunyuan_v1_dense", {**LLAMA, "head_dim": 6}),
    model_trial("diffllama", LLAMA),
    model_trial("bitnet", LLAMA),
    model_trial("vaultgemma", {**LLAMA, "head_dim": 6}),
    model_trial("ministral", {**LLAMA, "head_dim": 6}),
    model_trial("jetmoe", {**LLAMA, "num_local_experts": 4, "kv_channels": 6}),
    model_trial("minimax", {**LLAMA, "num_local_experts": 4, "head_dim": 6, "block_size": 4}),
    model_trial("glm4_moe", {**MOE, "n_routed_experts": 4, "head_dim": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    model_trial("dots1", {**MHA, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "head_dim": 6, "n_shared_experts": 1}),
    model_trial("dbrx", {"vocab_size": VOCABULARY, "d_model": 24, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 24}, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}}, "transformer.blocks.*"),
    model_trial("deepseek_v2", {**MHA, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "n_group": 1, "topk_group": 1}),
    model_trial("falcon_mamba", {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 4}, "backbone.layers.*"),
    model_trial("falcon_h1", {**LLAMA, "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}),
    model_trial("lfm2", {**LLAMA, "full_attn_idxs": [1]}),
    model_trial("ctrl", {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 3, "n_head": 4, "dff": 40, "n_positions": 64}, "transformer.h.*"),
    model_trial("gemma3n_text", {**LLAMA, "head_dim": 6, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 3, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 3, "altup_num_inputs": 4}, rejection="it has several parallel streams (AltUp), none of which alone is the residual stream"),
    model_trial("gemma3n_text", {**LLAMA, "head_dim": 6, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 3, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 3, "altup_num_inputs": 4}, states=lambda m, x: [(a[1], b[1]) for a, b in hooked(m, x, "model.layers.*", 24)], title="gemma3n_text, stream 1", stack="model.layers:1"),
    model_trial("longcat_flash", {**MHA, "num_hidden_layers": 6, "num_layers": 3, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "head_dim": 4}),
    # encoders
    encoder("camembert", {**BERT, "pad_token_id": 1}),
    encoder("mpnet", BERT),
    encoder("ernie", BERT),
    encoder("mobilebert", {**BERT, "embedding_size": 24, "intra_bottleneck_size": 12, "true_hidden_size": 12}),
    encoder("squeezebert", {**BERT, "embedding_size": 24}, rejection="its encoder calls forward() of its layers, which bypasses hooks, and the parts of the layers have features on axis 1"),
    encoder("roformer", {**BERT, "embedding_size": 24}),
    encoder("big_bird", {**BERT, "attention_type": "original_full"}),
    encoder("longformer", {**BERT, "attention_window": 4, "pad_token_id": 1}, inputs=partial(tokens, n_tokens=8)),
    encoder("nystromformer", {**BERT, "num_landmarks": 4, "segment_means_seq_len": 8}, inputs=partial(tokens, n_tokens=8)),
    encoder("fnet", BERT),
    encoder("convbert", {**BERT, "embedding_size": 24}),
    encoder("rembert", {**BERT, "input_embedding_size": 24}),
    encoder("layoutlm", BERT),
    encoder("megatron-bert", BERT),
    encoder("data2vec-text", {**BERT, "pad_token_id": 1}),
    encoder("ibert", {**BERT, "pad_token_id": 1}),
    encoder("xlnet", {"vocab_size": VOCABULARY, "d_model": 24, "n_layer": 3, "n_head": 4, "d_inner": 40}, "layer.*"),
    encoder("xlm", {"vocab_size": VOCABULARY, "emb_dim": 24, "n_layers": 3, "n_heads": 4, "pad_index": 0, "n_words": VOCABULARY}, hidden_states),
    encoder("flaubert", {"vocab_size": VOCABULARY, "emb_dim": 24, "n_layers": 3, "n_heads": 4, "pad_index": 0}, hidden_states),
    encoder("canine", {**BERT, "num_hash_buckets": 64, "num_hash_functions": 2, "downsampling_rate": 2, "local_transformer_stride": 4}, "encoder.layer.*", inputs=partial(tokens, n_tokens=16)),
    encoder("eurobert", LLAMA, "layers.*"),
    # encoder-decoder
    seq2seq("mbart", DECODER_LAYERS),
    seq2seq("pegasus", DECODER_LAYERS),
    seq2seq("blenderbot", DECODER_LAYERS),
    seq2seq("m2m_100", DECODER_LAYERS),
    seq2seq("marian", DECODER_LAYERS),
    seq2seq("led", {**DECODER_LAYERS, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}, "led.decoder.layers.*"),
    seq2seq("mt5", T5, "decoder.block.*"),
    seq2seq("longt5", T5, "decoder.block.*"),
    seq2seq("umt5", T5, "decoder.block.*"),
    seq2seq("prophetnet", {"vocab_size": VOCABULARY, "hidden_size": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_encoder_layers": 2, "num_decoder_layers": 3, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "max_position_embeddings": 64, "ngram": 2, "num_buckets": 8, "use_cache": False}, "prophetnet.decoder.layers.*"),
    # vision
    vision("dinov2_with_registers", VIT, ENCODER),
    vision("dinov3_vit", {**VIT, "num_attention_heads": 3}, "model.layer.*"),
    vision("vit_mae", {**VIT, "mask_ratio": 0.0}, "layers.*"),
    vision("siglip_vision_model", VIT, "encoder.layers.*"),
    vision("clip_vision_model", VIT, "encoder.layers.*"),
    vision("ijepa", VIT, "layers.*"),
    vision("data2vec-vision", VIT, ENCODER),
    vision("yolos", {**VIT, "image_size": [16, 16], "num_detection_tokens": 4}, "encoder.layer.*"),
    vision("vit_msn", VIT, "layers.*"),
    vision("hiera", {"embed_dim": 8, "image_size": [32, 32], "depths": [1, 2, 1, 1], "num_heads": [1, 2, 2, 2]}, rejection=STAGES, inputs=partial(pixels, 32)),
    vision("swin", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2, 4], "num_heads": [1, 2, 4], "window_size": 2}, rejection=STAGES, inputs=partial(pixels, 32)),
    vision("swin", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2, 4], "num_heads": [1, 2, 4], "window_size": 2}, "encoder.layers.2.blocks.*", n_blocks=4, width=32, inputs=partial(pixels, 32), title="swin, third stage", stack="encoder.layers.2.blocks"),
    vision("swinv2", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2, 4], "num_heads": [1, 2, 4], "window_size": 2}, "encoder.layers.2.blocks.*", n_blocks=4, width=32, inputs=partial(pixels, 32), title="swinv2, third stage", stack="encoder.layers.2.blocks"),
    vision("convnext", {"hidden_sizes": [8, 16], "depths": [2, 3], "num_stages": 2, "patch_size": 2}, rejection=STAGES, inputs=partial(pixels, 32)),
    vision("convnext", {"hidden_sizes": [8, 16], "depths": [2, 3], "num_stages": 2, "patch_size": 2}, "encoder.stages.1.layers.*", width=16, axis=1, inputs=partial(pixels, 32), title="convnext, second stage", stack="encoder.stages.1.layers"),
    vision("convnextv2", {"hidden_sizes": [8, 16], "depths": [2, 3], "num_stages": 2, "patch_size": 2}, "encoder.stages.1.layers.*", width=16, axis=1, inputs=partial(pixels, 32), title="convnextv2, second stage", stack="encoder.stages.1.layers"),
    vision("segformer", {"hidden_sizes": [8, 16], "depths": [2, 3], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}, rejection=STAGES, inputs=partial(pixels, 32)),
    vision("segformer", {"hidden_sizes": [8, 16], "depths": [2, 3], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}, "stages.1.blocks.*", width=16, inputs=partial(pixels, 32), title="segformer, second stage", stack="stages.1.blocks"),
    vision("poolformer", {"hidden_sizes": [8, 16], "depths": [2, 3], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1], "pool_size": 3}, "encoder.block.1.*", width=16, axis=1, inputs=partial(pixels, 32), title="poolformer, second stage", stack="encoder.block.1"),
    vision("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 3], "layer_type": "basic"}, rejection=STAGES, inputs=partial(pixels, 32)),
    vision("regnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 3], "groups_width": 4}, rejection=STAGES, inputs=partial(pixels, 32)),
    vision("videomae", {**VIT, "num_frames": 4}, "encoder.layer.*", inputs=lambda: torch.randn(N_ROWS, 4, 3, 16, 16)),
    vision("timesformer", {**VIT, "num_frames": 2}, "encoder.layer.*", inputs=lambda: torch.randn(N_ROWS, 2, 3, 16, 16)),
    vision("vivit", {**VIT, "num_frames": 4, "tubelet_size": [2, 8, 8]}, "layers.*", inputs=lambda: torch.randn(N_ROWS, 4, 3, 16, 16)),
    vision("dpt", {**VIT, "is_hybrid": False, "backbone_out_indices": [0, 1, 2], "neck_hidden_sizes": [8, 8, 8]}, "encoder.layer.*"),
    # audio
    audio("wav2vec2", WAVES),
    audio("hubert", WAVES),
    audio("wavlm", {**WAVES, "num_buckets": 8, "max_bucket_distance": 16}),
    audio("unispeech", WAVES),
    audio("wav2vec2-conformer", {**WAVES, "position_embeddings_type": "relative"}),
    audio("audio-spectrogram-transformer", {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "num_mel_bins": 16, "max_length": 32, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}, "layers.*", inputs=lambda: {"input_values": torch.randn(N_ROWS, 32, 16)}),
    # other kinds
    model_trial("clip_text_model", {**BERT, "eos_token_id": 2, "bos_token_id": 1}, "encoder.layers.*", auto="AutoModel"),
    model_trial("patchtst", {"d_model": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 40, "context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2}, "encoder.layers.*", auto="AutoModel", inputs=lambda: {"past_values": torch.randn(N_ROWS, 32, 2)}),
    model_trial("decision_transformer", {"hidden_size": 24, "n_layer": 3, "n_head": 4, "state_dim": 5, "act_dim": 2, "max_ep_len": 64, "n_positions": 64}, "encoder.h.*", auto="AutoModel", inputs=lambda: {"states": torch.randn(N_ROWS, 7, 5), "actions": torch.randn(N_ROWS, 7, 2), "rewards": torch.randn(N_ROWS, 7, 1), "returns_to_go": torch.randn(N_ROWS, 7, 1), "timesteps": torch.arange(7).expand(N_ROWS, 7), "attention_mask": torch.ones(N_ROWS, 7)}),
    model_trial("perceiver", {"num_latents": 8, "d_latents": 24, "d_model": 24, "num_blocks": 1, "num_self_attends_per_block": 3, "num_self_attention_heads": 4, "num_cross_attention_heads": 4}, "encoder.self_attends.*", auto="AutoModel", inputs=lambda: {"inputs": torch.randn(N_ROWS, 7, 24)}),
    # images with text, speech, stages, other heads and options
    model_trial("clip", {"text_config": {**BERT, "eos_token_id": 2, "bos_token_id": 1, "projection_dim": 16}, "vision_config": {**VIT, "num_hidden_layers": 2, "projection_dim": 16}, "projection_dim": 16}, "text_model.encoder.layers.*", auto="AutoModel", inputs=text_and_pixels),
    model_trial("siglip", {"text_config": {**BERT}, "vision_config": {**VIT, "num_hidden_layers": 2}}, "text_model.encoder.layers.*", auto="AutoModel", inputs=text_and_pixels),
    model_trial("llava", {"text_config": {**LLAMA, "model_type": "llama"}, "vision_config": {**VIT, "num_hidden_layers": 2, "model_type": "clip_vision_model"}, "image_token_index": 96, "vision_feature_layer": -1}, "model.language_model.layers.*", auto="AutoModelForImageTextToText", inputs=text_with_images),
    model_trial("blip", {"text_config": {**BERT, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "encoder_hidden_size": 24, "projection_dim": 16}, "vision_config": {**VIT, "num_hidden_layers": 2}, "projection_dim": 16}, "text_model.encoder.layer.*", auto="AutoModel", inputs=text_and_pixels),
    model_trial("vilt", {**BERT, **VIT, "max_image_length": 4}, "encoder.layer.*", auto="AutoModel", inputs=text_and_pixels),
    model_trial("vision-encoder-decoder", {"encoder": {"model_type": "vit", **VIT, "num_hidden_layers": 2}, "decoder": {"model_type": "gpt2", "vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64, "add_cross_attention": True, "is_decoder": True}}, "decoder.transformer.h.*", auto="AutoModelForImageTextToText", inputs=lambda: {"pixel_values": pixels(), "decoder_input_ids": tokens()}),
    model_trial("speech_to_text", {**DECODER_LAYERS, "input_feat_per_channel": 8, "conv_channels": 16, "num_conv_layers": 2, "max_source_positions": 64, "max_target_positions": 64}, "model.decoder.layers.*", auto="AutoModelForSpeechSeq2Seq", inputs=lambda: {"input_features": torch.randn(8, 20, 8), "decoder_input_ids": tokens(8)}),
    model_trial("patchtsmixer", {"d_model": 24, "num_layers": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2}, "encoder.mlp_mixer_encoder.mixers.*", auto="AutoModel", inputs=lambda: {"past_values": torch.randn(24, 32, 2)}),
    model_trial("modernbert-decoder", {**BERT, "local_attention": 8, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}, "model.layers.*"),
    model_trial("opt", {**BERT, "ffn_dim": 40, "word_embed_proj_dim": 12, "do_layer_norm_before": False}, "model.decoder.layers.*", title="opt, as the 350m model"),
    model_trial("deberta", {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "encoder.layer.*", auto="AutoModel"),
    model_trial("bert", {**BERT, "is_decoder": True}, "bert.encoder.layer.*", title="bert decoder"),
    model_trial("roberta-prelayernorm", {**BERT, "pad_token_id": 1}, "encoder.layer.*", auto="AutoModel"),
    model_trial("xmod", {**BERT, "pad_token_id": 1, "languages": ["en"], "default_language": "en"}, "encoder.layer.*", auto="AutoModel"),
    model_trial("gpt_neox_japanese", {**LLAMA}, "gpt_neox_japanese.layers.*"),
    model_trial("cvt", {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, rejection=STAGES, auto="AutoModel", inputs=partial(pixels, 32)),
    model_trial("bit", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_groups": 2}, rejection=STAGES, auto="AutoModel", inputs=partial(pixels, 32)),
    model_trial("levit", {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [2, 2, 2], "key_dim": [8, 8, 8]}, rejection=STAGES, auto="AutoModel", inputs=partial(pixels, 64)),
    model_trial("mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}, title="mixtral with router logits"),
    model_trial("gpt2", {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2, "output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}, "transformer.h.*", title="gpt2 with all outputs"),
    model_trial("gpt2", {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3, "pad_token_id": 0}, "transformer.h.*", auto="AutoModelForSequenceClassification", title="gpt2 classifier"),
    model_trial("llama", LLAMA, "transformer.layers.*", auto="AutoModelForQuestionAnswering", title="llama QA"),
)  # fmt: skip
