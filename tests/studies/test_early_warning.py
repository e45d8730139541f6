import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError, SchemaError
from workbench.studies import early_warning

NAN = np.nan
COLUMNS = (
    "set", "family", "kind", "settings_show_it", "start", "n_steps", "is_harmful", "harm_step", "expected_cause",
    "first_step", "first_cause", "cause", "first_signal", "loss_step", "grad_norm_step", "n_alarms", "n_loss_alarms",
    "n_grad_norm_alarms",
)  # fmt: skip
ROWS = [
    ("locked", "A", "", False, NAN, 3000, False, NAN, "", NAN, "", "", "", NAN, NAN, 0, 0, 0),
    ("locked", "B", "", False, NAN, 2000, False, NAN, "", 700, "x", "x", "loss", 700, NAN, 2, 1, 0),
    # Found immediately; found late with another cause; never; harmless; visible in the settings; of another set.
    ("locked", "A", "bits", False, 400, 700, True, 420, "bits", 410, "bits", "bits", "arithmetic", 430, 405, 1, 0, 0),
    ("locked", "A", "data", False, 400, 1500, True, 1300, "data", 500, "bits", "", "loss", 500, NAN, 1, 0, 0),
    ("locked", "B", "bits", False, 500, 1500, True, 1100, "bits", NAN, "", "", "", 1200, 1090, 0, 0, 0),
    ("locked", "B", "data", False, 500, 2500, False, NAN, "data", 520, "data", "data", "data", NAN, NAN, 1, 0, 0),
    ("locked", "B", "rate", True, 500, 600, True, 505, "rate", 500, "rate", "rate", "learning_rate", 501, 501, 1, 0, 0),
    ("choose", "C", "", False, NAN, 1000, False, NAN, "", NAN, "", "", "", NAN, NAN, 0, 0, 0),
    # Two late failures, one of which has an alarm.
    ("locked", "B", "late", False, NAN, 9000, True, 3000, "grown", 800, "grown", "grown", "logits", 4000, NAN, 1, 0, 0),
    ("locked", "B", "late", False, NAN, 9000, False, NAN, "grown", NAN, "", "", "", NAN, NAN, 0, 0, 0),
]  # fmt: skip


@pytest.fixture
def runs():
    return xr.Dataset({name: ("run", [row[i] for row in ROWS]) for i, name in enumerate(COLUMNS)})


def test_sets_are_selected_by_name(runs):
    assert early_warning.of_set(runs, "choose").sizes["run"] == 1
    assert early_warning.of_set(runs, "choose", "locked").sizes["run"] == len(ROWS)
    with pytest.raises(OptionError, check=about("set", "fit", ("choose", "locked"))):
        early_warning.of_set(runs, "fit")


def test_harm_counts_if_settings_do_not_reveal_the_fault(runs):
    assert np.flatnonzero(early_warning.harmful(runs)).tolist() == [2, 3, 4]


def test_delays_count_from_the_onset(runs):
    np.testing.assert_array_equal(early_warning.delays(runs)[2:7], [10, 100, NAN, 20, 0])
    np.testing.assert_array_equal(early_warning.delays(runs, detector="loss alone")[2:5], [30, 100, 700])


def test_false_alarms_are_a_rate_with_the_interval_of_poisson(runs):
    found = early_warning.false_alarms(runs)
    assert int(found["n_steps"]) == 6000
    assert found["n_alarms"].values.tolist() == [2, 1, 0]
    np.testing.assert_allclose(found["rate"], np.array([2, 1, 0]) / 6000 * 1e5)
    # Garwood's limits for counts of 2, 1 and 0, from a table.
    np.testing.assert_allclose(found["low"] * 0.06, [0.2422, 0.0253, 0], atol=1e-4)
    np.testing.assert_allclose(found["high"] * 0.06, [7.2247, 5.5716, 3.6889], atol=1e-4)
    with pytest.raises(SchemaError, check=says("The table has no healthy run; add runs whose kind of fault")):
        early_warning.false_alarms(runs.isel(run=slice(2, 4)))


def test_goals_count_runs_for_each_detector(runs):
    found = early_warning.goals(runs)
    assert found["n"].values.tolist() == [3, 3, 3, 3, 3]
    counts = found["n_reached"].values
    assert counts[0].tolist() == [1, 1, 1]
    assert counts[1].tolist() == [2, 1, 2]
    assert counts[2].tolist() == [1, 0, 1]
    assert counts[3, 0] == 1
    assert counts[4, 0] == 1
    assert np.isnan(counts[3:, 1:]).all()
    is_known = np.isfinite(counts)
    assert (found["low"].values[is_known] <= found["share"].values[is_known]).all()
    assert (found["high"].values[is_known] >= found["share"].values[is_known]).all()
    # The interval of one of three is at least Wilson's.
    assert found["low"].values[0, 0] <= 0.062
    assert found["high"].values[0, 0] >= 0.79


def test_kinds_have_their_medians(runs):
    found = early_warning.by_kind(runs)
    assert found["kind"].values.tolist() == ["bits", "data"]
    assert found["n_runs"].values.tolist() == [2, 2]
    assert found["n_harmful"].values.tolist() == [2, 1]
    assert found["n_soon"].values.tolist() == [1, 0]
    assert found["n_named"].values.tolist() == [1, 0]
    assert found["delay"].values.tolist() == [10, 100]
    assert found["first_signal"].values.tolist() == ["arithmetic", "loss"]


def test_another_table_is_rejected():
    with pytest.raises(SchemaError, check=says("The table lacks kind, n_steps, n_alarms,")):
        early_warning.false_alarms(xr.Dataset())
    assert wb.early_warning is early_warning
