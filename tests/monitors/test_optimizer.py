"""Size of updates and staleness of Adam's second moment, by hand and with a real optimizer."""

import math

import pytest
import torch
from torch import nn

from tests.about import about, says
from workbench.errors import OptionError
from workbench.monitors.optimizer_health import (
    adam_staleness,
    gradient_rms,
    gradient_signal_share,
    unchanged_share,
    update_ratio,
)


def test_gradients_of_a_module_are_weighted_by_entry():
    parts = [torch.tensor([[3.0, 4.0]]), torch.tensor([0.0]), torch.tensor(1.0)]
    assert gradient_rms(parts).item() == pytest.approx(math.sqrt(26 / 4))
    assert gradient_rms(iter(parts)).item() == gradient_rms(parts).item()
    assert gradient_rms(parts[0]).item() == pytest.approx(math.sqrt(12.5))
    assert gradient_rms([]).isnan()
    assert gradient_rms(torch.tensor([1.0, math.nan])).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_and_large_gradients_neither_underflow_nor_overflow(dtype):
    for size in (1e-4, 1e4):
        gradient = torch.full((1000,), size, dtype=dtype)
        assert gradient_rms(gradient).item() == pytest.approx(size, rel=1e-2)


def test_a_step_of_sgd_has_the_ratio_of_its_learning_rate():
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(3, 7)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    expected = 0.01 * gradient_rms([p.grad for p in model.parameters()]) / gradient_rms(before)
    torch.testing.assert_close(update_ratio(before, model.parameters()), expected, rtol=1e-5, atol=0)


def test_staleness_by_hand():
    gradient, moment = torch.tensor([2.0, 3.0]), torch.tensor([4.0, 1.0])
    assert adam_staleness(gradient, moment).item() == pytest.approx(math.sqrt((1 + 9) / 2))
    assert adam_staleness(gradient, torch.zeros(2), eps=0.5).item() == pytest.approx(math.sqrt((4 + 9) / 2) / 0.5)
    assert adam_staleness([gradient, gradient], [moment, moment]).item() == pytest.approx(math.sqrt(5))


def test_staleness_is_one_after_the_first_step_and_jumps_with_the_gradients():
    weight = nn.Parameter(torch.ones(50))
    optimizer = torch.optim.Adam([weight], betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(0)

    def staleness(size):
        weight.grad = size * torch.randn(50, generator=generator)
        optimizer.step()
        state = optimizer.state[weight]
        return adam_staleness(weight.grad, state["exp_avg_sq"] / (1 - 0.99 ** float(state["step"]))).item()

    assert staleness(1.0) == pytest.approx(1, rel=1e-5)
    steady = [staleness(1.0) for _ in range(300)]
    assert sum(steady[100:]) / 200 == pytest.approx(1, abs=0.05)
    assert staleness(10.0) > 5


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("beta1", [0.5, 0.9])
def test_a_known_signal_fraction_is_found_at_any_age_of_the_moments(share, beta1):
    """Gradients with a constant part and independent noise, averaged by Adam itself."""
    n = 20_000
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(n))
    optimizer = torch.optim.Adam([weight], betas=(beta1, 0.99))
    signal = share**0.5 * torch.ones(n)
    for step in range(1, 41):
        weight.grad = signal + (1 - share) ** 0.5 * torch.randn(n, generator=generator)
        optimizer.step()
        state = optimizer.state[weight]
        moments = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - 0.99**step)
        found = gradient_signal_share(*moments, beta1=beta1, n_updates=step).item()
        if step == 1:
            assert math.isnan(found)  # one gradient cannot be distinguished from noise
        elif step in (2, 5, 40):
            assert found == pytest.approx(share, abs=0.04)


def test_the_noise_scale_follows_from_the_fraction_and_the_batch_size():
    """B (1 - fraction) / fraction is the gradient noise scale, which does not depend on the batch size."""
    scales = []
    for n_rows in (4, 16):
        generator = torch.Generator().manual_seed(1)
        weight = nn.Parameter(torch.zeros(20_000))
        optimizer = torch.optim.Adam([weight], betas=(0.9, 0.999))
        for _ in range(30):
            weight.grad = 1.0 + 3.0 * torch.randn(20_000, generator=generator) / n_rows**0.5
            optimizer.step()
        state = optimizer.state[weight]
        moments = state["exp_avg"] / (1 - 0.9**30), state["exp_avg_sq"] / (1 - 0.999**30)
        share = gradient_signal_share(*moments, beta1=0.9, n_updates=30).item()
        scales.append(n_rows * (1 - share) / share)
    assert scales == pytest.approx([9.0, 9.0], rel=0.1)


def test_an_update_below_half_a_rounding_unit_leaves_parameters_unchanged():
    before = [torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16), torch.zeros(2)]
    after = [before[0] - torch.tensor([1e-3, 1e-2, 1e-3], dtype=torch.bfloat16), torch.tensor([1e-9, 0.0])]
    gradients = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0])]
    assert unchanged_share(before, after, gradients).item() == pytest.approx(0.5)
    assert unchanged_share(before, after, [torch.zeros(3), torch.zeros(2)]).isnan()
    assert unchanged_share([], [], []).isnan()


def test_invalid_arguments_are_rejected():
    with pytest.raises(OptionError, check=says("pass the same tensors in order.")):
        unchanged_share(torch.ones(2), torch.ones(2), torch.ones(3))
    with pytest.raises(OptionError, check=says("pass the same tensors in order.")):
        update_ratio(torch.ones(2), torch.ones(3))
    with pytest.raises(OptionError, check=says("and []; pass the same tensors in order.")):
        adam_staleness([torch.ones(2)], [])
    with pytest.raises(OptionError, check=about("eps", -1)):
        adam_staleness(torch.ones(2), torch.ones(2), eps=-1)
    with pytest.raises(OptionError, check=says("first_moments and second_moments have shapes")):
        gradient_signal_share(torch.ones(2), torch.ones(3), beta1=0.9, n_updates=3)
    with pytest.raises(OptionError, check=about("beta1", 1.0)):
        gradient_signal_share(torch.ones(2), torch.ones(2), beta1=1.0, n_updates=3)
    assert gradient_signal_share(torch.ones(2), torch.ones(2), beta1=0.0, n_updates=3).isnan()
    assert gradient_signal_share(torch.zeros(2), torch.zeros(2), beta1=0.9, n_updates=3).isnan()
