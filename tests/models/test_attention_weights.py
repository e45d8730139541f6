"""Query and key weights per head, compared with slices written by hand from the documented layout of each family."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models.model_families import BY_NAME, FAMILIES_BY_TIER, build, make_inputs
from workbench.models.anatomy import read_anatomy
from workbench.models.attention_weights import QueryKey, Unreadable, probe_inputs, query_key_weights
from workbench.models.column_matching import NormStep

D, H, DH = 24, 4, 6


def heads(rows, n_heads):
    """(head * head_dim, feature) -> (head, feature, head_dim); (head * head_dim,) -> (head, head_dim)."""
    if rows.ndim == 1:
        return rows.view(n_heads, -1)
    return rows.view(n_heads, -1, rows.shape[1]).transpose(1, 2)


# --- layouts by hand: block -> (query, key, query bias, key bias); a bias is None if there is none --------------------


def separate(path, q="q_proj", k="k_proj", n_kv=H, n_heads=H):
    def read(block):
        attention = block.get_submodule(path)
        query, key = getattr(attention, q), getattr(attention, k)
        biases = [heads(m.bias, n) if m.bias is not None else None for m, n in ((query, n_heads), (key, n_kv))]
        return heads(query.weight, n_heads), heads(key.weight, n_kv), *biases

    return read


def conv1d_thirds(block):
    conv = block.attn.c_attn
    query, key = (heads(conv.weight[:, part].T, H) for part in (slice(0, D), slice(D, 2 * D)))
    return query, key, heads(conv.bias[:D], H), heads(conv.bias[D : 2 * D], H)


def per_head(path):
    """Return a reader of a fused matrix with rows [head, (q, k, v), head_dim]."""

    def read(block):
        fused = block.get_submodule(path)
        weight, bias = fused.weight.view(H, 3, DH, D), fused.bias.view(H, 3, DH)
        return weight[:, 0].transpose(1, 2), weight[:, 1].transpose(1, 2), bias[:, 0], bias[:, 1]

    return read


def blocks_of_rows(path, n_kv):
    """Return a reader of a fused matrix with rows for all queries, then all keys, then all values."""

    def read(block):
        weight = block.get_submodule(path).weight
        return heads(weight[: H * DH], H), heads(weight[H * DH : (H + n_kv) * DH], n_kv), None, None

    return read


def grouped(block):
    """Read the new layout of Falcon: for each key head its queries, then the key, then the value."""
    weight = block.self_attention.query_key_value.weight.view(2, H // 2 + 2, DH, D)
    return weight[:, :-2].reshape(H, DH, D).transpose(1, 2), weight[:, -2].transpose(1, 2), None, None


def codegen(block):
    """Read four partitions, each with query, value and key."""
    weight = block.attn.qkv_proj.weight.view(4, 3, H // 4, DH, D)
    return weight[:, 0].reshape(H, DH, D).transpose(1, 2), weight[:, 2].reshape(H, DH, D).transpose(1, 2), None, None


def normed(offset, n_kv, *, spans_heads=False):
    def read(block):
        attention = block.self_attn
        query, key = heads(attention.q_proj.weight, H), heads(attention.k_proj.weight, n_kv)
        gains = [(offset + norm.weight) for norm in (attention.q_norm, attention.k_norm)]
        if spans_heads:
            gains = [gain.view(-1, 1, DH) for gain in gains]
        return query * gains[0], key * gains[1], None, None

    return read


def query_and_gate(block):
    attention = block.self_attn
    weight = attention.q_proj.weight.view(H, 2, 8, D)[:, 0].transpose(1, 2)
    return (
        weight * (1 + attention.q_norm.weight),
        heads(attention.k_proj.weight, 2) * (1 + attention.k_norm.weight),
        None,
        None,
    )


def latent(block):
    """Read the part without position of DeepSeek's latent attention, W_b diag(g) W_a."""
    a = block.self_attn
    query = a.q_b_proj.weight.view(H, 10, 12)[:, :6] * a.q_a_layernorm.weight @ a.q_a_proj.weight
    key = a.kv_b_proj.weight.view(H, 12, 10)[:, :6] * a.kv_a_layernorm.weight @ a.kv_a_proj_with_mqa.weight[:10]
    return query.transpose(1, 2), key.transpose(1, 2), None, None


