import pytest
import torch

from tests.models.model_families import FAMILIES, build
from workbench.weights.matrix_spectra import layer_of, role_of


@pytest.mark.parametrize(
    ("name", "layer", "role"),
    [
        ("model.layers.3.self_attn.q_proj.weight", 3, "attention query"),
        ("model.layers.3.self_attn.o_proj.weight", 3, "attention output"),
        ("model.layers.11.mlp.gate_proj.weight", 11, "MLP gate"),
        ("model.layers.1.block_sparse_moe.gate.weight", 1, "router"),
        ("model.layers.1.block_sparse_moe.experts.7.w1.weight", 1, "expert gate"),
        ("model.layers.1.block_sparse_moe.experts.7.w2.weight", 1, "expert down"),
        ("model.layers.1.mlp.experts.gate_up_proj", 1, "expert gate and up"),
        ("transformer.h.0.attn.c_attn.weight", 0, "attention query-key-value"),
        ("transformer.h.0.attn.c_proj.weight", 0, "attention output"),
        ("transformer.h.0.mlp.c_proj.weight", 0, "MLP down"),
        ("transformer.wte.weight", -1, "embedding"),
        ("transformer.wpe.weight", -1, "position embedding"),
        ("gpt_neox.layers.2.attention.query_key_value.weight", 2, "attention query-key-value"),
        ("gpt_neox.layers.2.attention.dense.weight", 2, "attention output"),
        ("bert.encoder.layer.4.attention.self.query.weight", 4, "attention query"),
        ("bert.encoder.layer.4.attention.output.dense.weight", 4, "attention output"),
        ("bert.encoder.layer.4.output.dense.weight", 4, "MLP down"),
        ("encoder.block.5.layer.0.SelfAttention.q.weight", 5, "attention query"),
        ("encoder.block.5.layer.0.SelfAttention.o.weight", 5, "attention output"),
        ("encoder.block.5.layer.1.DenseReluDense.wo.weight", 5, "MLP down"),
        ("layers.9.attention.wo.weight", 9, "attention output"),
        ("layers.9.feed_forward.w3.weight", 9, "MLP up"),
        ("blk.6.attn_q.weight", 6, "attention query"),
        ("blk.6.ffn_gate_exps.weight", 6, "expert gate"),
        ("blk.6.ffn_gate_inp.weight", 6, "router"),
        ("token_embd.weight", -1, "embedding"),
        ("output.weight", -1, "head"),
        ("lm_head.weight", -1, "head"),
        ("layers.0.self_attn.in_proj_weight", 0, "attention query-key-value"),
        ("backbone.layers.0.mixer.x_proj.weight", 0, ""),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 0, ""),
        ("0.weight", -1, ""),
    ],
)
def test_names_in_common_checkpoints(name, layer, role):
    assert (layer_of(name), role_of(name, [name])) == (layer, role)


def test_a_gate_is_a_router_only_next_to_experts():
    dense = ["blocks.0.mlp.gate.weight", "blocks.0.mlp.up.weight"]
    sparse = ["layers.0.mlp.gate.weight", "layers.0.mlp.experts.0.up_proj.weight"]
    assert role_of(dense[0], dense) == "MLP gate"
    assert role_of(sparse[0], sparse) == "router"
    assert role_of("x.gate.weight", ["x.gate.weight"]) == ""


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if str(f) in ("llama", "gpt2", "opt", "bert", "mixtral", "phi")]
)
def test_roles_of_families_are_complete(family):
    """Check that every layer has query, key and value (or all in one), output, up and down."""
    with torch.random.fork_rng(devices=[]):
        model = build(family)
    names = [name for name, p in model.named_parameters() if p.ndim >= 2]
    roles = [role_of(name, names).replace("expert", "MLP") for name in names if layer_of(name) == 1]
    assert set(roles) >= {"attention output", "MLP down"}
    assert {"attention query", "attention key", "attention value"} <= set(roles) or "attention query-key-value" in roles
    assert any("up" in role for role in roles)
    assert "" not in roles
