"""The share of eps in what normalizations divide by: from planted sizes, and on models with and without fault."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from workbench.flow.norm_eps import eps_shares


@pytest.mark.parametrize("norm", [nn.LayerNorm(64, eps=1e-2), nn.RMSNorm(64, eps=1e-2)])
@pytest.mark.parametrize("size", [1e-3, 0.1, 10.0])
def test_a_norm_of_states_of_a_known_size(norm, size):
    states = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0))
    states = size * (states - states.mean(-1, keepdim=True)) / states.std(-1, correction=0, keepdim=True)
    assert eps_shares(nn.Sequential(norm), states) == pytest.approx([1e-2 / (1e-2 + size**2)], rel=1e-4)


def test_a_layer_norm_counts_the_variance_and_an_rms_norm_the_mean_square():
    states = torch.full((2, 3, 8), 4.0) + torch.tensor([1.0, -1.0] * 4)
    norms = nn.Sequential(nn.LayerNorm(8, eps=1.0))
    assert eps_shares(norms, states) == pytest.approx([0.5])
    assert eps_shares(nn.Sequential(nn.RMSNorm(8, eps=17.0)), states) == pytest.approx([0.5])


def test_models_without_a_norm_over_features_have_none():
    assert (
        eps_shares(
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)), torch.ones(1, 3, 2, 2)
        ).size
        == 0
    )


@pytest.mark.parametrize("plant", ["eps", "weights"])
def test_a_model_that_does_not_normalize_is_told_from_a_sound_one(plant):
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
              "intermediate_size": 64, "vocab_size": 64}  # fmt: skip
    model = wb.design(config).build()
    tokens = torch.arange(16)[None]
    assert np.median(eps_shares(model, tokens)) < 0.01
    with torch.no_grad():
        for module in model.modules():
            if plant == "eps" and hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e6
        for weight in model.parameters() if plant == "weights" else ():
            weight.mul_(1e-4 if weight.ndim > 1 else 1)
    assert (eps_shares(model, tokens) > 0.99).all()
