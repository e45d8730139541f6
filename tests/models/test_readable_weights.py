import math

import numpy as np
import pytest
import torch

from workbench.models import readable_weights
from workbench.models.readable_weights import in_pieces, read_arrays, read_numbers


def test_numbers_of_every_dtype_are_read_exactly():
    values = [
        torch.tensor(0.1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor(70_000.0, dtype=torch.float32),
        torch.tensor(2**52 + 1),
        torch.tensor(True),
        torch.tensor([3.0], requires_grad=True),
        torch.nn.Parameter(torch.tensor(-math.inf)),
    ]
    assert read_numbers(values) == [value.item() for value in values]
    assert math.isnan(*read_numbers([torch.tensor(math.nan)]))


def test_arrays_keep_their_shapes():
    values = [torch.arange(6).reshape(2, 3), torch.zeros(0, 4), torch.tensor(5.0), torch.tensor([True, False])]
    found = read_arrays(values)
    assert [array.shape for array in found] == [(2, 3), (0, 4), (), (2,)]
    for array, value in zip(found, values, strict=True):
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, value.numpy())
    assert read_arrays([]) == []


def test_tensor_subclasses_are_read_by_their_own_method():
    class Split(torch.Tensor):
        """Represents a tensor that is split over ranks."""

    found = read_arrays([torch.tensor(1.0), torch.tensor([2.0, 3.0]).as_subclass(Split)])
    assert [array.tolist() for array in found] == [1.0, [2.0, 3.0]]


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 2, 5), (), (0, 3)])
def test_pieces_concatenate_to_the_tensor(shape, monkeypatch):
    monkeypatch.setattr(readable_weights, "_PIECE", 6)
    one, other = torch.rand(shape), torch.rand(shape, dtype=torch.float64)
    pieces = list(in_pieces(one, other))
    assert len(pieces) == max(1, -(-one.numel() // 6))
    for tensor, parts in zip((one, other), zip(*pieces, strict=True), strict=True):
        assert torch.equal(torch.cat([part.flatten() for part in parts]), tensor.flatten())


def test_tensors_that_are_not_contiguous_are_not_split(monkeypatch):
    """Pieces in the order of memory would combine different entries."""
    monkeypatch.setattr(readable_weights, "_PIECE", 6)
    transposed, contiguous = torch.rand(5, 4).T, torch.rand(4, 5)
    ((one, other),) = in_pieces(transposed, contiguous)
    assert one is transposed
    assert other is contiguous
