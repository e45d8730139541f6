import numpy as np
import pytest
import torch

from tests.koopman.snapshots import snapshots
from workbench.koopman import SnapshotMoments, eigenmodes, modes, whitened_operator


def test_modes_come_with_their_eigenvectors():
    X, Y = snapshots(9, 100, 1, "linear")
    operator = whitened_operator(SnapshotMoments(9).update(*map(torch.from_numpy, (X, Y))))
    modes = eigenmodes(operator)
    A, right, left = operator.matrix.to(torch.complex128), modes.right, modes.left
    eigenvalue = torch.from_numpy(modes.eigenvalue)
    torch.testing.assert_close(A @ right, right * eigenvalue)
    torch.testing.assert_close(left @ A, eigenvalue[:, None] * left)
    torch.testing.assert_close(left @ right, torch.eye(9, dtype=torch.complex128))


@pytest.mark.parametrize("is_defective", [False, True])
def test_modes_do_not_depend_on_the_order_in_which_a_solver_lists_them(monkeypatch, is_defective):
    """Conjugates that are not adjacent, with the negative imaginary part first, and equal pairs."""
    generator = torch.Generator().manual_seed(0)
    turns = [torch.tensor([[0.6, -w], [w, 0.6]], dtype=torch.float64) for w in (0.3, 0.3, 0.7)]
    matrix = torch.block_diag(*turns, torch.tensor([[0.2]], dtype=torch.float64), 0.9 * torch.eye(2))
    if is_defective:  # the inverse would not be accurate, so LAPACK computes the left eigenvectors
        matrix[6, 7], matrix[6, 6] = 1.0, 0.9 + 1e-9
    turn = torch.randn(9, 9, dtype=torch.float64, generator=generator)
    x = torch.randn(400, 9, dtype=torch.float64, generator=generator)
    moments = SnapshotMoments(9).update(x, x @ (turn @ matrix @ torch.linalg.inv(turn)).T)
    operator = whitened_operator(moments)
    expected, solve, lapack = eigenmodes(operator), torch.linalg.eig, modes._both_eigenvectors
    for seed in range(5):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))

        def shuffled(A, order=order):
            eigenvalue, right = solve(A)
            return eigenvalue[order], right[:, order]

        def both_shuffled(A, order=order):
            eigenvalue, right, left = lapack(A)
            return eigenvalue[order], right[:, order], left[:, order]

        monkeypatch.setattr(torch.linalg, "eig", shuffled)
        monkeypatch.setattr(modes, "_both_eigenvectors", both_shuffled)
        found = eigenmodes(operator)
        monkeypatch.undo()
        np.testing.assert_allclose(np.abs(found.eigenvalue), np.abs(expected.eigenvalue), rtol=1e-12)
        for name in ("residual", "eigenvalue"):
            ranked = [np.sort_complex(np.asarray(getattr(one, name), complex)) for one in (found, expected)]
            np.testing.assert_allclose(*ranked, rtol=1e-6, atol=1e-12)
        assert found.eigenvector_condition == pytest.approx(expected.eigenvector_condition, rel=1e-6)
        if found.left is not None:
            right, left = found.right.numpy(), found.left.numpy()
            products = left @ right  # left eigenvectors are orthogonal to right ones of other eigenvalues
            assert np.abs(products - np.eye(9)).max() < 1e-6


def test_pairs_that_are_not_bitwise_conjugates_are_recognized():
    value = torch.tensor([0.5 + 0.2j, 0.5 - 0.2j, 0.1], dtype=torch.complex128)
    assert modes._ConjugatePairs(value).is_exact
    assert modes._ConjugatePairs(value).second.tolist() == [1]
    value[1] += 1e-16j
    assert not modes._ConjugatePairs(value).is_exact
    assert not modes._ConjugatePairs(value[[0, 2]]).is_exact
