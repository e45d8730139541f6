"""Outcomes of sweeps from known tables: counts, uncertainties and fair comparisons."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError, SchemaError
from workbench.studies.outcomes import (
    accuracy_where_both_converge,
    divergence_rates,
    divergence_where_both_ran,
    largest_rate_without_explosion,
    shared_cells,
)


def outcomes_of(rows):
    """Return a table of outcomes from rows of control, rate, seed and accuracy, which is None if the run diverged."""
    control, rate, seed, accuracy = zip(*rows, strict=True)
    accuracy = np.array(accuracy, dtype=float)
    variables = {
        "has_diverged": np.isnan(accuracy),
        "accuracy": accuracy,
        "near_unit_mass": accuracy / 2,
    }
    coords = {"study": ["synthetic"] * len(rows), "control": [*control], "learning_rate": [*rate], "seed": [*seed]}
    data = xr.Dataset({name: ("run", values) for name, values in (variables | coords).items()})
    return data.set_coords(list(coords))


def grid_of(fractions, *, n_seeds=10):
    """Return outcomes from control -> fraction of runs that diverge at the rates 0.001, 0.002, ..., by highest seed."""
    return outcomes_of(
        [
            (control, (i + 1) / 1000, seed, None if seed >= round((1 - fraction) * n_seeds) else 0.5)
            for control, of_rates in fractions.items()
            for i, fraction in enumerate(of_rates)
            if fraction is not None
            for seed in range(n_seeds)
        ]
    )


KNOWN = [
    ("none", 0.001, 1, 0.2),
    ("none", 0.001, 2, 0.4),
    ("none", 0.002, 1, 0.6),
    ("none", 0.002, 2, None),
    ("KSS", 0.001, 1, 0.3),
    ("KSS", 0.001, 2, None),
    ("KSS", 0.002, 1, 0.5),
    ("KSS", 0.002, 2, 0.1),
]


def test_rates_of_a_known_table():
    rates = divergence_rates(outcomes_of(KNOWN))
    assert rates["control"].values.tolist() == ["none", "KSS"]  # in the order of the runs
    assert rates["n_runs"].values.tolist() == [4, 4]
    assert rates["n_diverged"].values.tolist() == [1, 1]
    assert rates["divergence_rate"].values.tolist() == [0.25, 0.25]
    np.testing.assert_allclose(rates["accuracy"], [0.4, 0.3])
    np.testing.assert_allclose(rates["near_unit_mass"], [0.2, 0.15])
    for name, values in rates.data_vars.items():
        assert values.attrs["long_name"], name
        assert values.attrs["units"] == "1"


def test_separate_rates_and_cells_without_runs():
    rows = [row for row in KNOWN if row[:2] != ("KSS", 0.001)]
    rates = divergence_rates(outcomes_of(rows[::-1]), by_rate=True)
    assert rates["learning_rate"].values.tolist() == [0.001, 0.002]
    assert rates["divergence_rate"].sel(control="none").values.tolist() == [0.0, 0.5]
    empty = rates.sel(control="KSS", learning_rate=0.001)
    assert int(empty["n_runs"]) == int(empty["n_diverged"]) == 0
    assert all(np.isnan(empty[name]) for name in ("divergence_rate", "low", "high", "accuracy", "near_unit_mass"))
    np.testing.assert_allclose(rates["accuracy"].sel(learning_rate=0.002, control=["none", "KSS"]), [0.6, 0.3])


@pytest.mark.medium
@given(n_runs=st.integers(1, 200), share=st.floats(0, 1), level=st.sampled_from([0.5, 0.9, 0.95]))
def test_the_interval_is_wilson_s(n_runs, share, level):
    n_diverged = round(share * n_runs)
    rows = [("none", 0.001, seed, None if seed < n_diverged else 0.5) for seed in range(n_runs)]
    found = divergence_rates(outcomes_of(rows), level=level)
    # Where |p - k/n| = z sqrt(p (1 - p) / n), Wilson 1927.
    z = {0.5: 0.6744897501960817, 0.9: 1.6448536269514722, 0.95: 1.959963984540054}[level]
    middle = (n_diverged + z**2 / 2) / (n_runs + z**2)
    half = z / (n_runs + z**2) * np.sqrt(n_diverged * (n_runs - n_diverged) / n_runs + z**2 / 4)
    np.testing.assert_allclose(
        [float(found["low"][0]), float(found["high"][0])], [middle - half, middle + half], atol=1e-9
    )
    assert found["low"][0] - 1e-12 <= found["divergence_rate"][0] <= found["high"][0] + 1e-12


def test_a_control_without_converged_runs_has_no_accuracy():
    rates = divergence_rates(outcomes_of([("none", 0.001, 1, None)]))
    assert np.isnan(rates["accuracy"]).all()
    assert np.isnan(rates["near_unit_mass"]).all()


def test_only_cells_of_all_controls_are_shared():
    rows = [*KNOWN, ("none", 0.003, 1, 0.5), ("KSS", 0.002, 9, 0.5)]
    shared = shared_cells(outcomes_of(rows))
    assert shared.sizes["run"] == len(KNOWN)
    assert set(zip(shared["learning_rate"].values.tolist(), shared["seed"].values.tolist(), strict=True)) == {
        row[1:3] for row in KNOWN
    }
    with pytest.raises(SchemaError, check=says("No learning rate and seed was run under every control;")):
        shared_cells(outcomes_of([("none", 0.001, 1, 0.5), ("KSS", 0.001, 2, 0.5)]))


def test_the_fair_comparison_uses_the_cells_on_which_both_converge():
    cells = accuracy_where_both_converge(outcomes_of(KNOWN), "KSS", "none")
    assert cells["learning_rate"].values.tolist() == [0.001, 0.002]
    assert cells["seed"].values.tolist() == [1, 1]
    np.testing.assert_allclose(cells["accuracy"], [0.3, 0.5])
    np.testing.assert_allclose(cells["reference_accuracy"], [0.2, 0.6])
    np.testing.assert_allclose(cells["gain"], [0.1, -0.1])
    # The means over all converged runs differ: "none" lacks a hard cell, "KSS" an easy one.
    rates = divergence_rates(outcomes_of(KNOWN))
    assert float(rates["accuracy"].sel(control="KSS") - rates["accuracy"].sel(control="none")) == pytest.approx(-0.1)
    backwards = accuracy_where_both_converge(outcomes_of(KNOWN), "none", "KSS")
    np.testing.assert_allclose(backwards["gain"], -cells["gain"])


def test_a_comparison_without_cells_is_empty():
    rows = [("none", 0.001, 1, 0.5), ("none", 0.002, 1, None), ("KSS", 0.001, 1, None), ("KSS", 0.002, 1, 0.5)]
    assert accuracy_where_both_converge(outcomes_of(rows), "KSS", "none").sizes["cell"] == 0


def test_runs_saved_and_lost_cell_by_cell():
    found = divergence_where_both_ran(outcomes_of([*KNOWN, ("KSS", 0.009, 1, None)]), "KSS", "none")
    assert [int(found[name]) for name in ("n_cells", "n_saved", "n_lost")] == [4, 1, 1]
    assert float(found["p_value"]) == 1.0
    better = grid_of({"none": (0.0, 0.8), "KSS": (0.1, 0.0)})
    found = divergence_where_both_ran(better, "KSS", "none")
    assert [int(found[name]) for name in ("n_cells", "n_saved", "n_lost")] == [20, 8, 1]
    assert float(found["p_value"]) == pytest.approx(2 * (1 + 9) / 2**9)  # at most one of nine, on either side
    backwards = divergence_where_both_ran(better, "none", "KSS")
    assert (int(backwards["n_saved"]), int(backwards["n_lost"])) == (1, 8)
    assert float(backwards["p_value"]) == float(found["p_value"])
    same = divergence_where_both_ran(better, "none", "none")
    assert float(same["p_value"]) == 1.0


def test_the_largest_rate_without_explosion_and_all_below_it_rarely_diverge():
    shares = {
        "edge at 2": (0.0, 0.1, 0.3, 1.0),
        "comes back": (0.0, 0.5, 0.0, 0.0),
        "never": (0.2, 0.0, 0.0, 0.0),
        "always": (0.0, 0.0, 0.1, 0.1),
        "fewer rates": (None, 0.0, 0.9, None),
    }
    rates = largest_rate_without_explosion(grid_of(shares))
    assert rates["control"].values.tolist() == list(shares)
    np.testing.assert_array_equal(rates, [0.002, 0.001, np.nan, 0.004, 0.002])
    assert rates["is_lower_bound"].values.tolist() == [False, False, False, True, False]
    np.testing.assert_array_equal(
        largest_rate_without_explosion(grid_of(shares), below=0.4), [0.003, 0.001, 0.004, 0.004, 0.002]
    )


@pytest.mark.parametrize(
    ("call", "error", "name", "value"),
    [
        (lambda: divergence_rates(xr.Dataset({"loss": ("run", [1.0])})), SchemaError, "control", None),
        (lambda: divergence_rates(outcomes_of(KNOWN).isel(run=0)), SchemaError, "run", None),
        (lambda: divergence_rates(outcomes_of(KNOWN).isel(run=[])), SchemaError, "run", 0),
        (lambda: divergence_rates(outcomes_of([*KNOWN, KNOWN[0]])), SchemaError, "run", ("none", 0.001, 1)),
        (lambda: divergence_rates(outcomes_of(KNOWN), level=1), OptionError, "level", 1),
        (lambda: accuracy_where_both_converge(outcomes_of(KNOWN), "SAM", "none"), OptionError, "control", "SAM"),
        (lambda: divergence_where_both_ran(outcomes_of(KNOWN), "KSS", "SAM"), OptionError, "reference", "SAM"),
        (lambda: largest_rate_without_explosion(outcomes_of(KNOWN), below=0), OptionError, "below", 0),
    ],
)
def test_wrong_input_is_rejected(call, error, name, value):
    with pytest.raises(error, check=about(name, value)):
        call()


def test_it_is_public():
    assert wb.outcomes.divergence_rates is divergence_rates
