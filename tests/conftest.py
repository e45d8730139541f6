"""Fixtures for the whole suite."""

import os

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread_per_worker():
    """Two workers on two cores: more threads only wait for each other."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)
