import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import SnapshotError
from workbench.koopman.dmd import DmdOptions, whitened_operator
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.stacked import ProjectedOperator, StackedMoments, orthonormalized


def operators_of(stack, options):
    """The operator of each layer, None where it has none."""
    facts, projected = stack.facts.numpy(), stack.project(options).detach().numpy()
    return [ProjectedOperator.of(stack, *pair, options) for pair in zip(facts, projected, strict=True)]


def sorted_eigenvalues(matrix):
    return np.sort_complex(np.linalg.eigvals(np.asarray(matrix)))


def pairs_of_layers():
    """States of layers of which some have no spectrum, or vary in fewer directions than others."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 60, 12, generator=generator)
    flat, bad = x.clone(), x.clone()
    flat[:, 3:], bad[7, 2] = 0.0, torch.inf
    return [(x, y), (flat, flat + 0.1 * y), (bad, y), (x, bad), (1e200 * x.double(), y), (0 * x + 1, y), (y, x + y)]


@pytest.mark.parametrize(
    "options",
    [DmdOptions(), DmdOptions(rank=5), DmdOptions(rank=2), DmdOptions(rank=12), DmdOptions(ridge_kind="absolute")],
    ids=str,
)
def test_operators_of_several_layers_are_those_of_each_layer(options):
    pairs = [(x.double(), y.double()) for x, y in pairs_of_layers()]
    found = operators_of(StackedMoments(dict(enumerate(pairs))), options)
    for operator, (x, y) in zip(found, pairs, strict=True):
        moments = SnapshotMoments(12).update(x, y, check_finite=False)
        try:
            expected = whitened_operator(moments, options)
        except SnapshotError:
            assert operator is None
            continue
        assert operator.matrix.shape == expected.matrix.shape
        assert np.allclose(
            sorted_eigenvalues(operator.matrix), sorted_eigenvalues(expected.matrix), rtol=1e-9, atol=1e-10
        )
    assert [operator is None for operator in found] == [False, False, True, True, True, True, False]


def test_facts_are_the_traces_of_the_moments():
    x, y = torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(1)) + 2.0
    moments = SnapshotMoments(6).update(x, y)
    traces = [part.trace() for part in (moments.c_xx, moments.c_dx, moments.c_dd)]
    expected = [*traces, moments.mean_x.square().sum(), 40]
    for facts in StackedMoments({3: (x, y), 5: (x, y)}).facts:
        assert facts.tolist() == pytest.approx([float(number) for number in expected], rel=1e-12)


def test_two_snapshots_are_too_few():
    x, y = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(1))
    assert operators_of(StackedMoments({0: (x, y)}), DmdOptions()) == [None]


def test_slopes_lead_to_the_gradient_in_the_states():
    """The gradient of the trace of A^2, which no basis changes, against finite differences along a direction."""
    x, y, dx, dy = torch.randn(4, 50, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    options, leaves, h = DmdOptions(), tuple(part.clone().requires_grad_() for part in (x, y)), 1e-5
    stack = StackedMoments({7: leaves, 8: (x, y)})
    operator, _ = operators_of(stack, options)
    gradients = stack.gradients({7: operator.slopes(2 * operator.matrix.T)})
    assert [state is leaf for (state, _), leaf in zip(gradients, leaves, strict=True)] == [True, True]
    found = sum(float((gradient * d).sum()) for (_, gradient), d in zip(gradients, (dx, dy), strict=True))
    moved = StackedMoments({i: (x + i * h * dx, y + i * h * dy) for i in (1, -1)})
    after, before = (np.trace(each.matrix @ each.matrix) for each in operators_of(moved, options))
    assert found == pytest.approx((after - before) / (2 * h), rel=1e-6)


@given(seed=st.integers(0, 1000), decay=st.floats(0, 14), n_zero=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_orthonormal_bases_span_the_columns_at_any_condition(seed, decay, n_zero):
    random = np.random.default_rng(seed)
    left, right = (np.linalg.qr(random.normal(size=(n, 6)))[0] for n in (40, 6))
    size = 10.0 ** (3 - decay * np.arange(6) / 6)
    size[6 - n_zero :] = 0.0
    found = orthonormalized(torch.tensor(np.stack([left * size @ right.T, left @ right.T]))).numpy()
    assert np.isfinite(found).all()
    # The projection onto the leading directions, which are those well above the rounding of the largest.
    leading = left[:, size > 1e-7 * size[0]]
    assert np.abs(found[0] @ (found[0].T @ leading) - leading).max() < 1e-7
    assert np.abs(found[1].T @ found[1] - np.eye(6)).max() < 1e-12
    gram = found[0].T @ found[0]
    assert np.abs(gram @ gram - gram).max() < 1e-10 + 1e-3 * (decay > 11 or n_zero > 0)
