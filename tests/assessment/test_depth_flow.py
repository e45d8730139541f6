"""Depth built and extrapolated, against chains whose gains are known."""

import math

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from workbench.assessment.depth_flow import _extrapolated, depth_flow, depths_below
from workbench.assessment.flow_numbers import LOGARITHMIC, NUMBERS, flow_numbers
from workbench.errors import OptionError


def test_depths_to_extrapolate_from_reach_half_of_the_target():
    assert depths_below(32) == [4, 8, 16]
    assert depths_below(12) == [3, 6]
    assert depths_below(4) == [2]
    assert depths_below(3) == []


def test_a_line_is_carried_on_exactly_and_its_error_is_that_of_least_squares():
    depth = np.array([2.0, 4.0, 8.0])
    value, error = _extrapolated(depth, 0.5 * depth + 1, 16)
    assert value == pytest.approx(9.0)
    assert error == pytest.approx(0.0, abs=1e-12)
    noisy = 0.5 * depth + 1 + np.array([0.1, -0.2, 0.1])
    design = np.column_stack([np.ones(3), depth])
    best, residual, *_ = np.linalg.lstsq(design, noisy, rcond=None)
    at = np.array([1.0, 16.0])
    expected = math.sqrt(float(residual[0]) * (1 + at @ np.linalg.inv(design.T @ design) @ at))
    assert _extrapolated(depth, noisy, 16) == (pytest.approx(float(best @ at)), pytest.approx(expected))
    assert math.isnan(_extrapolated(depth[:1], noisy[:1], 16)[0])


def test_numbers_are_means_over_seeds_with_their_standard_error():
    def flow(scale):
        boundary, layer = ("boundary", [1.0, scale, 4.0 * scale]), ("layer", [scale, 2.0])
        return xr.Dataset(
            {
                "state_rms": boundary, "gradient_norm": boundary, "token_cosine": boundary, "effective_rank": boundary,
                "gradient_gain": layer,
            }
            | {
                name: (("layer", "head"), [[scale, math.nan], [scale, math.nan]])
                for name in ("branch_ratio", "attention_entropy_share", "attention_logit_std", "sink_share")
            }
            | {
                name: ("layer", [math.nan, math.nan])
                for name in ("routing_entropy_share", "max_violation", "routing_margin")
            }
        )  # fmt: skip

    found = flow_numbers([flow(1.0), flow(4.0)])
    assert float(found["signal_gain_total"]) == pytest.approx(8.0)  # geometric: sqrt(4 * 16)
    assert float(found["signal_gain_total_error"]) == pytest.approx(np.std(np.log([4, 16]), ddof=1) / math.sqrt(2))
    assert float(found["token_cosine_last"]) == pytest.approx(10.0)
    assert float(found["gradient_gain_steepest"]) == pytest.approx(math.sqrt(2 * 4))
    assert math.isnan(float(found["max_violation_max"]))
    assert set(found) == set(NUMBERS) | {f"{name}_error" for name in NUMBERS}
    assert set(NUMBERS) >= LOGARITHMIC
    assert float(flow_numbers([flow(2.0)])["signal_gain_total_error"]) == 0.0
    besides = flow_numbers([flow(1.0), flow(4.0)], log_error=0.3)
    for name in NUMBERS:
        expected = math.hypot(float(found[f"{name}_error"]), 0.3 if name in LOGARITHMIC else 0.0)
        assert float(besides[f"{name}_error"]) == pytest.approx(expected, nan_ok=True)


def test_a_chain_that_doubles_is_foretold_and_built():
    class Double(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8, bias=False)
            torch.nn.init.eye_(self.inner.weight)

        def forward(self, x):
            return x + self.inner(x)

    class Chain(torch.nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 5)
            self.blocks = torch.nn.ModuleList(Double() for _ in range(depth))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    inputs = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
    found, flow = depth_flow(lambda depth, seed: Chain(depth), 8, inputs, None, seeds=(0,))
    assert found["depth"].values.tolist() == [2, 4, 8]
    for name in ("signal_gain_total", "gradient_gain_total"):
        assert float(found[name][-1]) == pytest.approx(256.0, rel=1e-5)
        assert float(found[f"{name}_extrapolated"]) == pytest.approx(256.0, rel=1e-5)
    assert flow.sizes["layer"] == 8


def test_no_depth_is_refused():
    with pytest.raises(OptionError, match="expected at least 1 block"):
        depth_flow(lambda depth, seed: wb.zoo.transformer(), 0, None, None)
