"""Fixtures: the small spectra of the tests of plots."""

import pytest

from tests.plots.conftest import spectra_of


@pytest.fixture(scope="session")
def spectra():
    return {"calm": spectra_of(0.9, subject="calm"), "wild": spectra_of(9.0, n_layers=6, seed=1, subject="wild")}
