"""One planted sweep and one model of it for the whole room; nobody changes them."""

import pytest

import workbench as wb
from tests.risk.made_sweep import PLANTED, made_sweep


@pytest.fixture(scope="session")
def planted():
    return made_sweep(n_configurations=30, n_cells=2, n_rates=7, n_seeds=1)


@pytest.fixture(scope="session")
def model(planted):
    return wb.risk.fit(planted[0], features=PLANTED, penalty=1.0, n_bootstrap=40)
