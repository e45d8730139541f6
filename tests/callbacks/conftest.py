"""What tests of callbacks share: the small model and task of training, and silence of the trainers."""

import logging
import warnings

import pytest

from tests.small_training import make_model, task  # noqa: F401 (fixtures)


@pytest.fixture
def quiet():
    """Both trainers say much on the way."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
