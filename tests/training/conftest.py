"""Small model and task, shared by the training tests."""

from tests.small_training import make_model, task  # noqa: F401 (fixtures)
