"""Fixtures for the whole suite."""

import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.waiting import on_one_thread

# nbformat loads jsonschema, which would then compile a grammar of addresses for 5 seconds; no notebook holds any.
sys.modules.setdefault("rfc3987_syntax", None)

# How long an example takes says something about the machine and about what is loaded in it, not about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread_per_worker():
    """Two workers on two cores: more threads only wait for each other."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture
def one_thread():
    """As the recorded data were made."""
    with on_one_thread():
        yield
