"""Eps fractions of normalizations, for states of known magnitude and for models with and without a fault."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from workbench.flow.norm_eps import eps_fractions


@pytest.mark.parametrize("norm", [nn.LayerNorm(64, eps=1e-2), nn.RMSNorm(64, eps=1e-2)])
@pytest.mark.parametrize("size", [1e-3, 0.1, 10.0])
def test_a_norm_of_states_of_a_known_size(norm, size):
    states = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0))
    states = size * (states - states.mean(-1, keepdim=True)) / states.std(-1, correction=0, keepdim=True)
    assert eps_fractions(nn.Sequential(norm), states) == pytest.approx([1e-2 / (1e-2 + size**2)], rel=1e-4)


def test_a_layer_norm_counts_the_variance_and_an_rms_norm_the_mean_square():
    states = torch.full((2, 3, 8), 4.0) + torch.tensor([1.0, -1.0] * 4)
    norms = nn.Sequential(nn.LayerNorm(8, eps=1.0))
    assert eps_fractions(norms, states) == pytest.approx([0.5])
    assert eps_fractions(nn.Sequential(nn.RMSNorm(8, eps=17.0)), states) == pytest.approx([0.5])


def test_models_without_a_norm_over_features_have_none():
    assert (
        eps_fractions(
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)), torch.ones(1, 3, 2, 2)
        ).size
        == 0
    )


class CustomLayerNorm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class ImageLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def test_a_custom_norm_is_measured_by_its_behavior():
    states = 1 + 1e-3 * torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    norms = CustomLayerNorm(1e-4), nn.LayerNorm(64, eps=1e-4)
    found, expected = (eps_fractions(nn.Sequential(norm), states) for norm in norms)
    assert found == pytest.approx(expected)
    assert found > 0.9


def test_norms_over_other_axes_or_of_weights_and_calls_without_tokens_do_not_count():
    assert eps_fractions(nn.Sequential(ImageLayerNorm(4)), torch.randn(2, 4, 1, 1)).size == 0
    assert eps_fractions(nn.Sequential(nn.LayerNorm(4)), torch.zeros(0, 4)).size == 0
    spectral = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.LayerNorm(4, eps=1e6))
    assert eps_fractions(spectral, torch.randn(3, 4)) == pytest.approx([1.0], abs=1e-3)
    over_two = torch.arange(3.0)[:, None].expand(3, 4)
    assert eps_fractions(nn.Sequential(nn.LayerNorm((3, 4), eps=1e-9)), over_two[None]) == pytest.approx(
        [0.0], abs=1e-6
    )


def test_the_default_eps_of_torchs_rms_norm_is_that_of_the_number_format():
    states = torch.full((2, 3, 8), 1e-6)
    eps = torch.finfo(torch.float32).eps
    assert eps_fractions(nn.Sequential(nn.RMSNorm(8)), states) == pytest.approx([eps / (eps + 1e-12)], rel=1e-4)


def test_states_that_are_not_finite_have_no_eps_fraction():
    assert np.isnan(eps_fractions(nn.Sequential(nn.RMSNorm(8, eps=1e-5)), torch.full((2, 3, 8), torch.inf))).all()


@pytest.mark.parametrize("fault", ["eps", "weights"])
def test_a_model_that_does_not_normalize_is_distinguished_from_a_healthy_one(fault):
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
              "intermediate_size": 64, "vocab_size": 64}  # fmt: skip
    model = wb.design(config).build()
    tokens = torch.arange(16)[None]
    assert np.median(eps_fractions(model, tokens)) < 0.01
    with torch.no_grad():
        for module in model.modules():
            if fault == "eps" and hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e6
        for weight in model.parameters() if fault == "weights" else ():
            weight.mul_(1e-4 if weight.ndim > 1 else 1)
    assert (eps_fractions(model, tokens) > 0.99).all()
