"""Router weights of mixture-of-experts models, compared with the parameters that each family documents."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models.model_families import BY_NAME, FAMILIES_BY_TIER, Family, build, make_inputs
from workbench.models.anatomy import read_anatomy
from workbench.models.attention_weights import Unreadable
from workbench.models.router_weights import Router, router_weights

#: family -> path of the router in a block, layers that have one, experts, experts per token, scoring, is corrected.
ROUTERS = {
    "mixtral": ("mlp.gate", (0, 1, 2), 6, 2, "softmax", False),
    "qwen2_moe": ("mlp.gate", (0, 1, 2), 6, 2, "softmax", False),
    "qwen3_moe": ("mlp.gate", (0, 1, 2), 6, 2, "softmax", False),
    "qwen3_next": ("mlp.gate", (0, 1, 2), 6, 2, "softmax", False),
    "olmoe": ("mlp.gate", (0, 1, 2), 6, 2, "softmax", False),
    "gpt_oss": ("mlp.router", (0, 1, 2), 6, 2, "logits", False),
    "granitemoe": ("block_sparse_moe.router", (0, 1, 2), 6, 2, "logits", False),
    "phimoe": ("mlp.router", (0, 1, 2), 6, 2, "logits", True),
    "jamba": ("feed_forward.router", (1,), 6, 2, "softmax", False),
    "deepseek_v3": ("mlp.gate", (1, 2), 8, 2, "sigmoid", True),
    "llama4_text": ("feed_forward.router", (0, 1, 2), 4, 1, "logits", False),
    "nemotron_h": ("mixer.gate", (2,), 4, 2, "sigmoid", False),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_family(name):
    path, layers, n_experts, top_k, scoring, is_corrected = ROUTERS[name]
    family = BY_NAME[name]
    model, inputs = build(family), make_inputs(family)
    anatomy = read_anatomy(model, inputs)
    routers = router_weights(model, inputs, anatomy=anatomy)
    assert [router.layer for router in routers] == list(layers)
    for router in routers:
        site = anatomy.sites[router.layer]
        module = site.module.get_submodule(path)
        assert router.name == f"{site.name}.{path}.weight"
        assert torch.equal(router.weight, module.weight)
        assert (router.n_experts, router.top_k) == (n_experts, top_k)
        assert (router.scoring, router.is_corrected) == (scoring, is_corrected)
        bias = getattr(module, "bias", None)
        assert (router.bias is None) == (bias is None)
        assert bias is None or torch.equal(router.bias, bias)


@pytest.mark.parametrize("family", [f for f in FAMILIES_BY_TIER if f.values[0].name not in ROUTERS], ids=str)
def test_dense_families_have_none(family):
    assert router_weights(build(family), make_inputs(family)) == []


def test_one_expert_per_token_by_maximum():
    config = {"vocab_size": 97, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_heads": 4, "num_experts": 4}
    layers = {"num_layers": 3, "num_decoder_layers": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    options = {**config, **layers, "decoder_start_token_id": 0}
    family = Family("switch_transformers", options, "", auto="AutoModelForSeq2SeqLM")
    routers = router_weights(build(family), make_inputs(family))
    assert [(r.layer, r.n_experts, r.top_k) for r in routers] == [(1, 4, 1)]
    assert routers[0].name == "decoder.block.1.layer.2.mlp.router.classifier.weight"


def test_a_correction_bias_is_detected_and_not_part_of_the_bias():
    family = BY_NAME["deepseek_v3"]
    model, inputs = build(family, n_group=1, topk_group=1), make_inputs(family)
    assert not router_weights(model, inputs)[0].is_corrected
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-1, 1, len(buffer)))
    router = router_weights(model, inputs)[0]
    assert (router.scoring, router.is_corrected, router.bias) == ("sigmoid", True, None)


def test_low_precision_is_read_through_the_cast():
    family = BY_NAME["deepseek_v3"]  # computes its logits in float32
    model = build(family).bfloat16()
    routers = router_weights(model, make_inputs(family))
    assert [type(router) for router in routers] == [Router, Router]
    assert routers[0].weight.dtype == torch.bfloat16
    assert torch.equal(routers[0].weight, model.model.layers[1].mlp.gate.weight)


def test_reading_follows_the_weights_without_a_forward():
    family = BY_NAME["gpt_oss"]
    model = build(family)
    router = router_weights(model, make_inputs(family))[0]
    gate = model.model.layers[0].mlp.router
    with torch.no_grad():
        gate.weight.add_(1.0)
        gate.bias.mul_(2.0)
    assert torch.equal(router.read(model).weight, gate.weight)
    assert torch.equal(router.read(model).bias, gate.bias)
    assert not torch.equal(router.weight, gate.weight)


class Mixture(nn.Module):
    """A block with a router, whose logits a subclass may transform, and a decoy of the same shape."""

    def __init__(self):
        super().__init__()
        self.decoy, self.gate = nn.Linear(16, 5), nn.Linear(16, 5)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def compared(self, logits):
        return logits.softmax(-1)

    def forward(self, x):
        extra = self.decoy(x).mean(-1, keepdim=True)
        weights, chosen = self.compared(self.gate(x)).topk(2, dim=-1)
        mixed = sum(
            (weights * (chosen == i)).sum(-1, keepdim=True) * expert(x) for i, expert in enumerate(self.experts)
        )
        return x + mixed + 0.01 * extra


class Squared(Mixture):
    def compared(self, logits):
        return logits.square()


def test_the_router_is_distinguished_from_a_decoy_by_its_values():
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(), Mixture())
    routers = router_weights(model, torch.randn(2, 7, 16))
    assert [router.name for router in routers] == ["0.gate.weight", "1.gate.weight"]
    assert torch.equal(routers[1].bias, model[1].gate.bias)


def test_an_unknown_scoring_is_not_guessed():
    torch.manual_seed(0)
    findings = router_weights(nn.Sequential(Squared(), Squared()), torch.randn(2, 7, 16))
    assert [type(finding) for finding in findings] == [Unreadable, Unreadable]
    assert "selects the largest of 5 values, but these are not the logits of one of its linear" in findings[0].reason
