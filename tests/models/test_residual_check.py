"""Chains without residuals are rejected where a residual stream is needed; every form of residual is accepted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.about import says
from tests.models.model_families import BY_NAME, build, make_inputs
from tests.zoo.zoo_models import MAKERS, inputs_for
from workbench.errors import AnatomyError
from workbench.models.residual_check import require_residuals

WIDTH = 12


class Attend(nn.Module):
    """Attention without a residual."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))


class Gated(nn.Module):
    """A gated MLP without a residual, which writes to the outputs of its products."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return functional.silu(self.gate(x), inplace=True).mul_(self.up(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


def perceptron():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def convolution():
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU())


@pytest.fixture
def vectors():
    return torch.randn(3, 9, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("part", [perceptron, Attend, Gated, Recurrent, convolution])
def test_a_chain_without_residuals_is_rejected_unless_it_is_named(part, vectors):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Sequential(*(part() for _ in range(4)))})["layers"]
    inputs = torch.randn(3, WIDTH, 5, 4) if part is convolution else vectors
    with pytest.raises(AnatomyError, check=says("depends on its input only through matrix products, and")):
        wb.profile(model, inputs, progress=False)
    assert wb.profile(model, inputs, stack="", progress=False).sizes["layer"] == 4
    assert len(wb.read_anatomy(model, inputs).sites) == 4  # gains along depth have a meaning without residuals


class Form(nn.Module):
    """A block whose output is a function of (block, state, branch)."""

    def __init__(self, form):
        super().__init__()
        self.form, self.branch, self.gate = form, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.full((1, WIDTH), 0.7))

    def forward(self, x):
        return self.form(self, x, torch.tanh(self.branch(x)))


def highway(block, x, y):
    gate = torch.sigmoid(block.gate(x))
    return gate * y + (1 - gate) * x


def ngpt(block, x, y):
    x = functional.normalize(x, dim=-1)
    return functional.normalize(x + block.scale * (functional.normalize(y, dim=-1) - x), dim=-1)


FORMS = {
    "plain residual": lambda block, x, y: x + y,
    "small residual": lambda block, x, y: 1e-3 * x + y,
    "negative residual": lambda block, x, y: y - x,
    "post-LN": lambda block, x, y: block.norm(x + y),
    "scaled by a parameter": lambda block, x, y: block.scale * x + y,
    "highway": highway,
    "normalized": ngpt,
    "rectified": lambda block, x, y: torch.relu(x + y),
    "without gradient": lambda block, x, y: x.detach() + y,
    "past autograd": lambda block, x, y: torch.from_numpy(x.numpy().copy()) + y,
    "in place": lambda block, x, y: x.add_(y),
    "added to the product": lambda block, x, y: torch.addmm(
        x.flatten(0, 1), y.flatten(0, 1), block.gate.weight
    ).view_as(x),
    "half the features": lambda block, x, y: torch.cat([x[..., 3:], y[..., :3]], -1),
    "by a matrix": lambda block, x, y: x @ (1.1 * torch.eye(WIDTH)) + y,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_residual_is_read(form, vectors):
    torch.manual_seed(0)
    model = nn.Sequential(*(Form(FORMS[form]) for _ in range(3)))
    assert wb.profile(model, vectors, progress=False).sizes["layer"] == 3


def test_kss_and_recorded_spectra_need_residuals_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
            self.layers = nn.Sequential(*(perceptron() for _ in range(3)))

        def forward(self, tokens):
            return self.head(self.layers(self.embedding(tokens)))

    task = wb.tasks.associative_recall(length=16, batch_size=8)
    for options in ({"kss": wb.KSS.published()}, {"spectra_every": 1}):
        with pytest.raises(AnatomyError, check=says("depends on its input only through matrix products, and")):
            list(wb.train(Model(), task, n_steps=1, learning_rate=1e-3, **options))
    with pytest.raises(AnatomyError, check=says("depends on its input only through matrix products, and")):
        wb.sweeps.measure_case(Model(), task, learning_rate=1e-3, warmup=0, n_steps=2)


def test_one_block_that_passes_on_its_state_suffices():
    """Check that passes run to their end, which wrappers such as FSDP need, and that hooks are removed."""
    model, inputs = build(BY_NAME["llama"]), make_inputs(BY_NAME["llama"])
    anatomy, n_calls = wb.read_anatomy(model, inputs), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: n_calls.append(1))
    n_hooks = [len(site.module._forward_hooks) for site in anatomy.sites]
    require_residuals(model, inputs, anatomy.stack, anatomy.sites)
    assert len(n_calls) == 2 * len(model.model.layers)
    assert [len(site.module._forward_hooks) for site in anatomy.sites] == n_hooks


@pytest.mark.parametrize("name", MAKERS)
def test_no_model_of_the_zoo_is_taken_for_a_chain_without_residuals(name):
    model = MAKERS[name](0)
    anatomy = wb.read_anatomy(model, inputs_for(model))
    require_residuals(model, inputs_for(model), anatomy.stack, anatomy.sites)
