"""Measures of singular values compared with a reference implementation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.about import about
from workbench.errors import OptionError
from workbench.monitors.matrices import (
    effective_rank,
    frobenius_norm,
    singular_values,
    spectral_entropy,
    stable_rank,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_measures_of_a_matrix(alpha):
    matrix = draw(3, 7, 5)
    s = singular_values(matrix)
    for i, one in enumerate(matrix.numpy()):
        assert effective_rank(s, alpha=alpha)[i].item() == pytest.approx(oracle.effective_rank(one, alpha), rel=1e-12)
        assert frobenius_norm(s)[i].item() == pytest.approx(np.linalg.norm(one))
        expected = (np.linalg.norm(one) / np.linalg.norm(one, 2)) ** 2
        assert stable_rank(s)[i].item() == pytest.approx(expected)
    torch.testing.assert_close(spectral_entropy(s, alpha=alpha).exp(), effective_rank(s, alpha=alpha))


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=6), st.floats(0.25, 4), st.floats(1e-100, 1e100))
@settings(deadline=None, max_examples=50)
def test_ranks_lie_between_one_and_n_and_are_independent_of_the_unit(values, alpha, unit):
    s = torch.tensor(values, dtype=torch.float64)
    for rank in (lambda x: effective_rank(x, alpha=alpha), stable_rank):
        assert 1 - 1e-9 <= rank(s).item() <= len(values) + 1e-9
        torch.testing.assert_close(rank(s * unit), rank(s), rtol=1e-6, atol=1e-9)


def test_a_zero_matrix_has_a_norm_and_no_rank():
    s = singular_values(torch.zeros(4, 3))
    assert frobenius_norm(s).item() == 0
    assert all(math.isnan(rank(s).item()) for rank in (stable_rank, effective_rank, spectral_entropy))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_everything_is_computed_in_double_precision(dtype):
    matrix = draw(6, 4).to(dtype)
    assert singular_values(matrix).dtype == torch.float64
    torch.testing.assert_close(singular_values(matrix), torch.linalg.svdvals(matrix.double()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_matrix_that_is_not_finite_does_not_affect_others(bad):
    matrix = draw(3, 6, 4)
    matrix[1, 2, 3] = bad
    values = singular_values(matrix)
    assert values[1].isnan().all()
    assert values[[0, 2]].isfinite().all()


def test_rounding_errors_do_not_increase_the_rank():
    matrix = draw(40, 2) @ draw(2, 30, seed=1)
    s = singular_values(matrix)
    assert (s[:2] > 0).all()
    assert (s[2:] == 0).all()
    assert effective_rank(s, alpha=0.1).item() <= 2


def test_invalid_arguments_are_rejected():
    with pytest.raises(OptionError, check=about("alpha", 0)):
        effective_rank(torch.ones(3), alpha=0)
    with pytest.raises(OptionError, check=about("alpha")):
        spectral_entropy(torch.ones(3), alpha=math.nan)
