"""Sharpness against the dense Hessian of a tiny model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError
from workbench.monitors.curvature import preconditioned_sharpness, sharpness

TOKENS = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(0))


def tiny(dtype=torch.float64):
    return wb.zoo.transformer(d_model=4, n_layers=1, n_heads=2, vocab_size=7, max_length=5, seed=0).to(dtype)


def cross_entropy(model):
    return functional.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def hessian(model, loss_of, h=1e-6):
    """Return the Hessian from central differences of gradients, in the order of the model's parameters."""
    weights = list(model.parameters())
    rows = []
    for weight in weights:
        flat = weight.detach().view(-1)
        for i in range(len(flat)):
            sides = []
            for shift in (h, -2 * h):
                flat[i] += shift
                parts = torch.autograd.grad(loss_of(model), weights)
                sides.append(torch.cat([part.flatten() for part in parts]))
            flat[i] += h
            rows.append((sides[0] - sides[1]) / (2 * h))
    rows = torch.stack(rows)
    torch.testing.assert_close(rows, rows.T, rtol=0, atol=1e-6)
    return (rows + rows.T) / 2


@pytest.fixture(scope="module")
def dense():
    return hessian(tiny(), cross_entropy)


def test_the_largest_eigenvalue(dense):
    expected = torch.linalg.eigvalsh(dense)
    assert expected[-1] > 0 > expected[0]  # the largest, not the largest in magnitude
    assert sharpness(tiny(), cross_entropy, tolerance=1e-8) == pytest.approx(expected[-1].item(), rel=1e-6)
    assert sharpness(tiny(), lambda m: -cross_entropy(m), tolerance=1e-8) == pytest.approx(
        -expected[0].item(), rel=1e-6
    )
    assert sharpness(tiny(torch.float32), cross_entropy) == pytest.approx(expected[-1].item(), rel=1e-3)


@pytest.mark.medium
def test_preconditioned_by_adam():
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-6)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model).backward()
        optimizer.step()
    moments = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()])
    p = (moments / (1 - 0.99**3)).sqrt() + 1e-6
    expected = torch.linalg.eigvalsh(hessian(model, cross_entropy) / p.sqrt()[:, None] / p.sqrt())[-1].item()
    got = preconditioned_sharpness(model, cross_entropy, optimizer, tolerance=1e-8)
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n_weights", [1, 2, 3, 5])
def test_a_quadratic_loss(n_weights):
    model = nn.Linear(n_weights, 1, bias=False).double()
    curvature = torch.linspace(0.5, 3, n_weights, dtype=torch.float64)
    bowl = lambda m: 0.5 * (curvature * m.weight.square()).sum()  # noqa: E731
    assert sharpness(model, bowl, tolerance=0) == pytest.approx(curvature[-1].item())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    bowl(model).backward()
    optimizer.step()
    scaled = (curvature / (model.weight.grad.abs() + 1e-8)).max().item()
    assert preconditioned_sharpness(model, bowl, optimizer, tolerance=0) == pytest.approx(scaled, rel=1e-6)


def test_gradient_descent_diverges_beyond_two_over_sharpness():
    torch.manual_seed(0)
    x, y = torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
    squares = lambda m: functional.mse_loss(m(x), y)  # noqa: E731
    limit = 2 / sharpness(nn.Linear(6, 1).double(), squares, tolerance=0)
    for factor, is_stable in ((0.95, True), (1.05, False)):
        model = nn.Linear(6, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=factor * limit)
        losses = []
        for _ in range(150):
            optimizer.zero_grad()
            loss = squares(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert (losses[-1] < losses[0]) == is_stable


def test_frozen_and_unused_weights_have_no_curvature(dense):
    model = tiny()
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    expected = torch.linalg.eigvalsh(dense)[-1].item()
    assert sharpness(model, cross_entropy, tolerance=1e-8) == pytest.approx(expected, rel=1e-6)
    frozen = tiny()
    for p in frozen.blocks.parameters():
        p.requires_grad_(False)
    is_free = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in frozen.parameters()])
    expected = torch.linalg.eigvalsh(dense[is_free][:, is_free])[-1].item()
    assert sharpness(frozen, cross_entropy, tolerance=1e-8) == pytest.approx(expected, rel=1e-6)


def test_values_that_are_not_finite_give_nan():
    model = tiny()
    assert math.isnan(sharpness(model, lambda m: cross_entropy(m) / 0))
    assert math.isnan(sharpness(nn.Linear(4, 1), lambda m: (m.weight * 0).sqrt().sum()))
    with torch.no_grad():
        model.blocks[0].attention.query.weight[0, 0] = math.nan
    assert math.isnan(sharpness(model, cross_entropy))


def test_too_few_products_to_converge_give_nan():
    torch.manual_seed(0)
    model = nn.Linear(400, 1, bias=False)
    curvature = torch.linspace(0.9999, 1, 400)
    bowl = lambda m: 0.5 * (curvature * m.weight.square()).sum()  # noqa: E731
    assert math.isnan(sharpness(model, bowl, tolerance=1e-9, n_vectors=3, n_products=4))


def test_invalid_arguments_are_rejected():
    model = nn.Linear(4, 1)
    loss_of = lambda m: m.weight.square().sum()  # noqa: E731
    for name, value in (("tolerance", -1), ("n_vectors", 2), ("n_products", 0)):
        with pytest.raises(OptionError, check=about(name, value)):
            sharpness(model, loss_of, **{name: value})
    with pytest.raises(OptionError, check=about("loss_of(model)", "Tensor of shape (1, 4)")):
        sharpness(model, lambda m: m.weight.square())
    with pytest.raises(OptionError, check=about("loss_of(model)")):
        sharpness(model, lambda m: loss_of(m).detach())
    with pytest.raises(OptionError, check=says("pass Adam or AdamW after a step with gradients of all")):
        preconditioned_sharpness(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(OptionError, check=says("The model has no trainable parameters, which sharpness")):
        sharpness(nn.Identity(), loss_of)
