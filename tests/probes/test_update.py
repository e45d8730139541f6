"""The effect of an update, exact for quadratic losses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.launches import launched
from workbench.errors import OptionError
from workbench.probes.update import update_effect, update_reading

numbers = st.floats(-3, 3, allow_subnormal=False)


class Quadratic(nn.Module):
    """The loss (w - a)' H (w - a) / 2 of two parameters, in float64."""

    def __init__(self, w):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in w)

    def forward(self):
        w = torch.cat([self.first, self.second]) - torch.tensor([0.5, -1.0], dtype=torch.float64)
        return w @ torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64) @ w / 2


@given(w=st.tuples(numbers, numbers), step=st.tuples(numbers, numbers))
def test_a_quadratic_loss(w, step):
    model = Quadratic([w[0] + step[0], w[1] + step[1]])
    before = dict(Quadratic(w).named_parameters())
    effect = update_effect(model, lambda m: m(), before)
    offset = torch.tensor(w, dtype=torch.float64) - torch.tensor([0.5, -1.0], dtype=torch.float64)
    d = torch.tensor(step, dtype=torch.float64)
    hessian = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    assert effect.predicted == pytest.approx(float(d @ hessian @ offset), abs=1e-9)
    assert effect.change - effect.predicted == pytest.approx(float(d @ hessian @ d) / 2, abs=1e-9)


@pytest.mark.parametrize(("rate", "ratio"), [(1e-3, 1), (1 / 4, 0.5), (1 / 2, 0), (1, -1)])
def test_the_ratio_distinguishes_small_steps_from_steps_across_the_valley(rate, ratio):
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)  # curvature 4
    nn.init.ones_(model.weight)
    x = torch.full((1, 1), 2.0, dtype=torch.float64)

    def loss_of(module):
        return module(x).square().sum() / 2

    before = {"weight": model.weight.detach().clone()}
    loss_of(model).backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    effect = update_effect(model, loss_of, before)
    assert effect.change / effect.predicted == pytest.approx(ratio, abs=0.01)


def test_large_parameters_are_summed_in_pieces(monkeypatch):
    monkeypatch.setattr("workbench.models.readable_weights._PIECE", 5)
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3), torch.rand(2, 4)
    before = {name: torch.rand_like(weight) for name, weight in model.named_parameters()}
    linear = update_effect(model, lambda m: m(inputs).sum(), before)
    assert linear.predicted == pytest.approx(linear.change, rel=1e-5)


@pytest.mark.parametrize("n_entries", [0, 20, 10**6])
def test_gradients_are_summed_together_up_to_a_size_without_waiting(n_entries, monkeypatch):
    monkeypatch.setattr("workbench.probes.update._ON_HOST", n_entries)
    model = nn.ModuleList([nn.Linear(6, 5, dtype=torch.float64), nn.Linear(5, 4), nn.Linear(4, 3)])
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss_of(layers):
        return layers[2](layers[1](layers[0](x).float()).tanh()).square().mean()

    before = {name: (0.99 * weight).detach() for name, weight in model.named_parameters()}
    launches, effect = launched(update_reading(model, loss_of, before))
    assert launches.waits == {}
    now = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model.load_state_dict(before)
    loss_of(model).backward()
    changes = [weight.grad.double() * (now[name].double() - before[name]) for name, weight in model.named_parameters()]
    assert effect.predicted == pytest.approx(sum(float(each.sum()) for each in changes), rel=1e-9)


def test_frozen_parameters_cost_nothing():
    """Of an adapter beside a large frozen matrix only the adapter is copied and differentiated."""
    model = nn.ModuleDict({"base": nn.Linear(64, 64), "adapter": nn.Linear(64, 1)})
    model["base"].requires_grad_(requires_grad=False)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    before = {f"adapter.{name}": weight.detach() + 0.1 for name, weight in model["adapter"].named_parameters()}
    launches, _ = launched(update_reading(model, lambda m: m["adapter"](m["base"](x)).sum(), before))
    assert launches.n_bytes < 64 * 64 * 4


def test_parameters_that_are_left_out_count_as_unchanged():
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0).double()
    tokens = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    loss_of = lambda m: torch.nn.functional.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten())  # noqa: E731
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss_of(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    whole = update_effect(model, loss_of, before)
    changed = {name: w for name, w in before.items() if not torch.equal(w, dict(model.named_parameters())[name])}
    assert update_effect(model, loss_of, changed) == pytest.approx(whole, rel=1e-12)
    norm = sum(float(w.grad.square().sum()) for w in model.parameters() if w.grad is not None)
    assert whole.predicted == pytest.approx(-0.05 * norm, rel=1e-9)
    assert update_effect(model, loss_of, {}) == (0, 0) if changed else True


def test_invalid_arguments_are_rejected():
    model = Quadratic([0.0, 1.0])
    with pytest.raises(OptionError, check=says("which is not a parameter of the model; pass copies of")):
        update_effect(model, lambda m: m(), {"third": torch.zeros(1)})
    with pytest.raises(OptionError, check=says("which is not a parameter of the model; pass copies of")):
        update_effect(model, lambda m: m(), {"first": torch.zeros(2)})
    with pytest.raises(OptionError, check=about("loss_of(model)")):
        update_effect(model, lambda m: m().detach(), {"first": torch.zeros(1)})
