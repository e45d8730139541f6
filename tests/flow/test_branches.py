"""Additions to the residual stream are found, named and measured in every implementation of a block."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.models.model_families import BY_NAME, build, make_inputs
from tests.zoo.zoo_models import TEXT, inputs_for, perturbed
from workbench.flow.flow_measurement import measure

WIDTH = 12


def size(x):
    return x.detach().square().mean().sqrt().item()


def first_state(model, tokens):
    return (model.token_embedding(tokens) + model.position_embedding(torch.arange(tokens.shape[1]))).detach()


@pytest.mark.parametrize("norm", wb.zoo.NORMS)
def test_every_place_of_the_norm(norm):
    model = perturbed(wb.zoo.transformer(norm, **TEXT)).double()
    tokens = inputs_for(model)
    flow = measure(model, tokens, jacobian=False)
    assert flow["sublayer_name"].values.tolist() == [["attention", "mlp"]] * 2
    block, x = model.blocks[0], first_state(model, tokens)
    sizes, ratios = [size(x)], []
    for branch, normalize in ((block.attention, block.attention_norm), (block.mlp, block.mlp_norm)):
        is_after = norm in ("post_ln", "deep_norm_post")
        added = branch(x if is_after else normalize(x))
        ratios.append(size(added) / size(block.alpha * x))
        x = block.alpha * x + added
        x = normalize(x) if is_after else x
        sizes.append(size(x))
    np.testing.assert_allclose(flow["branch_ratio"][0], ratios, rtol=1e-10)
    np.testing.assert_allclose(flow["sublayer_signal_gain"][0], np.divide(sizes[1:], sizes[:-1]), rtol=1e-10)
    for kind in ("signal", "gradient"):
        np.testing.assert_allclose(flow[f"sublayer_{kind}_gain"].prod("sublayer"), flow[f"{kind}_gain"], rtol=1e-10)


def test_gradients_between_sublayers_are_those_of_autograd():
    model = perturbed(wb.zoo.transformer(**TEXT)).double()
    tokens = inputs_for(model)
    flow = measure(model, tokens, jacobian=False)
    block, x = model.blocks[0], first_state(model, tokens).requires_grad_()
    middle = x + block.attention(block.attention_norm(x))
    logits = model.head(model.final_norm(model.blocks[1](middle + block.mlp(block.mlp_norm(middle)))))
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    into, between = (g.norm().item() for g in torch.autograd.grad(loss, (x, middle)))
    assert float(flow["sublayer_gradient_gain"][0, 0]) == pytest.approx(into / between, rel=1e-6)


class Net(nn.Module):
    """A model of two blocks of one kind."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        x = x.clone()
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


class Straight(Block):
    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return torch.add(x, self.mlp(self.norm(x)), alpha=0.5)


class InPlace(Block):
    """A block that overwrites its branch."""

    def forward(self, x):
        y = self.mixer(self.norm(x))
        y += x
        return y.add(0.5 * self.mlp(self.norm(y)))


class Overwriting(Block):
    """A block that overwrites the stream, so that there are no gradients."""

    def forward(self, x):
        x += self.mixer(self.norm(x))
        return x.add_(self.mlp(self.norm(x)), alpha=0.5)


class SummedFirst(Block):
    def forward(self, x):
        n = self.norm(x)
        return self.mixer(n) + self.mlp(n) + x


class SummedInPlace(Block):
    def forward(self, x):
        n = self.norm(x)
        branch = self.mixer(n)
        branch += self.mlp(n)
        return x + branch


class OneByOne(Block):
    def forward(self, x):
        n = self.norm(x)
        return x + self.mixer(n) + self.mlp(n)


class Nested(Block):
    """A block with an addition inside a branch, which does not belong to the stream that leaves."""

    def forward(self, x):
        return x + self.mlp(x + self.mixer(x))


class Nameless(Block):
    def forward(self, x):
        return x + torch.tanh(x @ self.mixer.weight)


class Hidden(Block):
    """A block with an operation after the addition that is neither a scaling nor a norm."""

    def forward(self, x):
        return (x + self.mixer(x)).roll(1, dims=0)


def flow_of(kind):
    model = Net(kind).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    flow = measure(model, x, jacobian=False)
    assert torch.equal(x, before)
    return flow


def test_additions_in_place_have_the_same_measurements():
    here, there = flow_of(InPlace), flow_of(Straight)
    assert here["sublayer_name"].values.tolist() == [["mixer", "mlp"]] * 2
    for name in ("branch_ratio", "sublayer_signal_gain", "sublayer_gradient_gain", "gradient_norm", "state_rms"):
        np.testing.assert_allclose(here[name], there[name], rtol=1e-12)
    assert np.isfinite(here["sublayer_gradient_gain"]).all()


def test_a_stream_that_is_overwritten_has_signals_and_no_gradients():
    here, there = flow_of(Overwriting), flow_of(Straight)
    for name in ("branch_ratio", "sublayer_signal_gain", "state_rms"):
        np.testing.assert_allclose(here[name], there[name], rtol=1e-12)
    assert np.isnan(here["gradient_norm"][:-1]).all()  # the last state enters no block
    assert "The model cannot be differentiated: one of the variables" in here.attrs["unseen"]


@pytest.mark.parametrize("kind", [SummedFirst, SummedInPlace])
def test_branches_that_are_first_added_to_each_other_are_distinguished(kind):
    flow, reference = flow_of(kind), flow_of(OneByOne)
    assert flow["sublayer_name"].values.tolist() == [["mixer", "mlp"]] * 2
    for name in ("branch_ratio", "sublayer_signal_gain", "sublayer_gradient_gain"):
        np.testing.assert_allclose(flow[name], reference[name], rtol=1e-12)


def test_additions_inside_a_branch_do_not_count():
    flow = flow_of(Nested)
    assert flow["sublayer_name"].values.tolist() == [["mlp"]] * 2
    np.testing.assert_allclose(flow["sublayer_signal_gain"][:, 0], flow["signal_gain"])


def test_a_branch_without_a_module_is_called_branch():
    assert flow_of(Nameless)["sublayer_name"].values.tolist() == [["branch"]] * 2


def test_unknown_operations_after_the_last_addition_are_reported():
    flow = flow_of(Hidden)
    assert np.isfinite(flow["branch_ratio"]).all()
    assert np.isnan(flow["sublayer_signal_gain"]).all()
    assert "after the last addition to the residual stream were not observed in any block" in flow.attrs["unseen"]


NAMES = {
    "gpt2": "attn mlp",
    "llama": "self_attn mlp",
    "mixtral": "self_attn mlp",
    "mamba": "mixer",
    "gptj": "attn mlp",
    "falcon": "mlp self_attention",
    "bert": "attention output",
    "beit": "attention mlp",
    "granite": "self_attn mlp",
    "t5": "layer.0.SelfAttention layer.1.EncDecAttention layer.2.DenseReluDense",
}


@pytest.mark.parametrize("family", NAMES)
def test_families(family):
    flow = measure(build(BY_NAME[family]), make_inputs(BY_NAME[family]), jacobian=False)
    assert [" ".join(names) for names in flow["sublayer_name"].values] == [NAMES[family]] * 3
    for kind in ("signal", "gradient"):
        assert np.isfinite(flow[f"sublayer_{kind}_gain"]).all()
        np.testing.assert_allclose(flow[f"sublayer_{kind}_gain"].prod("sublayer"), flow[f"{kind}_gain"], rtol=1e-5)
