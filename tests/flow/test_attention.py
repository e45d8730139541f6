"""Sharpness of attention and margins of routing, compared with known values and with the formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import workbench as wb
from tests.zoo.zoo_models import TEXT, inputs_for, perturbed
from workbench.flow.flow_measurement import measure
from workbench.flow.gains import routing_margin, sharpness


def scores(model, x, *, window=None):
    """Return logits and visibility of the first block's attention, computed from its weights."""
    attention = model.blocks[0].attention
    n = model.blocks[0].attention_norm(x)
    q, k = (
        layer(n).unflatten(-1, (attention.n_heads, -1)).transpose(1, 2) for layer in (attention.query, attention.key)
    )
    logits = q @ k.mT / q.shape[-1] ** 0.5
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return logits, visible if window is None else visible.triu(1 - window)


@pytest.mark.parametrize("window", [None, 6])
def test_attention_of_a_model_is_that_of_its_formula(window):
    model = perturbed(wb.zoo.transformer(window=window, **TEXT)).double()
    tokens = inputs_for(model)
    flow = measure(model, tokens, jacobian=False)
    x = (model.token_embedding(tokens) + model.position_embedding(torch.arange(20))).detach()
    logits, visible = scores(model, x, window=window)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).detach().numpy()
    logits, visible = logits.detach().numpy(), visible.numpy()
    std, sink = np.zeros(4), np.zeros(4)
    rows = [row for row in range(20) if visible[row].sum() > 1]
    seeing = [row for row in rows if visible[row, 0]]
    for head in range(4):
        std[head] = np.sqrt(np.mean([np.var(logits[i, head, row, visible[row]]) for i in range(3) for row in rows]))
        sink[head] = np.mean([weights[i, head, row, 0] for i in range(3) for row in seeing])
    np.testing.assert_allclose(flow["attention_logit_std"][0], std, rtol=1e-10)
    np.testing.assert_allclose(flow["sink_share"][0], sink, rtol=1e-10)
    largest = np.where(visible, logits, -np.inf).max((0, 2, 3))
    np.testing.assert_allclose(flow["attention_logit_max"][0], largest, rtol=1e-10)


def test_queries_of_zero_attend_uniformly():
    model = wb.zoo.transformer(**TEXT)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query.weight.zero_()
    flow = measure(model, inputs_for(model), jacobian=False)
    np.testing.assert_allclose(flow["attention_entropy_share"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(flow["attention_logit_std"], 0.0, atol=1e-12)
    np.testing.assert_allclose(flow["sink_share"], np.mean(1 / np.arange(2, 21)), rtol=1e-6)


@pytest.mark.parametrize("size", [2.0, 30.0], ids=["flat", "sharp"])  # sharp: most weights underflow
def test_all_ways_to_compute_attention_have_the_same_measurements(size):
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    class BySoftmax(Block):
        def forward(self, x):
            a = self.attention
            q, k, v = (
                y.unflatten(-1, (4, -1)).transpose(1, 2)
                for y in nn.functional.linear(x, a.in_proj_weight, a.in_proj_bias).chunk(3, -1)
            )
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
            mixed = torch.softmax(q @ k.mT / 2 + mask, dim=-1) @ v
            return x + a.out_proj(mixed.transpose(1, 2).flatten(2))

    packed = nn.Sequential(Block(), Block())
    explicit = nn.Sequential(BySoftmax(), BySoftmax())
    explicit.load_state_dict(packed.state_dict())
    x = size * torch.randn(3, 7, 16)
    one, other = (measure(net, x, jacobian=False) for net in (packed, explicit))
    for name in ("attention_entropy_share", "attention_logit_std", "attention_logit_max", "sink_share"):
        assert np.isfinite(one[name]).all()
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-30, err_msg=name)
    if size > 10:
        assert (one["attention_logit_max"] > 200).all()


@given(st.integers(0, 2**31), st.integers(2, 6), st.floats(-3, 3))
@settings(max_examples=25, deadline=None)
def test_a_constant_added_to_a_row_of_logits_changes_nothing(seed, n, shift):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, n, n, generator=generator, dtype=torch.float64)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    shifted = logits + shift * torch.randn(2, 3, n, 1, generator=generator, dtype=torch.float64)
    one, other = sharpness(logits, visible), sharpness(shifted, visible)
    torch.testing.assert_close(one.logit_std, other.logit_std)
    torch.testing.assert_close(one.sink_fraction, other.sink_fraction)
    doubled = sharpness(2 * logits, visible)
    torch.testing.assert_close(doubled.logit_std, 2 * one.logit_std)


def test_a_sink_is_found_behind_padding():
    logits = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    logits[..., 1] = np.log(8.0)  # the first token that is no padding receives eight times as much attention
    rows = torch.tensor([[False, True, True, True]])
    visible = torch.ones(4, 4, dtype=torch.bool).tril() & rows[:, None, None, :]
    found = sharpness(logits, visible, rows)
    assert float(found.sink_fraction) == pytest.approx((8 / 9 + 8 / 10) / 2)


def test_the_margin_is_that_of_the_last_chosen_expert():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    assert float(routing_margin(logits, torch.tensor([[0, 1], [3, 2]]))) == pytest.approx((0.15 + 0.1) / 2)
    assert float(routing_margin(logits, torch.tensor([[0], [2]]))) == pytest.approx((0.2 - 0.1) / 2)  # overruled
    assert torch.isnan(routing_margin(logits, torch.tensor([[0, 1, 2, 3]] * 2)))


def test_routing_of_a_model_is_that_of_its_logits():
    model = perturbed(wb.zoo.moe(**TEXT)).double()
    tokens = inputs_for(model)
    flow = measure(model, tokens, jacobian=False)
    model(tokens)
    for layer, block in enumerate(model.blocks):
        probability = np.sort(block.mlp.logits.detach().softmax(-1).numpy(), axis=-1)[:, ::-1]
        assert float(flow["routing_margin"][layer]) == pytest.approx((probability[:, 1] - probability[:, 2]).mean())
        load = np.bincount(block.mlp.logits.topk(2).indices.flatten(), minlength=8)
        assert float(flow["max_violation"][layer]) == pytest.approx(load.max() / load.mean() - 1)
    dense = measure(wb.zoo.transformer(**TEXT), tokens, jacobian=False)
    assert np.isnan(dense["routing_margin"]).all()
