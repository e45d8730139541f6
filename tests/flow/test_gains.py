"""Gains compared with closed forms for wide random networks, and with autograd for real models."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.flow.nets import deep_net, pairs
from tests.zoo.zoo_models import TEXT, inputs_for, perturbed
from workbench.flow.flow_measurement import measure
from workbench.models.losses import token_loss

WIDTH, DEPTH, SEEDS = 512, 5, (0, 1, 2)


def gains(scale, n_rows=256, **options):
    """Return RMS signal and gradient gains over blocks and seeds, whose expected squares are exact at every width."""
    found = []
    for seed in SEEDS:
        x = torch.randn(n_rows, WIDTH, generator=torch.Generator().manual_seed(100 + seed))
        flow = measure(deep_net(WIDTH, DEPTH, scale, seed=seed, **options), x, jacobian=False, seed=seed)
        found.append([flow["signal_gain"].values, flow["gradient_gain"].values])
    return np.sqrt(np.mean(np.square(found), axis=(0, 2)))


@pytest.mark.medium
@pytest.mark.parametrize("scale", [0.7, 1.0, 1.6])
def test_a_linear_layer_multiplies_signal_and_gradient_by_its_scale(scale):
    np.testing.assert_allclose(gains(scale), scale, rtol=0.02)


@pytest.mark.medium
@pytest.mark.parametrize("scale", [1.0, math.sqrt(2), 2.0])
def test_a_rectified_layer_multiplies_by_its_scale_over_root_two(scale):
    np.testing.assert_allclose(gains(scale, is_rectified=True), scale / math.sqrt(2), rtol=0.02)


@pytest.mark.medium
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_residual_layer_adds_the_squares(scale):
    np.testing.assert_allclose(gains(scale, is_residual=True), math.sqrt(1 + scale**2), rtol=0.02)
    net = deep_net(WIDTH, DEPTH, scale, is_residual=True)
    flow = measure(net, torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)), jacobian=False)
    np.testing.assert_allclose(flow["branch_ratio"].values[:, 0], scale, rtol=0.02)
    np.testing.assert_allclose(flow["sublayer_signal_gain"].values[:, 0], flow["signal_gain"], rtol=1e-6)
    np.testing.assert_allclose(flow["sublayer_gradient_gain"].values[:, 0], flow["gradient_gain"], rtol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.9])
def test_the_cosine_after_rectified_layers_is_that_of_the_arc_cosine_kernel(cosine):
    x = pairs(32, 1024, cosine)
    nets = (deep_net(1024, 3, math.sqrt(2), is_rectified=True, seed=seed) for seed in range(5))
    found = np.mean([measure(net, x, jacobian=False)["token_cosine"].values for net in nets], axis=0)
    expected = [cosine]
    for _ in range(3):  # Cho and Saul 2009
        c = expected[-1]
        expected.append((math.sqrt(1 - c**2) + c * (math.pi - math.acos(c))) / math.pi)
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=1e-6)


def states_and_gradients(model, tokens, targets, loss=token_loss):
    """Return states and gradients as read with hooks."""
    states = []

    def keep(module, args, output):
        if not states:
            states.append(args[0])
        states.append(output)

    handles = [block.register_forward_hook(keep) for block in model.blocks]
    try:
        value = loss(model(tokens), targets)
    finally:
        for handle in handles:
            handle.remove()
    return states, torch.autograd.grad(value, states)


@pytest.mark.parametrize("norm", ["pre_ln", "post_ln", "none"])
def test_states_and_gradients_are_those_of_autograd(norm):
    model = perturbed(wb.zoo.transformer(norm, **TEXT)).double()
    tokens = inputs_for(model)
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    flow = measure(model, tokens, jacobian=False)
    assert flow.attrs["cotangent"] == "loss on next tokens"
    states, gradients = states_and_gradients(model, tokens, targets)
    np.testing.assert_allclose(flow["state_rms"], [s.square().mean().sqrt().item() for s in states], rtol=1e-12)
    np.testing.assert_allclose(flow["gradient_norm"], [g.norm().item() for g in gradients], rtol=1e-12)
    np.testing.assert_allclose(flow["gradient_gain"], flow["gradient_norm"][:-1] / flow["gradient_norm"].values[1:])
    given = measure(model, tokens, targets=targets, jacobian=False)
    np.testing.assert_allclose(given["gradient_norm"], flow["gradient_norm"], rtol=1e-12)
    assert given.attrs["cotangent"] == "loss on given targets"


def test_any_loss_is_possible():
    model = wb.zoo.transformer(**TEXT).double()
    tokens = inputs_for(model)
    targets = torch.randn(*tokens.shape, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flow = measure(model, tokens, targets=targets, loss=nn.functional.mse_loss, jacobian=False)
    _, gradients = states_and_gradients(model, tokens, targets, nn.functional.mse_loss)
    np.testing.assert_allclose(flow["gradient_norm"], [g.norm().item() for g in gradients], rtol=1e-12)


def test_a_random_direction_replaces_a_loss_without_gradient():
    model = wb.zoo.transformer("none", initialization="fixup", **TEXT)  # its output head is initialized to zero
    flow = measure(model, inputs_for(model), jacobian=False, seed=3)
    assert flow.attrs["cotangent"].startswith("random direction at the last block, seed 3")
    np.testing.assert_allclose(flow["gradient_gain"], 1.0, rtol=1e-6)  # and its blocks to the identity
    np.testing.assert_allclose(flow["signal_gain"], 1.0, rtol=1e-6)


def test_frozen_weights_and_inputs_that_are_states_make_no_difference():
    model = deep_net(32, 3, 1.0)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    flow = measure(model, x, jacobian=False)
    model.requires_grad_(False)
    frozen = measure(model, x, jacobian=False)
    np.testing.assert_array_equal(frozen["gradient_norm"], flow["gradient_norm"])
    assert not x.requires_grad
