"""The measured model of a subject: the subject itself, a model of its design at full size, or a proxy model."""

import json

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about, says
from workbench.assessment.measured_model import (
    IMAGE_SIZE,
    LENGTH,
    LENGTH_OF_SCANS,
    PROXY_WIDTH,
    flops_per_token,
    measured_model,
    planned_task,
    steps_in_budget,
)
from workbench.assessment.plan_trials import rate_pilot, try_plan
from workbench.errors import OptionError

SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16}


def test_small_designs_are_measured_at_full_size_and_large_ones_as_proxies():
    small = measured_model({"family": "transformer", **SIZE})
    assert small.is_target_size
    assert not small.is_own
    large = measured_model("gpt2")
    assert (large.width, large.depth) == (PROXY_WIDTH, 4)
    assert (large.target_width, large.target_depth) == (768, 12)
    assert 1.2e8 < large.n_weights < 1.3e8
    assert len(list(small.siblings(3))) == 3
    assert list(measured_model(small.model).siblings(3)) == [small.model]


def test_fresh_proxy_models_have_the_variances_of_the_full_width():
    found = measured_model("gpt2")
    plain, fresh = (model.transformer.h[0].mlp.c_fc.weight for model in (found.model, found.fresh()))
    torch.testing.assert_close(fresh, plain * (768 / PROXY_WIDTH) ** 0.5)
    deep = found.fresh(seed=1, depth=12)
    assert len(deep.transformer.h) == 12
    assert not torch.equal(deep.transformer.h[0].mlp.c_fc.weight, fresh)


def test_a_subject_with_its_own_parameters_is_measured_itself():
    model = wb.zoo.transformer(**SIZE)
    found = measured_model(model)
    assert found.fresh() is model
    full = measured_model({"family": "transformer", **SIZE})
    assert full.fresh() is full.model
    assert not torch.equal(next(full.fresh(1).parameters()), next(full.model.parameters()))


def test_models_that_scan_their_tokens_read_shorter_sequences():
    import transformers

    plan = wb.hardware.read_plan({})
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=2, vocab_size=32)
    )
    other = wb.zoo.transformer(**SIZE | {"max_length": 128})
    lengths = [next(iter(planned_task(model, plan, seed=0).stream(0)))[0].shape[1] for model in (mamba, other)]
    assert lengths == [LENGTH_OF_SCANS, LENGTH]


PLAN = wb.hardware.read_plan({})
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8}


def test_models_of_color_images_receive_digits_in_their_channels_and_size():
    import transformers

    for options, shape in (
        ({"image_size": 16, "num_channels": 3}, (16, 3, 16, 16)),
        ({"image_size": [64, 64], "num_channels": 2}, (16, 2, 64, 64)),
        ({"image_size": 224, "patch_size": 16, "num_channels": 3}, (5, 3, 224, 224)),  # 196 patches each
    ):
        found = measured_model(transformers.ViTConfig(**VIT | options))
        task = planned_task(found.model, PLAN, seed=0)
        images, targets = next(iter(task.stream(0)))
        assert tuple(images.shape) == shape
        assert torch.equal(images[:, 0], images[:, -1])
        assert found.model(images).logits.shape == (len(targets), task.n_classes)
        assert found.n_weights == sum(weight.numel() for weight in found.model.parameters())
        assert not torch.equal(next(iter(found.fresh(1).parameters())), next(iter(found.model.parameters())))


def test_a_large_image_model_is_measured_as_a_proxy():
    found = measured_model("vit-b-16")
    assert (found.width, found.depth, found.target_width, found.target_depth) == (PROXY_WIDTH, 4, 768, 12)
    assert found.n_weights == 86_567_656
    task = planned_task(found.model, PLAN, seed=0)
    assert found.fresh(depth=2)(task.probe(2)).logits.shape[1] == task.n_classes


def test_an_encoder_decoder_reads_half_as_many_examples():
    import transformers

    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    found = measured_model(config)
    assert next(iter(planned_task(found.model, PLAN, seed=0).stream(0)))[0].shape == (8, LENGTH)


def speech_model():
    import transformers

    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return transformers.WhisperConfig(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, **sizes, **tokens)


def odd_images():
    import transformers

    return transformers.ViTConfig(**VIT | {"image_size": 20, "patch_size": 10})


def bare_model():
    import transformers

    return transformers.BertModel(transformers.BertConfig(vocab_size=64, **{**VIT, "patch_size": None}))


