import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.about import about, says
from workbench.errors import OptionError
from workbench.training.training_plan import TrainingPlan


@given(
    n_steps=st.integers(1, 400),
    warmup=st.integers(0, 100),
    schedule=st.sampled_from(["constant", "cosine", "linear", "wsd"]),
)
def test_rates_increase_to_the_peak_and_never_exceed_it(n_steps, warmup, schedule):
    plan = TrainingPlan(n_steps=n_steps, warmup=warmup, schedule=schedule)
    factors = [plan.rate_factor(step) for step in range(n_steps)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[: warmup or 1] == sorted(factors[: warmup or 1])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    if n_steps > warmup:
        assert max(factors) == pytest.approx(1.0)


def test_schedules_end_at_the_expected_rates():
    rates = {name: TrainingPlan(n_steps=100, warmup=20, schedule=name) for name in ("constant", "cosine", "linear")}
    assert {name: plan.rate_factor(9) for name, plan in rates.items()} == dict.fromkeys(rates, 0.5)
    assert [plan.rate_factor(60) for plan in rates.values()] == pytest.approx([1.0, 0.5, 0.5])
    assert [plan.rate_factor(100) for plan in rates.values()] == pytest.approx([1.0, 0.0, 0.0])
    wsd = TrainingPlan(n_steps=100, warmup=20, schedule="wsd")
    assert [wsd.rate_factor(step) for step in (9, 20, 80, 90, 100)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    custom = TrainingPlan(n_steps=100, warmup=2, schedule=lambda step: 0.25)
    assert [custom.rate_factor(0), custom.rate_factor(50)] == [0.125, 0.25]


@pytest.mark.parametrize(
    ("loss", "grad_norm", "cause"),
    [
        (50.0, 500.0, ""),
        (50.1, 1.0, "loss"),
        (1.0, 500.1, "grad_norm"),
        (51.0, 501.0, "loss"),
        (math.nan, 1.0, "non-finite"),
        (1.0, math.inf, "non-finite"),
        (math.inf, 1.0, "non-finite"),
    ],
)
def test_the_divergence_label_of_the_paper(loss, grad_norm, cause):
    assert TrainingPlan(n_steps=1).cause_of_divergence(loss, grad_norm) == cause


def test_limits_can_be_changed_and_removed():
    plan = TrainingPlan(n_steps=1, loss_limit=5.0, grad_norm_limit=math.inf)
    assert plan.cause_of_divergence(5.1, 1e9) == "loss"
    assert plan.cause_of_divergence(4.9, 1e9) == ""


def test_optimizers_by_name_by_function_and_as_objects():
    model = nn.Linear(3, 2)
    named = TrainingPlan(n_steps=1, learning_rate=0.1, optimizer="sgd", optimizer_options={"momentum": 0.5})
    sgd = named.optimizer_for(model)
    assert (type(sgd), sgd.defaults["lr"], sgd.defaults["momentum"]) == (torch.optim.SGD, 0.1, 0.5)
    rmsprop = TrainingPlan(n_steps=1, learning_rate=0.3, optimizer=torch.optim.RMSprop).optimizer_for(model)
    assert (type(rmsprop), rmsprop.param_groups[0]["lr"]) == (torch.optim.RMSprop, 0.3)
    adam = torch.optim.Adam(model.parameters(), lr=0.7)
    plan = TrainingPlan(n_steps=1, optimizer=adam)
    assert plan.optimizer_for(model) is adam
    assert adam.param_groups[0]["lr"] == 0.7
    assert plan.as_dict()["optimizer"] == "Adam"
    assert plan.as_dict()["optimizer_options"]["lr"] == 0.7


def test_frozen_parameters_are_not_optimized():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    (group,) = TrainingPlan(n_steps=1).optimizer_for(model).param_groups
    assert group["params"] == list(model[1].parameters())
    model[1].requires_grad_(False)
    with pytest.raises(OptionError, check=says("The model has no trainable parameters; set requires_grad on")):
        TrainingPlan(n_steps=1).optimizer_for(model)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"schedule": "step"}, about("schedule", "step", ("constant", "cosine", "linear", "wsd"))),
        ({"precision": "int8"}, about("precision", "int8", ("float32", "bfloat16", "float16"))),
        ({"optimizer": "lion"}, about("optimizer", "lion")),
        (
            {"optimizer": torch.optim.SGD, "optimizer_options": {"momentum": 0.9}},
            says("optimizer_options need the name of an optimizer; pass them"),
        ),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters()), "learning_rate": 0.1},
            says("An optimizer object has its own learning rate; omit"),
        ),
    ],
)
def test_invalid_settings_are_rejected(settings, error):
    with pytest.raises(OptionError, check=error):
        TrainingPlan(**{"n_steps": 10, **settings})


def test_optimizers_that_do_not_fit_are_rejected():
    with pytest.raises(OptionError, check=says("got an unexpected keyword argument")):
        TrainingPlan(n_steps=1, optimizer_options={"momentum": 0.9}).optimizer_for(nn.Linear(2, 2))
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(OptionError, check=says("The optimizer holds parameters that the model does not")):
        TrainingPlan(n_steps=1, optimizer=sgd).optimizer_for(nn.Linear(2, 2))
