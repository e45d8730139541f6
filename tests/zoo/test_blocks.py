"""Attention, residual blocks and initializations, compared with formulas written out in the tests."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import BSpline

import workbench as wb
from tests.zoo.zoo_models import IMAGE, TEXT, inputs_for, perturbed
from workbench.zoo.blocks import b_spline_bases, rotate, window_mask


def naive_attention(attention, x, *, window, is_causal):
    """Compute the attention of one sequence, shape (token, feature), float64, by loops over heads and tokens."""
    n_tokens, head_dim = len(x), attention.query.out_features // attention.n_heads
    group = attention.n_heads // attention.n_kv_heads
    mixed = torch.zeros(n_tokens, attention.n_heads, head_dim, dtype=x.dtype)
    for head in range(attention.n_heads):
        q = attention.query(x)[:, head * head_dim :][:, :head_dim]
        k = attention.key(x)[:, head // group * head_dim :][:, :head_dim]
        v = attention.value(x)[:, head // group * head_dim :][:, :head_dim]
        q, k = attention.query_norm(q), attention.key_norm(k)
        for i in range(n_tokens):
            first = 0 if window is None else max(0, i - window + 1)
            visible = range(first, i + 1 if is_causal else n_tokens)
            scores = torch.stack([rotated(q[i], i, attention) @ rotated(k[j], j, attention) for j in visible])
            weights = (scores / math.sqrt(head_dim)).softmax(0)
            mixed[i, head] = sum(w * v[j] for w, j in zip(weights, visible, strict=True))
    return attention.out(attention.inner_norm(mixed.flatten(1)))


def rotated(vector, position, attention):
    """Rotate a query or key by multiplication of complex numbers; feature i is paired with feature i + half."""
    if attention.rotary_base is None:
        return vector
    half = len(vector) // 2
    angle = [position * attention.rotary_base ** (-2 * i / len(vector)) for i in range(half)]
    pairs = torch.complex(vector[:half], vector[half:]) * torch.exp(1j * torch.tensor(angle, dtype=vector.dtype))
    return torch.cat((pairs.real, pairs.imag))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1, "has_bias": False},
        {"window": 3},
        {"window": 1},
        {"position": "rotary", "rotary_base": 100.0},
        {"position": "rotary", "window": 4, "n_kv_heads": 2, "qk_norm": True},
        {"norm": "sub_ln", "qk_norm": True},
        {"family": "vit"},
        {"family": "vit", "n_kv_heads": 1},
    ],
)
def test_attention_follows_its_formula(options):
    size = IMAGE if "family" in options else TEXT
    model = wb.zoo.build(wb.zoo.ArchitectureConfig(**{**size, **options}))
    attention = perturbed(model).double().blocks[1].attention
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [
        naive_attention(attention, sequence, window=options.get("window"), is_causal="family" not in options)
        for sequence in x
    ]
    torch.testing.assert_close(attention(x), torch.stack(expected), rtol=0, atol=1e-12)


def test_rotated_products_depend_only_on_the_distance():
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotated_q, rotated_k = (rotate(x.expand(1, 1, 12, 8), 50.0)[0, 0] for x in (q, k))
    products = rotated_q @ rotated_k.T
    for distance in range(5):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert torch.equal(rotated_q[0], q)
    assert abs(products[3, 0] - products[0, 0]) > 1e-2


def test_a_window_includes_the_token_itself():
    assert window_mask(4, 2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    model = perturbed(wb.zoo.transformer(window=3, **{**TEXT, "n_layers": 1}))
    tokens = inputs_for(model)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    difference = (model(tokens) - model(changed)).abs().amax((0, 2))
    assert difference.nonzero().flatten().tolist() == [5, 6, 7]


def test_parallel_branches_have_the_same_input():
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    block = perturbed(wb.zoo.transformer(is_parallel=True, **TEXT)).blocks[0]
    normed = block.attention_norm(x)
    torch.testing.assert_close(block(x), x + block.attention(normed) + block.mlp(normed))
    block = perturbed(wb.zoo.transformer("deep_norm_post", is_parallel=True, **TEXT)).blocks[0]
    alpha = (2 * 2) ** 0.25
    torch.testing.assert_close(block(x), block.attention_norm(alpha * x + block.attention(x) + block.mlp(x)))


def test_mlps_follow_their_formulas():
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    for kind, activation in (
        ("gelu", lambda u: u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))),
        ("gelu_tanh", lambda u: 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))),
    ):
        mlp = perturbed(wb.zoo.transformer(mlp=kind, **TEXT)).blocks[0].mlp
        torch.testing.assert_close(mlp(x), mlp.down(activation(mlp.up(x))))
    mlp = perturbed(wb.zoo.transformer(mlp="swiglu", **TEXT)).blocks[0].mlp
    gate = mlp.gate(x)
    torch.testing.assert_close(mlp(x), mlp.down(gate / (1 + torch.exp(-gate)) * mlp.up(x)))


# Initializations


@pytest.mark.parametrize("family", ["transformer", "vit"])
def test_fixup_scales_the_branches_and_begins_as_the_identity(family):
    size = {**(IMAGE if family == "vit" else TEXT), "n_layers": 3, "norm": "none"}
    normal = wb.zoo.build(wb.zoo.ArchitectureConfig(family=family, **size))
    fixup = wb.zoo.build(wb.zoo.ArchitectureConfig(family=family, initialization="fixup", **size))
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    factor = (2 * 3) ** -0.5  # n_branches^(-1 / (2m - 2)) with m = 2 matrices in each
    for here, there in zip(fixup.blocks, normal.blocks, strict=True):
        assert torch.equal(here(x), x)
        torch.testing.assert_close(here.mlp.up.weight, factor * there.mlp.up.weight)
        torch.testing.assert_close(here.attention.value.weight, factor * there.attention.value.weight)
        assert torch.equal(here.attention.query.weight, there.attention.query.weight)
        assert not here.mlp.down.weight.any()
        assert not here.attention.out.weight.any()
        scalars = {name: p.item() for name, p in here.named_parameters() if p.ndim == 0}
        biases = ["attention.input_bias", "attention.mixed_bias", "mlp.input_bias", "mlp.activation_bias"]
        assert scalars == {f"{name}.bias": 0.0 for name in [*biases, "mlp.hidden_bias"]} | {
            "attention_scale.scale": 1.0,
            "mlp_scale.scale": 1.0,
        }
    assert not fixup(inputs_for(fixup)).any()


def test_rezero_begins_as_the_identity_and_its_factors_have_gradients():
    normal = wb.zoo.transformer("none", **TEXT)
    model = wb.zoo.transformer("none", initialization="rezero", **TEXT)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    for here, there in zip(model.blocks, normal.blocks, strict=True):
        assert torch.equal(here(x), x)
        assert torch.equal(here.mlp.down.weight, there.mlp.down.weight)
    model(inputs_for(model)).square().mean().backward()
    factors = [getattr(block, name).scale for block in model.blocks for name in ("attention_scale", "mlp_scale")]
    assert all(factor.grad != 0 for factor in factors)


def test_xavier_depends_on_numbers_of_inputs_and_outputs():
    model = wb.zoo.transformer(initialization="xavier", d_model=64, n_layers=1)
    for linear in (model.blocks[0].mlp.up, model.blocks[0].attention.out, model.head):
        n_out, n_in = linear.weight.shape
        assert linear.weight.var().item() == pytest.approx(2 / (n_in + n_out), rel=0.05)
        assert linear.weight.abs().max() <= math.sqrt(6 / (n_in + n_out))
    tied = wb.zoo.transformer(initialization="xavier", ties_embeddings=True, d_model=64, n_layers=1)
    for embedding in (model.token_embedding, tied.token_embedding):
        assert embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("family", ["transformer", "moe", "kan"])
def test_last_matrices_are_scaled_by_the_number_of_branches(family):
    unscaled, scaled = (
        wb.zoo.build(wb.zoo.ArchitectureConfig(family=family, scales_residual_init=flag, **TEXT)).state_dict()
        for flag in (False, True)
    )
    last = ("attention.out.weight", "mlp.down.weight", "down.base_weight", "down.coefficient")
    n_scaled = 0
    for key, tensor in unscaled.items():
        is_last = key.endswith(last) or ("experts" in key and key.endswith("down.weight"))
        n_scaled += is_last
        torch.testing.assert_close(scaled[key], tensor / 2 if is_last else tensor)  # sqrt(2 * 2 layers)
    assert n_scaled == {"transformer": 4, "moe": 18, "kan": 6}[family]


@pytest.mark.parametrize("family", ["transformer", "moe", "kan"])
def test_deep_norm_scales_every_matrix_on_the_path(family):
    post_ln, deep = (
        wb.zoo.build(wb.zoo.ArchitectureConfig(family=family, norm=norm, **TEXT)).state_dict()
        for norm in ("post_ln", "deep_norm_post")
    )
    n_scaled = 0
    for key, tensor in post_ln.items():
        *_, layer, kind = key.split(".")
        is_on_path = layer in ("value", "out", "up", "down") and kind in ("weight", "base_weight", "coefficient")
        n_scaled += is_on_path
        torch.testing.assert_close(deep[key], tensor * 16**-0.25 if is_on_path else tensor)  # (8 * 2 layers)^(-1/4)
    assert n_scaled == {"transformer": 8, "moe": 36, "kan": 12}[family]


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