def with_classes(n):
    import transformers

    return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, image_size=16, num_labels=n))


def one_class():
    return with_classes(1)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (speech_model, "task", "input_features"),
        (odd_images, "task", 20),
        (bare_model, "loss", "a BaseModelOutputWithPoolingAndCrossAttentions"),
        (one_class, "task", (2,)),
    ],
)
def test_a_model_without_a_default_task_is_rejected_before_the_first_measurement(make, name, value):
    found = measured_model(make())
    with pytest.raises(OptionError, check=about(name, value)):
        planned_task(found.model, PLAN, seed=0)


def test_a_model_of_images_of_any_size_receives_small_ones():
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    task = planned_task(transformers.ResNetForImageClassification(config), PLAN, seed=0)
    assert tuple(task.batch(0)[0].shape[1:]) == (3, IMAGE_SIZE, IMAGE_SIZE)


def test_a_configuration_of_stages_is_built_at_full_size_if_it_is_small(monkeypatch):
    import transformers

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(**sizes)
    found = measured_model({"model_type": "resnet", **sizes})
    assert (found.name, found.design, found.is_own) == ("resnet", None, False)
    weights = [measured_model(config, seed=seed).model.state_dict() for seed in (0, 0, 1)]
    name = next(name for name in weights[0] if name.endswith("convolution.weight"))
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])
    with pytest.raises(OptionError, check=says("ResNetConfig has no hidden_size, so it is no stack")):
        measured_model(config, width=64)
    monkeypatch.setattr("workbench.assessment.measured_model.MAX_PARAMETERS_OF_STAGES", 10)
    with pytest.raises(OptionError, check=says("ResNetConfig has no hidden_size, so it is no stack")):
        measured_model(config)


@pytest.mark.medium
@pytest.mark.parametrize(
    "kind", ["images", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("encoder and decoder", "state space"))]
)
def test_every_kind_of_small_design_is_assessed_to_the_end(kind, monkeypatch):
    """Pilot and trials run for a few updates only."""
    import transformers

    monkeypatch.setitem(try_plan.__kwdefaults__, "n_updates", 4)
    monkeypatch.setitem(try_plan.__kwdefaults__, "n_trials", 1)
    monkeypatch.setitem(rate_pilot.__kwdefaults__, "budget", 200)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = {
        "images": lambda: transformers.ViTConfig(**VIT, image_size=16),
        "encoder and decoder": lambda: transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
        ),
        "state space": lambda: transformers.Mamba2Config(
            vocab_size=64, hidden_size=16, num_heads=2, head_dim=16, state_size=4, n_groups=1, num_hidden_layers=2,
            chunk_size=8, **tokens,
        ),
    }[kind]()  # fmt: skip
    plan = {"training": {"learning_rate": 1e-3}, "hardware": {"data_parallel": 2, "gradient_dtype": "bf16"}}
    tree = wb.assess(config, plan=plan)
    assert tree.attrs["verdict"]
    assert tree.attrs["measured_depth"] == 2
    assert (json.loads(tree.attrs["task"])["task"] == "digits") == (kind == "images")


SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16}


def test_work_and_budget_follow_the_usual_count():
    plan = wb.hardware.read_plan({"training": {"batch_size": 32, "sequence_length": 16}, "budget": {"tokens": 51_200}})
    found = measured_model({"family": "transformer", **SIZE})
    n_weights = sum(weight.numel() for weight in found.model.parameters())
    assert flops_per_token(found, plan) == 6 * n_weights + 12 * 2 * 16 * 16
    assert steps_in_budget(plan, 1.0) == 100
    flops = wb.hardware.read_plan({"training": {"batch_size": 32, "sequence_length": 16}, "budget": {"flops": 512_000}})
    assert steps_in_budget(flops, 10.0) == 100
    assert np.isnan(steps_in_budget(wb.hardware.read_plan({}), 10.0))


def test_experts_that_a_token_does_not_use_have_no_cost():
    plan = wb.hardware.read_plan({})
    work = {
        top_k: flops_per_token(measured_model({"family": "moe", **SIZE, "n_experts": 4, "top_k": top_k}), plan)
        for top_k in (1, 2, 4)
    }
    assert work[1] < work[2] < work[4]
    assert work[4] - work[2] == pytest.approx(2 * (work[2] - work[1]), rel=1e-3)