LAYOUTS = {
    "gpt2": (conv1d_thirds, {}),
    "openai-gpt": (conv1d_thirds, {}),
    "gpt_neox": (per_head("attention.query_key_value"), {}),
    "bloom": (per_head("self_attention.query_key_value"), {}),
    "falcon": (blocks_of_rows("self_attention.query_key_value", 1), {}),
    "falcon new": (grouped, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi3": (blocks_of_rows("self_attn.qkv_proj", 2), {}),
    "mpt": (blocks_of_rows("attn.Wqkv", H), {}),
    "modernbert": (blocks_of_rows("attn.Wqkv", H), {}),
    "codegen": (codegen, {}),
    "llama": (separate("self_attn", n_kv=2), {}),
    "qwen2": (separate("self_attn", n_kv=2), {}),
    "gemma2": (separate("self_attn", n_kv=2), {}),
    "opt": (separate("self_attn"), {}),
    "gptj": (separate("attn"), {}),
    "whisper": (separate("self_attn"), {}),
    "t5": (separate("layer.0.SelfAttention", "q", "k"), {}),
    "bert": (separate("attention.self", "query", "key"), {}),
    "distilbert": (separate("attention", "q_lin", "k_lin"), {}),
    "deberta-v2": (separate("attention.self", "query_proj", "key_proj"), {}),
    "vit": (separate("attention"), {}),
    "qwen3": (normed(0, 2), {}),
    "gemma3_text": (normed(1, 2), {}),
    "olmo2": (normed(0, H, spans_heads=True), {}),
    "qwen3_next": (query_and_gate, {}),
    "deepseek_v3": (latent, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name):
    by_hand, options = LAYOUTS[name]
    family = BY_NAME[name.split()[0]]
    model, inputs = build(family, **options), make_inputs(family)
    anatomy = read_anatomy(model, inputs)
    readings = query_key_weights(model, inputs, anatomy=anatomy)
    assert [r.site for r in readings] == [s.name for s in anatomy.sites]
    readable = [(r, s) for r, s in zip(readings, anatomy.sites, strict=True) if isinstance(r, QueryKey)]
    assert len(readable) == (2 if name == "qwen3_next" else len(anatomy.sites))
    for reading, site in readable:
        found = (reading.query, reading.key, reading.query_bias, reading.key_bias)
        for value, expected in zip(found, by_hand(site.module), strict=True):
            if expected is None:
                assert value is None
            else:
                assert value.shape == expected.shape
                torch.testing.assert_close(value, expected.detach(), rtol=1e-6, atol=1e-7)


#: Layers without readable attention: state-space, linear-attention and expert-only blocks.
WITHOUT = {
    "mamba": {0, 1, 2},
    "mamba2": {0, 1, 2},
    "rwkv": {0, 1, 2},
    "jamba": {0, 2},
    "bamba": {0, 2},
    "recurrent_gemma": {0, 1},
    "nemotron_h": {0, 2},
    "qwen3_next": {0},
    "zamba2": {0, 2},
}


@pytest.mark.parametrize("family", FAMILIES_BY_TIER, ids=str)
def test_family(family):
    """Every attention block is read, and the model is unchanged."""
    model, inputs = build(family), make_inputs(family)
    weights = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    readings = query_key_weights(model, inputs)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    unreadable = {r.layer for r in readings if isinstance(r, Unreadable)}
    assert unreadable == WITHOUT.get(family.name, set())
    for reading in readings:
        if isinstance(reading, Unreadable):
            assert reading.site in reading.reason
        else:
            assert reading.query.shape[1:] == reading.key.shape[1:]
            assert reading.query.shape[0] % reading.key.shape[0] == 0


def test_weights_are_reread_without_a_forward_pass():
    family = BY_NAME["qwen3"]
    model, inputs = build(family), make_inputs(family)
    before = query_key_weights(model, inputs)[1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    n_forwards = []
    model.register_forward_pre_hook(lambda *args: n_forwards.append(1))
    after = before.read(model)
    assert not n_forwards
    torch.testing.assert_close(after.query, before.query * 1.5**2)  # weight and gain
    assert not torch.equal(after.key, before.key)


@pytest.mark.medium
def test_notes_state_the_scale_of_the_weights():
    def notes(name):
        family = BY_NAME[name]
        return next(r for r in query_key_weights(build(family), make_inputs(family)) if isinstance(r, QueryKey)).notes

    assert notes("llama") == ""
    assert "query: exact up to a positive factor per token, because an RMS norm" in notes("qwen3")
    assert "a LayerNorm follows" in notes("persimmon")
    assert "q_layernorm.bias, which is not included" in notes("persimmon")
    assert "query is multiplied by 0.4082 before the scores" in notes("opt")
    assert "only the 6 of 10 features without position" in notes("deepseek_v3")
    assert "act on 48 features computed from the 24 of the stream" in notes("zamba2")


def test_low_precision():
    family = BY_NAME["opt"]  # scales its queries, so columns agree only up to rounding
    model = build(family).bfloat16()
    reading = query_key_weights(model, make_inputs(family))[2]
    block = model.model.decoder.layers[2].self_attn
    assert torch.equal(reading.query, heads(block.q_proj.weight, H).detach())


# --- PyTorch's own attention and models written here -----------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_pytorch_attention(batch_first, bias):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 40, batch_first=batch_first, bias=bias)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    readings = query_key_weights(model, torch.randn(2, 7, D))
    for reading, block in zip(readings, model.layers, strict=True):
        weight = block.self_attn.in_proj_weight.detach()
        assert torch.equal(reading.query, heads(weight[:D], H))
        assert torch.equal(reading.key, heads(weight[D : 2 * D], H))
        if bias:
            assert torch.equal(reading.key_bias, heads(block.self_attn.in_proj_bias.detach()[D : 2 * D], H))
        else:
            assert reading.key_bias is None


class Block(nn.Module):
    """Attention by a matrix product; subclasses define how queries and keys are computed."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.randn(D, 3 * D) * 0.2)
        self.shift = nn.Parameter(torch.randn(D))

    def queries_and_keys(self, x):
        query, key, _ = (x @ self.fused).chunk(3, dim=-1)
        return query, key

    def forward(self, x):
        query, key = (t.unflatten(-1, (H, DH)).transpose(1, 2) for t in self.queries_and_keys(x))
        weights = functional.softmax(query @ key.transpose(-1, -2), dim=-1)
        value = x.unflatten(-1, (H, DH)).transpose(1, 2)
        return x + (weights @ value).transpose(1, 2).flatten(2)


class Einsum(Block):
    def forward(self, x):
        query, key = (t.unflatten(-1, (H, DH)) for t in self.queries_and_keys(x))
        weights = torch.einsum("bihd,bjhd->bhij", query, key).softmax(-1)
        return x + torch.einsum("bhij,bjhd->bihd", weights, x.unflatten(-1, (H, DH))).flatten(2)


class Interleaved(Block):
    """Heads vary fastest, features slowest: not a slice of rows, but one index per column."""

    def queries_and_keys(self, x):
        query, key = super().queries_and_keys(x)
        return tuple(t.unflatten(-1, (DH, H)).transpose(-1, -2).flatten(-2) for t in (query, key))


class Nonlinear(Block):
    def queries_and_keys(self, x):
        query, key = super().queries_and_keys(x)
        return torch.tanh(query), key


class LowRankUpdate(Block):
    """An adapter in parallel with the projection: no parameter has their sum as output."""

    def queries_and_keys(self, x):
        query, key = super().queries_and_keys(x)
        return query + 0.1 * (x @ self.fused[:, :D].T), key


class NoParameter(Block):
    def queries_and_keys(self, x):
        return functional.linear(x, (2 * self.fused[:, :D]).T), functional.linear(x, self.fused[:, D : 2 * D].T)


class CrossAttention(Block):
    def queries_and_keys(self, x):
        return x @ self.fused[:, :D], x.flip(1) @ self.fused[:, D : 2 * D]


class ScaledColumns(Block):
    def queries_and_keys(self, x):
        query, key = super().queries_and_keys(x)
        return query * self.shift, key


class TiedColumns(Block):
    """Queries and keys that are initially equal, so that values cannot distinguish them."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.fused[:, D : 2 * D] = self.fused[:, :D]


class TwiceTheSame(Block):
    def queries_and_keys(self, x):
        super().queries_and_keys(x)
        return super().queries_and_keys(x)


class ZeroColumn(Block):
    """A feature of a head that is always zero; its neighbors determine where it belongs."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.fused[:, [3, D + 3]] = 0


class AlternatingHeads(Block):
    """Query head h uses key head h modulo 2."""

    def queries_and_keys(self, x):
        query, key = super().queries_and_keys(x)
        return query, key[..., : 2 * DH].repeat(1, 1, 2)


def model_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind(), kind())


@pytest.mark.parametrize("kind", [Block, Einsum, TwiceTheSame, ZeroColumn])
def test_matrix_products_with_a_bare_parameter(kind):
    model = model_of(kind)
    for reading, block in zip(query_key_weights(model, torch.randn(2, 7, D)), model, strict=True):
        columns = block.fused.detach()
        assert torch.equal(reading.query, heads(columns[:, :D].T, H))
        assert torch.equal(reading.key, heads(columns[:, D : 2 * D].T, H))


def test_any_permutation_of_columns():
    model = model_of(Interleaved)
    reading = query_key_weights(model, torch.randn(2, 7, D))[0]
    columns = model[0].fused.detach()
    assert torch.equal(reading.query, columns[:, :D].view(D, DH, H).permute(2, 0, 1))
    assert not (reading.query_recipe.index.diff(dim=1) == 1).any()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Nonlinear, r"of the queries, only 0% of the columns are outputs of a linear map"),
        (LowRankUpdate, r"of the queries, only 0% of the columns"),
        (NoParameter, r"the matrix of a projection is not a parameter of the model \(query\)"),
        (TiedColumns, r"several linear maps have equal outputs.*are they zero or tied"),
        (AlternatingHeads, r"its shared heads are not in consecutive order.*\(key\)"),
        (CrossAttention, r"queries and keys come from different inputs"),
        (ScaledColumns, r"the columns of one projection are scaled by different constants \(query\)"),
    ],
)
def test_unreadable_weights_have_a_reason(kind, reason):
    readings = query_key_weights(model_of(kind), torch.randn(2, 7, D))
    assert len(readings) == 3
    for layer, reading in enumerate(readings):
        assert isinstance(reading, Unreadable)
        assert reading.site == str(layer)
        assert f"weights of {layer} cannot be read" in reading.reason
        assert re.search(reason, reading.reason), reading.reason


# --- parts -----------------------------------------------------------------------------------------------------------


def test_probe_inputs_keep_the_structure_and_the_random_state():
    family = BY_NAME["llama"]
    model, tokens = build(family), make_inputs(family)
    state = torch.get_rng_state()
    probe = probe_inputs(model, {"input_ids": tokens, "attention_mask": torch.zeros_like(tokens), "use_cache": False})
    assert torch.equal(state, torch.get_rng_state())
    ids = probe["input_ids"]
    assert len(ids[:, 0].unique()) == len(ids) == 12
    assert ids.max() <= tokens.max()
    assert (probe["attention_mask"] == 1).all()
    assert probe["attention_mask"].shape == ids.shape
    assert probe["use_cache"] is False
    assert all(size % ids.shape[1] for p in model.parameters() for size in p.shape)


def test_centering_spans_what_the_norm_spans():
    weight = torch.randn(2, 5, 3)
    within = NormStep(None, 0, torch.zeros(2, 3), None, True, False).center(weight)
    across = NormStep(None, 0, torch.zeros(2, 3), None, True, True).center(weight)
    torch.testing.assert_close(within.mean(2), torch.zeros(2, 5))
    torch.testing.assert_close(across.mean((0, 2)), torch.zeros(5))
    assert across.mean(2).abs().max() > 1e-3


@pytest.mark.medium
def test_gain_and_one_plus_gain_are_distinguished():
    """Norms have constant gains initially, which fit both conventions up to a factor."""
    for name, offset in (("qwen3", 0), ("gemma3_text", 1)):
        family = BY_NAME[name]
        model = build(family)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "q_norm" in parameter_name or "k_norm" in parameter_name:
                    parameter.fill_(0.7)
        reading = query_key_weights(model, make_inputs(family))[0]
        assert reading.query_recipe.norm.gain_offset == offset
