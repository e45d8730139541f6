"""bfloat16 products computed in float32: they agree with those of torch, and are used only where torch casts."""

import pytest
import torch
from torch.nn import functional

from workbench.training import low_precision
from workbench.training.low_precision import _ProductsInFloat32, autocast


@pytest.fixture(autouse=True)
def _old_processor(monkeypatch):
    monkeypatch.setattr(low_precision, "_knows_bfloat16", lambda: False)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


PRODUCTS = {
    "linear": (functional.linear, (5, 7, 16), (12, 16), (12,)),
    "matmul": (torch.matmul, (5, 7, 16), (5, 16, 6)),
    "operator": (lambda a, b: a @ b, (7, 16), (16, 6)),
    "addmm": (torch.addmm, (6,), (7, 16), (16, 6)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (3, 4, 16), (3, 5, 16)),
    "conv1d": (functional.conv1d, (2, 4, 9), (6, 4, 3)),
    "conv2d": (functional.conv2d, (2, 3, 8, 8), (5, 3, 4, 4)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients_agree_with_torch_up_to_the_order_of_summation(name):
    product, *shapes = PRODUCTS[name]
    found = []
    for context in (torch.autocast("cpu", torch.bfloat16), autocast("cpu", torch.bfloat16)):
        factors = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
        with context:
            result = product(*factors)
        assert result.dtype is torch.bfloat16
        gradients = torch.autograd.grad(result.float().square().sum(), factors)
        found.append([result.detach().float(), *gradients])
    for theirs, ours in zip(*found, strict=True):
        assert theirs.dtype is ours.dtype
        # One unit in the last place of bfloat16, for sums that are rounded in the other direction.
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7 * float(theirs.abs().max()))


def test_factors_are_rounded_before_they_are_multiplied():
    x, w = numbers(4, 8), numbers(3, 8, seed=1)
    with autocast("cpu", torch.bfloat16):
        found = functional.linear(x, w)
    exact = x.detach().bfloat16().double() @ w.detach().bfloat16().double().T
    assert torch.equal(found, exact.bfloat16())
    assert not torch.equal(found, (x.detach().double() @ w.detach().double().T).bfloat16())


def test_products_are_unchanged_without_autocast_or_in_another_format():
    x, w = numbers(4, 8), numbers(3, 8, seed=1)
    expected = functional.linear(x, w)
    with _ProductsInFloat32():
        assert torch.equal(functional.linear(x, w), expected)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert torch.equal(functional.linear(x, w), expected)
        with torch.autocast("cpu", torch.float16):
            assert functional.linear(x, w).dtype is torch.float16
    with autocast("cpu", None):
        assert torch.equal(functional.linear(x, w), expected)
    with autocast("cpu", torch.bfloat16):
        assert functional.linear(x.double(), w.double()).dtype is torch.float64


def test_torch_is_used_on_processors_with_bfloat16(monkeypatch):
    monkeypatch.setattr(low_precision, "_knows_bfloat16", lambda: True)
    with autocast("cpu", torch.bfloat16):
        assert torch.overrides._get_current_function_mode() is None
        assert torch.is_autocast_enabled("cpu")
