"""Tests of narrow models of published designs: their dimensions in each family, and errors."""

import math

import pytest
import torch

from tests.about import about, says
from tests.models.model_families import BY_NAME, FAMILIES
from workbench.errors import OptionError
from workbench.scaling.design_sources import LARGEST_CHUNK
from workbench.scaling.designs import design, matched_width
from workbench.scaling.transformers_source import misfit


def narrow(name, width=64, depth=4, **options):
    """Return a published design and a narrow model of it."""
    of = design(name, **options)
    return of, of.build(of.nearest_width(width), min(depth, of.depth), vocabulary=32)


def n_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_is_built_at_two_sizes(family):
    import transformers

    of = design(transformers.AutoConfig.for_model(family.name, **family.config))
    for width, depth in ((12, 2), (48, 4)):
        width = of.nearest_width(width)
        model = of.build(width, depth, vocabulary=32)
        assert model.config.hidden_size == width
        assert any(width in parameter.shape for parameter in model.parameters())
        assert of.n_weights(width, depth, vocabulary=32) == n_parameters(model)


def test_falcon_has_heads_of_64_and_an_mlp_of_four_times_the_width():
    of, model = narrow("falcon-7b", 128)
    assert (of.width, of.depth, of.source.width_per_head) == (4544, 32, 64)
    config, block = model.config, model.transformer.h[0]
    assert (config.num_attention_heads, config.head_dim, config.ffn_hidden_size) == (2, 64, 512)
    assert block.mlp.dense_h_to_4h.weight.shape == (512, 128)
    config = of.build(16, 2, vocabulary=32).config  # Falcon derives the width of the single narrower head itself.
    assert (config.num_attention_heads, config.head_dim) == (1, 16)


def test_mamba_2_keeps_its_state_and_the_width_of_its_heads():
    of, model = narrow("mamba2-2.7b")
    config, mixer = model.config, model.backbone.layers[0].mixer
    assert (of.width, of.depth) == (2560, 64)
    assert (config.num_heads, config.head_dim, config.n_groups, config.state_size) == (2, 64, 1, 128)
    assert config.num_heads * config.head_dim == config.expand * config.hidden_size
    assert mixer.in_proj.weight.shape == (2 * 128 + 2 * 128 + 2, 64)
    config = of.build(of.nearest_width(16), 2, vocabulary=32).config
    assert config.num_heads * config.head_dim == 2 * 16


def test_groups_of_a_state_space_model_divide_its_heads():
    import transformers

    codestral = transformers.Mamba2Config(
        hidden_size=4096, num_heads=128, head_dim=64, n_groups=8, vocab_size=32, num_hidden_layers=64
    )
    for width in (32, 64, 512, 1024):
        config = design(codestral).source.at(width, 2, None)
        assert config.num_heads % config.n_groups == 0
    assert (config.num_heads, config.n_groups) == (32, 2)  # 16 heads per group, unchanged


