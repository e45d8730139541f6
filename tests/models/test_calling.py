"""Attention in opaque kernels is measured through another implementation of the model, and options are restored."""

import sys

import numpy as np
import pytest
import torch
import torch._dynamo  # (else transformers compiles flex attention in the first pass, which takes long)
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import workbench as wb
from tests.models.model_families import BY_NAME, build, make_inputs
from workbench.flow.flow_measurement import measure
from workbench.flow.gains import eager_options
from workbench.models.anatomy import read_anatomy
from workbench.models.block_hooks import BlockHooks
from workbench.models.calling import config_options, visible_attention
from workbench.monitors.attention_calls import BlockCalls, BlockNotes
from workbench.monitors.probe_pass import ModelProbe

FAMILIES = ("llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "gpt_oss")
#: Families that cap their logits or have sinks.
WITHOUT_SDPA = ("gemma2", "gpt_oss")
KERNEL = "tests/hidden-flash-attention"


def hidden(module, *args, **kwargs):
    """Compute the eager attention of a model, with no call visible to torch functions."""
    with torch._C.DisableTorchFunction():
        return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


@pytest.fixture
def kernel():
    AttentionInterface.register(KERNEL, hidden)
    AttentionMaskInterface.register(KERNEL, eager_mask)
    yield KERNEL
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        del interface._global_mapping[KERNEL]


def sharp(name):
    """Return a model whose attention is not uniform, and its inputs."""
    family = BY_NAME[name]
    model = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model, make_inputs(family)


def probe(model, inputs):
    return ModelProbe(model, read_anatomy(model, inputs), inputs, routers=())


def use(model, implementation):
    model.config._attn_implementation = implementation


def entropies(model, inputs):
    """Compute entropies from the attention weights that the model returns; the rest to a sum of 1 is on a sink."""
    use(model, "eager")
    with torch.no_grad():
        found = model(inputs, output_attentions=True).attentions
    sinks = [(1 - p.double().sum(-1, keepdim=True)).clamp_min(0) for p in found]
    weights = [torch.cat([p.double(), s * (s > 1e-6)], -1) for p, s in zip(found, sinks, strict=True)]
    return np.array([torch.special.entr(p).sum(-1).mean((0, 2)).numpy() for p in weights])


@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_attention_is_measured(name, kernel):
    model, inputs = sharp(name)
    use(model, "eager")
    eager, weights = probe(model, inputs).take(), wb.query_key_weights(model, inputs)
    expected = entropies(model, inputs)
    use(model, kernel)
    with torch.no_grad():
        logits = model(inputs).logits
    hidden_probe = probe(model, inputs)
    taken = hidden_probe.take()
    assert hidden_probe.unreadable == []
    np.testing.assert_allclose(taken["attention"]["attention_entropy"], expected, rtol=1e-5)
    for measure_name, values in eager["attention"].items():
        np.testing.assert_allclose(taken["attention"][measure_name], values, rtol=1e-4, atol=1e-6)
    for measure_name, values in eager["activations"].items():  # measured with the model's own kernel
        np.testing.assert_array_equal(taken["activations"][measure_name], values)
    for one, other in zip(wb.query_key_weights(model, inputs), weights, strict=True):
        assert torch.equal(one.query, other.query)
    assert model.config._attn_implementation == kernel
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, logits)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, "eager") for name in FAMILIES] + [(name, "sdpa") for name in FAMILIES if name not in WITHOUT_SDPA],
)
def test_training_is_bitwise_identical_with_measurements(name, implementation):
    def gradients(*, is_watched):
        model, inputs = sharp(name)
        use(model, implementation)
        calls, seen = BlockCalls(), []
        sites = read_anatomy(model, inputs).sites
        model.train()

        def enter(call):
            calls.block = BlockNotes(call.state_in.shape[:-1], None)
            seen.append(calls.block)

        def leave(call):
            calls.block = None

        torch.manual_seed(1)
        if is_watched:
            with BlockHooks(sites, enter, leave), calls:
                loss = model(inputs, labels=inputs).loss
            assert len(seen) == len(sites)
            assert all(torch.isfinite(notes.attention.entropy).all() for notes in seen)
        else:
            loss = model(inputs, labels=inputs).loss
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    for one, other in zip(gradients(is_watched=True), gradients(is_watched=False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.medium
def test_flow_of_flex_attention():
    """Flex attention has no backward pass on a CPU, and no second derivative."""
    model, inputs = sharp("llama")
    use(model, "sdpa")
    expected = measure(model, inputs[:1])
    use(model, "flex_attention")
    found = measure(model, inputs[:1])
    assert model.config._attn_implementation == "flex_attention"
    for name, variable in expected.data_vars.items():
        if variable.dtype.kind == "f":
            np.testing.assert_array_equal(found[name], variable)


def test_flex_attention_of_padded_sequences():
    model, tokens = sharp("llama")
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0

    def attention(implementation):
        use(model, implementation)
        return probe(model, {"input_ids": tokens, "attention_mask": mask}).take(["attention"])["attention"]

    expected = attention("sdpa")
    for name, values in attention("flex_attention").items():
        np.testing.assert_array_equal(values, expected[name])


@pytest.mark.medium
def test_largest_curvature_of_flex_attention():
    def largest(implementation):
        model, inputs = sharp("llama")
        use(model, implementation)
        return wb.monitors.sharpness(model, lambda m: m(inputs, labels=inputs).loss)

    assert largest("flex_attention") == largest("sdpa")


def names_of(model):
    return [name for _, _, name in visible_attention(model)]


def test_which_attention_is_replaced(kernel):
    llama, _ = sharp("llama")
    for name in ("sdpa", "eager", None, "paged|eager", "mine"):
        use(llama, name)
        assert visible_attention(llama) == []
    for name in ("flex_attention", "flash_attention_2", "kernels-community/flash-attn3", kernel):
        use(llama, name)
        assert names_of(llama) == ["sdpa"]
    for name in WITHOUT_SDPA:
        model, _ = sharp(name)
        use(model, "flash_attention_3")
        assert names_of(model) == ["eager"]
    gptj, _ = sharp("gptj")  # does not use the interface
    use(gptj, "flash_attention_2")
    assert visible_attention(gptj) == []
    assert visible_attention(nn.Linear(2, 2)) == []


def test_options_are_restored_after_errors():
    model, inputs = sharp("llama")
    other, _ = sharp("llama")
    for one in (model, other):
        use(one, "flex_attention")
    anatomy = read_anatomy(model, inputs)
    registered = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)
    seen = []

    def fail(*args):
        seen.append((model.config._attn_implementation, other.config._attn_implementation))
        if seen[-1][0] == "sdpa":
            raise RuntimeError("injected")

    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="injected"):
        ModelProbe(model, anatomy, inputs, routers=()).take(["attention"])
    assert seen == [("flex_attention", "flex_attention"), ("sdpa", "flex_attention")]
    assert model.config._attn_implementation == "flex_attention"
    assert (dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)) == registered


def test_nested_configs_are_restored():
    config = AutoConfig.for_model("qwen3_vl_moe")
    config._experts_implementation, config._attn_implementation = "grouped_mm", "flex_attention"
    config.text_config._attn_implementation = "flash_attention_2"

    def part(config, *inner):
        module = nn.Module()
        module.config, module.inner = config, nn.ModuleList(inner)
        module._supports_sdpa, module._can_set_attn_implementation = True, lambda: True
        return module

    model = part(config, part(config.text_config), part(config.vision_config))

    def options():
        return [
            (c._experts_implementation, c._attn_implementation)
            for c in (config, config.text_config, config.vision_config)
        ]

    before = options()
    with config_options(eager_options(model)):
        assert options() == [("eager", "sdpa")] * 3
        with config_options(eager_options(model)):
            pass
        assert options() == [("eager", "sdpa")] * 3
    assert options() == before
