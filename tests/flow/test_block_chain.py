"""States between blocks: equal to the flow where both can be read, exact in mixed streams, otherwise an error."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import says
from workbench.errors import AnatomyError
from workbench.flow.block_chain import chain_sizes

SIZE = {"d_model": 16, "n_heads": 2, "vocab_size": 32, "max_length": 16}


def batch_of(seed=0):
    return wb.tasks.random_tokens(length=16, vocab_size=32, batch_size=4, seed=seed).batch(0)


@pytest.mark.parametrize(
    "options",
    [
        {**SIZE, "n_layers": 4},
        {**SIZE, "n_layers": 3, "norm": "post_ln"},
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 32, "n_positions": 16},
    ],
)
def test_a_model_whose_stream_is_read_has_the_same_sizes_and_gradients(options):
    model = wb.design(options).build(seed=1)
    inputs, targets = batch_of()
    sizes, gradients = chain_sizes(model, inputs, targets=targets)
    flow = wb.flow.measure(model, inputs, targets=targets, jacobian=False)
    np.testing.assert_allclose(sizes, flow["state_rms"].values[1:], rtol=1e-5)
    np.testing.assert_allclose(gradients, flow["gradient_norm"].values[1:], rtol=1e-4)


class Mixed(nn.Module):
    """Blocks that rotate and stretch the stream by a known factor."""

    def __init__(self, n=5, width=8, factor=1.5, *, skips=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))
        turns = [
            torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(i)))[0] for i in range(n)
        ]
        for layer, turn in zip(self.layers, turns, strict=True):
            layer.weight.data = factor * turn
        self.embed, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.skips = skips

    def forward(self, tokens):
        x = self.embed(tokens)
        first = None
        for layer in self.layers:
            x = layer(x)
            first = x if first is None else first
        return self.head(x + first if self.skips else x)


def test_a_stream_that_is_stretched_between_blocks_grows_by_the_factor_and_gradients_shrink_by_it():
    model = Mixed()
    inputs, targets = batch_of()
    sizes, gradients = chain_sizes(model, inputs, targets=targets)
    np.testing.assert_allclose(sizes[1:] / sizes[:-1], 1.5, rtol=1e-5)
    np.testing.assert_allclose(gradients[1:] / gradients[:-1], 1 / 1.5, rtol=1e-4)
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_with_a_head_of_zeros_gradients_are_those_of_a_random_direction():
    model = Mixed()
    with torch.no_grad():
        model.head.weight.zero_()
    inputs, targets = batch_of()
    _, gradients = chain_sizes(model, inputs, targets=targets)
    np.testing.assert_allclose(gradients[1:] / gradients[:-1], 1 / 1.5, rtol=1e-4)


def test_outputs_that_bypass_later_blocks_are_rejected():
    inputs, targets = batch_of()
    with pytest.raises(AnatomyError, check=says("The outputs of some blocks bypass later ones, so that no")):
        chain_sizes(Mixed(skips=True), inputs, targets=targets)


def test_a_model_without_repeated_blocks_is_rejected():
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    with pytest.raises(AnatomyError, check=says("No container has blocks that run once each, in")):
        chain_sizes(model, batch_of()[0], targets=batch_of()[1])


def test_the_structure_of_a_mixed_stream_is_that_of_its_blocks_without_a_flow():
    from workbench.assessment.structure import measure_structure

    batch = batch_of()
    numbers, flow = measure_structure([Mixed(9)], batch, batch_of(1)[0], wb.TrainingPlan(10, 1e-3))
    assert flow is None
    assert float(numbers["gain_by_depth"]) == pytest.approx(1.0, abs=1e-3)
    assert float(numbers["growth_by_depth"]) == pytest.approx(1.5 ** (8 / 8**0.5), rel=1e-3)
    assert "residual" in numbers["attention_entropy_share"].attrs["unseen"]
