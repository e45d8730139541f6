"""Tests of designs: published numbers of parameters, narrow models, and errors for what cannot be built."""

import json
import math

import pytest
import torch

import workbench as wb
from tests.about import about, says
from workbench.errors import CheckpointError, OptionError
from workbench.models.anatomy import read_anatomy
from workbench.scaling.designs import design
from workbench.scaling.known_designs import ALIASES, KNOWN

#: Numbers of parameters of the published checkpoints, with tied parameters counted once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "mamba-130m": 129_135_360,
    "mamba-370m": 371_516_416,
    "mamba-790m": 793_204_224,
    "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "phi-3-mini": 3_821_079_552,
    "olmo-2-7b": 7_298_617_344,
    "gpt-neox-20b": 20_554_567_680,
    "gemma-2-2b": 2_614_341_888,
    "deepseek-v2-lite": 15_706_484_224,
    "falcon-7b": 6_921_720_704,
    "mamba2-130m": 128_989_632,
    "mamba2-2.7b": 2_702_599_680,
    "bert-base": 109_514_298,
    "modernbert-base": 149_655_232,
    "t5-base": 222_903_552,
    "vit-b-16": 86_567_656,
}


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.medium
def test_every_known_design_has_its_published_number_of_parameters():
    assert set(PUBLISHED) == set(KNOWN)
    assert {name: design(name).n_weights() for name in KNOWN} == PUBLISHED


def test_aliases_are_those_of_known_designs():
    assert set(ALIASES.values()) <= set(KNOWN)
    assert design("EleutherAI/pythia-160m").describe() == design("pythia-160m").describe()
    assert design("state-spaces/mamba-130m-hf").width == 768
    assert design("TinyLlama").depth == 22


