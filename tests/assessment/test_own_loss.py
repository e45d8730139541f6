"""Assessments with a custom loss, for models with any output, and invalid losses and outputs."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import workbench as wb
from tests.about import about, says
from workbench.assessment.plan_trials import rate_pilot, try_plan
from workbench.errors import OptionError

PLAN = {
    "training": {"n_steps": 60, "learning_rate": 1e-2, "batch_size": 4},
    "hardware": {"data_parallel": 2, "gradient_dtype": "bfloat16"},
}


class Regression(nn.Module):
    """Model whose output is a mapping without logits, with values of any scale."""

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
def test_a_loss_of_logits_receives_them_as_in_training():
    options = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 8}
    shapes = set()

    def smoothed(logits, targets):
        shapes.add(tuple(logits.shape[1:]))
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)

    tree = wb.assess(options, plan=PLAN, loss=smoothed)
    assert shapes == {(8, 32)}
    assert math.isfinite(tree["structure"]["gain_by_depth"])


def test_large_losses_of_another_scale_do_not_count_as_divergence():
    plan = wb.TrainingPlan(learning_rate=1e-4, n_steps=60)
    large = try_plan(Regression(scale=100.0), batches(), plan, n_updates=4, loss=squared)
    assert large["loss"].max() > plan.loss_limit
    assert float(large["share_broken"]) == 0
    wild = try_plan(Regression(), batches(), wb.TrainingPlan(learning_rate=1e3, n_steps=60), n_updates=4, loss=squared)
    assert float(wild["share_broken"]) == 1


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (None, "a dict"),
        (lambda output, _: output["price"], "'price'"),
        (lambda output, targets: output["value"] - targets, "a tensor of shape (2, 1)"),
        (lambda *_: 1.0, "float"),
    ],
)
def test_an_output_or_loss_that_does_not_fit_is_rejected(loss, value):
    more = {} if loss is None else {"loss": loss}
    with pytest.raises(OptionError, check=about("loss", value)):
        wb.assess(Regression(), batches(), plan=PLAN, **more)


def test_a_task_that_does_not_fit_the_model_is_rejected():
    with pytest.raises(OptionError, check=says("in data, expected logits for each target; pass task= with")):
        wb.assess(Regression().layers, batches(), plan=PLAN)
    model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=1, vocab_size=32, max_length=8)
    with pytest.raises(OptionError, check=says("to have one of the following scalar types: Long, Int; but")):
        wb.assess(model, batches(), plan=PLAN)


@pytest.mark.parametrize(
    ("section", "place", "name"),
    [
        ({"target": {"width": 30}}, "[target]", "width"),
        ({"task": {"name": "digits"}}, "[task]", "task"),
        ({"task": {"name": "text_bytes"}}, "[task]", "vocabulary"),
        ({"task": {"name": "random_tokens", "length": 64}}, "[task]", "length"),
        ({"task": {"name": "random_tokens", "length": "8"}}, "[task]", "length"),
        ({"task": {"name": "associative_recall", "n_pairs": 99}}, "[task]", "length"),
        ({"training": {"optimizer": "SparseAdam"}}, "[training]", "optimizer"),
        ({"assessment": {"widths": [64]}}, "", "assessment"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_section_and_the_key(section, place, name):
    options = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 8}
    for subject in (options, wb.zoo.transformer(**options)):
        with pytest.raises(OptionError, check=about(name)) as caught:
            wb.assess(subject, plan=section)
        assert str(caught.value).startswith(place)


def test_a_function_needs_the_target_of_the_plan():
    def make(width, depth, seed):
        raise AssertionError(f"{width}, {depth}, {seed}: it is not built")

    with pytest.raises(OptionError, check=says("The size of a design given as a function is unknown; add")):
        wb.assess(make)
