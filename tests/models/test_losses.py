"""The largest token losses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.models.losses import largest_losses


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
