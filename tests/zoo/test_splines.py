import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import BSpline

import workbench as wb
from tests.zoo.zoo_models import TEXT, perturbed
from workbench.zoo.blocks import KanLayer, b_spline_bases

grids = {
    "n_grid": st.integers(1, 12),
    "order": st.integers(1, 5),
    "half_range": st.sampled_from([0.25, 1.0, 3.0, 10.0]),
}


def scipy_bases(x, n_grid, order, half_range):
    """Return all basis functions from scipy, zero outside their supports."""
    step = 2 * half_range / n_grid
    knots = -half_range + step * np.arange(-order, n_grid + order + 1)
    columns = [
        np.nan_to_num(BSpline.basis_element(knots[i : i + order + 2], extrapolate=False)(x))
        for i in range(n_grid + order)
    ]
    return np.stack(columns, axis=-1)


@settings(max_examples=30, deadline=None)
@given(**grids)
def test_bases_agree_with_scipy(n_grid, order, half_range):
    # Also outside the grid, where they decrease to zero, but not at the outermost knots, which are in no interval.
    x = half_range * np.linspace(-3.01, 2.97, 397)
    expected = scipy_bases(x, n_grid, order, half_range)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        points = torch.from_numpy(x).to(dtype)
        found = b_spline_bases(points, n_grid=n_grid, order=order, half_range=half_range)
        exact = expected if dtype == torch.float64 else scipy_bases(points.double().numpy(), n_grid, order, half_range)
        np.testing.assert_allclose(found.numpy(), exact, rtol=0, atol=tolerance)


def test_default_bases_in_single_precision_agree_with_scipy_to_1e_6():
    x = torch.linspace(-3, 3, 1001)
    for n_grid in (4, 8):
        found = b_spline_bases(x, n_grid=n_grid, order=3, half_range=3.0).numpy()
        np.testing.assert_allclose(found, scipy_bases(x.double().numpy(), n_grid, 3, 3.0), rtol=0, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(relative=st.floats(-1, 1, exclude_max=True), **grids)
def test_bases_sum_to_one_on_the_grid_and_are_never_negative(relative, n_grid, order, half_range):
    x = torch.tensor([relative * half_range], dtype=torch.float64)
    bases = b_spline_bases(x, n_grid=n_grid, order=order, half_range=half_range)
    assert bases.sum().item() == pytest.approx(1, abs=1e-12)
    assert (bases >= -1e-15).all()
    assert (bases > 0).sum() <= order + 1


@pytest.mark.medium
def test_first_and_second_derivatives_are_correct():
    x = torch.linspace(-4.03, 4.01, 13, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda v: b_spline_bases(v, n_grid=5, order=3, half_range=3.0), x)
    torch.autograd.gradgradcheck(lambda v: b_spline_bases(v, n_grid=5, order=3, half_range=3.0), x)


def test_nan_stays_nan_and_infinite_points_have_zero_bases():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, 0.0], requires_grad=True)
    bases = b_spline_bases(x, n_grid=4, order=3, half_range=3.0)
    assert bases[0].isnan().any()
    assert not bases[1:4].any()
    bases[1:].sum().backward()
    assert torch.isfinite(x.grad[1:]).all()


def test_a_layer_is_the_sum_of_its_edges():
    model = perturbed(wb.zoo.kan(spline_std=0.5, **TEXT)).double()
    layer = model.blocks[0].mlp.up
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).clamp(-2.9, 2.9)
    expected = torch.zeros(5, 16, dtype=torch.float64)
    knots = -3 + 1.5 * np.arange(-3, 8)
    for out in range(16):
        for i in range(16):
            coefficients = layer.coefficient[out, i].detach().numpy()
            spline = BSpline(knots, coefficients, 3)(x[:, i].numpy())
            silu = x[:, i] / (1 + torch.exp(-x[:, i]))
            edge = layer.base_weight[out, i] * silu + layer.spline_weight[out, i] * torch.from_numpy(spline)
            expected[:, out] += edge.detach()
    torch.testing.assert_close(layer(x).detach(), expected, rtol=0, atol=1e-12)


def test_a_layer_is_initialized_as_in_the_paper():
    layer = wb.zoo.kan(d_model=64, n_layers=1, n_grid=8).blocks[0].mlp.down
    assert layer.coefficient.shape == (64, 64, 11)
    assert layer.coefficient.std().item() == pytest.approx(0.1, rel=0.05)
    assert layer.base_weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (layer.spline_weight == 1).all()
    xavier = wb.zoo.kan(d_model=64, n_layers=1, initialization="xavier").blocks[0].mlp.down
    assert xavier.base_weight.var().item() == pytest.approx(1 / 64, rel=0.1)
    assert xavier.coefficient.std().item() == pytest.approx(0.1, rel=0.05)


def test_a_layer_learns_a_curve():
    layer = KanLayer(1, 1, n_grid=8, order=3, half_range=3.0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0)
    x = torch.linspace(-3, 3, 200)[:, None]
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=200)

    def loss():
        optimizer.zero_grad()
        value = (layer(x) - torch.sin(2 * x)).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    assert loss() < 1e-3
