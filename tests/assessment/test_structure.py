"""Scale-free measurements at initialization: from known flows, and on models known to be healthy or faulty."""

import math

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.assessment.structure import average_structure, gains, measure_structure, with_standard_start

SIZE = {"d_model": 32, "n_heads": 4, "vocab_size": 64, "max_length": 32}
PLAN = wb.TrainingPlan(100, 1e-3)


def flow_of(rms, gradients, **others):
    n = len(rms) - 1
    nothing = {name: ("layer", [math.nan] * n) for name in ("attention_entropy_share", "routing_entropy_share")}
    nothing["branch_ratio"] = ("layer", [0.5] * n)
    data = {"state_rms": ("boundary", rms), "gradient_norm": ("boundary", gradients), **nothing, **others}
    return xr.Dataset(data, {"layer": range(n)})


def number(flow, name, **outputs):
    return float(average_structure([flow], [outputs])[name])


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=9))
def test_a_stream_that_grows_while_gradients_shrink_alike_has_a_gain_of_one(growth):
    rms = np.cumprod([1.0, *growth])
    flow = flow_of(rms, 7.0 / rms)
    np.testing.assert_allclose(gains(flow), 1.0)
    assert number(flow, "gain_by_depth") == pytest.approx(1.0)


def test_an_even_explosion_or_decay_counts_alike():
    depth = 6
    for factor in (1.5, 1 / 1.5):
        gradients = factor ** np.arange(depth, -1.0, -1)
        gradients[0] *= 1e6  # the first block is excluded, as its input may have token states of 0
        assert number(flow_of(np.ones(depth + 1), gradients), "gain_by_depth") == pytest.approx(
            1.5 ** math.sqrt(depth - 1)
        )


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [([1.0, 0.0, 1.0, 1.0], math.inf), ([1.0, math.inf, 1.0, 1.0], math.inf), ([math.nan] * 4, None)],
)
def test_a_vanishing_or_overflowing_gradient_has_an_infinite_gain_and_an_unknown_one_none(gradients, expected):
    found = number(flow_of(np.ones(4), gradients), "gain_by_depth")
    assert math.isnan(found) if expected is None else found == expected


def test_the_growth_of_the_stream_is_that_after_the_first_block_per_root_of_the_depth():
    for depth, last in ((16, 2.0**4), (16, 2.0**-4), (5, 2.0 ** math.sqrt(8))):
        sizes = [0.02, 1.0, *np.full(depth - 1, 1.1), last]
        assert number(flow_of(sizes, np.ones(depth + 2)), "growth_by_depth") == pytest.approx(2.0)
    assert number(flow_of([1.0, 1.0, 0.0, 1.0], np.ones(4)), "growth_by_depth") == math.inf


def test_measurements_of_several_seeds_are_averaged_on_their_scale():
    flows = [flow_of(np.ones(4), gain ** np.arange(3, -1.0, -1)) for gain in (2.0, 8.0)]
    found = average_structure(
        flows, [{"function_change": 0.1}, {"function_change": 0.4}], log_errors={"gain_by_depth": 0.15}
    )
    assert float(found["gain_by_depth"]) == pytest.approx(4.0 ** math.sqrt(2))  # of two blocks after the first
    spread = np.std(np.log([2.0, 8.0]) * math.sqrt(2), ddof=1) / math.sqrt(2)
    assert float(found["gain_by_depth_error"]) == pytest.approx(math.hypot(spread, 0.15))
    assert float(found["function_change"]) == pytest.approx(0.2)
    assert math.isnan(float(found["loss_over_guess"]))


def structure_of(options, *, width_ratio=1.0, inject=None, seed=0):
    model = wb.design(options).build(seed=seed) if not isinstance(options, torch.nn.Module) else options
    if inject is not None:
        with torch.no_grad():
            inject(model)
    task = wb.tasks.random_tokens(length=32, vocab_size=64, batch_size=8)
    others = task.batch(1)[0]
    return measure_structure([model], task.batch(0), others, PLAN, width_ratio=width_ratio)[0]


def test_a_healthy_model_has_gains_near_one_and_one_with_exploding_weights_has_not():
    options = {**SIZE, "norm": "none", "n_layers": 12}

    def enlarge(model):
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(20)

    healthy, faulty = structure_of({**options, "norm": "pre_ln"}), structure_of(options, inject=enlarge)
    assert float(healthy["gain_by_depth"]) < 1.1
    assert float(faulty["gain_by_depth"]) > 2
    assert float(faulty["loss_over_guess"]) > 2 > float(healthy["loss_over_guess"])


def test_a_narrow_model_with_matched_variances_has_the_structure_of_the_wide_one():
    design = wb.design({**SIZE, "d_model": 256, "n_layers": 6, "norm": "pre_ln"})
    wide = structure_of(design.build())
    narrow = structure_of(wb.scaling.matched_width(design, 32), width_ratio=8.0)
    unscaled = structure_of(wb.scaling.matched_width(design, 32))
    for name, factor in {"gain_by_depth": 1.05, "growth_by_depth": 1.2, "function_change": 2.5}.items():
        ratio = float(narrow[name]) / float(wide[name])
        assert 1 / factor < ratio < factor, name
    assert float(unscaled["function_change"]) < float(narrow["function_change"]) / 2


def test_the_worst_block_is_named():
    rms, gradients = np.ones(6), np.array([8.0, 8.0, 8.0, 1.0, 1.0, 1.0])
    assert average_structure([flow_of(rms, gradients)], [{}])["gain_by_depth"].attrs["block"] == 2
    rms = np.array([0.1, 1.0, 1.0, 1.0, 9.0, 9.0])
    assert average_structure([flow_of(rms, 1 / rms)], [{}])["growth_by_depth"].attrs["block"] == 3


@pytest.mark.parametrize("options", [{**SIZE, "norm": "none", "n_layers": 6, "init_std": 0.5}, {"model_type": "gpt2"}])
def test_a_standard_start_repairs_a_copy_of_a_bad_initialization(options):
    if "model_type" in options:
        options |= {
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "vocab_size": 64,
            "n_positions": 32,
            "initializer_range": 0.8,
        }
    wild = wb.design(options).build()
    before, state = {k: v.clone() for k, v in wild.state_dict().items()}, torch.get_rng_state()
    calm = with_standard_start(wild, 6)
    assert all(torch.equal(before[name], weight) for name, weight in wild.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert float(structure_of(wild)["loss_over_guess"]) > 2
    assert float(structure_of(calm)["loss_over_guess"]) < 1.5
    assert float(structure_of(calm)["gain_by_depth"]) < 1.3
