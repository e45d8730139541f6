"""Measurements of a model compared with attention and routing computed in float64 from its weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests import oracle
from tests.about import about
from tests.launches import Launches, launched
from tests.models.model_families import BY_NAME, build, make_inputs
from tests.zoo.zoo_models import MAKERS, inputs_for, perturbed
from workbench.errors import OptionError
from workbench.models.anatomy import read_anatomy
from workbench.monitors.probe_pass import ModelProbe
from workbench.zoo.blocks import rotate

ATTENTION = ("attention_logit_max", "attention_entropy", "attention_entropy_share")


def probe_of(model, inputs):
    return ModelProbe(model, read_anatomy(model, inputs), inputs)


def attention_by_hand(q, k, scale, visible):
    """Return (3, head) from q (batch, head, token, head_dim), k of the same shape, visible (batch, token, token)."""
    columns = []
    for h in range(q.shape[1]):
        rows = [
            row
            for b in range(len(q))
            for row in oracle.attention_rows(q[b, h].numpy(), k[b, h].numpy(), scale, visible[b].numpy())
        ]
        shares = [entropy / math.log(n) for _, entropy, n in rows if n > 1]
        columns.append((max(r[0] for r in rows), np.mean([r[1] for r in rows]), np.mean(shares)))
    return np.array(columns).T


def heads(x, n):
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def causal(n_rows, n_tokens, window=None):
    mask = torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril()
    return (mask if window is None else mask.triu(1 - window)).expand(n_rows, -1, -1)


def inputs_of(modules, model, inputs):
    """Return the input of each module in one forward pass."""
    taken = []
    handles = [
        m.register_forward_pre_hook(
            lambda m, args, kwargs: taken.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for m in modules
    ]
    with torch.no_grad():
        output = model(inputs)
    for handle in handles:
        handle.remove()
    return taken, output


# --- attention -------------------------------------------------------------------------------------------------------

ZOO = ("transformer", "gpt2", "llama", "parallel", "mixtral", "vit pre_ln")


@pytest.mark.parametrize("name", ZOO)
def test_attention_of_the_zoo(name):
    model = perturbed(MAKERS[name](0)).double()
    inputs = inputs_for(model)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    taken = probe_of(model, inputs).take(["attention"])["attention"]
    modules = [m for m in model.modules() if type(m).__name__ == "Attention"]
    states, _ = inputs_of(modules, model.eval(), inputs)
    for layer, (attention, x) in enumerate(zip(modules, states, strict=True)):
        with torch.no_grad():
            x = attention.input_bias(x)
            q = attention.query_norm(heads(x @ attention.query.weight.T + _bias(attention.query), attention.n_heads))
            k = attention.key_norm(heads(x @ attention.key.weight.T + _bias(attention.key), attention.n_kv_heads))
            if attention.rotary_base is not None:
                q, k = rotate(q, attention.rotary_base), rotate(k, attention.rotary_base)
            k = k.repeat_interleave(attention.n_heads // attention.n_kv_heads, dim=1)
        visible = causal(*x.shape[:2], attention.window)
        visible = visible if attention.is_causal else torch.ones_like(visible)
        expected = attention_by_hand(q, k, q.shape[-1] ** -0.5, visible)
        for measure, values in zip(ATTENTION, expected, strict=True):
            assert taken[measure].dtype == np.float64
            np.testing.assert_allclose(taken[measure][layer], values, rtol=1e-8, err_msg=measure)


def _bias(linear):
    return 0 if linear.bias is None else linear.bias


PAD = {
    "none": None,
    "right": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
    "left": torch.tensor([[1] * 7, [0] * 3 + [1] * 4]),
}


@pytest.mark.parametrize("padding", PAD)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "mixtral"])
def test_attention_of_families_is_what_the_model_returns(name, implementation, padding):
    """transformers returns the eager probabilities, rounded to float32."""
    family = BY_NAME[name]
    model = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # otherwise attention is almost uniform
    tokens, mask = make_inputs(family), PAD[padding]
    inputs = {"input_ids": tokens} | ({} if mask is None else {"attention_mask": mask})
    model.set_attn_implementation(implementation)
    taken = probe_of(model, inputs).take(["attention"])["attention"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        probabilities = model(**inputs, output_attentions=True).attentions
    rows = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    is_causal = name != "bert"
    for layer, p in enumerate(probabilities):
        entropy = torch.special.entr(p).sum(-1)  # (batch, head, token)
        visible = causal(*tokens.shape) if is_causal else torch.ones(2, 7, 7, dtype=torch.bool)
        n_seen = (visible & rows[:, None, :]).sum(-1)[:, None].expand_as(entropy)
        counts = rows[:, None].expand_as(entropy)
        expected = (entropy * counts).sum((0, 2)) / counts.sum((0, 2))
        np.testing.assert_allclose(taken["attention_entropy"][layer], expected, rtol=1e-5)
        share, counts = (entropy / n_seen.log()).masked_fill(~(counts & (n_seen > 1)), 0), counts & (n_seen > 1)
        expected = share.sum((0, 2)) / counts.sum((0, 2))
        np.testing.assert_allclose(taken["attention_entropy_share"][layer], expected, rtol=1e-5)


class SoftmaxWatch(torch.overrides.TorchFunctionMode):
    """Records the input of each softmax of attention."""

    def __init__(self):
        super().__init__()
        self.entering, self.before = [], None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.softmax and args[0].ndim == 4:
            self.entering.append((args[0] if self.before is None else self.before).double())
            self.before = None
        elif func is torch.Tensor.max and args[0].ndim == 4:
            self.before = args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "n_sinks"), [("gemma2", 0), ("gpt_oss", 1)])
def test_scores_are_those_that_enter_the_softmax(name, n_sinks):
    """gemma2 caps its logits; gpt_oss adds a sink for each token and subtracts the largest logit of each token."""
    family = BY_NAME[name]
    model, tokens = build(family, attn_implementation="eager"), make_inputs(family)
    with torch.no_grad(), SoftmaxWatch() as watch:
        model(tokens)
    taken = probe_of(model, tokens).take(["attention"])["attention"]
    for layer, logits in enumerate(watch.entering):
        assert logits.shape[-1] == 7 + n_sinks
        np.testing.assert_allclose(taken["attention_logit_max"][layer], logits.amax((0, 2, 3)), rtol=1e-5)
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1).mean((0, 2))
        np.testing.assert_allclose(taken["attention_entropy"][layer], entropy, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_padded", [True, False])
def test_pytorch_attention(batch_first, is_padded):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=batch_first, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    hidden = torch.arange(7) >= torch.tensor([7, 5, 4])[:, None]
    inputs = {"src": x if batch_first else x.transpose(0, 1)}
    if is_padded:
        inputs["src_key_padding_mask"] = hidden
        inputs["mask"] = ~torch.ones(7, 7, dtype=torch.bool).tril()
    taken = probe_of(model, inputs).take()["attention"]
    attention = model.layers[0].self_attn
    with torch.no_grad():
        q, k = (
            heads(x @ w.T + b, 4)
            for w, b in zip(attention.in_proj_weight.chunk(3)[:2], attention.in_proj_bias.chunk(3)[:2], strict=True)
        )
    visible = torch.ones(3, 7, 7, dtype=torch.bool)
    if is_padded:
        visible = causal(3, 7) & ~hidden[:, None, :] & ~hidden[:, :, None]  # padding tokens are excluded as queries
    expected = attention_by_hand(q, k, 6**-0.5, visible)
    for measure, values in zip(ATTENTION, expected, strict=True):
        np.testing.assert_allclose(taken[measure][0], values, rtol=1e-7, err_msg=measure)


# --- routing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["moe", "switch", "mixtral"])
def test_routing_of_the_zoo(name):
    model = perturbed(MAKERS[name](0)).double()
    tokens = inputs_for(model)
    probe = probe_of(model, tokens)
    taken = probe.take(["router"])["router"]
    model(tokens)
    assert probe.router_layers == (0, 1)
    for layer, block in enumerate(model.blocks):
        p = block.mlp.logits.detach().softmax(-1)
        n_experts, top_k = p.shape[-1], model.config.top_k
        entropy = -(p * p.log()).sum(-1).mean().item()
        count = np.bincount(p.topk(top_k, dim=-1).indices.flatten(), minlength=n_experts)
        load = count / count.sum()
        assert taken["routing_entropy"][layer] == pytest.approx(entropy)
        assert taken["routing_entropy_share"][layer] == pytest.approx(entropy / math.log(n_experts))
        np.testing.assert_allclose(taken["expert_load"][layer], load)
        assert taken["max_violation"][layer] == pytest.approx(load.max() * n_experts - 1)
        assert taken["dead_experts"][layer] == (count == 0).sum()
        assert math.isnan(taken["routing_change"][layer])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "llama4_text", "granitemoe"])
def test_routing_of_families(name, dtype):
    """The logits are those of the documented router for its inputs; the choices are its own."""
    family = BY_NAME[name]
    model, tokens = build(family).to(dtype), make_inputs(family)
    probe = probe_of(model, tokens)
    taken = probe.take(["router"])["router"]
    gates = [model.get_submodule(router.name.rpartition(".")[0]) for router in wb.router_weights(model, tokens)]
    assert len(gates) == len(probe.router_layers) == len(taken["routing_entropy"])
    states, _ = inputs_of(gates, model, tokens)
    for row, (gate, x) in enumerate(zip(gates, states, strict=True)):
        x = x.reshape(-1, x.shape[-1]).double()
        bias = getattr(gate, "bias", None)
        logits = x @ gate.weight.detach().double().T + (0 if bias is None else bias.detach().double())
        p = logits.softmax(-1)
        assert taken["routing_entropy"][row] == pytest.approx(
            torch.special.entr(p).sum(-1).mean().item(), abs=1e-5 if dtype == torch.float32 else 2e-3
        )
        if dtype == torch.float32 and name != "deepseek_v3":  # which excludes experts by group
            top_k = family.config["num_experts_per_tok"]
            count = np.bincount(logits.topk(top_k, dim=-1).indices.flatten(), minlength=logits.shape[-1])
            np.testing.assert_allclose(taken["expert_load"][row], count / count.sum())
        assert taken["expert_load"][row].sum() == pytest.approx(1)


def test_choices_follow_a_correction():
    """A bias added to the scores changes the choices but not the logits."""
    family = BY_NAME["deepseek_v3"]
    model, tokens = build(family, n_group=1, topk_group=1), make_inputs(family)
    before = probe_of(model, tokens).take(["router"])["router"]
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([100.0, 90.0] + [0] * 6))
    after = probe_of(model, tokens).take(["router"])["router"]
    np.testing.assert_allclose(after["expert_load"][0], [0.5, 0.5] + [0] * 6)
    assert after["dead_experts"][0] == 6
    assert after["max_violation"][0] == 3
    assert after["routing_entropy"][0] == pytest.approx(before["routing_entropy"][0])


def test_routing_change_is_since_the_last_measurement():
    model = perturbed(MAKERS["switch"](0))
    probe = probe_of(model, inputs_for(model))
    probe.take()
    assert (probe.take()["router"]["routing_change"] == 0).all()
    with torch.no_grad():
        router = model.blocks[1].mlp.router.weight
        router.copy_(-router)
    probe.take(["attention"])  # does not measure the routers
    change = probe.take()["router"]["routing_change"]
    assert change[0] == 0
    assert change[1] == 1  # the most loaded expert is now the least loaded


def test_padding_is_excluded():
    family = BY_NAME["mixtral"]
    model, tokens = build(family), make_inputs(family, n_rows=1)
    padded = torch.cat([tokens, torch.full((1, 5), 3)], dim=1)
    mask = (torch.arange(12) < 7).long()[None]
    alone = probe_of(model, tokens).take()
    with_padding = probe_of(model, {"input_ids": padded, "attention_mask": mask}).take()
    for part, values in alone.items():
        for name, value in values.items():
            np.testing.assert_allclose(with_padding[part][name], value, rtol=1e-4, err_msg=name)


# --- states ----------------------------------------------------------------------------------------------------------


def test_states_and_log_z():
    model = perturbed(MAKERS["transformer"](0))
    tokens = inputs_for(model)
    taken = probe_of(model, tokens).take(["activations"])["activations"]
    leaving = []
    handles = [
        b.register_forward_hook(lambda m, args, out: leaving.append(out.detach().double())) for b in model.blocks
    ]
    logits = model.eval()(tokens).detach().double().numpy()
    for handle in handles:
        handle.remove()
    for layer, h in enumerate(h.flatten(0, -2).numpy() for h in leaving):
        size = np.abs(h)
        assert taken["activation_max"][layer] == pytest.approx(size.max())
        assert taken["outlier_ratio"][layer] == pytest.approx(size.max() / np.sort(size.ravel())[(size.size - 1) // 2])
        assert taken["state_norm"][layer] == pytest.approx(np.linalg.norm(h, axis=1).mean())
        assert taken["kurtosis"][layer] == pytest.approx(((h - h.mean()) ** 4).mean() / h.var() ** 2)
    assert taken["log_z"].shape == ()
    assert taken["log_z"] == pytest.approx(np.sqrt((np.log(np.exp(logits).sum(-1)) ** 2).mean()), rel=1e-5)


# --- missing values --------------------------------------------------------------------------------------------------


def test_mixed_blocks():
    family = BY_NAME["jamba"]
    model, tokens = build(family), make_inputs(family)
    probe = probe_of(model, tokens)
    taken = probe.take()
    assert np.isnan(taken["attention"]["attention_entropy"][[0, 2]]).all()
    assert np.isfinite(taken["attention"]["attention_entropy"][1]).all()
    assert probe.router_layers == (1,)
    probe.take()
    assert [reason.split(" cannot")[0] for reason in probe.unreadable] == [
        "The attention of model.layers.0",
        "The attention of model.layers.2",
    ]


def test_a_model_without_attention_routers_and_logits():
    family = BY_NAME["mamba"]
    model, tokens = build(family), make_inputs(family)
    probe = probe_of(model.backbone, tokens)
    taken = probe.take()
    assert list(taken) == ["activations"]
    assert np.isnan(taken["activations"]["log_z"])
    assert np.isfinite(taken["activations"]["kurtosis"]).all()
    assert probe.unreadable[-1] == "The model returns no logits, so log_z is unknown."
    assert len(probe.unreadable) == 4


def test_choices_that_cannot_be_seen_are_not_guessed():
    family = BY_NAME["phimoe"]  # chooses experts sequentially, each by a maximum among the remaining ones
    probe = probe_of(build(family), make_inputs(family))
    taken = probe.take()["router"]
    assert np.isfinite(taken["routing_entropy"]).all()
    assert all(np.isnan(taken[name]).all() for name in ("expert_load", "max_violation", "dead_experts"))
    assert probe.unreadable[0] == "The choices of the router of model.layers.0 cannot be observed, only its logits."


@pytest.mark.parametrize("name", ["moe", "llama"])
def test_a_layer_that_is_not_finite_leaves_the_others(name):
    model = MAKERS[name](0)
    probe = probe_of(model, inputs_for(model))
    with torch.no_grad():
        model.blocks[1].attention.query.weight[0, 0] = math.nan
    taken = probe.take()
    for part in taken.values():
        for measure, values in part.items():
            if measure == "log_z" or measure == "routing_change":
                continue
            values = values.reshape(2, -1)
            assert np.isfinite(values[0]).all(), measure
            expected_nan = values[1][:1] if measure.startswith("attention") else values[1]
            assert np.isnan(expected_nan).all(), measure
    assert np.isnan(taken["activations"]["log_z"])
    assert probe.unreadable == []
    probe.take()


#: Waits of the models' own code: experts choose their tokens by index, transformers looks for packed sequences.
OWN_WAITS = {"transformer": set(), "moe": {"nonzero"}}


@pytest.mark.parametrize("name", ["transformer", "moe", "mixtral", "gpt_oss"])
def test_the_host_waits_only_for_the_values(name):
    family = BY_NAME.get(name)
    model = MAKERS[name](0) if family is None else build(family, attn_implementation="eager")
    inputs = inputs_for(model) if family is None else make_inputs(family)
    if family is not None:
        inputs = {"input_ids": inputs, "attention_mask": PAD["left"]}
    probe = probe_of(model, inputs)
    expected = probe.take()  # reads the mask
    launches, found = launched(probe.taking())
    assert launches.waits.keys() <= OWN_WAITS.get(name, {"nonzero", "_local_scalar_dense"})
    assert found.keys() == expected.keys()
    for part, values in found.items():
        for variable, value in values.items():
            if variable != "routing_change":
                np.testing.assert_array_equal(value, expected[part][variable])


def test_a_layer_takes_few_operations():
    """Most of them are those of the scores; measures of states and means are computed for all layers at once."""
    counts = []
    for n_layers in (2, 6):
        model = wb.zoo.transformer(d_model=16, n_layers=n_layers, n_heads=2, vocab_size=16, max_length=8)
        tokens = torch.arange(16).reshape(2, 8)
        with Launches() as of_model, torch.no_grad():
            model(tokens)
        counts.append(launched(probe_of(model, tokens).taking())[0].n_operations - of_model.n_operations)
    assert (counts[1] - counts[0]) / 4 < 20


def test_states_are_measured_alike_in_parts_of_any_size(monkeypatch):
    model = perturbed(MAKERS["transformer"](0))
    probe = probe_of(model, inputs_for(model))
    whole = probe.take(["activations"])["activations"]
    monkeypatch.setattr("workbench.monitors.probe_pass._ENTRIES_ON_HOST", 0)  # layer by layer
    for name, value in probe.take(["activations"])["activations"].items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-12)


def test_an_unknown_part():
    model = MAKERS["moe"](0)
    probe = probe_of(model, inputs_for(model))
    with pytest.raises(OptionError, check=about("parts", "routers", ("attention", "router", "activations"))):
        probe.take(["routers"])


# --- the model is unchanged ------------------------------------------------------------------------------------------
