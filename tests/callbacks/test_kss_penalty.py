import math

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.about import about
from tests.oracle import kss_penalty, kss_penalty_precisely
from workbench.callbacks.kss import PenaltyShape
from workbench.callbacks.kss.penalty import ILL_DEFINED, NOT_FINITE, layer_penalties
from workbench.errors import OptionError
from workbench.koopman.stacked import StackedMoments
from workbench.models.readable_weights import complete

#: Shape of the penalty and target near-unit mass.
SHAPES = {
    "published": (PenaltyShape(rank=None), 0.4),
    "soft bounds": (PenaltyShape(rank=None, sharpness=5.0, beta=0.3), 0.5),
    "sharp bounds": (PenaltyShape(rank=None, sharpness=40.0, beta=2.0), 0.3),
    "log": (PenaltyShape(rank=None, unstable_term="log"), 0.4),
    "log alone": (PenaltyShape(rank=None, unstable_term="log", beta=0.0), 0.0),
    "near-unit alone": (PenaltyShape(rank=None, unstable=0.0, beta=1.0), 0.9),
}


def states(n_features=8, n=60, seed=0, spread=1.0):
    """Snapshots in which the scale of successive directions decreases by the given factor."""
    rng = np.random.default_rng(seed)
    scale = spread ** -np.arange(n_features)
    turn = np.linalg.qr(rng.normal(size=(n_features, n_features)))[0]
    return (rng.normal(size=(n, n_features)) * scale) @ turn + rng.normal(size=n_features)


def operator(blocks, seed=0, shear=0.0):
    """A matrix with given eigenvalues, and the conjugates of complex ones; normal without shear."""
    rng = np.random.default_rng(seed)
    parts = [np.array([[b]]) if np.isreal(b) else np.array([[b.real, b.imag], [-b.imag, b.real]]) for b in blocks]
    A = scipy.linalg.block_diag(*parts)
    A = A + shear * np.triu(rng.normal(size=A.shape), 1) * (A == 0)
    turn = np.linalg.qr(rng.normal(size=A.shape))[0]
    return turn @ A @ turn.T


def known_operator(blocks, *, seed=0, shear=0.0, noise=0.0, n=60):
    """Snapshots with a known operator."""
    A = operator(blocks, seed, shear)
    X = states(len(A), n, seed)
    return X, X @ A.T + noise * np.random.default_rng(seed + 1).normal(size=X.shape)


def layer_penalty(x, y, shape, *, gamma):
    """The penalty and its gradients in the states that have one."""
    stack = StackedMoments({0: (x, y)})
    part = complete(layer_penalties([stack], shape, gamma=gamma))[0]
    return part, [] if part.slopes is None else [gradient for _, gradient in stack.gradients({0: part.slopes})]


def measure(X, Y, shape, gamma, *, follows=("x", "y")):
    """The penalty and its gradients in the named states."""
    x, y = (torch.tensor(values, requires_grad=name in follows) for name, values in (("x", X), ("y", Y)))
    part, gradients = layer_penalty(x, y, shape, gamma=gamma)
    return part, [g.numpy() for g in gradients]


def as_oracle(shape, gamma):
    """The shape as arguments of the oracle."""
    return {
        "T": shape.sharpness,
        "gamma": gamma,
        "beta": shape.beta,
        "term": shape.unstable_term,
        "unstable": shape.unstable,
    }


def literal(X, Y, shape, gamma, basis=None):
    """The published formula."""
    return kss_penalty(X.T, Y.T, rank=shape.rank, basis=basis, **as_oracle(shape, gamma))


def slope(f, step):
    """Derivative of a function at 0, by finite differences of fourth order."""
    return (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step)