def test_chunk_sizes_of_a_scan_do_not_change_the_result():
    import transformers

    options = {
        "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 32, "n_groups": 1,
        "state_size": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    tokens = torch.randint(32, (2, 3 * LARGEST_CHUNK - 5), generator=torch.Generator().manual_seed(0))
    logits = []
    for chunk in (LARGEST_CHUNK, 256):
        torch.manual_seed(0)
        model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**options, chunk_size=chunk)).eval()
        with torch.no_grad():
            logits.append(model(tokens).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert narrow("mamba2-130m")[1].config.chunk_size == LARGEST_CHUNK


def test_both_stacks_of_an_encoder_decoder_model_are_resized():
    of, model = narrow("t5-base")
    assert (len(model.encoder.block), len(model.decoder.block)) == (4, 4)
    assert model.encoder.block[0].layer[1].DenseReluDense.wi.weight.shape == (256, 64)
    assert (of.width, of.depth) == (768, 12)
    import transformers

    unequal = transformers.WhisperConfig(
        d_model=64, encoder_layers=8, decoder_layers=2, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=32,
        encoder_attention_heads=4, decoder_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    of = design(unequal)
    assert of.depth == 2
    model = of.build(32, 4)
    assert (len(model.model.encoder.layers), len(model.model.decoder.layers)) == (16, 4)
    assert {model.config.encoder_attention_heads, model.config.decoder_attention_heads} == {2}


def test_deepseek_keeps_its_experts_and_has_proportional_ranks():
    _, model = narrow("deepseek-v2-lite")
    config, blocks = model.config, model.model.layers
    assert (config.n_routed_experts, config.num_experts_per_tok, config.kv_lora_rank) == (64, 6, 16)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (64, 32, 64)
    assert (config.qk_head_dim, config.moe_intermediate_size) == (96, 48)
    has_experts = [hasattr(block.mlp, "experts") for block in blocks]
    assert has_experts == [False, True, True, True]
    assert blocks[0].self_attn.kv_a_proj_with_mqa.weight.shape == (16 + 32, 64)


def test_a_shallow_model_has_blocks_of_all_kinds():
    import transformers

    jamba = transformers.JambaConfig(vocab_size=32)
    kinds = design(jamba).source.at(128, 4, None).layers_block_type
    assert kinds == ["mamba", "mamba", "mamba", "attention"]
    gemma3 = transformers.Gemma3TextConfig(num_hidden_layers=26, vocab_size=32)
    assert set(design(gemma3).source.at(256, 4, None).layer_types) == set(gemma3.layer_types)
    assert design(gemma3).source.at(256, 26, None).layer_types == gemma3.layer_types
    v3 = transformers.DeepseekV3Config(vocab_size=32)  # 3 of its 61 blocks have no experts
    assert [design(v3).source.at(112, depth, None).first_k_dense_replace for depth in (2, 30, 61)] == [1, 1, 3]


def test_options_that_depend_on_the_width_of_a_head_are_resized():
    config = narrow("gemma-2-2b")[1].config  # width 2,304 with 8 heads of width 256: one head of 2/9 of its width
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (1, 1, 56)
    assert config.query_pre_attn_scalar == config.head_dim
    config = narrow("gpt-oss-20b")[1].config  # heads of width 64 at any width
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (64, 1, 64)
    import transformers

    long = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": list(range(1, 49)), "short_factor": [1.0] * 48}
    phi = transformers.Phi3Config(vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                  original_max_position_embeddings=4096, rope_parameters=long)  # fmt: skip
    model = design(phi).build(64, 2)
    assert len(model.config.rope_parameters["long_factor"]) == 32
    assert model(torch.arange(6)[None]).logits.shape == (1, 6, 32)


def test_rotated_parts_of_narrow_heads_are_even():
    import transformers

    phi2 = transformers.PhiConfig(hidden_size=2560, num_attention_heads=32, partial_rotary_factor=0.4, vocab_size=32,
                                  pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    of = design(phi2)
    assert of.nearest_width(64) == 56  # with 64 features, 25.6 would be rotated
    assert of.build(56, 2)(torch.arange(6)[None]).logits.shape == (1, 6, 32)


def test_quantization_and_an_architecture_of_another_kind_are_ignored():
    options = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32,
        "num_attention_heads": 4, "quantization_config": {"quant_method": "fp8"}, "architectures": "GPT2LMHeadModel",
    }  # fmt: skip
    model = design(options).build(32, 2)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bert", "BertLMHeadModel"), ("vit", "ViTForImageClassification"), ("t5", "T5ForConditionalGeneration")],
)
def test_a_model_without_a_head_receives_one(name, kind):
    import transformers

    config = transformers.AutoConfig.for_model(name, **BY_NAME[name].config)
    assert type(design(config).build()).__name__ == kind
    config.architectures = [kind.split("For")[0].removesuffix("LMHeadModel") + "Model"]
    assert type(design(config).build()).__name__ == kind


def test_configurations_of_parts_and_stages_are_rejected():
    import transformers

    with pytest.raises(OptionError, match=r"several parts \(vision_config, text_config\).*such as its text_config"):
        design(transformers.CLIPConfig())
    with pytest.raises(OptionError, check=says("SwinConfig describes blocks of several widths, but a design")):
        design(transformers.SwinConfig())
    with pytest.raises(OptionError, check=says("ResNetConfig has no hidden_size, so it is no stack")):
        design(transformers.ResNetConfig())
    assert design(transformers.CLIPConfig().text_config.__class__(vocab_size=32)).width == 512


def test_errors_of_transformers_are_quoted_in_one_sentence():
    import transformers

    invalid = transformers.LlamaConfig(vocab_size=32, rope_parameters={"rope_type": "no such", "rope_theta": 1e4})
    with pytest.raises(
        OptionError,
        match="KeyError: 'no such'",
        check=says("choose another size, or pass a function(width, depth, seed)"),
    ):
        design(invalid).build(128, 2)
    funnel = transformers.FunnelConfig(vocab_size=32)
    with pytest.raises(
        OptionError,
        match="does not support the setting of `num_hidden_layers`",
        check=says("NotImplementedError: This model does not support the"),
    ):
        design(funnel).build(64, 4)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"model_type": "llama", "hidden_size": "wide"}, "Field 'hidden_size' expected int, got str"),
        ({"model_type": "llama", "vocab_size": None}, "Field 'vocab_size' expected int, got NoneType"),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}, "is not a multiple of the number of"),
        ({"model_type": "mamba2", "hidden_size": 64}, r"hidden_size \* expand \(128\) must equal num_heads"),
        ({"model_type": "RefinedWebModel"}, "no architecture 'RefinedWebModel'"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 64}, "has no model_type"),
    ],
)
def test_invalid_options_are_rejected_in_one_sentence(options, cause):
    with pytest.raises(OptionError, match=cause, check=about("model_type", options.get("model_type"))) as error:
        design(options)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_dimensions_that_were_not_resized_are_found():
    target = {f"layers.{i}.{name}.weight": shape for i in range(8) for name, shape in
              {"up": (4096, 1024), "down": (1024, 4096), "norm": (1024,)}.items()}  # fmt: skip
    right = {name: tuple(n // 16 for n in shape) for name, shape in target.items() if int(name.split(".")[1]) < 4}
    assert not misfit(right, target, (64, 4), (1024, 8))
    forgotten = right | {"layers.1.up.weight": (4096, 64)}
    assert misfit(forgotten, target, (64, 4), (1024, 8)) == "layers.1.up.weight still has a width of 4096"
    wide = {name: (256, *shape[1:]) if "up" in name else shape for name, shape in right.items()}
    assert not misfit(wide, target, (64, 4), (1024, 8))
    thick = right | {f"layers.{i}.up.weight": (4000, 64) for i in range(4)}
    assert "8.3 times as many parameters as that width needs" in misfit(thick, target, (64, 4), (1024, 8))
    deep = {name: tuple(n // 16 for n in shape) for name, shape in target.items()}
    assert misfit(deep, target, (64, 4), (1024, 8)) == "layers still has 8 blocks"
    assert misfit(right, target, (96, 4), (1024, 8)) == "no parameter of its blocks has that width"


def test_fan_ins_of_the_design_are_those_of_its_target_width():
    import transformers

    config = transformers.DeepseekV3Config(
        hidden_size=512, num_attention_heads=8, num_hidden_layers=2, kv_lora_rank=128, q_lora_rank=96, vocab_size=32,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, intermediate_size=1024, moe_intermediate_size=64,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    of = design(config)
    unmodified, matched = (model.model.layers[1].self_attn.kv_b_proj.weight for model in (
        of.build(16, 2), matched_width(of, 16)))  # fmt: skip
    # The rank of 128 is reduced to 8, the minimum, and not to 4: the fan-in must be read from the target.
    assert unmodified.shape[1] == 8
    torch.testing.assert_close(matched, unmodified * math.sqrt(128 / 8))
