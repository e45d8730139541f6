import numpy as np
import pytest
import xarray as xr

import workbench as wb
from workbench.errors import OptionError, SchemaError
from workbench.studies import early_warning

NAN = np.nan


@pytest.fixture
def runs():
    """Two healthy runs, one with a false alarm; four faulted ones: warned first, too late, never, harmless."""
    rows = [
        # fault, diverged, step, accuracy, twin, mechanism, loss, grad, cause, acted accuracy
        ("", False, 99, 0.9, 0.9, NAN, NAN, NAN, "", NAN),
        ("", False, 99, 0.9, 0.9, 40, NAN, NAN, "large_rate", NAN),
        ("large_rate", True, 80, NAN, 0.9, 50, NAN, 60, "large_rate", 0.89),
        ("large_rate", False, 99, 0.2, 0.9, 70, 60, NAN, "small_batch", 0.5),
        ("small_batch + large_rate", False, 99, 0.5, 0.9, NAN, 55, NAN, "small_batch", 0.9),
        ("small_batch", False, 99, 0.88, 0.9, 45, NAN, NAN, "small_batch", 0.9),
    ]
    names = [
        "fault", "has_diverged", "step", "accuracy", "healthy_accuracy", "mechanism_step", "loss_step",
        "grad_norm_step", "cause_later", "acted_accuracy",
    ]  # fmt: skip
    table = {name: ("run", [row[i] for row in rows]) for i, name in enumerate(names)}
    table |= {"spike_score_step": ("run", [NAN] * 6), "acted_has_diverged": ("run", [False] * 6)}
    return xr.Dataset(table).set_coords("fault")


def test_harm_is_divergence_or_lost_accuracy(runs):
    assert early_warning.harmful(runs).values.tolist() == [False, False, True, True, True, False]
    assert early_warning.harmful(runs, margin=0.01).values[-1]
    with pytest.raises(OptionError, match="margin is -1"):
        early_warning.harmful(runs, margin=-1)


def test_lead_times_count_to_whatever_shows_first(runs):
    np.testing.assert_array_equal(early_warning.shown_at(runs), [NAN, NAN, 60, 60, 55, NAN])
    np.testing.assert_array_equal(early_warning.lead_times(runs), [NAN, np.inf, 10, -10, NAN, np.inf])
    np.testing.assert_array_equal(early_warning.shown_at(runs, signs=["divergence"]), [NAN, NAN, 80, NAN, NAN, NAN])
    assert early_warning.lead_times(runs, signs=["divergence"]).values[2] == 30
    with pytest.raises(OptionError, match="There is no sign 'acc'"):
        early_warning.shown_at(runs, signs=["acc"])
    assert early_warning.warned_first(runs).values.tolist() == [False, True, True, False, False, True]


def test_a_divergence_shows_even_without_an_alarm(runs):
    runs["grad_norm_step"][2] = NAN
    assert early_warning.lead_times(runs).values[2] == 30


def test_false_alarms_count_healthy_runs(runs):
    found = early_warning.false_alarms(runs)
    assert {name: int(found[name]) for name in ("n_runs", "any", "mechanism", "outcome")} == {
        "n_runs": 2, "any": 1, "mechanism": 1, "outcome": 0,
    }  # fmt: skip
    with pytest.raises(SchemaError, match="no healthy run"):
        early_warning.false_alarms(runs.isel(run=slice(2, None)))


def test_the_confusion_matrix_has_the_runs_with_one_fault(runs):
    found = early_warning.confusion(runs)
    assert found.sum() == 3
    assert int(found.sel(fault="large_rate", attributed="small_batch")) == 1
    # One of several faults is right too.
    assert early_warning.attributed_rightly(runs) == (3, 4)


def test_saved_are_harmful_ones_that_end_well(runs):
    assert early_warning.saved(runs).values.tolist() == [False, False, True, False, True, False]


def test_a_table_of_something_else_is_refused():
    with pytest.raises(SchemaError, match="lacks fault"):
        early_warning.false_alarms(xr.Dataset())
    assert wb.early_warning is early_warning