def assert_slopes_agree(X, Y, shape, gamma, *, step=1e-5, tolerance=1e-5, basis=None):
    """Compare the gradients in X, in Y and in both with finite differences of the published formula."""
    rng = np.random.default_rng(5)
    for follows in (("x",), ("y",), ("x", "y")):
        part, gradients = measure(X, Y, shape, gamma, follows=follows)
        assert part.value == pytest.approx(literal(X, Y, shape, gamma, basis), rel=1e-8)
        gradient = dict(zip(follows, gradients, strict=True))
        # Along the gradient, where the slope is largest, and along two independent directions.
        size = math.sqrt(sum(np.sum(g**2) for g in gradients))
        directions = [{name: g / size for name, g in gradient.items()}]
        directions += [{name: rng.normal(size=X.shape) / math.sqrt(X.size) for name in follows} for _ in range(2)]
        for direction in directions:
            dx, dy = direction.get("x", 0), direction.get("y", 0)
            measured = slope(lambda h, dx=dx, dy=dy: literal(X + h * dx, Y + h * dy, shape, gamma, basis), step)
            expected = sum(float(np.sum(gradient[name] * direction[name])) for name in follows)
            assert abs(measured - expected) <= tolerance * size


@pytest.mark.parametrize("name", SHAPES)
def test_gradient_of_the_published_formula(name):
    shape, gamma = SHAPES[name]
    X, Y = known_operator([1.4, 1.06, 0.97, -0.7, 0.6 + 0.9j, 0.5 + 0.2j], noise=0.1, shear=0.5)
    assert_slopes_agree(X, Y, shape, gamma)


@given(
    moduli=st.lists(st.floats(0.3, 1.8), min_size=2, max_size=4),
    angle=st.floats(0.2, 2.9),
    sharpness=st.floats(1.0, 30.0),
    gamma=st.floats(0.0, 1.0),
    shear=st.floats(0.0, 1.0),
)
@settings(max_examples=15, deadline=None)
def test_gradient_for_any_spectrum_and_target(moduli, angle, sharpness, gamma, shear):
    assume(np.diff(sorted(moduli)).min() > 0.05)  # another test covers nearly repeated eigenvalues
    pair = 1.1 * complex(math.cos(angle), math.sin(angle))
    X, Y = known_operator([*moduli, pair], shear=shear, noise=1e-4, n=30)
    assert_slopes_agree(X, Y, PenaltyShape(rank=None, sharpness=sharpness), gamma, step=1e-6)


