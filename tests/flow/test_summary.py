"""Summaries of flows with known values."""

import numpy as np
import pytest
import torch
from scipy.stats import linregress

import workbench as wb
from tests.about import about, says
from tests.flow.nets import deep_net
from tests.zoo.zoo_models import TEXT, inputs_for
from workbench.errors import OptionError, SchemaError
from workbench.flow import summarize
from workbench.flow.flow_measurement import measure
from workbench.flow.flow_summary import SUMMARY


@pytest.fixture(scope="module")
def flow():
    return measure(wb.zoo.transformer(**{**TEXT, "n_layers": 5}), inputs_for(wb.zoo.transformer(**TEXT)))


def test_known_gains_are_found(flow):
    made = flow.copy(deep=True)
    log = 0.2 + 0.03 * np.arange(5)
    made["signal_gain"][:] = np.exp(log)
    made["state_rms"][:] = 2 * np.exp(np.append(0, np.cumsum(log)))
    made["gradient_gain"][:] = [1.0, 1.5, 0.5, 1.0, 1.0]
    made["gradient_norm"][:] = [0.75, 0.75, 0.5, 1, 1, 1]
    found = summarize(made)
    assert float(found["log_signal_gain"]) == pytest.approx(log.mean())
    assert float(found["log_signal_gain_error"]) == pytest.approx(log.std(ddof=1) / np.sqrt(5))
    assert float(found["log_signal_gain_trend"]) == pytest.approx(0.03)
    assert float(found["log_signal_gain_trend_error"]) == pytest.approx(0, abs=1e-12)
    assert float(found["total_signal_gain"]) == pytest.approx(np.exp(log.sum()))
    assert float(found["total_gradient_gain"]) == pytest.approx(0.75)
    assert float(found["largest_gradient_gain"]) == 1.5
    assert [int(found[f"{word}_gradient_gain_layer"]) for word in ("largest", "smallest")] == [1, 2]


def test_growth_exponents_are_those_of_power_laws(flow):
    made = flow.copy(deep=True)
    depth = np.arange(1, 6)
    made["state_rms"][1:] = 3 * depth**0.5
    made["branch_ratio"][:] = np.stack([depth**-0.5, 3 * depth**-0.5], axis=1)
    found = summarize(made)
    assert float(found["state_growth"]) == pytest.approx(0.5)
    assert float(found["branch_ratio_growth"]) == pytest.approx(-0.5)
    assert float(found["branch_ratio_growth_error"]) == pytest.approx(0, abs=1e-9)


def test_standard_errors_are_those_of_least_squares(flow):
    made = flow.copy(deep=True)
    noise = np.random.default_rng(0).normal(size=5)
    made["gradient_gain"][:] = np.exp(noise)
    line, found = linregress(np.arange(5), noise), summarize(made)
    assert float(found["log_gradient_gain_trend"]) == pytest.approx(line.slope)
    assert float(found["log_gradient_gain_trend_error"]) == pytest.approx(line.stderr)


def test_all_variables_are_there_and_those_not_observed_are_nan(flow):
    found = summarize(flow)
    assert set(found) == set(SUMMARY)
    unknown = {name for name in SUMMARY if SUMMARY[name].kind == "f" and np.isnan(found[name])}
    assert unknown == {"routing_entropy_share_smallest", "max_violation_largest", "routing_margin_smallest"}
    assert float(found["sink_share_largest"]) == float(flow["sink_share"].max())
    bare = summarize(measure(deep_net(8, 1, 1.0, is_residual=True).append(deep_net(8, 1, 1.0)[0]), torch.eye(8)))
    assert np.isnan(bare["log_signal_gain_trend_error"])
    assert np.isnan(bare["sink_share_largest"])
    assert found.attrs["cotangent"] == flow.attrs["cotangent"]


def test_an_undefined_gain_has_no_logarithm(flow):
    made = flow.copy(deep=True)
    made["gradient_gain"][2] = np.nan
    found = summarize(made)
    assert np.isnan(found["log_gradient_gain"])
    made["gradient_gain"][:] = np.nan
    assert int(summarize(made)["largest_gradient_gain_layer"]) == -1


def test_other_datasets_are_rejected(flow):
    with pytest.raises(SchemaError, check=says("The dataset is no flow: it lacks state_rms; create one with")):
        summarize(flow.drop_vars("state_rms"))
    with pytest.raises(OptionError, check=about("flow", {})):
        summarize({})
    with pytest.raises(SchemaError, check=says("; transpose it.")):
        summarize(flow.assign(signal_gain=flow["state_rms"]))
