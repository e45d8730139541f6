import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.about import says
from tests.sweeps.small_sweeps import run_sequentially
from workbench.errors import SchemaError
from workbench.rates.outcomes import (
    LossTable,
    count_lasting_spikes,
    held_out_at,
    largest_useful_loss,
    rate_outcomes,
    rate_sensitivity,
    useful_band,
)

RATES = 1e-3 * 1.5 ** np.arange(-6, 7)


def parabola(center, *, curvature=0.5, seeds=(0.0,), gain=0.1):
    """Return losses that increase with the squared log distance from the best rate, and the earlier losses."""
    distance = np.log(RATES / center)[:, None]
    loss = 2.0 + curvature * distance**2 + np.array(seeds)
    return loss, loss + gain


def test_the_ends_of_a_known_band_are_found():
    loss, earlier = parabola(1e-3, curvature=0.5, gain=0.08)  # useful up to sqrt(0.08 / 0.5) = 0.4 in the logarithm
    band = useful_band(RATES, loss, earlier)
    assert band.best_rate == pytest.approx(1e-3)
    assert band.best_loss == pytest.approx(2.0)
    # Interpolated linearly between 0 and log 1.5 = 0.405, where the parabola is 0.0822.
    assert band.useful_edge == pytest.approx(1e-3 * math.exp(0.08 / (0.5 * math.log(1.5) ** 2) * math.log(1.5)))
    assert band.slow_edge == pytest.approx(1e-6 / band.useful_edge)


@given(shift=st.integers(-2, 2), offset=st.floats(-1, 1), gain=st.floats(0.05, 0.5))
def test_bands_move_with_the_rates_and_ignore_the_level_of_a_seed(shift, offset, gain):
    loss, earlier = parabola(1e-3, gain=gain, seeds=(0.0, offset))
    moved, moved_earlier = parabola(1e-3 * 1.5**shift, gain=gain, seeds=(0.0, 0.0))
    one, two = useful_band(RATES, loss, earlier), useful_band(RATES, moved, moved_earlier)
    for name in ("best_rate", "useful_edge", "slow_edge"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) * 1.5**shift)


def test_the_band_ends_at_the_first_rate_that_is_not_useful():
    loss, earlier = parabola(1e-3, curvature=0.01, gain=0.2)
    loss[9] = earlier[9] = 5.0  # useful rates beyond it do not count
    band = useful_band(RATES, loss, earlier)
    assert RATES[8] < band.useful_edge < RATES[9]
    assert math.isnan(band.slow_edge)


def test_a_rate_that_is_not_finite_ends_the_band_half_a_step_before():
    loss, earlier = parabola(1e-3, curvature=0.01, gain=0.2)
    loss[9:] = math.inf
    assert useful_band(RATES, loss, earlier).useful_edge == pytest.approx(math.sqrt(RATES[8] * RATES[9]))


def test_the_edge_is_unknown_next_to_a_rate_that_was_not_tried():
    loss, earlier = parabola(1e-3, curvature=0.01, gain=0.2)
    loss[8] = np.nan
    assert math.isnan(useful_band(RATES, loss, earlier).useful_edge)


def test_the_best_rate_is_chosen_on_other_seeds():
    """A run with a low loss by chance is not its own reference; otherwise no other rate would be useful."""
    loss, earlier = parabola(1e-3, curvature=0.05, gain=0.05, seeds=(0.0, 0.0, 0.0))
    loss[5, 0] -= 1.0
    earlier[5, 0] -= 1.0
    band = useful_band(RATES, loss, earlier)
    assert band.useful_edge > 1e-3


def test_sensitivity_is_the_mean_excess_over_the_range():
    loss = np.array([2.0, 2.0, 2.0, math.inf])
    rates = np.array([1e-4, 1e-3, 1e-2, 1e-1])
    assert rate_sensitivity(rates, loss, start_loss=4.0, over=(1e-4, 1e-2)) == 0
    assert rate_sensitivity(rates, loss, start_loss=4.0, over=(1e-3, 1e-1)) == pytest.approx(0.5)
    assert math.isnan(rate_sensitivity(rates, loss, start_loss=4.0, over=(1e-5, 1e-2)))
    # The best loss is the lowest within the range.
    better_before = np.array([1.0, 2.0, 2.0, math.inf])
    assert rate_sensitivity(rates, better_before, start_loss=4.0, over=(1e-3, 1e-2)) == 0
    assert rate_sensitivity(rates, np.full(4, math.inf), start_loss=4.0, over=(1e-3, 1e-2)) == 0


def test_only_spikes_that_last_are_counted():
    calm = np.linspace(3.0, 2.0, 30)
    assert count_lasting_spikes(calm) == 0
    short, lasting, diverged, padded = calm.copy(), calm.copy(), calm.copy(), calm.copy()
    short[10:12] += 1
    lasting[10:14] += 1
    diverged[25:] = np.inf
    padded[25:] = np.nan
    assert [count_lasting_spikes(one) for one in (short, lasting, diverged, padded)] == [0, 1, 1, 0]


