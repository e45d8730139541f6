"""Measures of a router compared with a reference implementation and by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.about import says
from tests.monitors.test_matrices import draw
from workbench.errors import OptionError
from workbench.monitors.router_health import (
    dead_experts,
    expert_load,
    max_violation,
    router_conditioning,
    router_similarity,
    routing_change,
    routing_entropy,
    routing_entropy_share,
)


@given(st.integers(2, 7), st.integers(1, 6), st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_similarity_is_the_mean_cosine(n_experts, width, seed):
    weight = draw(2, n_experts, width, seed=seed)
    similarity = router_similarity(weight)
    for one, got in zip(weight, similarity.tolist(), strict=True):
        assert got == pytest.approx(oracle.router_similarity(one.numpy()), abs=1e-12)
    scale = draw(2, n_experts, 1, seed=seed + 1).abs() + 0.1
    torch.testing.assert_close(router_similarity(weight * scale), similarity)  # only directions matter


def test_similarity_by_hand():
    assert router_similarity(torch.eye(4)).item() == pytest.approx(0)
    assert router_similarity(torch.ones(4, 3)).item() == pytest.approx(1)
    assert router_similarity(torch.tensor([[1.0], [-1.0]])).item() == pytest.approx(-1)
    for unknown in (torch.ones(1, 3), torch.tensor([[1.0, 0], [0, 0]]), torch.tensor([[1.0, 0], [math.nan, 1]])):
        assert router_similarity(unknown).isnan()


def test_conditioning():
    weight = draw(3, 5, 4)
    for one, got in zip(weight, router_conditioning(weight).tolist(), strict=True):
        mean = one.mean(0)
        assert got == pytest.approx(max(float((row - mean).norm()) for row in one) / float(mean.norm()))
    assert router_conditioning(torch.tensor([[1.0, 2], [-1, -2]])).item() == math.inf
    assert router_conditioning(torch.ones(4, 3)).item() == 0
    assert router_conditioning(torch.ones(1, 3)).item() == 0
    assert router_conditioning(torch.zeros(2, 3)).isnan()


def test_entropy_includes_all_experts():
    logits = draw(2, 6, 5)
    p = logits.softmax(-1)
    torch.testing.assert_close(routing_entropy(logits), -(p * p.log()).sum(-1).mean(-1))
    torch.testing.assert_close(routing_entropy_share(logits), routing_entropy(logits) / math.log(5))
    assert routing_entropy_share(torch.zeros(6, 5)).item() == pytest.approx(1)
    assert routing_entropy(1e4 * torch.eye(5)).item() == 0


def test_entropy_in_edge_cases():
    two_of_three = torch.tensor([[0.0, 0.0, -math.inf]])
    assert routing_entropy(two_of_three).item() == pytest.approx(math.log(2))
    assert routing_entropy(torch.zeros(4, 1)).item() == 0
    assert routing_entropy_share(torch.zeros(4, 1)).isnan()
    for unknown in (-math.inf, math.inf, math.nan):
        assert routing_entropy(torch.full((2, 3), unknown)).isnan()


def test_load_by_hand():
    choices = torch.tensor([[[0, 1], [0, 2]], [[1, 2], [2, 1]]])  # (layer, token, k)
    load = expert_load(choices, 4)
    assert load.tolist() == [[0.5, 0.25, 0.25, 0], [0, 0.5, 0.5, 0]]
    assert max_violation(load).tolist() == [1, 1]
    assert dead_experts(load).tolist() == [1, 2]
    assert max_violation(torch.tensor([1.0, 0, 0, 0])).item() == 3
    assert max_violation(torch.ones(4)).item() == 0
    nothing = expert_load(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert nothing.isnan().all()
    assert dead_experts(nothing).isnan()
    assert max_violation(nothing).isnan()


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_change_counts_new_choices_in_any_order(seed):
    generator = torch.Generator().manual_seed(seed)
    before, after = (torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(5)]) for _ in range(2))
    new = sum(len(set(a.tolist()) - set(b.tolist())) for b, a in zip(before, after, strict=True))
    assert routing_change(before, after).item() == pytest.approx(new / 15)
    assert routing_change(before, before.flip(-1)).item() == 0


def test_invalid_choices_are_rejected():
    with pytest.raises(OptionError, check=says("experts; pass the number of experts of this router.")):
        expert_load(torch.tensor([[0], [4]]), 4)
    with pytest.raises(OptionError, check=says("differ; pass equal tokens.")):
        routing_change(torch.zeros(2, 1), torch.zeros(3, 1))
