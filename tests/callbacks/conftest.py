"""Fixtures of the tests of callbacks: the small model and task, and a fixture that silences the trainers."""

import logging
import warnings

import pytest

from tests.small_training import make_model, task  # noqa: F401 (fixtures)


@pytest.fixture
def quiet():
    """Suppress the log messages and warnings of both trainers."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