def sweep_of(*, n_steps=20, n_evaluations=5, rates=(1e-3, 1e-2), seeds=(0, 1), **training):
    task = {"name": "random_tokens", "length": 8, "vocab_size": 16, "batch_size": 4}
    size = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 16, "max_length": 8}
    return wb.sweeps.grid(
        {"tiny": size}, learning_rate=rates, seed=seeds, n_steps=n_steps, task=task, n_snapshots=0,
        n_evaluations=n_evaluations, **training,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return run_sequentially(sweep_of(), tmp_path_factory.mktemp("sweep") / "sweep.zarr")


def test_tables_contain_each_run_once(sweep):
    table = LossTable.of(sweep)
    assert table.loss.shape == (2, 2)
    for i, rate in enumerate(table.rate):
        for j, seed in enumerate(table.seed):
            run = sweep.isel(run=(sweep["learning_rate"] == rate) & (sweep["seed"] == seed))
            assert table.loss[i, j] == run["held_out_loss"].values[0, -1]
            assert table.earlier()[i, j] == run["held_out_loss"].values[0, -2]


def test_useful_rates_can_be_relative_to_another_design():
    """A design whose losses are larger by an offset has the band of a lower reference loss, or no band."""
    loss, earlier = parabola(1e-3, gain=0.5, seeds=(0.0, 0.3))
    reference = largest_useful_loss(loss, earlier)
    assert reference == pytest.approx([2.5, 2.8])
    own = useful_band(RATES, loss, earlier)
    same = useful_band(RATES, loss, earlier, reference=reference)
    assert (same.slow_edge, same.useful_edge) == (own.slow_edge, own.useful_edge)
    worse = useful_band(RATES, loss + 0.2, earlier + 0.2, reference=reference)
    lower = useful_band(RATES, loss, earlier - 0.2)
    assert (worse.slow_edge, worse.useful_edge) == pytest.approx((lower.slow_edge, lower.useful_edge))
    none = useful_band(RATES, loss + 0.6, earlier + 0.6, reference=reference)
    assert (none.best_rate, none.best_loss) == pytest.approx((1e-3, 2.75))
    assert np.isnan([none.slow_edge, none.useful_edge]).all()


def test_cells_are_compared_with_the_same_architecture_of_another_study(sweep):
    other = sweep.assign_coords(study=("run", ["worse"] * sweep.sizes["run"]), cell=("run", ["x"] * sweep.sizes["run"]))
    both = xr.concat([sweep, other.assign(held_out_loss=other["held_out_loss"] + 1.0)], "run")
    both["trivial_loss"][:] = 99.0  # so that all count as learned
    study = str(sweep["study"].values[0])
    alone = rate_outcomes(both)
    compared = rate_outcomes(both, against=study)
    np.testing.assert_array_equal(alone["useful_edge"][0], compared["useful_edge"][0])
    np.testing.assert_array_equal(alone["useful_edge"][0], alone["useful_edge"][1])
    assert np.isnan(compared["slow_edge"][1])
    assert np.isnan(compared["useful_edge"][1])
    with pytest.raises(SchemaError, check=says("must have one cell of tiny with seeds")):
        rate_outcomes(both, against="none")
    with pytest.raises(SchemaError, check=says("must have one cell of tiny with seeds")):
        rate_outcomes(both.isel(run=(both["study"] == study) | (both["seed"] == 0)), against=study)


def test_noise_cannot_be_learned(sweep):
    found = rate_outcomes(sweep)
    assert found.sizes == {"cell": 1}
    assert not found["is_learned"].item()
    assert np.isnan(found["useful_edge"].item())
    assert sweep["trivial_loss"].values == pytest.approx(math.log(16), abs=0.1)


def test_cells_with_a_schedule_are_compared_with_shorter_runs(sweep, tmp_path):
    shorter = run_sequentially(sweep_of(n_steps=16, n_evaluations=4, rates=(1e-2,)), tmp_path / "shorter.zarr")
    earlier = LossTable.of(sweep).earlier_from(shorter)
    assert np.isnan(earlier[0]).all()
    assert earlier[1].tolist() == shorter["held_out_loss"].values[:, -1].tolist()
    assert LossTable.of(sweep).earlier_from(shorter.isel(run=slice(0))) is None
    other = run_sequentially(sweep_of(n_steps=16, n_evaluations=4, rates=(1e-2,), warmup=3), tmp_path / "other.zarr")
    assert LossTable.of(sweep).earlier_from(other) is None
    assert LossTable.of(sweep).earlier_from(sweep) is None  # runs of another length


def test_a_cell_whose_runs_all_diverge_has_outcomes(tmp_path):
    diverged = run_sequentially(sweep_of(rates=(1e30,)), tmp_path / "diverged.zarr")
    found = rate_outcomes(diverged)
    assert not found["is_learned"].item()
    assert found["explosion_edge"].item() == pytest.approx(1e30)
    assert np.isnan(found["lasting_spike_share"].item())


def test_sweeps_without_losses_are_rejected():
    old = wb.samples.open("divergence_sweep", "held out")
    with pytest.raises(SchemaError, check=says("The sweep has no losses along its runs; use")):
        rate_outcomes(old)


def test_losses_are_read_only_where_they_were_measured(sweep):
    assert held_out_at(sweep, 8).tolist() == sweep["held_out_loss"].values[:, 1].tolist()
    for n_steps in (7, 24):
        with pytest.raises(SchemaError, check=says(f"measured at update {n_steps};")):
            held_out_at(sweep, n_steps)
