"""Tests of the recorded study of scaling: its conclusions, its provenance, and that a part of it is reproducible."""

import json
from pathlib import Path

import make_scaling
import numpy as np
import pytest
import xarray as xr
from ladder_trend import extrapolated
from size_ladder import LadderTrainer, Rung

from workbench.rates.find_rate import _WIDTH_ERROR, _WIDTH_RATIO
from workbench.scaling.designs import design

pytestmark = pytest.mark.recorded

FILE = Path(__file__).parents[2] / "data" / "scaling.nc"
#: Values that differ by less than this factor count as equal: it is the scatter of the edges between seeds.
SAME = 1.25


@pytest.fixture(scope="module")
def record():
    return xr.load_dataset(FILE, engine="netcdf4")


def edges(record):
    return record.sel(quantity="explosion_edge")


def rounding(measured, is_logarithm):
    """Return the tolerance for rounding errors that depend on the processor; constants have no other slope.

    The line is solved from normal equations: n points, times the squared condition number of the sizes (below 1e3, also
    of parabolas), times eps of the largest value. A hundred times that is still a millionth of any relevant slope.
    """
    y = np.log(measured[measured > 0]) if is_logarithm else measured
    return 100 * y.size * 1e3 * np.finfo(float).eps * np.nanmax(np.abs(y), initial=0)


def test_the_file_is_small_and_has_its_provenance(record):
    assert FILE.stat().st_size < 300_000
    assert {"call", "seeds", "versions", "core_minutes", "created"} <= set(record.attrs)
    assert record["architecture"].values.tolist() == list(make_scaling.STUDIES)
    assert json.loads(record.attrs["seeds"]) == list(make_scaling.SEEDS)
    assert record.attrs["n_steps"] == make_scaling.N_STEPS
    for name, (options, _) in make_scaling.STUDIES.items():
        recorded = json.loads(record["design"].sel(architecture=name).item())
        assert {key: recorded[key] for key in options} == options


def test_ladders_end_at_a_quarter_of_their_target(record):
    for along in ("width", "depth"):
        sizes, target = record[along], record[f"target_{along}"]
        varies = np.ptp(sizes.values, axis=1) > 0
        assert (4 * sizes.values.max(1) <= target.values)[varies].all()
        assert (sizes.values == target.values[:, None])[~varies].all()


def test_at_least_four_architectures_were_predicted_within_a_factor_of_two(record):
    """The main conclusion of the study: the direction, and the edge within a factor of 2, are predicted."""
    of = edges(record)
    factor = np.exp(np.abs(np.log(of["at_target"] / of["measured_at_target"])))
    last = record["explosion_edge"].isel(rung=-1)
    predicted_change, change = np.log(of["at_target"] / last), np.log(of["measured_at_target"] / last)
    is_flat = np.maximum(np.abs(predicted_change), np.abs(change)) < np.log(SAME)
    is_right = ((factor < 2) & (is_flat | (predicted_change * change > 0))).values
    assert is_right.sum() >= 4
    decreases = is_right & (change.values < -np.log(SAME))
    assert decreases.sum() >= 4


def test_intervals_of_the_explosion_edge_held_and_those_of_untrained_models_did_not(record):
    """The reason why only the explosion edge is predicted beyond a ladder."""
    value = record["measured_at_target"]
    is_inside = ((record["at_target_low"] <= value) & (value <= record["at_target_high"])).where(value.notnull())
    coverage = is_inside.mean("architecture")
    assert float(coverage.sel(quantity="explosion_edge")) >= 0.9
    of_untrained_models = coverage.drop_sel(quantity="explosion_edge")
    assert float(of_untrained_models.mean()) < 0.8
    is_predicted = record["is_supported"].any("architecture")
    assert record["quantity"].values[is_predicted.values].tolist() == ["explosion_edge"]


