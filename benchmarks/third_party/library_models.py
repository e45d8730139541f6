"""Trials of models of x-transformers, vit-pytorch and diffusers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.third_party.trial import Pairs, Trial, hooked

VOCABULARY, WIDTH = 97, 24


def perturbed(model: nn.Module) -> nn.Module:
    """Add noise to all parameters, so that no norm is the identity and no bias or branch is zero; set eval mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def tokens(n_rows: int = 16, n_tokens: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (n_rows, n_tokens))


# --- x-transformers --------------------------------------------------------------------------------------------------


def x_model(kind: str = "Decoder", **options: Any) -> tuple[nn.Module, Tensor]:
    import x_transformers

    wrapper = {
        name: options.pop(name) for name in ("num_memory_tokens", "use_abs_pos_emb", "num_tokens") if name in options
    }
    layers = getattr(x_transformers, kind)(dim=WIDTH, depth=3, heads=4, attn_dim_head=8, **options)
    model = x_transformers.TransformerWrapper(
        **{"num_tokens": VOCABULARY, **wrapper}, max_seq_len=32, attn_layers=layers
    )
    return perturbed(model), tokens()


def layer_hiddens(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Return the states before each branch and after the last one, as x-transformers itself records them."""
    return model(inputs, return_intermediates=True)[1].layer_hiddens


def with_merges(model: nn.Module, inputs: Tensor) -> Pairs:
    """Return the states before each branch, after the merge with an earlier state, and after the branch."""
    sums = hooked(model, inputs, "attn_layers.layers.*.2", WIDTH)
    return list(zip(layer_hiddens(model, inputs), (after for _, after in sums), strict=False))


def x_trial(name: str, n_blocks: int = 6, *, rejection: str = "", states: Any = layer_hiddens, **options: Any) -> Trial:
    return Trial(name, partial(x_model, **options), states, n_blocks, WIDTH, rejection, needs=("x_transformers",))


X_TRANSFORMERS = (
    x_trial("decoder"),
    x_trial("encoder", kind="Encoder"),
    x_trial("rmsnorm", use_rmsnorm=True),
    x_trial("simple rmsnorm", use_simple_rmsnorm=True),
    x_trial("scalenorm", use_scalenorm=True),
    x_trial("rotary", rotary_pos_emb=True),
    x_trial("alibi", alibi_pos_bias=True, alibi_num_heads=2),
    x_trial("relative positions (T5)", rel_pos_bias=True),
    x_trial("GLU with swish", ff_glu=True, ff_swish=True),
    x_trial("no bias in feed-forward", ff_no_bias=True),
    x_trial("macaron", 9, macaron=True),
    x_trial("sandwich of layers", 6, sandwich_coef=1),
    x_trial("sandwich norm", sandwich_norm=True),
    x_trial("post-norm", pre_norm=False),
    x_trial("scaled residual", scale_residual=True),
    x_trial("gated residual (GRU)", gate_residual=True, rejection="a GRU replaces the sum, so that the factors are not constant"),
    x_trial("residual attention", residual_attn=True),
    x_trial("one KV head", attn_one_kv_head=True),
    x_trial("grouped queries", attn_kv_heads=2),
    x_trial("QK norm", attn_qk_norm=True),
    x_trial("talking heads", attn_pre_talking_heads=True),
    x_trial("value residual", add_value_residual=True, learned_value_residual_mix=True),
    x_trial("memory tokens", num_memory_tokens=3),
    x_trial("shift tokens", shift_tokens=1),
    x_trial("zero-initialized branches", zero_init_branch_output=True),
    x_trial("layer dropout", layer_dropout=0.2),
    x_trial("U-Net skips", states=with_merges, unet_skips=True),
    x_trial("LayerScale", use_layerscale=True),
    x_trial("dynamic tanh", use_dynamic_tanh=True),
    x_trial("DeepNorm-like scaled init", ff_relu_squared=True),
    x_trial("hyper-connections", num_residual_streams=2, rejection="several streams are folded into the batch axis"),
    x_trial("LIMe", integrate_layers=True),
    x_trial("weight tying", 6, weight_tie_layers=True),
)  # fmt: skip


# --- vit-pytorch -----------------------------------------------------------------------------------------------------


def v_model(module: str, **options: Any) -> tuple[nn.Module, Tensor]:
    """Create a model of vit-pytorch without its ``__init__``, which imports torchvision; the models do not need it."""
    if "vit_pytorch" not in sys.modules:
        spec = importlib.util.find_spec("vit_pytorch")
        package = sys.modules["vit_pytorch"] = importlib.util.module_from_spec(spec)
        package.__path__ = list(spec.submodule_search_locations)
    cls = options.pop("cls", "ViT")
    base = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": WIDTH, "depth": 3, "heads": 4, "mlp_dim": 40}
    options = {name: value for name, value in {**base, **options}.items() if value is not None}
    return perturbed(getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)(**options)), torch.randn(
        16, 3, 16, 16
    )


def by_parts(layers: str = "transformer.layers", first: int = 0, last: int = 1) -> Callable[[nn.Module, Any], Pairs]:
    """Return a function that records the state entering the first branch of each layer and the sum after its last."""

    def states(model: nn.Module, inputs: Any) -> Pairs:
        entering = hooked(model, inputs, f"{layers}.*.{first}", WIDTH)
        ending = hooked(model, inputs, f"{layers}.*.{last}", WIDTH)
        return [(x, before + added) for (x, _), (before, added) in zip(entering, ending, strict=True)]

    return states


def v_trial(
    name: str, module: str, states: Any = None, *, n_blocks: int = 3, rejection: str = "", **options: Any
) -> Trial:
    return Trial(
        name,
        partial(v_model, module, **options),
        states or by_parts(),
        n_blocks,
        WIDTH,
        rejection,
        needs=("vit_pytorch",),
    )


VIT_PYTORCH = (
    v_trial("ViT", "vit"),
    v_trial("SimpleViT", "simple_vit", cls="SimpleViT"),
    v_trial("SimpleViT with registers", "simple_vit_with_register_tokens", cls="SimpleViT"),
    v_trial("SimpleViT with QK norm", "simple_vit_with_qk_norm", cls="SimpleViT"),
    v_trial("ViT for small data sets", "vit_for_small_dataset"),
    v_trial("DeepViT", "deepvit", cls="DeepViT"),
    v_trial("parallel ViT", "parallel_vit", num_parallel_branches=2),
    v_trial("CaiT", "cait", by_parts("patch_transformer.layers"), cls="CaiT", cls_depth=1),
    v_trial("patch dropout", "vit_with_patch_dropout", patch_dropout=0.1),
    v_trial("SimpleViT with value residual", "simple_vit_with_value_residual", cls="SimpleViT"),
    v_trial("U-ViT", "simple_uvit", by_parts(first=1, last=2), cls="SimpleUViT", depth=4, n_blocks=4),
    v_trial("SimpleViT with FFT", "simple_vit_with_fft", cls="SimpleViT", freq_patch_size=4),
    v_trial("SimpleViT with hyper-connections", "simple_vit_with_hyper_connections", cls="SimpleViT", num_residual_streams=2, rejection="several streams are folded into the batch axis"),
    v_trial("normalized ViT", "normalized_vit", cls="nViT", rejection="the loop normalizes each sum by token, so that the factors are not constant"),
)  # fmt: skip


# --- diffusers -------------------------------------------------------------------------------------------------------


def d_model(name: str, config: dict[str, Any], inputs: Callable[[], dict[str, Any]]) -> tuple[nn.Module, Any]:
    import diffusers

    return perturbed(getattr(diffusers, name)(**config)), inputs()


def d_trial(
    name: str, config: dict[str, Any], inputs: Callable[[], dict[str, Any]], states: Any = "transformer_blocks.*", *,
    n_blocks: int = 3, rejection: str = "", title: str = "", **options: Any,
) -> Trial:  # fmt: skip
    return Trial(
        title or name,
        partial(d_model, name, config, inputs),
        states,
        n_blocks,
        WIDTH,
        rejection,
        options,
        needs=("diffusers",),
    )


def latents(channels: int = 4, n_rows: int = 8, size: int = 8) -> Tensor:
    return torch.randn(n_rows, channels, size, size)


def text(width: int, n_tokens: int = 5, n_rows: int = 8) -> Tensor:
    return torch.randn(n_rows, n_tokens, width)


HEADS = {"num_attention_heads": 4, "attention_head_dim": 6}
TIMES = torch.arange(1, 9)
DIFFUSERS = (
    d_trial("DiTTransformer2DModel", {**HEADS, "in_channels": 4, "num_layers": 3, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_type": "ada_norm_zero", "norm_elementwise_affine": False}, lambda: {"hidden_states": latents(), "timestep": TIMES, "class_labels": torch.arange(8)}),
    d_trial("PixArtTransformer2DModel", {**HEADS, "in_channels": 4, "num_layers": 3, "sample_size": 8, "patch_size": 2, "cross_attention_dim": 24, "caption_channels": 16, "use_additional_conditions": False, "norm_type": "ada_norm_single"}, lambda: {"hidden_states": latents(), "timestep": TIMES, "encoder_hidden_states": text(16), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}),
    d_trial("SD3Transformer2DModel", {**HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 4, "joint_attention_dim": 16, "caption_projection_dim": 24, "pooled_projection_dim": 12, "pos_embed_max_size": 8}, lambda: {"hidden_states": latents(), "timestep": TIMES, "encoder_hidden_states": text(16), "pooled_projections": torch.randn(8, 12)}, rejection="it carries a stream of the image and a stream of the text"),
    d_trial("FluxTransformer2DModel", {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 3, "attention_head_dim": 12, "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 12, "axes_dims_rope": [4, 4, 4]}, lambda: {"hidden_states": torch.randn(8, 16, 4), "timestep": TIMES / 10, "encoder_hidden_states": text(16), "pooled_projections": torch.randn(8, 12), "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(5, 3)}, rejection="each block carries a stream of the image and a stream of the text"),
    d_trial("AuraFlowTransformer2DModel", {**HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 3, "joint_attention_dim": 16, "caption_projection_dim": 24, "pos_embed_max_size": 16}, lambda: {"hidden_states": latents(), "timestep": TIMES / 10, "encoder_hidden_states": text(16)}, "single_transformer_blocks.*"),
    d_trial("PriorTransformer", {**HEADS, "num_layers": 3, "embedding_dim": 16, "num_embeddings": 5, "additional_embeddings": 4}, lambda: {"hidden_states": torch.randn(8, 16), "timestep": TIMES, "proj_embedding": torch.randn(8, 16), "encoder_hidden_states": text(16)}),
    d_trial("CogVideoXTransformer3DModel", {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 3, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 5}, lambda: {"hidden_states": torch.randn(4, 2, 4, 8, 8), "timestep": TIMES[:4], "encoder_hidden_states": text(16, n_rows=4)}, rejection="it carries a stream of the video and a stream of the text"),
    d_trial("SanaTransformer2DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 6, "num_layers": 3, "num_cross_attention_heads": 4, "cross_attention_head_dim": 6, "cross_attention_dim": 24, "caption_channels": 16, "sample_size": 8, "patch_size": 1}, lambda: {"hidden_states": latents(n_rows=4), "timestep": TIMES[:4], "encoder_hidden_states": text(16, n_rows=4)}),
    d_trial("StableAudioDiTModel", {"sample_size": 16, "in_channels": 4, "num_layers": 3, "attention_head_dim": 6, "num_attention_heads": 4, "num_key_value_attention_heads": 2, "out_channels": 4, "cross_attention_dim": 24, "time_proj_dim": 16, "global_states_input_dim": 16, "cross_attention_input_dim": 16}, lambda: {"hidden_states": torch.randn(8, 4, 16), "timestep": TIMES, "encoder_hidden_states": text(16), "global_hidden_states": text(16, 1)}),
    d_trial("WanTransformer3DModel", {**HEADS, "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 40, "num_layers": 3, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}, lambda: {"hidden_states": torch.randn(4, 4, 2, 8, 8), "timestep": TIMES[:4], "encoder_hidden_states": text(16, n_rows=4)}, "blocks.*"),
    d_trial("Lumina2Transformer2DModel", {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 3, "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 8, "scaling_factor": 1.0, "axes_dim_rope": (4, 2, 2), "axes_lens": (32, 32, 32), "cap_feat_dim": 16}, lambda: {"hidden_states": latents(), "timestep": TIMES / 10, "encoder_hidden_states": text(16), "encoder_attention_mask": torch.ones(8, 5, dtype=torch.bool)}, "layers.*"),
    d_trial("LTXVideoTransformer3DModel", {**HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 24, "num_layers": 3, "caption_channels": 16, "qk_norm": "rms_norm_across_heads"}, lambda: {"hidden_states": torch.randn(4, 16, 4), "timestep": TIMES[:4], "encoder_hidden_states": text(16, n_rows=4), "encoder_attention_mask": torch.ones(4, 5, dtype=torch.bool), "num_frames": 1, "height": 4, "width": 4}),
    d_trial("UNet2DConditionModel", {"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16, "attention_head_dim": 4, "norm_num_groups": 4}, lambda: {"sample": latents(), "timestep": TIMES, "encoder_hidden_states": text(16)}, rejection="a U-Net whose stages have different widths"),
    d_trial("AutoencoderKL", {"block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4, "latent_channels": 4}, lambda: {"sample": latents(3, size=16)}, rejection="a convolutional autoencoder whose stages have different widths"),
)  # fmt: skip
