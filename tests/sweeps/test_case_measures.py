import math

import numpy as np
import pytest
import torch
from pytorch_optimizer import SAM
from torch import nn

import workbench as wb
from tests.sweeps.small_sweeps import SIZE, TASK, my_model
from workbench.errors import AnatomyError
from workbench.schema.sweeps import MEASURES, SETTINGS
from workbench.sweeps.case_measures import pilot_rate
from workbench.training.training_plan import TrainingPlan

PLAN = {"n_steps": 20, "learning_rate": 0.01, "warmup": 5}


def task(**changes):
    return wb.tasks.associative_recall(**{k: v for k, v in {**TASK, **changes}.items() if k != "name"})


def model(norm="pre_ln", **changes):
    return wb.zoo.transformer(norm, **{**SIZE, **changes})


@pytest.mark.medium
def test_a_case_holds_all_settings_and_measures():
    case = wb.sweeps.measure_case(model(), task(), n_snapshots=64, **PLAN)
    assert set(case.coords) == set(SETTINGS)
    assert set(case.data_vars) == set(MEASURES)
    for name, rule in {**SETTINGS, **MEASURES}.items():
        assert case[name].dims == rule.dims
        assert case[name].attrs["long_name"] == rule.long_name
    assert (case.sizes["run"], case.sizes["layer"], case.sizes["mode"]) == (1, 2, 16)
    assert case["n_tokens"].item() == 4 * 8
    assert (case["norm"].item(), case["optimizer"].item(), case["momentum"].item()) == ("pre_ln", "AdamW", 0.9)
    assert case["mean_rate_share"].item() == pytest.approx((0.2 + 0.4 + 0.6 + 0.8 + 16) / 20)


@pytest.mark.medium
def test_its_spectra_are_those_of_profile():
    untrained = model()
    case = wb.sweeps.measure_case(untrained, task(), n_snapshots=64, **PLAN)
    spectra = wb.profile(untrained, task().probe(64), n_snapshots=64, progress=False)
    for name in ("near_unit_mass", "spectral_radius", "nonlinearity_ratio"):
        np.testing.assert_allclose(case[name].values[0], spectra[name].values, rtol=1e-6)
    np.testing.assert_allclose(case["eigenvalue"].values[0], spectra["eigenvalue"].values, rtol=1e-5, atol=1e-6)


class Parabola(nn.Module):
    """A model with frozen residual blocks whose loss is known in closed form."""

    def __init__(self):
        super().__init__()
        self.body = my_model(8, seed=0).requires_grad_(False)
        self.weight = nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, tokens):
        return self.body(tokens) * 0 + self.weight.square().sum() / 2


def quadratic(logits, targets):
    """Return the loss |w|^2 / 2, which ignores the targets."""
    return logits.mean()


def test_rates_of_the_trial_update_against_a_parabola():
    # Loss |w|^2/2 at w = (3, 4): gradient w, norm 5. With SGD the first update at learning rate r yields (1 - r) w, so
    # the loss increases for r > 2, and exceeds 50 where 25/2 (1-r)^2 > 50, that is for r > 3.
    case = wb.sweeps.measure_case(
        Parabola(), task(), n_snapshots=32, loss=quadratic, n_steps=5, learning_rate=0.1, optimizer="SGD"
    )
    assert case["initial_loss"].item() == pytest.approx(12.5)
    assert case["initial_grad_norm"].item() == pytest.approx(5)
    assert case["overshoot_rate"].item() == pytest.approx(2, rel=0.06)
    assert case["breaking_rate"].item() == pytest.approx(3, rel=0.06)


class Shifted(Parabola):
    """A model whose two logits are parameters, the same for each token."""

    def forward(self, tokens):
        return self.body(tokens)[..., :2] * 0 + self.weight


def test_the_rate_at_which_the_first_update_changes_the_logits_by_one():
    # The gradient of the first logit is (1, 0), so the logits change by (-r, 0), less their mean (-r, r) / 2.
    case = wb.sweeps.measure_case(
        Shifted(), task(), n_snapshots=32, loss=lambda logits, targets: logits[..., 0].mean(), n_steps=5,
        learning_rate=0.1, optimizer="SGD",
    )  # fmt: skip
    assert case["unit_change_rate"].item() == pytest.approx(2, rel=0.06)


def test_the_pilot_rate_against_a_parabola():
    # Each update multiplies w by 1 - r; ten updates increase the loss from 25/2 beyond 50 where (r - 1)^20 > 4.
    options = {"n_snapshots": 32, "loss": quadratic, "n_steps": 5, "learning_rate": 0.1, "optimizer": "SGD"}
    case = wb.sweeps.measure_case(Parabola(), task(), **options)
    assert case["rehearsed_rate"].item() == pytest.approx(1 + 4**0.05, rel=0.06)
    # With gradients clipped to norm 1 the updates do not grow: |w| oscillates in steps of r, starting from 5.
    clipped = wb.sweeps.measure_case(Parabola(), task(), clip_norm=1.0, **options)["rehearsed_rate"].item()
    assert clipped == pytest.approx(15, rel=0.06)  # the first update alone diverges where |5 - r| > 10
    short = [next(task().stream())] * 3
    rate = pilot_rate(Parabola(), short, TrainingPlan(n_steps=5, optimizer="SGD"), quadratic)
    assert rate == pytest.approx(1 + 4**0.25, rel=0.06)


