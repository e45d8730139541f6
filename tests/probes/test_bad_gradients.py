"""The first gradient that is not finite, of a finite loss."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.probes.bad_passes import HALF, TOKENS, Do, Plant, change, half, line, loss_of, of_line, place, zoo
from workbench.probes.failed_pass import first_bad_tensor


def test_an_infinite_derivative_is_found():
    model = zoo()
    model.blocks[2].mlp_norm = nn.Sequential(model.blocks[2].mlp_norm, Do(lambda x: (x - x.detach()).sqrt() + x))
    assert bool(loss_of(model).isfinite())
    bad = first_bad_tensor(model, loss_of)
    assert place(bad) == ("backward", "blocks.2.mlp_norm.1", "gradient of the input")
    assert bad.operation == "SqrtBackward0"
    assert (bad.n_bad, bad.n_values) == (512, 512)
    assert bad.largest_before > 0
    before, after = bad.bracket
    assert before[0] == "blocks.2"
    assert before[1] > 0
    assert after is None  # all later gradients are not finite
    assert "a derivative that is infinite, as at zero" in bad.sentence
    assert "the last finite gradients before it are those of blocks.2 (at most" in bad.sentence


def test_the_modules_on_either_side_are_named():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.good, self.bad, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.root = Do(lambda x: (x * 0).sqrt())

        def forward(self, x):
            return self.end(self.good(x) + self.root(self.bad(x)))

    model = Fork()
    bad = first_bad_tensor(model, of_line)
    assert place(bad) == ("backward", "root", "gradient of the input")
    assert [side[0] for side in bad.bracket] == ["", "good"]  # the model itself computes the sum
    x = torch.ones(3, 4)
    middle = model.good(x) + model.root(model.bad(x))
    loss = model.end(middle).square().sum()
    expected = torch.autograd.grad(loss, [middle, model.good.weight, model.good.bias])
    assert bad.bracket[0][1] == bad.largest_before == float(expected[0].abs().max())
    assert bad.bracket[1][1] == max(float(g.abs().max()) for g in expected[1:])


def test_a_scaled_loss_overflows_in_float16():
    model = zoo()
    assert first_bad_tensor(model, lambda m: 1e3 * loss_of(m), around=half) is None
    bad = first_bad_tensor(model, lambda m: 1e8 * loss_of(m), around=half)
    assert place(bad) == ("backward", "", "gradient from the loss")
    assert (bad.operation, bad.suggestion) == ("ToCopyBackward0", HALF)
    assert bad.sentence.startswith("Backward pass: the loss passes back to the model a gradient with")


class Product(torch.autograd.Function):
    """A product that does not define how autocast treats its gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return (x @ weight).float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].T, None


def test_the_backward_pass_runs_without_autocast():
    weight = torch.full((4, 4), 1e5)
    assert first_bad_tensor(line(Do(lambda x: Product.apply(1e-5 * x, weight))), of_line) is None

    def alone(model):
        with torch.autocast("cpu", enabled=False):
            return change(Product.apply(model[0](torch.ones(3, 4)).float(), weight))

    assert first_bad_tensor(line(), alone, around=half) is None


@pytest.mark.parametrize(
    "around", [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["float32", "bfloat16"]
)
def test_a_gradient_of_a_parameter_is_found(around):
    x = torch.full((3, 4), 1e30)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(1e-30)
    bad = first_bad_tensor(model, lambda m: 1e12 * m[0](x).sum(), around=around)
    assert place(bad) == ("backward", "0", "gradient of parameter weight")
    assert (bad.n_bad, bad.n_values) == (16, 16)
    assert bad.operation == "MmBackward0"


def test_finite_contributions_may_have_no_finite_sum():
    shared = nn.Parameter(torch.ones(2))
    model = nn.Module()
    model.register_parameter("shared", shared)
    bad = first_bad_tensor(model, lambda m: change(m.shared * 3e38) + change(m.shared * 2e38))
    assert place(bad) == ("backward", "", "gradient of parameter shared")
    assert bad.largest_before == pytest.approx(3e38)
    bad = first_bad_tensor(line(), lambda m: 3e38 * change(y := m[0](torch.ones(1, 4))) + 2e38 * change(y))
    assert place(bad) == ("backward", "0", "gradient of the output")
    assert (bad.n_bad, bad.n_values, bad.largest_before) == (4, 4, pytest.approx(3e38))


def test_a_bad_gradient_that_reaches_no_parameter_is_ignored():
    def guarded(x):  # the well-known pitfall is avoided on one side only
        return torch.where(x > 1e9, Plant.apply(x.detach().clone().requires_grad_(), torch.nan), x)

    assert first_bad_tensor(line(Do(guarded)), of_line) is None

    def masked(x):  # the NaN that is passed back is then masked
        return Plant.apply(torch.where(torch.zeros_like(x, dtype=torch.bool), x, 0.0), torch.nan) + x

    assert first_bad_tensor(line(Do(masked)), of_line) is None
    bad = first_bad_tensor(line(Do(lambda x: Plant.apply(x, torch.nan)), Do(masked)), of_line)
    assert place(bad) == ("backward", "1", "gradient of the input")
    assert bad.operation == "PlantBackward"


def test_a_sparse_gradient_is_read():
    model = nn.Sequential(nn.Embedding(16, 4, sparse=True), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(1e10)
    assert first_bad_tensor(model, lambda m: 1e20 * change(m(TOKENS))) is None
    bad = first_bad_tensor(model, lambda m: 1e29 * change(m(TOKENS)))
    assert place(bad) == ("backward", "1", "gradient of the input")
    model[0].weight.register_hook(lambda gradient: gradient * 1e30)
    bad = first_bad_tensor(model, lambda m: 1e10 * change(m(TOKENS)))
    assert place(bad) == ("backward", "0", "gradient of parameter weight")
    assert bad.largest_before >= 4e20
