"""The largest token losses, and the accuracy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.models.losses import accuracy_of, largest_losses


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 256), seed=st.integers(0, 1000), ignored=st.sampled_from([0.0, 0.3, 0.9]))
def test_it_is_the_mean_of_the_largest_eighth_of_the_valid_targets(n, seed, ignored):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, 7, generator=generator)
    targets = torch.randint(0, 7, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < ignored] = -100
    kept = torch.nn.functional.cross_entropy(logits, targets, reduction="none")[targets != -100].sort().values
    found = float(largest_losses(logits, targets))
    expected = float(kept.flip(0)[: math.ceil(len(kept) / 8)].mean()) if len(kept) else math.nan
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)


def test_many_targets_are_sampled_over_the_full_batch():
    logits = torch.zeros(4, 1000, 5)
    logits[..., 0] = 20.0
    targets = torch.zeros(4, 1000, dtype=torch.int64)
    targets[3] = 1
    assert float(largest_losses(logits, targets)) == pytest.approx(20.0, rel=1e-4)


def test_few_valid_targets_are_all_used_and_invalid_classes_are_ignored():
    logits, targets = torch.zeros(64, 64, 5), torch.full((64, 64), -100)
    targets[:, -1] = torch.arange(64) % 5
    targets[0, :10] = torch.tensor([-1, 5, 255, -100, 9, 7, -5, 6, 99, 1000])
    assert float(largest_losses(logits, targets)) == pytest.approx(math.log(5))
    late = torch.zeros(500, 5)
    late[250:, 0] = 30.0
    assert float(largest_losses(late, torch.ones(500, dtype=torch.int64))) == pytest.approx(30.0, rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    n_known=st.sampled_from([0, 30, 300, 512]),
    scale=st.sampled_from([0.0, 1.0, 1e3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_accuracy_is_that_of_argmax_with_ties_nan_and_targets_that_are_no_classes(seed, n_known, scale, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(8, 64, 256, generator=generator)).round().div(8).to(dtype)
    logits[0, :9, 5], logits[1, 3] = math.nan, -math.inf
    targets = torch.randint(-1, 260, (8, 64), generator=generator)
    known = torch.randperm(512, generator=generator)[:n_known]
    targets.view(-1)[known] = logits.argmax(-1).view(-1)[known]
    targets[torch.rand(8, 64, generator=generator) < 0.3] = -100
    expected = ((logits.argmax(-1) == targets) & (targets != -100)).sum() / (targets != -100).sum()
    assert accuracy_of(logits, targets) == float(expected)
