"""Assessments with a loss of the user's own: of models whose output is anything, and what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import workbench as wb
from workbench.assessment.plan_trials import try_plan
from workbench.assessment.rate_pilot import rate_pilot
from workbench.errors import OptionError

PLAN = {
    "training": {"n_steps": 60, "learning_rate": 1e-2, "batch_size": 4},
    "hardware": {"data_parallel": 2, "gradient_dtype": "bfloat16"},
}


class Regression(nn.Module):
    """A model whose output has no logits: a mapping, of numbers of any size."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, features):
        return {"value": self.scale * self.layers(features), "features": (features,)}


def batches():
    features = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    return [(rows, rows.sum(-1, keepdim=True)) for rows in features.split(8)]


def squared(output, targets):
    return mse_loss(output["value"], targets)


@pytest.fixture(autouse=True)
def few_updates(monkeypatch):
    monkeypatch.setitem(try_plan.__kwdefaults__, "n_updates", 4)
    monkeypatch.setitem(rate_pilot.__kwdefaults__, "budget", 200)
    torch.manual_seed(0)


@pytest.mark.medium
def test_a_model_with_any_output_is_assessed_with_its_own_loss():
    model = Regression()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tree = wb.assess(model, batches(), plan=PLAN, loss=squared)
    assert tree.attrs["verdict"]
    assert not tree["pilot"].attrs["reason"]
    assert float(tree["trials"]["share_broken"]) == 0
    assert math.isfinite(tree["hardware"].attrs["gradient_norm"])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    structure = tree["structure"].to_dataset()
    assert math.isnan(structure["loss_over_guess"])
    assert "loss=" in structure["function_change"].attrs["unseen"]


@pytest.mark.medium
def test_a_loss_of_logits_gets_them_as_in_training():
    options = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 8}
    shapes = set()

    def smoothed(logits, targets):
        shapes.add(tuple(logits.shape[1:]))
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)

    tree = wb.assess(options, plan=PLAN, loss=smoothed)
    assert shapes == {(8, 32)}
    assert math.isfinite(tree["structure"]["gain_by_depth"])


def test_large_losses_of_another_scale_are_no_divergence():
    plan = wb.TrainingPlan(learning_rate=1e-4, n_steps=60)
    large = try_plan(Regression(scale=100.0), batches(), plan, n_updates=4, loss=squared)
    assert large["loss"].max() > plan.loss_limit
    assert float(large["share_broken"]) == 0
    wild = try_plan(Regression(), batches(), wb.TrainingPlan(learning_rate=1e3, n_steps=60), n_updates=4, loss=squared)
    assert float(wild["share_broken"]) == 1


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (None, r"Regression returns a dict without logits, so its loss is not known; pass loss="),
        (lambda output, _: output["price"], r"loss= fails on the output of Regression in data \(KeyError: 'price'\)"),
        (lambda output, targets: output["value"] - targets, r"loss= returned shape \(2, 1\) .*expected a 0-dim tensor"),
        (lambda *_: 1.0, "loss= returned type float for Regression in data, expected a 0-dim tensor; return the mean"),
    ],
)
def test_an_output_that_cannot_be_read_is_one_sentence(loss, says):
    more = {} if loss is None else {"loss": loss}
    with pytest.raises(OptionError, match=says):
        wb.assess(Regression(), batches(), plan=PLAN, **more)


def test_a_tensor_that_holds_no_logits_is_said_to_need_a_loss():
    with pytest.raises(OptionError, match=r"logits of shape \(2, 1\) for targets of shape \(2, 1\) in data.* or loss="):
        wb.assess(Regression().layers, batches(), plan=PLAN)
    model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=1, vocab_size=32, max_length=8)
    with pytest.raises(OptionError, match="does not run on batches of data"):
        wb.assess(model, batches(), plan=PLAN)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"target": {"width": 30}}, r"^\[target\] .* cannot be 30 wide, for each of its heads takes 16; choose 32"),
        ({"task": {"name": "digits"}}, r"^\[task\] .* does not run on batches of digits"),
        ({"task": {"name": "text_bytes"}}, r"^\[task\] text_bytes has 256 tokens, but the model knows only 32"),
        ({"task": {"name": "random_tokens", "length": 64}}, r"^\[task\] random_tokens has sequences of 64 tokens"),
        ({"task": {"name": "random_tokens", "length": "8"}}, r"^\[task\] random_tokens: length is '8'"),
        ({"task": {"name": "associative_recall", "n_pairs": 99}}, r"^\[task\] associative_recall: length is"),
        ({"training": {"optimizer": "SparseAdam"}}, r"^\[training\] optimizer is 'SparseAdam', but SparseAdam does no"),
        ({"assessment": {"widths": [64]}}, "^The plan knows no section 'assessment'"),
    ],
)
def test_a_plan_that_does_not_fit_says_which_section(section, says):
    options = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 8}
    for subject in (options, wb.zoo.transformer(**options)):
        with pytest.raises(OptionError, match=says):
            wb.assess(subject, plan=section)


def test_a_function_needs_the_target_of_the_plan():
    def make(width, depth, seed):
        raise AssertionError(f"{width}, {depth}, {seed}: it is not built")

    with pytest.raises(OptionError, match=r"add \[target\] with width and depth to the plan"):
        wb.assess(make)
