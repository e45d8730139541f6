import numpy as np
import pytest

from tests.about import about
from tests.oracle import kreiss_grid
from workbench.errors import OptionError, SnapshotError
from workbench.koopman import kreiss_constant


def random_operator(kind, seed):
    rng = np.random.default_rng([seed, len(kind)])
    m = int(rng.integers(3, 20))
    A = rng.normal(size=(m, m)) / np.sqrt(m)
    if kind == "triangular":
        A = np.triu(A, 1) * 2 + np.diag(rng.uniform(-0.9, 0.9, m))
    elif kind == "near identity":
        A = np.eye(m) + 0.1 * A
    return A / np.abs(np.linalg.eigvals(A)).max() * rng.choice([0.7, 0.95, 0.999])


@pytest.mark.parametrize("kind", ["dense", "triangular", "near identity"])
@pytest.mark.parametrize("seed", range(3))
def test_within_one_percent_of_a_dense_grid(kind, seed):
    A = random_operator(kind, seed)
    assert kreiss_constant(A) > 0.99 * kreiss_grid(A, n_angles=91, n_distances=50)


def test_bound_is_sound():
    # The norm of the resolvent of [[a, c], [0, a]] is known in closed form, and its maximum is at a real z.
    a, c = 0.9, 1.0
    z = 1 + np.geomspace(1e-7, 10, 200_001)
    p, q = 1 / (z - a), c / (z - a) ** 2
    norm = np.sqrt((2 * p**2 + q**2 + q * np.sqrt(4 * p**2 + q**2)) / 2)
    exact = ((z - 1) * norm).max()
    found = kreiss_constant(np.array([[a, c], [0, a]]))
    assert found <= exact * (1 + 1e-9)
    assert found == pytest.approx(exact, rel=1e-3)


def test_normal_operators_have_no_transient_growth():
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(12, 12)))[0]
    assert kreiss_constant(Q @ np.diag(rng.uniform(-0.99, 0.99, 12)) @ Q.T) == pytest.approx(1.0, abs=1e-9)
    assert kreiss_constant(0.999 * Q) == pytest.approx(1.0, abs=1e-6)


def test_nilpotent_operator_without_a_basis_of_eigenvectors():
    A = np.diag([5.0] * 5, 1)
    assert kreiss_constant(A) >= 0.99 * kreiss_grid(A)


def test_eigenvalue_outside_the_circle_makes_it_infinite():
    assert kreiss_constant(np.diag([0.5, 1.01])) == np.inf
    assert np.isfinite(kreiss_constant(np.diag([0.5, 1.0])))


def test_bad_operators_are_rejected():
    with pytest.raises(SnapshotError, check=about("operator", "Tensor of shape (2, 3)")):
        kreiss_constant(np.ones((2, 3)))
    with pytest.raises(SnapshotError, check=about("operator")):
        kreiss_constant(np.full((2, 2), np.nan))
    with pytest.raises(OptionError, check=about("tolerance", 0)):
        kreiss_constant(np.eye(2), tolerance=0)
