import math

import numpy as np
import torch

from workbench.models.device_numbers import read_arrays, read_numbers


def test_numbers_of_every_dtype_are_read_as_they_are():
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


def test_a_tensor_that_knows_itself_how_it_is_read_is_asked():
    class Split(torch.Tensor):
        """Stands for a tensor that is split over ranks."""

    found = read_arrays([torch.tensor(1.0), torch.tensor([2.0, 3.0]).as_subclass(Split)])
    assert [array.tolist() for array in found] == [1.0, [2.0, 3.0]]