@pytest.mark.parametrize(
    "name", ["gpt2", "pythia-160m", "llama-2-7b", "llama-3-8b", "mixtral-8x7b", "qwen2.5-0.5b", "mamba-130m"]
)
def test_a_narrow_model_runs_and_has_the_requested_size(name):
    of = design(name)
    width = of.nearest_width(64)
    state = torch.get_rng_state()
    model = of.build(width, 3, seed=1, vocabulary=32)
    assert torch.equal(torch.get_rng_state(), state)
    anatomy = read_anatomy(model, torch.arange(8)[None])
    assert (anatomy.width, len(anatomy.sites)) == (width, 3)
    assert model(torch.arange(8)[None]).logits.shape == (1, 8, 32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert of.n_weights(width, 3, vocabulary=32) == sum(p.numel() for p in model.parameters())
    assert same(model, of.build(width, 3, seed=1, vocabulary=32))
    assert not same(model, of.build(width, 3, seed=2, vocabulary=32))


@pytest.mark.medium
def test_a_narrow_model_keeps_head_width_ratios_and_experts():
    config = design("mixtral-8x7b").build(512, 2, vocabulary=16).config  # heads of 128, one key-value head for four
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (4, 1, 1792)
    assert (config.num_local_experts, config.num_experts_per_tok) == (8, 2)
    config = design("gpt2").build(128, 2, vocabulary=16).config
    assert (config.n_head, config.n_embd // config.n_head, config.vocab_size) == (2, 64, 16)
    config = design("mamba-130m").build(64, 2, vocabulary=16).config
    assert (config.time_step_rank, config.state_size) == (4, 16)
    mixer = design("mamba-130m").build(64, 2, vocabulary=16).backbone.layers[0].mixer
    assert mixer.in_proj.weight.shape == (2 * 2 * 64, 64)


def test_narrow_models_of_the_zoo_keep_head_width_and_ratios():
    options = {"d_model": 256, "n_heads": 8, "n_kv_heads": 2, "n_layers": 4, "mlp_width": 640, "vocab_size": 64}
    of = design({"family": "moe", **options})
    narrow = of.build(64, 2, seed=5).config
    assert (narrow.n_heads, narrow.n_kv_heads, narrow.mlp_width, narrow.n_layers, narrow.n_experts) == (2, 1, 160, 2, 8)
    assert (of.width, of.depth, of.vocabulary) == (256, 4, 64)
    full = of.build(seed=5)
    assert same(full, wb.zoo.moe(**options, seed=5))
    assert of.n_weights() == sum(p.numel() for p in full.parameters())


def test_below_one_head_there_is_one_narrower_head():
    of = design({"d_model": 256, "n_heads": 4})
    assert [of.nearest_width(w) for w in (1, 8, 30, 64, 96, 97, 200)] == [8, 8, 32, 64, 64, 128, 192]
    assert of.build(32, 1).config.n_heads == 1
    with pytest.raises(OptionError, check=says("pre_ln transformer cannot have a width of")):
        of.build(100)


def test_the_number_of_heads_is_a_multiple_of_their_parts():
    of = design({"model_type": "codegen", "n_embd": 512, "n_layer": 2, "n_head": 8, "rotary_dim": 32})
    assert [of.nearest_width(w) for w in (1, 64, 300, 500)] == [256, 256, 256, 512]
    assert of.build(256, vocabulary=16)(torch.arange(8)[None]).logits.shape == (1, 8, 16)


def test_configurations_models_folders_and_files_are_equivalent(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=32,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    of = [
        design(config),
        design(tmp_path),
        design(tmp_path / "config.json"),
        design(transformers.LlamaForCausalLM(config)),
    ]
    models = [one.build(32, 3, seed=4) for one in of]
    assert all(same(models[0], other) for other in models[1:])
    assert models[0].lm_head.weight.dtype == torch.float32
    assert of[1].name == tmp_path.name
    assert config.hidden_size == 64  # not changed


def test_a_checkpoint_of_the_zoo_is_a_design():
    folder = wb.samples.embedded("pre_ln")
    options = json.loads((folder / "config.json").read_text())
    of = design(folder)
    assert (of.name, of.width, of.depth) == ("pre_ln", options["d_model"], options["n_layers"])
    subject = wb.open_checkpoint(folder)
    assert design(subject).describe() | {"name": ""} == of.describe() | {"name": ""}
    assert not same(of.build(), subject.model)  # initial, not trained, parameters


def make(width, depth, seed):
    return wb.zoo.transformer(d_model=width, n_layers=depth, n_heads=1, vocab_size=16, seed=seed)


def test_a_function_is_a_design_of_the_given_size():
    of = design(make, width=64, depth=2)
    assert (of.name, of.width, of.depth, of.vocabulary) == ("make", 64, 2, None)
    assert same(of.build(seed=3), make(64, 2, 3))
    assert of.build(16, 1).config.n_layers == 1
    assert of.n_weights() == sum(p.numel() for p in make(64, 2, 0).parameters())
    assert of.nearest_width(17) == 17
    with pytest.raises(OptionError, check=says("A function has no target size; pass wb.design(..., width=,")):
        design(make)


@pytest.mark.parametrize(
    ("source", "error", "name"),
    [
        ("gpt2-xxl", CheckpointError, "gpt2-xxl"),
        ({"family": "transformer", "n_head": 4}, OptionError, "n_head"),
        ({"model_type": "no such"}, OptionError, "model_type"),
        (3, OptionError, "source"),
        (torch.nn.Linear(2, 2), OptionError, "Linear"),
    ],
)
def test_invalid_sources_are_rejected(source, error, name):
    with pytest.raises(error, check=about(name)):
        design(source)


def test_damaged_files_and_empty_folders_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, check=about("config.json", tmp_path / "config.json")):
        design(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, check=about("config.json", tmp_path / "config.json")):
        design(tmp_path)


def test_a_configuration_file_of_transformers_may_contain_infinity(tmp_path):
    import transformers

    transformers.AutoConfig.for_model("mamba2").save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert wb.design(tmp_path).source.config.time_step_limit[1] == math.inf
