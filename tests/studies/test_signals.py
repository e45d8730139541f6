"""Signals: lines by name, their reductions, and a decimation without visible change."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.about import about, says
from tests.monitored_runs import HEAD, LAYER, monitored_run
from tests.plots.conftest import run_of
from workbench.errors import OptionError, SchemaError
from workbench.studies import signals
from workbench.studies.signals import decimate, healthy_band


@pytest.fixture(scope="module")
def run():
    return monitored_run(100, fault_at=40, every=5)


def test_names_are_variables_with_their_terms_part_by_part(run):
    names = signals.names(run)
    assert names[:5] == ["loss", "grad_norm", "accuracy", "learning_rate", "effective_rank D2"]
    assert {"routing_entropy", "expert_load", "update_ratio", "near_unit_mass", "effective_rank W"} <= set(names)
    assert "kss_enabled" not in names  # a Boolean is not a line
    assert "eigenvalue" not in names
    assert "step" not in names


def test_every_name_can_be_read(run):
    for name in signals.names(run):
        signal = signals.read(run, name)
        assert signal.name == name
        assert signal.step.dtype == np.int64
        assert signal.step.shape == signal.value.shape
        assert (np.diff(signal.step) > 0).all()


def test_a_signal_is_reduced_over_layers_and_heads(run):
    rank = run["attention"]["effective_rank"].sel(term="D2").values
    for reduce in signals.REDUCTIONS:
        signal = signals.read(run, "effective_rank D2", reduce=reduce)
        np.testing.assert_allclose(signal.value, getattr(np, reduce)(rank, axis=(1, 2)))
        assert signal.long_name == f"effective rank D2, {reduce} over layers and heads"
    np.testing.assert_array_equal(signals.read(run, "effective_rank D2").value, rank.min((1, 2)))
    entropy = signals.read(run, "routing_entropy")
    np.testing.assert_array_equal(entropy.value, run["router"]["routing_entropy"].min("layer"))
    assert (entropy.part, entropy.unit) == ("router", "nat")
    ratio = signals.read(run, "update_ratio")
    np.testing.assert_array_equal(ratio.value, run["optimizer"]["update_ratio"].max("module"))
    loss = signals.read(run, "loss")
    np.testing.assert_array_equal(loss.value, run["monitors"]["loss"])
    assert (loss.reduce, loss.long_name) == ("", "loss")


def test_one_layer_and_one_head_can_be_selected(run):
    rank = run["attention"]["effective_rank"].sel(term="D2")
    signal = signals.read(run, "effective_rank D2", layer=LAYER, head=HEAD)
    np.testing.assert_array_equal(signal.value, rank.sel(layer=LAYER, head=HEAD))
    assert signal.long_name == "effective rank D2, layer 1, head 2"
    signal = signals.read(run, "effective_rank D2", layer=LAYER, reduce="mean")
    np.testing.assert_allclose(signal.value, rank.sel(layer=LAYER).mean("head"))
    outside = signals.read(run, "update_ratio", layer=-1)
    np.testing.assert_array_equal(outside.value, run["optimizer"]["update_ratio"].isel(module=-1))


def test_nan_is_ignored_unless_all_values_are_nan(run):
    data = run["attention"].to_dataset().copy(deep=True)
    data["effective_rank"][2, 0] = np.nan
    data["effective_rank"][3] = np.nan
    data["effective_rank"][4, 1, 1] = np.inf
    spoilt = xr.DataTree.from_dict({"attention": data})
    for reduce in signals.REDUCTIONS:
        value = signals.read(spoilt, "effective_rank D2", reduce=reduce).value
        assert np.isnan(value).tolist() == [i == 3 for i in range(len(value))]
    assert np.isinf(signals.read(spoilt, "effective_rank D2", reduce="max").value[4])
    step, value = signals.read(spoilt, "effective_rank D2", reduce="max").finite
    assert step.tolist() == [5 * i for i in range(20) if i not in (3, 4)]
    assert np.isfinite(value).all()


def test_spectral_measures_exclude_layers_that_are_not_informative():
    run = run_of({0: 0.9, 10: 1.2}, n_layers=3, width=8)
    run["spectra"]["is_informative"][0] = False
    run["spectra"]["is_informative"][1, 2] = False
    value = signals.read(run, "spectral_radius", reduce="max").value
    np.testing.assert_allclose(value, [np.nan, run["spectra"]["spectral_radius"].values[1, :2].max()])
    norm = run["spectra"]["update_norm"].values
    np.testing.assert_allclose(signals.read(run, "update_norm", reduce="max").value, norm.max(1))


def test_equal_names_in_two_parts_are_distinguished(run):
    step = xr.Dataset({"log_z": ("step", [1.0, 2.0])}, {"step": [0, 1]})
    later = xr.Dataset({"log_z": ("step", [3.0])}, {"step": [1]})
    both = xr.DataTree.from_dict({"activations": later, "monitors": step})
    assert signals.names(both) == ["log_z", "activations/log_z"]
    assert signals.read(both, "log_z").value.tolist() == [1, 2]
    assert signals.read(both, "activations/log_z").value.tolist() == [3]
    assert signals.worst("activations/routing_entropy") == "min"


def test_bad_is_low_for_ranks_and_entropies_and_high_for_the_rest():
    for name in ("effective_rank D2", "routing_entropy", "attention_entropy", "stable_rank W", "accuracy"):
        assert (signals.bad_direction(name), signals.worst(name)) == ("low", "min")
    for name in ("loss", "router_similarity", "max_violation", "adam_staleness", "frobenius_norm D2"):
        assert (signals.bad_direction(name), signals.worst(name)) == ("high", "max")
    assert signals.worst("near_unit_mass") == "mean"


def test_rows_read_before_can_be_skipped(run):
    full, rest = signals.read(run, "effective_rank D2"), signals.read(run, "effective_rank D2", first_row=7)
    np.testing.assert_array_equal(full.value[7:], rest.value)
    np.testing.assert_array_equal(full.step[7:], rest.step)


def test_heat_is_the_nearest_recorded_step_with_all_layers_and_heads(run):
    heat = signals.heat(run, "effective_rank D2", 58)
    assert (heat.dims, int(heat["step"])) == (("layer", "head"), 60)
    np.testing.assert_array_equal(heat, run["attention"]["effective_rank"].sel(step=60, term="D2"))
    assert int(heat.argmin(...)["head"]) == HEAD
    assert signals.heat(run, "expert_load", 10**6).dims == ("layer", "expert")
    assert signals.heat(run, "update_ratio", 0).dims == ("module",)
    with pytest.raises(SchemaError, check=says("has no layers; choose a signal that has, such as an")):
        signals.heat(run, "loss", 0)


def test_wrong_input_is_rejected(run):
    with pytest.raises(SchemaError, check=says("effective_rank dWq, effective_rank dWk, effective_rank W,")):
        signals.read(run, "effective_rank")
    with pytest.raises(SchemaError, check=says("none of its parts has steps.")):
        signals.read(xr.DataTree(), "loss")
    with pytest.raises(OptionError, check=about("reduce", "median", ("min", "max", "mean"))):
        signals.read(run, "loss", reduce="median")
    with pytest.raises(OptionError, check=about("layer", 9, (0, 1, 2))):
        signals.read(run, "effective_rank D2", layer=9)
    with pytest.raises(OptionError, check=says("has no heads; omit head=.")):
        signals.read(run, "routing_entropy", head=0)
    with pytest.raises(OptionError, check=about("n", 0)):
        decimate(np.arange(3), np.zeros(3), 0)
    with pytest.raises(OptionError, check=about("quantiles", (0.9, 0.1))):
        healthy_band([], quantiles=(0.9, 0.1))


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 3000),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
    st.tuples(st.floats(-200, 4000), st.floats(1, 4000)),
    st.booleans(),
)
def test_decimation_keeps_order_ends_and_every_extreme(n_rows, n, seed, view, is_whole):
    draws = np.random.default_rng(seed)
    step = np.cumsum(draws.integers(1, 4, n_rows))
    value = draws.normal(size=n_rows) * 10.0 ** draws.integers(0, 3, n_rows)
    value[draws.random(n_rows) < 0.1] = np.nan
    start, stop = (None, None) if is_whole else (view[0], view[0] + view[1])
    kept, found = decimate(step, value, n, start, stop)
    assert len(kept) <= 2 * (2**0.5 * n + 4)
    assert (np.diff(kept) > 0).all()
    known = dict(zip(step.tolist(), value.tolist(), strict=True))
    assert all(known[s] == v for s, v in zip(kept.tolist(), found.tolist(), strict=True))
    inside = np.isfinite(value)
    if not is_whole:
        inside &= (step >= start) & (step <= stop)
    if inside.any():  # the extremes in view are kept, and the line enters and leaves the view
        assert found.min() <= value[inside].min()
        assert found.max() >= value[inside].max()
        assert kept[-1] >= step[inside][-1]
        finite = np.isfinite(value)
        before = step[finite & (step < step[inside][0])]
        if len(before):
            assert kept[0] <= step[inside][0]


def test_every_bucket_keeps_its_lowest_and_highest():
    value = np.random.default_rng(0).normal(size=4096)
    step, found = decimate(np.arange(4096), value, 64)
    for bucket in range(64):
        own = found[(step >= 64 * bucket) & (step < 64 * (bucket + 1))]
        full = value[64 * bucket : 64 * (bucket + 1)]
        assert (own.min(), own.max()) == (full.min(), full.max())


def test_buckets_do_not_change_while_the_view_moves():
    value = np.random.default_rng(1).normal(size=10_000)
    here, there = (decimate(np.arange(10_000), value, 50, start, start + 4000)[0] for start in (2000.0, 2100.0))
    common = (2300, 5800)
    shared = [step[(step > common[0]) & (step < common[1])].tolist() for step in (here, there)]
    assert shared[0] == shared[1]
    assert len(shared[0]) > 20


def test_the_healthy_band_contains_the_quantiles_of_healthy_runs():
    draws = np.random.default_rng(2)
    step = np.arange(0, 5000)
    lines = [(step, 10 - step / 1000 + draws.normal(size=len(step))) for _ in range(6)]
    lines[0][1][::7] = np.nan
    band = healthy_band(lines, quantiles=(0.1, 0.9))
    fresh = 10 - step / 1000 + draws.normal(size=len(step))
    lower, upper = np.interp(step, band.step, band.lower), np.interp(step, band.step, band.upper)
    assert np.mean((fresh >= lower) & (fresh <= upper)) == pytest.approx(0.8, abs=0.02)
    assert (band.step[0], band.step[-1]) == (0, 4999)
    few = healthy_band([(np.array([3]), np.array([1.0]))])
    assert (few.lower.tolist(), few.upper.tolist()) == ([1], [1])
    assert not len(healthy_band([(np.arange(3), np.full(3, np.nan))]).step)


def test_the_default_signals_include_those_with_alarms_up_to_the_limit(run):
    found = signals.default_names({"a": run}, ["expert_load", "effective_rank W"])
    assert found[:4] == ["loss", "grad_norm", "expert_load", "effective_rank W"]
    assert len(found) == 6
    assert signals.default_names({"a": xr.DataTree()}) == []