@pytest.mark.parametrize("optimizer", ["LBFGS", lambda parameters: SAM(parameters, torch.optim.SGD, rho=0.05, lr=0.1)])
def test_an_optimizer_of_several_gradients_cannot_be_tried(optimizer):
    case = wb.sweeps.measure_case(Parabola(), task(), n_snapshots=32, loss=quadratic, n_steps=5, optimizer=optimizer)
    for name in ("overshoot_rate", "breaking_rate", "unit_change_rate", "rehearsed_rate"):
        assert math.isnan(case[name].item())
    assert case["initial_grad_norm"].item() == pytest.approx(5)


def test_clipping_and_other_optimizers_take_part_in_the_trial():
    def rates(**plan):
        case = wb.sweeps.measure_case(
            Parabola(), task(), n_snapshots=32, loss=quadratic, n_steps=5, learning_rate=0.1, **plan
        )
        return case["overshoot_rate"].item(), case["breaking_rate"].item()

    # Clipped to norm 1, the gradient is w/5, so both rates are five times as large.
    np.testing.assert_allclose(rates(optimizer="SGD", clip_norm=1.0), (10, 15), rtol=0.06)
    # Adam's first update is sign(g): |w - r (1, 1)|^2 = 25 - 14 r + 2 r^2 exceeds 25 for r > 7, and is 100 at 10.56.
    options = {"weight_decay": 0.0}
    np.testing.assert_allclose(rates(optimizer="AdamW", optimizer_options=options), (7, 10.56), rtol=0.06)


def test_measurements_that_need_gradients_are_nan_without_them():
    case = wb.sweeps.measure_case(model(), task(), n_snapshots=64, takes_gradients=False, **PLAN)
    for name in ("initial_grad_norm", "overshoot_rate", "breaking_rate", "rehearsed_rate"):
        assert math.isnan(case[name].item())
    assert math.isfinite(case["initial_loss"].item())


def test_stream_rms_is_that_of_the_states():
    untrained = my_model(8, seed=0)
    tokens, _ = next(task().stream())
    entering = untrained.embedding(tokens)
    leaving = entering
    for block in untrained.blocks:
        leaving = block(leaving)
    case = wb.sweeps.measure_case(untrained, task(), n_snapshots=32, **PLAN)
    assert case["stream_rms_first"].item() == pytest.approx(entering.square().mean().sqrt().item(), rel=1e-5)
    assert case["stream_rms_last"].item() == pytest.approx(leaving.square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"norm": "pre_ln"}, 0), ({"norm": "post_ln"}, 0), ({"norm": "none", "initialization": "rezero"}, 1)],
)
def test_the_scale_response_shows_whether_a_norm_removes_the_scale(options, expected):
    untrained = model(**options)
    case = wb.sweeps.measure_case(untrained, task(), n_snapshots=64, runs_pilot=False, **PLAN)
    assert case["scale_response"].item() == pytest.approx(expected, abs=0.1)
    assert not any(module._forward_pre_hooks for module in untrained.modules())


@pytest.mark.medium
def test_replanning_equals_measuring_with_the_other_plan():
    case = wb.sweeps.measure_case(model(), task(), n_snapshots=64, **PLAN)
    other = {"n_steps": 30, "learning_rate": 0.5, "warmup": 2, "schedule": "cosine"}
    replanned = wb.sweeps.replan(case, **other)
    measured = wb.sweeps.measure_case(model(), task(), n_snapshots=64, **other)
    for name in {*SETTINGS, *MEASURES} - {"settings"}:
        np.testing.assert_array_equal(replanned[name].values, measured[name].values, err_msg=name)
    assert case["learning_rate"].item() == 0.01
    again = wb.sweeps.replan(replanned, learning_rate=0.2)
    assert (again["schedule"].item(), again["n_steps"].item(), again["learning_rate"].item()) == ("cosine", 30, 0.2)


@pytest.mark.medium
def test_replanning_with_another_optimizer_discards_the_trial_update():
    case = wb.sweeps.replan(wb.sweeps.measure_case(model(), task(), n_snapshots=64, **PLAN), optimizer="SGD")
    assert case["optimizer"].item() == "SGD"
    assert np.isnan(case["breaking_rate"].item())
    assert np.isnan(case["overshoot_rate"].item())
    assert np.isnan(case["rehearsed_rate"].item())
    assert np.isfinite(case["initial_grad_norm"].item())


def test_a_model_without_a_residual_stream_is_rejected():
    with pytest.raises(AnatomyError):
        wb.sweeps.measure_case(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), task(), **PLAN)
