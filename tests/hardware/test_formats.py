"""Tests of parameter formats, loss scale and late gradients, on models with known results."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.hardware.known_gradients import Known, batches, emulation
from workbench.hardware.emulation import NotMeasured
from workbench.hardware.hazards import late_gradients
from workbench.hardware.number_formats import (
    _N_RATES,
    activation_overflow,
    gradient_overflow,
    gradient_underflow,
    lost_updates,
    underflow_fraction,
)

BF16 = {"weight_dtype": "bfloat16", "master_weights": False}


def sgd(rate: float, **hardware: object) -> dict:
    return {"training": {"optimizer": "SGD", "learning_rate": rate, "n_steps": 100}, "hardware": hardware}


@pytest.mark.parametrize(
    ("rate", "lost"),
    [
        (2.0**-9, 1.0),  # less than half of 2^-8, the distance to the next number below 1: lost entirely
        (2.0**-7, 0.0),  # two such distances: not changed
        (1.25 * 2.0**-7, 1 - 1 / 1.25),  # two and a half distances: rounded to even, which is two
    ],
)
def test_the_lost_update_depends_on_the_distance_to_the_next_number(rate: float, lost: float) -> None:
    finding = lost_updates(emulation(Known(), sgd(rate, **BF16)))
    if rate == 1.25 * 2.0**-7:
        # The tie is rounded differently from update to update; both ends are quotients of rounded sums.
        assert -1e-9 <= finding.effect <= lost + 1e-9
    else:
        assert finding.effect == pytest.approx(lost)
        assert finding.relative_error == pytest.approx(lost)


def test_a_schedule_loses_the_updates_of_its_low_rates() -> None:
    constant, linear = (
        lost_updates(
            emulation(Known(), {"hardware": BF16, "training": {**sgd(2.0**-8)["training"], "schedule": schedule}})
        )
        for schedule in ("constant", "linear")
    )
    assert constant.effect == 0
    # Below half of 2^-8, the distance to the next number below 1, updates are lost; above half they are rounded up.
    rates = np.linspace(0, 99, _N_RATES).astype(int)
    factors = np.array([1 - step / 100 for step in rates])
    kept = np.where(factors > 0.5, 1.0, 0.0)
    assert linear.shrinkage == pytest.approx(1 - kept.sum() / factors.sum(), abs=1e-6)


def test_a_gradient_of_1e_8_underflows_in_float16_without_a_scale() -> None:
    values = torch.full((10,), 1e-8)
    assert underflow_fraction(values, 1.0, torch.float16) == 1.0
    assert underflow_fraction(values, 1024.0, torch.float16) == 0.0
    assert underflow_fraction(values, 1.0, torch.bfloat16) == 0.0
    assert underflow_fraction(torch.tensor([0.0, 1e-8, 1.0, 1.0, 1.0]), 1.0, torch.float16) == 0.25
    model = Known(scale=1e-8)
    plan = {"training": {"precision": "fp16"}, "hardware": {"loss_scale": 1}}
    assert gradient_underflow(emulation(model, plan)).effect == 1.0
    assert gradient_underflow(emulation(model, {"training": {"precision": "fp16"}})).effect == 0.0


def test_gradients_and_activations_overflow_float16() -> None:
    plan = {"training": {"precision": "fp16", "learning_rate": 1e-9}, "hardware": {"loss_scale": 1000}}
    finding = gradient_overflow(emulation(Known(scale=100.0), plan))
    assert finding.effect == pytest.approx(1e5 / 65504, rel=1e-3)
    assert finding.remedy_value is not None
    assert "overflows" in finding.meaning
    finding = activation_overflow(emulation(Known(scale=655.04), plan))
    assert finding.effect == pytest.approx(0.01, rel=1e-3)


class Parabola(nn.Module):
    """A model with the loss ``sum(curvature * weight^2) / 2``."""

    def __init__(self, *curvatures: float) -> None:
        super().__init__()
        self.register_buffer("curvatures", torch.tensor(curvatures))
        self.weight = nn.Parameter(torch.ones(len(curvatures)))
        self.other = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.curvatures * self.weight.square()).sum() / 2 + 0 * self.other).expand(len(x))


def value(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.mean()


@pytest.mark.parametrize("delay", [1, 2])
def test_the_largest_rate_on_a_parabola_agrees_with_theory(delay: int) -> None:
    curvature, rate = 4.0, 0.05
    plan = sgd(rate, reduction="stale", staleness=delay)
    finding = late_gradients(emulation(Parabola(curvature), plan, loss=value, data=batches()))
    edge = 2 * math.sin(math.pi / (4 * delay + 2)) / curvature
    assert rate / finding.effect == pytest.approx(edge, rel=0.25)
    assert finding.shrinkage == pytest.approx(1 - edge / (2 / curvature), abs=0.15)
    assert finding.remedy_value is None or rate * 2 > rate / finding.effect


def test_a_rate_above_the_late_edge_fails_and_a_smaller_one_is_proposed() -> None:
    plan = sgd(0.4, reduction="stale")
    finding = late_gradients(emulation(Parabola(4.0), plan, loss=value, data=batches()))
    assert finding.effect > 1
    assert "learning_rate = 0.1" in str(finding.remedy_value)


def test_only_the_last_bucket_is_late_when_reduction_is_overlapped() -> None:
    plan = sgd(0.05, reduction="overlapped", staleness=1)
    model = Parabola(4.0)
    # Buckets are filled from the last parameter on, so the first parameter is late.
    assert late_gradients(emulation(model, plan, loss=value)).effect > 0.15
    model = nn.Sequential(Known(64, scale=0.0), Parabola(4.0))  # the first parameter has no effect
    finding = late_gradients(emulation(model, plan, loss=value))
    assert finding.shrinkage == pytest.approx(0, abs=1e-6)


def test_nothing_is_late_when_reduction_waits() -> None:
    with pytest.raises(NotMeasured):
        late_gradients(emulation(Parabola(1.0), sgd(0.1, reduction="overlapped"), loss=value))


def test_an_optimizer_with_several_gradients_per_update_is_not_measured() -> None:
    plan = {"training": {"optimizer": "LBFGS"}, "hardware": {"reduction": "stale", **BF16}}
    for measure in (late_gradients, lost_updates):
        with pytest.raises(NotMeasured, match="LBFGS needs several gradients"):
            measure(emulation(Parabola(1.0), plan, loss=value))
