"""Singular values compared with those of the Jacobian matrix from autograd."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.models.model_families import BY_NAME, build, make_inputs
from tests.zoo.zoo_models import TEXT, inputs_for, perturbed
from workbench.flow.flow_measurement import measure
from workbench.flow.jacobian import Jacobian, SequenceJacobians, singular_values
from workbench.models.anatomy import read_anatomy


def spectrum(function, x):
    """Return all singular values of the dense Jacobian in decreasing order."""
    matrix = torch.autograd.functional.jacobian(function, x).reshape(x.numel(), x.numel())
    return torch.linalg.svdvals(matrix).numpy()


ZOO = {
    "pre_ln": lambda: wb.zoo.transformer("pre_ln", **TEXT),
    "post_ln": lambda: wb.zoo.transformer("post_ln", **TEXT),
    "moe": lambda: wb.zoo.moe(**TEXT),
    "mamba": lambda: wb.zoo.mamba(**TEXT),
    "kan": lambda: wb.zoo.kan(**TEXT),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", ZOO)
def test_single_blocks_and_all_together_against_dense_autograd(name):
    model = perturbed(ZOO[name]()).double()
    tokens = inputs_for(model, n_examples=2, n_tokens=3)
    flow = measure(model, tokens, n_jacobian_tokens=3, n_singular=6)
    assert flow.attrs["singular_values"] == "exact"
    state = model.token_embedding(tokens[:1])
    if model.position_embedding is not None:
        state = state + model.position_embedding(torch.arange(3))
    start = state = state.detach()
    for layer, block in enumerate(model.blocks):
        expected = spectrum(block, state)
        np.testing.assert_allclose(flow["block_singular_value"][layer], expected[:6], rtol=1e-6)
        assert float(flow["block_singular_mean"][layer]) == pytest.approx(np.sqrt(np.mean(expected**2)), rel=1e-6)
        state = block(state).detach()
    expected = spectrum(nn.Sequential(*model.blocks), start)
    np.testing.assert_allclose(flow["end_to_end_singular_value"], expected[:6], rtol=1e-6)
    assert float(flow["end_to_end_singular_mean"]) == pytest.approx(np.sqrt(np.mean(expected**2)), rel=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_hugging_face_models_against_dense_autograd(name):
    model = build(BY_NAME[name])
    tokens = make_inputs(BY_NAME[name])
    model = model.double()
    model.config._experts_implementation = "eager"  # the fused kernel does not support float64
    flow = measure(model, tokens, n_jacobian_tokens=4, n_singular=5)
    sites = read_anatomy(model, tokens).sites
    embedded = model.get_input_embeddings()(tokens[:1, :4]).detach()

    def last_state(x):  # positions are added or rotated later, so this is the Jacobian of all blocks
        left = []
        handle = sites[-1].module.register_forward_hook(
            lambda m, args, output: left.append(sites[-1].state_out(output))
        )
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            model(inputs_embeds=x, use_cache=False)
        handle.remove()
        return left[0]

    expected = spectrum(last_state, embedded)
    np.testing.assert_allclose(flow["end_to_end_singular_value"], expected[:5], rtol=1e-6)


def test_lanczos_and_random_probes_find_what_the_matrix_has():
    model = perturbed(wb.zoo.transformer(**TEXT)).double()
    tokens = inputs_for(model, n_examples=1, n_tokens=10)
    anatomy = read_anatomy(model, tokens)
    dense, krylov = (SequenceJacobians(model, anatomy, tokens, exact_up_to=limit) for limit in (1000, 0))
    dense.measure(6)
    krylov.measure(6)
    for exact, found in zip([*dense.blocks, dense.end_to_end], [*krylov.blocks, krylov.end_to_end], strict=True):
        assert exact.is_exact
        assert not found.is_exact
        np.testing.assert_allclose(found.largest, exact.largest, rtol=1e-6)
        assert found.mean == pytest.approx(exact.mean, rel=0.1)


def test_push_and_pull_are_each_others_transpose():
    x = torch.randn(1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    linear = Jacobian(lambda state: torch.tanh(state + state.flip(1) * state.sum()), x)
    random = np.random.default_rng(0)
    u, v = random.normal(size=(2, 96))
    assert u @ linear.push(v) == pytest.approx(v @ linear.pull(u), rel=1e-12)
    np.testing.assert_allclose(linear.dense() @ v, linear.push(v), rtol=1e-10)


def test_clustered_singular_values_are_found_too():
    x = torch.randn(1, 900, dtype=torch.float64)
    found = singular_values(Jacobian(lambda state: 3 * state.clone(), x), 4, exact_up_to=0)
    np.testing.assert_allclose(found.largest, 3.0, rtol=1e-10)
    assert found.mean == pytest.approx(3.0)


class Shortcut(nn.Module):
    """Blocks that also receive the state that enters the first block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(WithOrigin() for _ in range(3))

    def forward(self, x):
        origin = x
        for block in self.blocks:
            x = block(x, origin)
        return x


class WithOrigin(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 10, generator=torch.Generator().manual_seed(0)) / 3)

    def forward(self, x, origin):
        return torch.tanh(x @ self.weight) + origin


def test_other_inputs_of_a_block_are_kept_fixed():
    model = Shortcut().double()
    x = torch.randn(2, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flow = measure(model, x, n_singular=4)
    state = x[:1]
    for layer, block in enumerate(model.blocks):
        expected = spectrum(lambda s, block=block: block(s, x[:1]), state)
        np.testing.assert_allclose(flow["block_singular_value"][layer], expected[:4], rtol=1e-6)
        state = block(state, x[:1]).detach()


class WithoutDerivative(torch.autograd.Function):
    """The identity, with a derivative for several sequences but none for a single one."""

    @staticmethod
    def forward(ctx, x):
        ctx.n_rows = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.n_rows == 1:
            raise NotImplementedError("no derivative here")
        return gradient


class Gain(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.gain, self.function = nn.Parameter(torch.ones(6)), function

    def forward(self, x):
        return self.gain * self.function(x)


def test_a_block_without_derivative_is_named_and_the_others_are_measured():
    net = nn.Sequential(Gain(WithoutDerivative.apply), Gain(torch.clone))
    flow = measure(net, torch.randn(3, 6), n_singular=2)
    assert np.isnan(flow["block_singular_value"][0]).all()
    np.testing.assert_allclose(flow["block_singular_value"][1], 1.0)
    assert "Singular values of 0: no derivative here." in flow.attrs["unseen"]
    assert np.isnan(flow["end_to_end_singular_mean"])
    np.testing.assert_allclose(flow["signal_gain"], 1.0)


def test_a_block_that_does_not_depend_on_its_state_has_singular_values_of_zero():
    flow = measure(nn.Sequential(Gain(torch.detach), Gain(torch.clone)), torch.randn(3, 6), n_singular=2)
    np.testing.assert_array_equal(flow["block_singular_value"], [[0, 0], [1, 1]])
    np.testing.assert_array_equal(flow["end_to_end_singular_value"], [0, 0])