@pytest.mark.parametrize("shear", [0.0, 1.0], ids=["normal", "non-normal"])
@pytest.mark.parametrize("gap", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_gradient_where_eigenvalues_nearly_repeat(kind, gap, shear):
    """Differences are taken in 60 digits, as non-normal modes change within the square of their gap."""
    center = 1.2 if kind == "real" else 0.9 + 0.7j
    X, Y = known_operator([center, center + gap, 0.95], shear=shear, n=12)
    shape, rng = PenaltyShape(rank=None), np.random.default_rng(0)
    _, (in_x, in_y) = measure(X, Y, shape, 0.4)
    dx, dy = rng.normal(size=X.shape), rng.normal(size=Y.shape)

    def precise(h):
        moved = (mpmath.matrix(v.T.tolist()) + h * mpmath.matrix(dv.T.tolist()) for v, dv in ((X, dx), (Y, dy)))
        return kss_penalty_precisely(*moved, digits=60, **as_oracle(shape, 0.4))

    step = mpmath.mpf(gap) ** 2 * mpmath.mpf(10) ** -12
    with mpmath.workdps(60):
        measured = float((precise(step) - precise(-step)) / (2 * step))
    expected = np.sum(in_x * dx) + np.sum(in_y * dy)
    # The rounding error of the moments, about 1e-15, is relative to the square of the gap.
    tolerance = 1e-5 if not shear else max(1e-5, 1e-14 / gap**2)
    assert abs(measured - expected) <= tolerance * math.sqrt(np.sum(in_x**2) + np.sum(in_y**2))


@pytest.mark.parametrize(("n_features", "rank"), [(9, 4), (40, 6)])
@pytest.mark.parametrize("term", ["softplus", "log"])
def test_gradient_at_reduced_rank(n_features, rank, term):
    X = states(n_features, 80, seed=2, spread=1.5)
    A = np.random.default_rng(3).normal(size=(n_features, n_features)) * 1.4 / math.sqrt(n_features)
    Y, shape = X @ A.T + 0.5 * X, PenaltyShape(rank=rank, unstable_term=term)
    basis = np.linalg.svd((X - X.mean(0)).T)[0][:, :rank]
    assert_slopes_agree(X, Y, shape, 0.4, basis=basis)


def test_a_step_against_the_gradient_lowers_the_penalty_and_the_radius():
    X, Y = known_operator([1.6, 1.2, 0.95, -0.7, 0.6 + 0.9j], noise=0.1)
    part, (_, in_y) = measure(X, Y, PenaltyShape(rank=None), 0.4)
    after, _ = measure(X, Y - 0.05 * part.value * in_y / np.sum(in_y**2), PenaltyShape(rank=None), 0.4)
    assert after.value < 0.97 * part.value
    assert after.spectral_radius < part.spectral_radius


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
@settings(max_examples=20, deadline=None)
def test_the_penalty_does_not_depend_on_coordinates_at_full_rank(seed, scale):
    X, Y = known_operator([1.3, 0.97, -0.6, 0.5 + 0.9j], noise=0.2, seed=3)
    rng = np.random.default_rng(seed)
    T = scale * (np.eye(X.shape[1]) + 0.3 * rng.uniform(-1, 1, size=(X.shape[1],) * 2))
    one, _ = measure(X, Y, PenaltyShape(rank=None), 0.4)
    other, _ = measure(X @ T + 3.0, Y @ T - 1.0, PenaltyShape(rank=None), 0.4)
    assert other.value == pytest.approx(one.value, rel=1e-6)
    assert other.spectral_radius == pytest.approx(one.spectral_radius, rel=1e-6)


@given(
    moduli=st.lists(st.floats(0.0, 50.0), min_size=1, max_size=12),
    gamma=st.floats(0.0, 1.0),
    term=st.sampled_from(["softplus", "log"]),
)
@settings(max_examples=60, deadline=None)
def test_the_penalty_is_nonnegative_and_independent_of_the_order(moduli, gamma, term):
    shape = PenaltyShape(unstable_term=term)
    modulus = torch.tensor(moduli, dtype=torch.float64)
    value = shape.of_moduli(modulus, gamma)
    assert value >= 0
    assert float(shape.of_moduli(modulus.flip(0), gamma)) == pytest.approx(float(value), rel=1e-12, abs=1e-300)
    assert 0 <= shape.soft_near_unit_mass(modulus) <= 1
    if term == "log" and max(moduli) <= shape.upper:
        assert PenaltyShape(unstable_term="log", beta=0).of_moduli(modulus, gamma) == 0


def test_what_is_reported_in_addition_to_the_value():
    X, Y = known_operator([1.3, 1.0, 0.95, 0.4])
    part, _ = measure(X, Y, PenaltyShape(rank=None), 0.4)
    assert part.spectral_radius == pytest.approx(1.3)
    assert part.near_unit_mass == 0.5
    assert sorted(part.modulus.tolist()) == pytest.approx([0.4, 0.95, 1.0, 1.3])
    assert part.reason == ""


@pytest.mark.parametrize("size", [2, 3])
def test_a_jordan_block_is_skipped_but_its_spectrum_is_reported(size):
    A = scipy.linalg.block_diag(1.2 * np.eye(size) + np.eye(size, k=1), 0.5)
    X = states(len(A), seed=1)
    x = torch.tensor(X, requires_grad=True)
    part, _ = layer_penalty(x, x @ torch.tensor(A.T), PenaltyShape(rank=None), gamma=0.4)
    assert part.value is None
    assert part.reason == ILL_DEFINED
    assert part.spectral_radius == pytest.approx(1.2, abs=1e-3)


def test_states_that_are_not_finite_have_no_penalty():
    part, _ = layer_penalty(*torch.full((2, 9, 4), math.nan), PenaltyShape(), gamma=0.4)
    assert (part.value, part.reason) == (None, NOT_FINITE)
    assert math.isnan(part.spectral_radius)
    assert math.isnan(part.near_unit_mass)


def test_states_that_overflow_or_do_not_vary_have_no_penalty():
    X = torch.tensor(states(4))
    for x, y in ((1e200 * X, X), (X, 1e200 * X), (torch.ones_like(X), X), (X[:2], X[:2])):
        x = x.clone().requires_grad_()
        part, _ = layer_penalty(x, y, PenaltyShape(rank=None), gamma=0.4)
        assert (part.value, part.reason) == (None, NOT_FINITE)


def test_the_bounds_are_in_order():
    with pytest.raises(OptionError, check=about("upper", 0.8)):
        PenaltyShape(upper=0.8)