def test_the_standard_parametrization_is_always_flagged_and_mup_passes(record):
    was_checked = record["n_coordinate_steps"].values > 0
    state = dict(zip(record["architecture"].values, record["coordinate_state"].values, strict=True))
    checked = {name: state[name] for name in record["architecture"].values[was_checked]}
    assert checked.pop("Pre-LN in muP") == "passes"
    assert set(checked.values()) == {"grows"}
    assert len(checked) >= 4


def test_the_trends_follow_from_the_measurements(record):
    for name in record["architecture"].values:
        one = record.sel(architecture=name)
        recomputed = extrapolated(one, (int(one["target_width"]), int(one["target_depth"])))
        for quantity in record["quantity"].values:
            found, recorded = recomputed.sel(quantity=quantity), one.sel(quantity=quantity)
            atol = rounding(recorded["measured"].values, recorded["scale"] == "log")
            for column in ("slope", "depth_slope", "at_target", "at_target_low", "at_target_high", "curve"):
                message = f"{name}: {column} of {quantity}"
                np.testing.assert_allclose(found[column], recorded[column], rtol=1e-5, atol=atol, err_msg=message)
        for column in ("is_supported", "reason", "scale"):
            np.testing.assert_array_equal(recomputed[column], one[column])


def test_edges_agree_with_the_runs_of_the_seeds(record):
    low, high = record["edge_low_of_seed"], record["edge_high_of_seed"]
    assert (low < high).all()
    np.testing.assert_allclose(edges(record)["measured"], np.sqrt(low * high))
    np.testing.assert_allclose(record["edge_low"], low.min("seed"))
    np.testing.assert_allclose(record["edge_high"], high.max("seed"))


def test_rates_at_other_widths_are_within_the_error_stated_by_find_rate(record):
    """Rates follow 1 / width in the standard parametrization and are constant in muP, up to four times the width."""
    factors = []
    for name in record["architecture"].values[(record["target_width"] > record["width"].max("rung")).values]:
        one = edges(record).sel(architecture=name)
        ratio = float(one["target_width"] / one["width"][-1])
        last, target = (
            float(np.exp(np.log(values).mean("seed")))
            for values in (one["measured"].isel(rung=-1), one["measured_at_target_of_seed"])
        )
        rule = last if str(one["parametrization"].values) else last / ratio
        factors.append(abs(np.log(rule / target)))
        assert ratio == _WIDTH_RATIO
    assert len(factors) == 8
    assert max(factors) <= np.log(_WIDTH_ERROR)


@pytest.mark.slow
def test_the_smallest_rung_is_reproducible(record):
    seed = make_scaling.SEEDS[0]
    repeated = make_scaling.study("Pre-LN", widths=(16,), seeds=(seed,), measures_target=False, n_check_steps=2)
    before = record.sel(architecture="Pre-LN", seed=seed).isel(rung=0)
    for end in ("low", "high"):
        np.testing.assert_allclose(repeated[f"edge_{end}_of_seed"].item(), before[f"edge_{end}_of_seed"])
    for name in ("near_unit_mass", "spectral_radius", "total_gradient_gain"):
        np.testing.assert_allclose(repeated[name].item(), before["measured"].sel(quantity=name), rtol=1e-3)
    groups = repeated["layer_group"].values
    expected = before["update_size_of_seed"].sel(layer_group=groups).isel(step=slice(2))
    np.testing.assert_allclose(repeated["update_size_of_seed"][0, 0], expected, rtol=1e-2)


@pytest.mark.slow
def test_a_run_of_another_rung_ends_as_recorded(record):
    name, seed = "No-Norm", make_scaling.SEEDS[1]
    model, _ = make_scaling.STUDIES[name]
    of = design({"d_model": make_scaling.TARGET_WIDTH, **make_scaling.TEXT, **model})
    trainer = LadderTrainer(of, make_scaling.task, make_scaling.OPTIMIZER_OPTIONS)
    before = record.sel(architecture=name, seed=seed).isel(rung=1)
    rate = float(before["edge_high_of_seed"])
    assert trainer.diverges(Rung(32, 4), seed, rate, make_scaling.N_STEPS)
