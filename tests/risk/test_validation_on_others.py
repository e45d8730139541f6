"""Runs of another sweep, predicted by models that have not seen their group."""

import numpy as np
import pytest

import workbench as wb


@pytest.mark.medium
def test_new_groups_get_the_model_of_everything():
    runs, others = wb.samples.divergence_sweep("fit"), wb.samples.divergence_sweep("held out")
    options = {"features": ["rehearsed_rate"], "method": "logistic", "n_bootstrap": 0, "penalty": 1.0}
    found = wb.risk.cross_validate(runs, by="configuration", test=others, **options)
    expected = wb.risk.fit(runs, **options)._extrapolated(others)
    np.testing.assert_allclose(found["probability"].values, expected["probability"].values)
    assert found.attrs["n_folds"] == 1


@pytest.mark.medium
def test_known_groups_are_predicted_without_their_own_runs():
    runs, others = wb.samples.divergence_sweep("fit"), wb.samples.divergence_sweep("held out")
    few = others.isel(run=np.isin(others["architecture"].values, ["No-Norm", "ViT"]))
    options = {"features": ["rehearsed_rate"], "method": "logistic", "n_bootstrap": 0, "penalty": 1.0}
    found = wb.risk.cross_validate(runs, by="architecture", test=few, **options)
    assert found.attrs["n_folds"] == 2
    for name in ("No-Norm", "ViT"):
        without = wb.risk.fit(runs.isel(run=(runs["architecture"] != name).values), **options)
        of_name = (few["architecture"] == name).values
        expected = without._extrapolated(few.isel(run=of_name))["probability"].values
        np.testing.assert_allclose(found["probability"].values[of_name], expected)
