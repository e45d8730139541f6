import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from workbench.errors import OptionError
from workbench.training.training_plan import TrainingPlan


@given(
    n_steps=st.integers(1, 400),
    warmup=st.integers(0, 100),
    schedule=st.sampled_from(["constant", "cosine", "linear", "wsd"]),
)
def test_rates_rise_to_the_peak_and_never_above(n_steps, warmup, schedule):
    plan = TrainingPlan(n_steps=n_steps, warmup=warmup, schedule=schedule)
    factors = [plan.rate_factor(step) for step in range(n_steps)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[: warmup or 1] == sorted(factors[: warmup or 1])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    if n_steps > warmup:
        assert max(factors) == pytest.approx(1.0)


def test_schedules_end_where_they_should():
    rates = {name: TrainingPlan(n_steps=100, warmup=20, schedule=name) for name in ("constant", "cosine", "linear")}
    assert {name: plan.rate_factor(9) for name, plan in rates.items()} == dict.fromkeys(rates, 0.5)
    assert [plan.rate_factor(60) for plan in rates.values()] == pytest.approx([1.0, 0.5, 0.5])
    assert [plan.rate_factor(100) for plan in rates.values()] == pytest.approx([1.0, 0.0, 0.0])
    wsd = TrainingPlan(n_steps=100, warmup=20, schedule="wsd")
    assert [wsd.rate_factor(step) for step in (9, 20, 80, 90, 100)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    own = TrainingPlan(n_steps=100, warmup=2, schedule=lambda step: 0.25)
    assert [own.rate_factor(0), own.rate_factor(50)] == [0.125, 0.25]


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


def test_limits_can_be_moved_and_lifted():
    plan = TrainingPlan(n_steps=1, loss_limit=5.0, grad_norm_limit=math.inf)
    assert plan.cause_of_divergence(5.1, 1e9) == "loss"
    assert plan.cause_of_divergence(4.9, 1e9) == ""


def test_optimizers_by_name_by_function_and_ready():
    model = nn.Linear(3, 2)
    named = TrainingPlan(n_steps=1, learning_rate=0.1, optimizer="sgd", optimizer_options={"momentum": 0.5})
    sgd = named.optimizer_for(model)
    assert (type(sgd), sgd.defaults["lr"], sgd.defaults["momentum"]) == (torch.optim.SGD, 0.1, 0.5)
    made = TrainingPlan(n_steps=1, learning_rate=0.3, optimizer=torch.optim.RMSprop).optimizer_for(model)
    assert (type(made), made.param_groups[0]["lr"]) == (torch.optim.RMSprop, 0.3)
    ready = torch.optim.Adam(model.parameters(), lr=0.7)
    plan = TrainingPlan(n_steps=1, optimizer=ready)
    assert plan.optimizer_for(model) is ready
    assert ready.param_groups[0]["lr"] == 0.7
    assert plan.as_dict()["optimizer"] == "Adam"
    assert plan.as_dict()["optimizer_options"]["lr"] == 0.7


def test_frozen_weights_are_left_to_themselves():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    (group,) = TrainingPlan(n_steps=1).optimizer_for(model).param_groups
    assert group["params"] == list(model[1].parameters())
    model[1].requires_grad_(False)
    with pytest.raises(OptionError, match="no trainable weights"):
        TrainingPlan(n_steps=1).optimizer_for(model)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"n_steps": 0}, "n_steps is 0, expected at least 1"),
        ({"warmup": -1}, "warmup is -1, expected at least 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, expected a positive number"),
        ({"learning_rate": math.nan}, "learning_rate is nan, expected a positive number"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0, expected a positive number"),
        ({"loss_limit": 0.0}, "loss_limit is 0.0, expected a positive number"),
        ({"schedule": "step"}, "schedule is 'step', expected one of constant, cosine, linear"),
        ({"precision": "int8"}, "precision is 'int8', expected one of float32, bfloat16, float16"),
        ({"optimizer": "lion"}, "optimizer is 'lion', expected one of .*AdamW.*; pass any other as optimizer="),
        (
            {"optimizer": torch.optim.SGD, "optimizer_options": {"momentum": 0.9}},
            "optimizer_options belong to an optimizer given by name",
        ),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters()), "learning_rate": 0.1},
            "A ready optimizer has a rate of its own",
        ),
    ],
)
def test_impossible_settings_are_refused(settings, sentence):
    with pytest.raises(OptionError, match=sentence):
        TrainingPlan(**{"n_steps": 10, **settings})


def test_optimizers_that_do_not_fit_are_refused():
    with pytest.raises(OptionError, match=r"AdamW does not take .*momentum"):
        TrainingPlan(n_steps=1, optimizer_options={"momentum": 0.9}).optimizer_for(nn.Linear(2, 2))
    ready = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(OptionError, match="weights that are not the model's"):
        TrainingPlan(n_steps=1, optimizer=ready).optimizer_for(nn.Linear(2, 2))
