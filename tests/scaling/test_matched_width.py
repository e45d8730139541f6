"""Tests of narrow models with the variances of wide ones: each kind of parameter, and gains of the target width."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.data_scripts import load_script
from workbench.assessment.structure import NUMBERS, OUTPUTS, WIDTH_ERRORS
from workbench.scaling.designs import matched_width

TINY = {"vocab_size": 32, "max_position_embeddings": 32}


def factors(design, width, depth=2):
    """Return the factor by which each parameter was multiplied, by name."""
    unmodified = dict(design.build(width, depth, 0).named_parameters(remove_duplicate=False))
    found = {}
    for name, parameter in matched_width(design, width, depth).named_parameters(remove_duplicate=False):
        is_nonzero = unmodified[name] != 0
        ratio = (parameter[is_nonzero] / unmodified[name][is_nonzero]).detach().double()
        assert ratio.numel() == 0 or float(ratio.std(correction=0)) < 1e-5
        found[name] = float(ratio.mean()) if ratio.numel() else math.nan
    return found


def test_matrices_of_constant_standard_deviation_are_scaled_by_the_root_of_their_fan_in():
    found = factors(wb.design({"family": "transformer", "d_model": 256, "n_heads": 16, "initialization": "normal"}), 16)
    for name, factor in found.items():
        is_matrix = name.endswith("weight") and "norm" not in name and "embedding" not in name
        assert factor == pytest.approx(4.0 if is_matrix else 1.0, rel=1e-4) or math.isnan(factor), name


def test_standard_deviations_that_depend_on_the_width_are_kept():
    options = {"family": "transformer", "d_model": 256, "n_heads": 16, "initialization": "xavier"}
    found = factors(wb.design(options), 16)
    blocks = [factor for name, factor in found.items() if name.startswith("blocks") and not math.isnan(factor)]
    assert blocks
    assert blocks == pytest.approx([1.0] * len(blocks), rel=1e-4)


def test_each_kind_of_layer_of_transformers():
    import transformers

    gpt2 = transformers.GPT2Config(n_embd=256, n_head=8, n_layer=2, vocab_size=32, n_positions=32)
    found = factors(wb.design(gpt2), 32)
    root = math.sqrt(8)
    assert found["transformer.h.0.attn.c_attn.weight"] == pytest.approx(root)
    assert found["transformer.h.1.mlp.c_proj.weight"] == pytest.approx(root)
    assert found["transformer.wte.weight"] == found["transformer.wpe.weight"] == pytest.approx(1.0)
    assert found["lm_head.weight"] == pytest.approx(root)  # untied, because the two scale differently
    mixtral = transformers.MixtralConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        **TINY,
    )
    found = factors(wb.design(mixtral), 32)
    experts = {name: factor for name, factor in found.items() if "experts" in name or ".gate." in name}
    assert len(experts) >= 4
    assert list(experts.values()) == pytest.approx([root] * len(experts))
    mamba = transformers.MambaConfig(hidden_size=128, num_hidden_layers=2, state_size=4, vocab_size=32)
    found = factors(wb.design(mamba), 32)
    for name, factor in found.items():
        if name.endswith(("A_log", "D", "conv1d.weight", "embeddings.weight")):
            assert factor == pytest.approx(1.0), name
    assert found["backbone.layers.0.mixer.in_proj.weight"] == pytest.approx(2.0)


@pytest.mark.parametrize("spread", [0.05, None], ids=["constant", "by fan-in"])
def test_gains_of_a_chain_are_those_of_the_target(spread):
    """Each layer of a linear chain multiplies the mean square by variance times fan-in at any width."""

    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.map = nn.Linear(width, width, bias=False)
            nn.init.normal_(self.map.weight, std=spread or 1.5 / math.sqrt(width))

        def forward(self, x):
            return x + self.map(x)

    class Chain(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.config = {"width": width, "depth": depth}
            self.first, self.last = nn.Embedding(16, width), nn.Linear(width, 16)
            self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    of = wb.design(lambda width, depth, seed: Chain(width, depth), width=1024, depth=4)
    inputs = torch.arange(16).reshape(1, 16)
    flows = [
        wb.flow.measure(matched_width(of, 128, seed=seed), inputs, targets=inputs, jacobian=False) for seed in range(4)
    ]
    gain = 1 + (spread**2 * 1024 if spread else 1.5**2)
    found = np.exp(np.mean([np.log(flow["state_rms"].values[-1] / flow["state_rms"].values[0]) for flow in flows]))
    assert found == pytest.approx(gain**2, rel=0.1)


@pytest.mark.recorded
def test_the_error_of_matched_models_is_the_recorded_one_and_far_below_that_of_unmodified_ones():
    recorded = wb.samples.open("matched_width")
    log_ratio = {
        size: {
            name: np.log(recorded[name].sel(size=size) / recorded[name].sel(size="target")).values for name in names()
        }
        for size in ("thin", "matched")
    }
    rms = {size: {name: np.sqrt(np.nanmean(of**2)) for name, of in each.items()} for size, each in log_ratio.items()}
    assert rms["matched"] == pytest.approx(WIDTH_ERRORS, abs=0.005)
    for name in ("gain_by_depth", "growth_by_depth", "function_change"):
        assert rms["thin"][name] > 1.5 * rms["matched"][name], name


def names():
    return [name for name, (_, scale, *_) in {**NUMBERS, **OUTPUTS}.items() if scale == "log"]


@pytest.mark.slow
@pytest.mark.recorded
def test_repeating_the_measurement_yields_the_recorded_structure():
    make_matched_width = load_script("make_matched_width")
    recorded = wb.samples.open("matched_width").sel(design="gpt2")
    for size in ("thin", "matched"):
        found = make_matched_width.measure_size("gpt2", size)
        for name in names():
            assert float(found[name]) == pytest.approx(float(recorded[name].sel(size=size)), rel=1e-2)
